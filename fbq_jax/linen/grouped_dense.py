"""A Flax Linen layer that multiplies groups of rows by one kernel each."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

from fbq_jax.core.dot_general import LayerDot
from fbq_jax.experts.ragged_dot import layer_dot_of

Initializer = Callable[..., jax.Array]


class GroupedDense(nn.Module):
    """``nn.Dense`` without a bias for each of several groups of rows.

    Attributes:
      features: N, the width of the output.
      param_dtype: dtype of the kernel.
      kernel_init: the kernel's initializer.
      dot_general: a ``FallbackDot`` or ``RulesDot``; None for ``lax.ragged_dot``.
    """

    features: int
    param_dtype: Any
    kernel_init: Initializer
    dot_general: Callable[..., jax.Array] | None = None

    @nn.compact
    def projection(
        self, x: jax.Array, groups: int, size: int
    ) -> tuple[jax.Array, LayerDot | None]:
        """The weight ``[groups, size, N]`` in the dtype of x, and its dot."""
        shape = groups, size, self.features
        kernel = self.param("kernel", self.kernel_init, shape, self.param_dtype)
        weight = jnp.asarray(kernel, x.dtype)
        return weight, layer_dot_of(self.dot_general, x, weight)
