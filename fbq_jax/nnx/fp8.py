"""FP8 with delayed scaling in Flax NNX: ``nnx.Linear(..., dot_general=Fp8Dot())``."""

from typing import Any

import jax
from flax import nnx

from fbq_jax.core.dimension_numbers import DimensionNumbers
from fbq_jax.fp8 import dot_general as fp8


class Fp8Scaling(nnx.Variable):
    """A tensor's state, an ``fp8.Scaling``; its "gradient" is its new value."""


class Fp8Dot(nnx.Module):
    """A ``dot_general`` in FP8 with delayed scaling for one NNX layer.

    ``fbq_jax.Fp8Dot()`` for NNX, with the numerics of ``fbq_jax.fp8.dot_general`` and
    the state in its variables ``lhs``, ``rhs`` and ``grad``.  (Current scaling has no
    state: ``fbq_jax.Fp8Dot(scaling="current")`` serves NNX as it is.)

    The largest value of a gradient is known to the backward pass only, so the new state
    comes out as the gradient of the old.  A training step differentiates with respect
    to it together with the parameters, and puts what it gets for it in place, as below.
    Nothing else moves the state.  Such gradients must not be summed over micro-batches,
    nor a layer be used twice in one forward, nor two layers share one object, for which
    ``fbq_jax.nnx.check_unshared`` looks.

    Args:
      history: the number of calls whose largest value sets a scale.

    Raises:
      ValueError: the history is no positive integer.

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

    def __call__(
        self,
        lhs: jax.Array,
        rhs: jax.Array,
        dimension_numbers: DimensionNumbers,
        precision: Any = None,
        preferred_element_type: jax.typing.DTypeLike | None = None,
        *,
        out_sharding: Any = None,
    ) -> jax.Array:
        """``lax.dot_general(lhs, rhs, ...)`` in FP8; lhs is the activation."""
        variables = self.lhs, self.rhs, self.grad
        return fp8.dot_general(
            fp8.Scalings(*(variable.get_value() for variable in variables)),
            lhs,
            rhs,
            dimension_numbers,
            precision,
            preferred_element_type,
            out_sharding,
        )
