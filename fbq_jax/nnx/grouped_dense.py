"""A Flax NNX layer that multiplies groups of rows by one kernel each."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from fbq_jax.core.dot_general import LayerDot
from fbq_jax.experts.ragged_dot import layer_dot_of
from fbq_jax.nnx.plain_method import PlainMethod

Initializer = nnx.initializers.Initializer


class GroupedDense(nnx.Module):
    """``nnx.Linear`` without a bias for each of several groups of rows.

    Args:
      kernel_shape: ``(G, K, N)``.
      param_dtype: dtype of the kernel.
      kernel_init: the kernel's initializer.
      rngs: seeds the kernel.

    Attributes:
      kernel_shape: ``(G, K, N)``.
      dot_general: an ``fbq_jax.nnx.FallbackDot``; or ``lax.dot_general``, which stands
        for ``lax.ragged_dot``.
    """

    def __init__(
        self,
        kernel_shape: tuple[int, int, int],
        param_dtype: Any,
        kernel_init: Initializer,
        rngs: nnx.Rngs,
    ):
        self.kernel_shape = kernel_shape
        self.kernel = nnx.Param(kernel_init(rngs.params(), kernel_shape, param_dtype))
        self.dot_general: Callable[..., jax.Array] = lax.dot_general

    @PlainMethod
    def projection(
        self, x: jax.Array, groups: int, size: int
    ) -> tuple[jax.Array, LayerDot | None]:
        """The kernel in the dtype of x, and its dot."""
        del groups, size
        weight = jnp.asarray(self.kernel[...], x.dtype)
        return weight, layer_dot_of(self.dot_general, x, weight)
