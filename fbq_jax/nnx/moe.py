"""A Flax NNX module of a mixture of experts."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from fbq_jax.core.training_warnings import warn_if_differentiated
from fbq_jax.experts.expert_sharding import ExpertSharding, check_expert_sharding
from fbq_jax.experts.mlp import mixture, tokens_of
from fbq_jax.experts.routing import Routing, check_routing, next_bias, router_logits
from fbq_jax.nnx.dot import FallbackDot, in_evaluation
from fbq_jax.nnx.grouped_dense import GroupedDense, Initializer
from fbq_jax.recipes.schema import Recipe


class ExpertStats(nnx.Variable):
    """What a mixture of experts counts in training, and the bias that follows it."""


class RouterLoss(nnx.Variable):
    """A loss of a mixture's router in its last training forward, float32 ``[]``."""


class MoEMLP(nnx.Module):
    """A mixture of experts, each of which is a SwiGLU MLP without biases.

    ``fbq_jax.MoEMLP`` for NNX: the same operations, fused in the same cases, and the
    same names of parameters.

    Training overwrites the ``ExpertStats`` and ``RouterLoss`` variables in each
    forward; ``model.eval()`` and ``fbq_jax.nnx.evaluation()`` leave them as they are.
    Inside the function that ``nnx.grad`` differentiates, add the ``RouterLoss`` values
    to the loss after the model has run, with weights such as 0.01 and 0.001.

    Args:
      features: D, the width of the input and the output.
      routing: the number of experts, and how tokens get theirs.
      hidden: F, the width of an expert's gate and of its up.
      bits: bits per value that the gate saves for the backward pass, 4 to 12; None
        saves floats.
      dtype: dtype of the computation and the output; None takes the input's.
      param_dtype: dtype of the parameters.
      router_init: the initializer of the router's kernel ``[D, E]``.
      kernel_init: the initializer of the experts' kernels ``[E, K, N]``.
      recipe: how the experts are quantized, each projection with a ``FallbackDot`` of
        its own; None for ``lax.ragged_dot``.  ``fbq_jax.nnx.quantize`` gives them one,
        too.
      implementation: as in ``FallbackDot``.
      expert_sharding: the mesh axes of experts, to which devices send tokens as INT8
        codes; None if each device has all experts.  Over the mesh of
        ``jax.set_mesh``, if one is set, the kernels are sharded from the start.
      rngs: seeds the parameters and the noise.

    Attributes:
      load: int32 ``[E]``, the tokens that selected each expert in the last training
        forward.
      dropped: int32 ``[]``, the rows that exceeded the capacity in it.
      bias: float32 ``[E]``, which balances the experts; None without a
        ``bias_update_rate``.
      load_balance_loss: see ``fbq_jax.experts.routing.Routes``.
      z_loss: see ``fbq_jax.experts.routing.Routes``.

    Raises:
      TypeError: ``routing`` is not a ``Routing``, ``expert_sharding`` neither an
        ``ExpertSharding`` nor None.
      ValueError: in a call, the mesh does not fit ``expert_sharding``, or x is sharded
        over explicit mesh axes.

    >>> from fbq_jax import Routing, recipes
    >>> layer = MoEMLP(
    ...     16, Routing(num_experts=8), 32, recipe=recipes.fallback, rngs=nnx.Rngs(0))
    >>> nnx.eval_shape(lambda layer: layer(jnp.ones((2, 5, 16))), layer).shape
    (2, 5, 16)
    >>> layer.gate_up.kernel.shape, layer.down.kernel.shape, layer.load.shape
    ((8, 16, 64), (8, 32, 16), (8,))
    """

    def __init__(
        self,
        features: int,
        routing: Routing,
        hidden: int,
        *,
        bits: int | None = 10,
        dtype: Any = None,
        param_dtype: Any = jnp.float32,
        router_init: Initializer = nnx.initializers.lecun_normal(),  # noqa: B008
        kernel_init: Initializer = nnx.initializers.lecun_normal(  # noqa: B008
            batch_axis=(0,)
        ),
        recipe: Recipe | None = None,
        implementation: str | None = None,
        expert_sharding: ExpertSharding | None = None,
        rngs: nnx.Rngs,
    ):
        check_routing(routing)
        check_expert_sharding(expert_sharding)
        self.routing, self.bits, self.dtype = routing, bits, dtype
        self.expert_sharding = expert_sharding
        if expert_sharding is not None:
            kernel_init = expert_sharding.sharded(kernel_init)
        experts = routing.num_experts
        self.router = _Router((features, experts), param_dtype, router_init, rngs)

        def dense(size: int, out: int) -> GroupedDense:
            return GroupedDense((experts, size, out), param_dtype, kernel_init, rngs)

        self.gate_up, self.down = dense(features, 2 * hidden), dense(hidden, features)
        if recipe is not None:
            # After the parameters, which therefore equal the unquantized layer's.
            for layer in (self.gate_up, self.down):
                dot = FallbackDot(recipe, rngs=rngs, implementation=implementation)
                layer.dot_general = nnx.data(dot)
        self.use_running_average = False
        self.load = ExpertStats(jnp.zeros(experts, jnp.int32))
        self.dropped = ExpertStats(jnp.zeros((), jnp.int32))
        self.bias: ExpertStats | None = nnx.data(None)
        if routing.bias_update_rate is not None:
            self.bias = ExpertStats(jnp.zeros(experts, jnp.float32))
        self.load_balance_loss = RouterLoss(jnp.zeros((), jnp.float32))
        self.z_loss = RouterLoss(jnp.zeros((), jnp.float32))

    def set_view(self, use_running_average: bool | None = None) -> None:
        """Called by ``nnx.view``: True freezes the bias, False lets it move."""
        if use_running_average is not None:
            self.use_running_average = use_running_average

    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps ``[..., D]`` to the same shape."""
        logits, bias = self.router(tokens_of(x)), self.bias
        evaluates = self.use_running_average or in_evaluation.value
        if evaluates and bias is not None:
            logits = warn_if_differentiated("bias in evaluation", _EVALUATES, logits)
        y, routes, dropped = mixture(
            x.astype(self.dtype or x.dtype),
            logits,
            None if bias is None else bias[...],
            self.gate_up,
            self.down,
            routing=self.routing,
            sharding=self.expert_sharding,
            bits=self.bits,
        )
        if not evaluates:
            self.load[...], self.dropped[...] = routes.load, dropped
            for loss, new in (
                (self.load_balance_loss, routes.load_balance_loss),
                (self.z_loss, routes.z_loss),
            ):
                loss[...] = new.astype(loss[...].dtype)
            if bias is not None:
                bias[...] = next_bias(self.routing, bias[...], routes.load)
        return y


_EVALUATES = (
    "an nnx.MoEMLP: a gradient is taken in evaluation mode, so the bias that balances "
    "its experts does not move: call model.train() before training"
)


class _Router(nnx.Module):
    """The logits of tokens; no ``nnx.Linear``, which rules quantize."""

    def __init__(
        self,
        kernel_shape: tuple[int, int],
        param_dtype: Any,
        kernel_init: Initializer,
        rngs: nnx.Rngs,
    ):
        self.kernel = nnx.Param(kernel_init(rngs.params(), kernel_shape, param_dtype))

    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps ``[T, D]`` to ``[T, E]``."""
        return router_logits(x, self.kernel[...])
