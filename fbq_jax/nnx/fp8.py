"""FP8 with delayed scaling in Flax NNX: ``nnx.Linear(..., dot_general=Fp8Dot())``."""

import jax
from flax import nnx

from fbq_jax.core.arguments import DotArguments, DotGeneral
from fbq_jax.core.training_warnings import warn_without_state_gradient
from fbq_jax.fp8 import dot_general as fp8
from fbq_jax.nnx.op_warnings import warn_if_shared

_NO_STATE_GRADIENT = (
    "a gradient is taken with respect to the weight of a layer with an Fp8Dot, but not "
    "to the Fp8Scaling variables of the op, whose gradient is their new value, so they "
    "never change. Differentiate with respect to both, by "
    "nnx.DiffState(0, (nnx.Param, fbq_jax.nnx.Fp8Scaling)), and replace the variables "
    "by their gradients"
)


class Fp8Scaling(nnx.Variable):
    """A tensor's state, an ``fp8.Scaling``; its "gradient" is its new value."""


class Fp8Dot(DotGeneral, nnx.Module):
    """A ``dot_general`` in FP8 with delayed scaling for one NNX layer.

    ``fbq_jax.Fp8Dot()`` for NNX.  ``fbq_jax.fp8.dot_general`` defines the numerics, and
    the state is in the variables ``lhs``, ``rhs`` and ``grad``.  Current scaling
    has no state: ``fbq_jax.Fp8Dot(scaling="current")`` also works in NNX.

    Only the backward pass knows the largest magnitude of a gradient, so the new state
    is the gradient of the old one.  A training step differentiates with respect to the
    state together with the parameters, and stores the result, as below.  Nothing else
    changes the state.  Such gradients must not be summed over micro-batches, a layer
    must not be called twice in one forward pass, and layers must not share one object
    (``fbq_jax.nnx.check_unshared`` checks that).

    Args:
      history: the number of calls whose largest magnitude sets a scale.

    Raises:
      ValueError: ``history`` is not a positive integer.

    >>> import jax.numpy as jnp
    >>> model = nnx.Linear(16, 8, dot_general=Fp8Dot(history=4), rngs=nnx.Rngs(0))
    >>> @nnx.jit
    ... def gradients(model, x):
    ...     wrt = nnx.DiffState(0, (nnx.Param, Fp8Scaling))
    ...     grads = nnx.grad(lambda model: jnp.sum(model(x)), argnums=wrt)(model)
    ...     scalings, grads = nnx.split_state(grads, Fp8Scaling, nnx.Param)
    ...     nnx.update(model, scalings)
    ...     return grads  # of the parameters
    >>> grads = gradients(model, jnp.full((4, 16), 3.0))
    >>> model.dot_general.lhs.get_value().amax_history
    Array([3., 0., 0., 0.], dtype=float32)
    """

    def __init__(self, history: int = 1024):
        lhs, rhs, grad = fp8.start(history)
        self.lhs, self.rhs = Fp8Scaling(lhs), Fp8Scaling(rhs)
        self.grad = Fp8Scaling(grad)

    def _compute(
        self, lhs: jax.Array, rhs: jax.Array, arguments: DotArguments
    ) -> jax.Array:
        """Computes the product in FP8; lhs is the activation."""
        variables = self.lhs, self.rhs, self.grad
        values = fp8.Scalings(*(variable.get_value() for variable in variables))
        scalings = fp8.as_float32(values)
        warn_if_shared(self, rhs)
        rhs = warn_without_state_gradient(
            "no gradient of Fp8Scaling", _NO_STATE_GRADIENT, rhs, scalings
        )
        return fp8.dot_general(scalings, lhs, rhs, arguments)
