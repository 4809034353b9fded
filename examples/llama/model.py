"""A Llama in Flax Linen, with the settings of the families that descend from it.

`hf/families.py` lists the settings of each family. The argument ``dot_general``
computes all projections of a layer:

>>> import jax, jax.numpy as jnp
>>> config = LlamaConfig(
...     vocab_size=64, hidden_size=32, intermediate_size=48,
...     num_layers=2, num_heads=4, num_kv_heads=2,
... )
>>> model = Llama(config)  # INT8: Llama(config, dot_general=fallback_dot)
>>> tokens = jnp.zeros((1, 8), jnp.int32)
>>> variables = model.init(jax.random.key(0), tokens)
>>> model.apply(variables, tokens).shape
(1, 8, 64)

Q, K and V are one projection, and gate and up are another, so that their shared input
is quantized once. The columns of the QKV projection are grouped by key-value head: its
queries, its key, its value. A device that holds some of these groups computes a model
with fewer heads.
"""

import functools
import math
from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax.core import DenyList
from jax import lax

import fbq_jax
from examples.llama import attention, invariant, loss, mesh, rotary
from examples.llama.mesh import constrain
from examples.llama.model_config import LlamaConfig
from examples.llama.projections import INITIALIZER, DotGeneral, Part
from examples.llama.rotary import Tables

# The collections that have an axis of layers: "_overwrite_with_gradient" is Flax's, for
# FallbackDot(collection=...) and for FP8; the last three tell training about experts.
_STACKED = (
    *("params", "fallback", "fallback_codes", "_overwrite_with_gradient"),
    *("expert_stats", "losses", "intermediates"),
)


class KVCache(NamedTuple):
    """The rotated keys and the values of all layers, [L, B, S, kv_heads, head_dim].

    Positions from ``length`` on have no meaning.
    """

    keys: jax.Array
    values: jax.Array
    length: jax.Array


def empty_cache(config: LlamaConfig, batch: int, size: int) -> KVCache:
    """Returns a cache for ``size`` tokens in each of ``batch`` sequences."""
    shape = config.num_layers, batch, size, config.num_kv_heads, config.head_dim
    keys, values = jnp.zeros((2, *shape), config.dtype)
    return KVCache(keys, values, jnp.zeros((), jnp.int32))


# The keys and values of one layer in a cache.
_Cached = tuple[jax.Array, jax.Array] | None


class Attention(Part):
    """RMSNorm and causal grouped-query attention, with the arguments of `Layer`."""

    @nn.compact
    def __call__(
        self,
        x: jax.Array,
        tables: Tables,
        kind: jax.Array | None,
        cached: _Cached,
        start: jax.Array | None,
    ) -> tuple[jax.Array, _Cached]:
        """Computes attention."""
        config = self.config
        queries = config.num_heads // config.num_kv_heads
        heads = config.num_kv_heads, queries + 2, config.head_dim
        qkv = self.norm_dense(math.prod(heads), "qkv")(x)
        qkv = qkv.reshape(*x.shape[:2], *heads)
        q = qkv[..., :queries, :].reshape(*x.shape[:2], -1, config.head_dim)
        k, v = qkv[..., queries, :], qkv[..., queries + 1, :]
        if config.qk_norm:
            q, k = self.norm("q_norm")(q), self.norm("k_norm")(k)
        if kind is not None:
            cos, sin = (lax.dynamic_index_in_dim(table, kind) for table in tables)
            tables = cos, sin
        rotate = invariant.rotate if config.invariant else rotary.rotate
        q, k = rotate(q, tables), rotate(k, tables)
        if cached is not None:
            assert start is not None
            k = lax.dynamic_update_slice_in_dim(cached[0], k, start, axis=1)
            v = lax.dynamic_update_slice_in_dim(cached[1], v, start, axis=1)
            cached = k, v
        scale, softcap = config.score_scale(), config.attn_softcap
        attend_by = invariant.attend if config.invariant else attention.attend
        attend = functools.partial(attend_by, start=start, scale=scale, softcap=softcap)
        windows = [kind.window for kind in config.distinct_kinds()]
        windows = [None if w is None or w >= k.shape[1] else w for w in windows]
        # cuDNN takes windows that the compiler knows.
        branches = [functools.partial(attend, window=window) for window in windows]
        if len(set(windows)) == 1:
            y = branches[0](q, k, v)
        else:
            y = lax.switch(kind, branches, q, k, v)
        return self.dense(config.hidden_size, "out")(y), cached


class Layer(Part):
    """One pre-norm layer, with the signature that ``nn.scan`` expects."""

    @nn.compact
    def __call__(
        self,
        x: jax.Array,
        tables: Tables,
        kind: jax.Array | None = None,
        cached: _Cached = None,
        start: jax.Array | None = None,
    ) -> tuple[jax.Array, _Cached]:
        """Computes one layer of ``x`` [B, S, hidden].

        Args:
            x: The input, whose shape and dtype the output has.
            tables: The result of ``config.rotary_tables``.
            kind: The layer's index into ``config.distinct_kinds()``; None if all layers
                are of one kind.
            cached: The layer's keys and values in a cache, [B, T, kv_heads, head_dim]
                each, which are returned with those of ``x``; None without a cache.
            start: The position of the first token of ``x``, with a cache.
        """
        config = self.config
        attend = Attention(config, self.dot_general, name="attention")
        y, cached = attend(x, tables, kind, cached, start)
        if config.post_norms:
            y = self.norm("post_attention_norm")(y)
        add = invariant.add if config.invariant else jnp.add
        x = add(x, y)
        y = self.gated_mlp("mlp")(x)
        if config.post_norms:
            y = self.norm("post_mlp_norm")(y)
        return constrain(add(x, y), "batch", None, None), cached


def remat_layer(config: LlamaConfig, *, prevent_cse: bool = True) -> type[Layer]:
    """Returns `Layer` with the rematerialization that ``config.remat`` asks for."""
    if config.remat == "none":
        return Layer
    policy = fbq_jax.save_codes if config.remat == "codes" else None
    return nn.remat(Layer, policy=policy, prevent_cse=prevent_cse)


class TiedHead(Part):
    """A head that shares the embedding table."""

    @nn.compact
    def __call__(self, x: jax.Array, table: jax.Array) -> jax.Array:
        """Multiplies ``x`` [B, S, hidden] by the table."""
        multiply = self.dot_general or lax.dot_general
        return multiply(x, table.T.astype(x.dtype), (((2,), (0,)), ((), ())))


class Llama(Part):
    """A Llama language model.

    ``dot_general`` computes the four projections of each layer: qkv, out, gate_up and
    down; None means ``jax.lax.dot_general``. Its state in the collection "fallback" is
    stacked over the layers along the first axis. The embedding never uses it,
    and the head only with ``config.quantize_head`` or ``config.invariant``; they stay
    in ``config.dtype``. A router of experts computes in float32.
    """

    @nn.compact
    def __call__(
        self,
        tokens: jax.Array,
        cache: KVCache | None = None,
        targets: jax.Array | None = None,
    ) -> jax.Array | tuple[jax.Array, KVCache]:
        """Predicts the next token at every position, or after the last one.

        Args:
            tokens: Integers [B, S] below ``vocab_size``; others are a ValueError.
            cache: The tokens before these; it has room for S more.
            targets: The next tokens, [B, S], without a cache.

        Returns:
            Logits, float32 [B, S, vocab_size]. With a cache, the logits after the last
            token, float32 [B, 1, vocab_size], and the cache with these tokens. With
            targets, their mean cross-entropy in nats, float32 []; sequences whose
            logits would take too much memory are divided into chunks.
        """
        config, dot_general = self.config, self._op()
        if tokens.ndim != 2 or not jnp.issubdtype(tokens.dtype, jnp.integer):
            got = f"{tokens.dtype} {tokens.shape}"
            raise ValueError(f"tokens takes integers [B, S], got {got}")
        if (length := tokens.shape[1]) > (longest := config.max_seq_len):
            raise ValueError(
                f"tokens takes sequences up to max_seq_len ({longest}), got {length}"
            )
        sizes = config.vocab_size, config.hidden_size
        embed = nn.Embed(*sizes, embedding_init=INITIALIZER, name="embed")
        # The lookup is in float32, so that the gradients of rows add up in float32.
        # With FSDP, devices exchange the tokens and what they find, not the table.
        tokens = constrain(tokens, "replica", None)
        rows = jnp.take(constrain(embed.embedding, "vocab", "embed"), tokens, axis=0)
        rows = constrain(rows, "replica", None, "embed")
        # Gemma's factor is rounded to the dtype of the computation.
        factor = jnp.asarray(config.embed_scale, config.dtype)
        if config.invariant:
            x = invariant.scale(rows, factor)
        else:
            x = rows.astype(config.dtype) * factor
        x = constrain(x, "batch", None, None)

        layers = nn.scan(
            # The scan separates the forward from the backward pass, so CSE is safe.
            remat_layer(config, prevent_cse=False),
            variable_axes=dict.fromkeys(_STACKED, 0),
            split_rngs={"params": True},
            in_axes=(nn.broadcast, 0, 0, nn.broadcast),
            length=config.num_layers,
            unroll=config.num_layers if config.unroll else 1,
        )(config, dot_general, name="layers")
        start = None if cache is None else cache.length
        tables, cached = config.rotary_tables(length), None
        if cache is not None:
            cached = cache.keys, cache.values
            cos, sin = (
                lax.dynamic_slice_in_dim(table, cache.length, length, axis=1)
                for table in config.rotary_tables(cache.keys.shape[2])
            )
            tables = cos, sin
        kinds = None
        if len(distinct := config.distinct_kinds()) > 1:
            indices = [distinct.index(kind) for kind in config.layer_kinds()]
            kinds = jnp.asarray(indices, jnp.int32)
        x, cached = layers(x, tables, kinds, cached, start)

        x = self.norm("norm")(x if cache is None else x[:, -1:])
        table = embed.embedding if config.tie_embeddings else None
        if targets is not None:
            return self._loss(x, targets, table)
        logits = self._logits(x, table)
        if cache is None:
            return logits
        assert cached is not None
        keys, values = cached
        return logits, KVCache(keys, values, cache.length + length)

    @nn.nowrap
    def _op(self) -> DotGeneral | None:
        """The op of the projections."""
        op = self.dot_general
        return invariant.checked(op) if self.config.invariant else op

    @nn.nowrap
    def _logits(self, x: jax.Array, table: jax.Array | None) -> jax.Array:
        """The logits after the last norm, by the embedding's table if it is shared."""
        config = self.config
        op = self._op() if config.quantize_head or config.invariant else None
        if table is not None:
            logits = TiedHead(config, op, name="lm_head")(x, table)
        else:
            logits = self.dense(config.vocab_size, "lm_head", dot_general=op)(x)
        logits = (invariant.exact if config.invariant else jnp.float32)(logits)
        if (cap := config.logit_softcap) is not None:

            def soft(x: jax.Array) -> jax.Array:
                return cap * jnp.tanh(x / cap)

            is_kernel = config.invariant
            logits = invariant.pointwise(soft, logits) if is_kernel else soft(logits)
        return logits

    @nn.nowrap
    def _loss(
        self, x: jax.Array, targets: jax.Array, table: jax.Array | None
    ) -> jax.Array:
        """The mean cross-entropy of targets [B, S] after the last norm."""
        batch, length = targets.shape
        of_device = -(-batch // mesh.shards("batch"))
        count = loss.chunks(of_device, length, self.config.vocab_size)
        if count == 1:
            return loss.cross_entropy(self._logits(x, table), targets)

        def add(
            model: Llama, total: jax.Array, chunk: tuple[jax.Array, jax.Array]
        ) -> tuple[jax.Array, None]:
            x, targets = chunk
            return total + loss.cross_entropy(model._logits(x, table), targets), None

        chunks = loss.in_chunks(x, count), loss.in_chunks(targets, count)
        moves = self.is_mutable_collection("fallback")
        total, _ = nn.scan(
            nn.remat(add, prevent_cse=False),
            variable_broadcast=DenyList("fallback" if moves else ()),
            variable_carry="fallback" if moves else False,
            split_rngs={"params": True},
        )(self, jnp.float32(0), chunks)
        return total / count
