"""A Flax Linen layer that multiplies groups of rows by one kernel each."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

from fbq_jax.core.dot_call import ragged_dot_of
from fbq_jax.core.expert_exchange import ExchangedGroups

Initializer = Callable[..., jax.Array]


class GroupedDense(nn.Module):
    """``nn.Dense`` without a bias for each of several groups of rows.

    Attributes:
      features: N, the width of the output.
      param_dtype: dtype of the kernel.
      kernel_init: the kernel's initializer.
      dot_general: its ``ragged_dot`` multiplies; None for ``lax.ragged_dot``.
    """

    features: int
    param_dtype: Any
    kernel_init: Initializer
    dot_general: Callable[..., jax.Array] | None = None

    @nn.compact
    def __call__(
        self, x: jax.Array, group_sizes: jax.Array | ExchangedGroups
    ) -> jax.Array:
        """Maps rows ``[M, K]`` in groups of sizes ``[G]`` to ``[M, N]``.

        ``ExchangedGroups`` say which shapes they take and give.
        """
        shape = len(group_sizes), x.shape[-1], self.features
        kernel = self.param("kernel", self.kernel_init, shape, self.param_dtype)
        ragged_dot = ragged_dot_of(self.dot_general)
        return ragged_dot(x, jnp.asarray(kernel, x.dtype), group_sizes)
