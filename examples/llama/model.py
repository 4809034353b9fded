"""Llama in Flax Linen, the architecture of Llama 2, Llama 3 and Qwen2.

One argument, ``dot_general``, decides how all projections of a layer multiply:

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

Q, K and V are one projection, and so are gate and up: their common input is then
quantized once, where the norm before them computes it (`projections.py`). The columns
of Q, K and V are in an order in which a part of them, on one of several devices, is a
model with fewer heads: by head of keys and values, its queries, its key and its value.
"""

import dataclasses
import math
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

import fbq_jax
from examples.llama import attention
from examples.llama.mesh import constrain
from examples.llama.projections import (
    INITIALIZER,
    DotGeneral,
    dense,
    gated_mlp,
    norm,
    norm_dense,
)
from fbq_jax import nonlinear

# What the backward pass finds of a layer; see `LlamaConfig.remat`.
REMAT = ("none", "codes", "full")


@dataclasses.dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """Llama 3.1's scaling: slow rotations are slowed further, fast ones are kept.

    Attributes:
        factor: how much slower a rotation becomes that completes fewer than
            ``low_freq_factor`` turns in the original context.
        low_freq_factor: see ``factor``.
        high_freq_factor: a rotation with more turns than this is kept; between the
            two factors the scale is interpolated in the number of turns.
        original_max_position_embeddings: the original context, in tokens.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int

    def __post_init__(self) -> None:
        _check_positive(self, "factor", "low_freq_factor", "high_freq_factor")
        _check_positive(self, "original_max_position_embeddings", whole=True)
        if self.high_freq_factor <= self.low_freq_factor:
            raise ValueError(
                "high_freq_factor takes a number above low_freq_factor "
                f"({self.low_freq_factor}), got {self.high_freq_factor}"
            )

    def scale(self, frequencies: np.ndarray) -> np.ndarray:
        """Returns the scaled rotation ``frequencies`` (radians a token)."""
        turns = self.original_max_position_embeddings * frequencies / (2 * np.pi)
        span = self.high_freq_factor - self.low_freq_factor
        kept = np.clip((turns - self.low_freq_factor) / span, 0, 1)
        return frequencies * (kept + (1 - kept) / self.factor)


@dataclasses.dataclass(frozen=True, kw_only=True)
class LlamaConfig:
    """Sizes and numerics of a Llama.

    Attributes:
        vocab_size: number of tokens.
        hidden_size: width of the residual stream.
        intermediate_size: width of the MLP.
        num_layers: number of layers.
        num_heads: number of query heads.
        num_kv_heads: number of key and value heads, a divisor of ``num_heads``.
        head_dim: width of one head, even; None takes hidden_size / num_heads.
        max_seq_len: the longest sequence the model accepts, in tokens.
        rope_theta: base of the rotary frequencies.
        rope_scaling: how the rotary frequencies are stretched to a longer context.
        norm_eps: added to the mean square in RMSNorm.
        qkv_bias: whether the QKV projection has a bias (Qwen2).
        tie_embeddings: whether the head shares the embedding's table.
        dtype: of the computation, jnp.bfloat16 or jnp.float32; parameters are
            float32 either way.
        remat: what each layer keeps for the backward pass, which recomputes the
            rest. "none" of it: all is kept that the backward pass reads. "codes":
            the layer's input and the codes of quantized operands and of
            ``saved_bits``. "full": the layer's input.
        saved_bits: of each value that the layers' norms and gates keep for the
            backward pass, 4 to 12; 10 lose nothing that training would notice.
            None leaves them to autodiff, which keeps floats.

    Raises:
        ValueError: if a field is out of range; names it and what it takes.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int = None  # type: ignore[assignment]  # an int from __post_init__ on
    max_seq_len: int = 8192
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling | None = None
    norm_eps: float = 1e-5
    qkv_bias: bool = False
    tie_embeddings: bool = False
    dtype: Any = jnp.bfloat16
    remat: str = "none"
    saved_bits: int | None = None

    def __post_init__(self) -> None:
        sizes = ("vocab_size", "hidden_size", "intermediate_size", "num_layers")
        _check_positive(self, *sizes, "num_heads", "num_kv_heads", whole=True)
        _check_positive(self, "rope_theta", "norm_eps")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_kv_heads takes a divisor of num_heads ({self.num_heads}), "
                f"got {self.num_kv_heads}"
            )
        if self.head_dim is None:
            if self.hidden_size % self.num_heads:
                raise ValueError(
                    f"hidden_size takes a multiple of num_heads ({self.num_heads}) "
                    f"when head_dim is None, got {self.hidden_size}"
                )
            object.__setattr__(self, "head_dim", self.hidden_size // self.num_heads)
        _check_positive(self, "head_dim", "max_seq_len", whole=True)
        if self.head_dim % 2:
            raise ValueError(
                f"head_dim takes an even number (RoPE turns pairs), got {self.head_dim}"
            )
        for name in ("qkv_bias", "tie_embeddings"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name} takes a bool, got {getattr(self, name)!r}")
        if self.remat not in REMAT:
            raise ValueError(
                f"remat takes one of {', '.join(REMAT)}, got {self.remat!r}"
            )
        bits = self.saved_bits
        if bits is not None and (type(bits) is not int or bits not in nonlinear.BITS):
            raise ValueError(
                f"saved_bits takes None or an integer from {nonlinear.BITS[0]} to "
                f"{nonlinear.BITS[-1]}, got {bits!r}"
            )
        if self.dtype not in (jnp.bfloat16, jnp.float32):
            raise ValueError(
                f"dtype takes jnp.bfloat16 or jnp.float32, got {self.dtype!r}"
            )


def _check_positive(config: object, *names: str, whole: bool = False) -> None:
    accepted = int if whole else (int, float)
    for name in names:
        value = getattr(config, name)
        if not isinstance(value, accepted) or isinstance(value, bool) or value <= 0:
            kind = "integer" if whole else "number"
            raise ValueError(f"{name} takes a positive {kind}, got {value!r}")


def rotary_tables(config: LlamaConfig, seq_len: int) -> tuple[jax.Array, jax.Array]:
    """Cosines and sines of the rotary angles.

    Args:
        config: gives ``head_dim``, ``rope_theta`` and ``rope_scaling``.
        seq_len: number of positions S.

    Returns:
        Two float32 arrays [1, S, 1, head_dim / 2].
    """
    exponents = np.arange(0, config.head_dim, 2) / config.head_dim
    frequencies = config.rope_theta**-exponents
    if config.rope_scaling is not None:
        frequencies = config.rope_scaling.scale(frequencies)
    positions = jnp.arange(seq_len, dtype=jnp.float32)
    angles = jnp.outer(positions, jnp.asarray(frequencies, jnp.float32))
    angles = angles[None, :, None, :]
    return jnp.cos(angles), jnp.sin(angles)


def rotate(x: jax.Array, tables: tuple[jax.Array, jax.Array]) -> jax.Array:
    """Rotates heads by their position: channel i with channel i + head_dim / 2.

    Args:
        x: [B, S, heads, head_dim], any floating dtype.
        tables: see `rotary_tables`.

    Returns:
        An array of the shape and dtype of ``x``, computed in float32.
    """
    cos, sin = tables
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    rotated = [first * cos - second * sin, second * cos + first * sin]
    return jnp.concatenate(rotated, axis=-1).astype(x.dtype)


class Attention(nn.Module):
    """RMSNorm and causal grouped-query attention with rotary positions."""

    config: LlamaConfig
    dot_general: DotGeneral | None = None

    @nn.compact
    def __call__(self, x: jax.Array, tables: tuple[jax.Array, jax.Array]) -> jax.Array:
        """Maps ``x`` [B, S, hidden] to an array of its shape and dtype."""
        config = self.config
        queries = config.num_heads // config.num_kv_heads
        heads = config.num_kv_heads, queries + 2, config.head_dim
        width, bias = math.prod(heads), config.qkv_bias
        project = norm_dense(config, self.dot_general, width, use_bias=bias, name="qkv")
        qkv = project(x)
        qkv = qkv.reshape(*x.shape[:2], *heads)
        q = qkv[..., :queries, :].reshape(*x.shape[:2], -1, config.head_dim)
        k, v = qkv[..., queries, :], qkv[..., queries + 1, :]
        q, k = rotate(q, tables), rotate(k, tables)
        out = dense(config, self.dot_general)(config.hidden_size, name="out")
        return out(attention.attend(q, k, v))


class Layer(nn.Module):
    """One pre-norm layer, in the form ``nn.scan`` takes."""

    config: LlamaConfig
    dot_general: DotGeneral | None = None

    @nn.compact
    def __call__(
        self, x: jax.Array, tables: tuple[jax.Array, jax.Array]
    ) -> tuple[jax.Array, None]:
        """Maps ``x`` [B, S, hidden] to an array of its shape and dtype, and None."""
        x = x + Attention(self.config, self.dot_general, name="attention")(x, tables)
        x = x + gated_mlp(self.config, self.dot_general, name="mlp")(x)
        return constrain(x, "batch", None, None), None


def remat_layer(config: LlamaConfig, *, prevent_cse: bool = True) -> type[Layer]:
    """`Layer`, recomputing in the backward pass what `config.remat` says.

    Args:
        config: gives ``remat``.
        prevent_cse: see ``jax.checkpoint``.
    """
    if config.remat == "none":
        return Layer
    policy = fbq_jax.save_codes if config.remat == "codes" else None
    return nn.remat(Layer, policy=policy, prevent_cse=prevent_cse)


class Llama(nn.Module):
    """A Llama language model.

    Attributes:
        config: sizes and numerics.
        dot_general: multiplies in the four projections of each layer, qkv, out,
            gate_up and down; None is ``jax.lax.dot_general``. What it keeps in the
            collection "fallback" has the layers as its first axis. The embedding
            and the head are never given to it and stay in ``config.dtype``.
    """

    config: LlamaConfig
    dot_general: DotGeneral | None = None

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        """Predicts each next token.

        Args:
            tokens: [B, S] integers below ``vocab_size``.

        Returns:
            Logits, float32 [B, S, vocab_size]; those at position i depend on tokens
            0 to i.

        Raises:
            ValueError: if ``tokens`` has another rank or dtype, or is too long.
        """
        config = self.config
        if tokens.ndim != 2 or not jnp.issubdtype(tokens.dtype, jnp.integer):
            raise ValueError(
                f"tokens takes integers [B, S], got {tokens.dtype} {tokens.shape}"
            )
        if tokens.shape[1] > config.max_seq_len:
            raise ValueError(
                f"tokens takes sequences up to max_seq_len ({config.max_seq_len}), "
                f"got {tokens.shape[1]}"
            )
        embed = nn.Embed(
            config.vocab_size,
            config.hidden_size,
            embedding_init=INITIALIZER,
            name="embed",
        )
        # Rows leave the table in float32, so their gradients add up in float32.
        # A device looks its own tokens up in whole rows.
        rows = jnp.take(constrain(embed.embedding, "vocab", None), tokens, axis=0)
        x = constrain(rows.astype(config.dtype), "batch", None, None)

        # "fallback" is where FallbackDot keeps its state; the other name is for those
        # who choose Flax's transport, FallbackDot(collection=...).
        layers = nn.scan(
            # The loops of scan keep the two passes apart, so CSE may run.
            remat_layer(config, prevent_cse=False),
            variable_axes={"params": 0, "fallback": 0, "_overwrite_with_gradient": 0},
            split_rngs={"params": True},
            in_axes=nn.broadcast,
            length=config.num_layers,
        )(config, self.dot_general, name="layers")
        x, _ = layers(x, rotary_tables(config, tokens.shape[1]))

        x = norm(config, "norm")(x)
        if config.tie_embeddings:
            logits = x @ embed.embedding.T.astype(config.dtype)
        else:
            logits = dense(config)(config.vocab_size, name="lm_head")(x)
        return logits.astype(jnp.float32)
