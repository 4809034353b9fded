"""A Flax Linen module of a mixture of experts."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

from fbq_jax.core.threshold import layer_path
from fbq_jax.core.training_warnings import warn_if_differentiated
from fbq_jax.experts.expert_sharding import ExpertSharding, check_expert_sharding
from fbq_jax.experts.mlp import mixture, tokens_of
from fbq_jax.experts.routing import (
    Routes,
    Routing,
    check_routing,
    next_bias,
    router_logits,
)
from fbq_jax.linen.grouped_dense import GroupedDense, Initializer

#: The collection with the load of the experts and the bias that balances them.
STATS = "expert_stats"
#: The collection with the losses of the router.
LOSSES = "losses"


class MoEMLP(nn.Module):
    """A mixture of experts, each of which is a SwiGLU MLP without biases.

        y[t] = sum_i weights[t, i] down_e(silu(gate_e(x[t])) up_e(x[t])),
        e = experts[t, i]

    A router in float32 selects the ``top_k`` experts of each token and their weights
    (``fbq_jax.Routing`` has the settings).  Tokens are sorted by expert, so that each
    projection of all experts is one ``ragged_dot``: ``gate_up``, with the gate in the
    first half of its columns, and ``down``.  If both have one recipe that
    ``fbq_jax.fuses`` accepts, and ``bits`` is not None, the gate between them is fused
    with quantization (``fbq_jax.experts.fused``).  No token is dropped, unless the
    routing has a ``capacity_factor``.  The caller adds norms, skip connections and
    shared experts.

    Training makes these collections mutable:

    - ``"expert_stats"``, like Flax's ``batch_stats``, holds ``load`` (int32 ``[E]``,
      the tokens that selected each expert in the last step), ``dropped`` (int32
      ``[]``, the rows that exceeded the capacity) and, with a ``bias_update_rate``,
      ``bias`` (float32 ``[E]``).  Each forward that may change it moves the bias, which
      evaluation needs, too.  Inside ``shard_map`` and ``pmap`` devices count their own
      tokens; ``jax.lax.pmean`` of the bias gives all devices the mean.
    - ``"losses"`` gets ``load_balance`` and ``z`` by ``sow``: add them to the loss with
      weights such as 0.01 and 0.001.  ``init`` does not return it.
    - The collection of ``dot_general`` holds the state of both projections.
    - ``"intermediates"``, of Flax, gets ``fallback_rates`` of both by ``sow``, float32
      ``[E]``: the share of each expert's blocks that fell back.

    Attributes:
      routing: the number of experts, and how tokens get theirs.
      hidden: F, the width of an expert's gate and of its up.
      bits: bits per value that the gate saves for the backward pass, 4 to 12; None
        saves floats.
      dtype: dtype of the computation and the output; None takes the input's.
      param_dtype: dtype of the parameters.
      router_init: the initializer of the router's kernel ``[D, E]``.
      kernel_init: the initializer of the experts' kernels ``[E, K, N]``.
      dot_general: multiplies in the experts, such as a ``FallbackDot`` or
        ``RulesDot``, or an op with a ``ragged_dot`` of its own; None for
        ``lax.ragged_dot``, which takes no ``jax.vmap`` over tokens with the same
        experts.
      expert_sharding: the mesh axes of experts, to which devices send tokens as INT8
        codes; None if each device has all experts.  ``init`` shards the kernels.

    Raises:
      TypeError: ``routing`` is not a ``Routing``, ``expert_sharding`` neither an
        ``ExpertSharding`` nor None, or ``dot_general`` is none
        of these.
      ValueError: in a call, the routing has a bias that is in no collection, the mesh
        does not fit ``expert_sharding``, or x is sharded over explicit mesh axes.

    >>> from fbq_jax import fallback_dot
    >>> layer = MoEMLP(Routing(num_experts=8), hidden=32, dot_general=fallback_dot)
    >>> x = jnp.ones((2, 5, 16))
    >>> variables = jax.eval_shape(layer.init, jax.random.key(0), x)
    >>> jax.tree.map(jnp.shape, variables["params"])  # doctest: +NORMALIZE_WHITESPACE
    {'down': {'kernel': (8, 32, 16)},
     'gate_up': {'kernel': (8, 16, 64)},
     'router': {'kernel': (16, 8)}}
    >>> sorted(variables["fallback"]), sorted(variables["expert_stats"])
    (['down', 'gate_up'], ['dropped', 'load'])
    """

    routing: Routing
    hidden: int
    bits: int | None = 10
    dtype: Any = None
    param_dtype: Any = jnp.float32
    router_init: Initializer = nn.initializers.lecun_normal()
    kernel_init: Initializer = nn.initializers.lecun_normal(batch_axis=(0,))
    dot_general: Callable[..., jax.Array] | None = None
    expert_sharding: ExpertSharding | None = None

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps ``[..., D]`` to the same shape."""
        check_routing(self.routing)
        check_expert_sharding(self.expert_sharding)
        tokens, size = tokens_of(x), x.shape[-1]
        router = _Router(
            self.routing.num_experts, self.param_dtype, self.router_init, name="router"
        )
        logits, bias = router(tokens), None
        if self.routing.bias_update_rate is not None:
            logits = self._check_bias(logits)
            shape = (self.routing.num_experts,)
            bias = self.variable(STATS, "bias", jnp.zeros, shape, jnp.float32)
        init, sharding = self.kernel_init, self.expert_sharding
        if sharding is not None:
            init = sharding.sharded(init)

        def dense(features: int, name: str) -> GroupedDense:
            types = self.param_dtype, init
            return GroupedDense(features, *types, self.dot_general, name=name)

        y, routes, dropped = mixture(
            x.astype(self.dtype or x.dtype),
            logits,
            None if bias is None else bias.value,
            dense(2 * self.hidden, "gate_up"),
            dense(size, "down"),
            routing=self.routing,
            sharding=sharding,
            bits=self.bits,
        )
        self._update(routes, dropped, bias)
        return y

    def _update(
        self, routes: Routes, dropped: jax.Array, bias: nn.Variable | None
    ) -> None:
        """Updates the collections."""
        if self.is_mutable_collection(STATS):
            shape = (self.routing.num_experts,)
            load = self.variable(STATS, "load", jnp.zeros, shape, jnp.int32)
            drops = self.variable(STATS, "dropped", jnp.zeros, (), jnp.int32)
            if not self.is_initializing():
                load.value, drops.value = routes.load, dropped
                if bias is not None:
                    bias.value = next_bias(self.routing, bias.value, routes.load)
        if not self.is_initializing():
            self.sow(LOSSES, "load_balance", routes.load_balance_loss)
            self.sow(LOSSES, "z", routes.z_loss)

    def _check_bias(self, logits: jax.Array) -> jax.Array:
        """The logits; their gradient warns if the bias cannot move.

        Raises:
          ValueError: there is no bias.
        """
        layer = layer_path(self.path)
        is_mutable = self.is_mutable_collection(STATS)
        if self.is_initializing() and is_mutable:
            return logits
        if not self.has_variable(STATS, "bias"):
            raise ValueError(
                f"layer {layer!r} balances its experts with a bias, which is not in "
                f"the collection {STATS!r}: pass apply the collection that init or "
                "the last training step returned; list it in variable_axes if the "
                "layer is inside nn.scan or nn.vmap"
            )
        if is_mutable:
            return logits
        text = (
            f"layer {layer!r}: a gradient is taken while the collection {STATS!r} is "
            "immutable, so the bias that balances its experts does not move. Training "
            f"calls apply with mutable=[{STATS!r}] and passes the updates to the next "
            "step"
        )
        return warn_if_differentiated("immutable bias", text, logits)


class _Router(nn.Module):
    """The logits of tokens; no ``nn.Dense``, which rules quantize."""

    num_experts: int
    param_dtype: Any
    kernel_init: Initializer

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps ``[T, D]`` to ``[T, E]``."""
        shape = x.shape[-1], self.num_experts
        kernel = self.param("kernel", self.kernel_init, shape, self.param_dtype)
        return router_logits(x, jnp.asarray(kernel))
