"""A Flax Linen layer that multiplies groups of rows by one kernel each."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

from fbq_jax.core.dot_call import RaggedCall, ragged_dot_of
from fbq_jax.core.expert_exchange import ExchangedGroups
from fbq_jax.core.grouped_projection import GroupedDot, GroupedProjection

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

    def __call__(
        self, x: jax.Array, group_sizes: jax.Array | ExchangedGroups
    ) -> jax.Array:
        """Maps rows ``[M, K]`` in groups of sizes ``[G]`` to ``[M, N]``.

        ``ExchangedGroups`` say which shapes they take and give.
        """
        weight = self._weight(len(group_sizes), x.shape[-1], x.dtype)
        return ragged_dot_of(self.dot_general)(x, weight, group_sizes)

    def projection(
        self, x: jax.Array, group_sizes: jax.Array | ExchangedGroups, size: int
    ) -> GroupedProjection | None:
        """The layer's product with rows ``[M, size]`` that are computed from x.

        None if the layer's op computes products at once only.
        """
        if not isinstance(self.dot_general, GroupedDot):
            return None
        weight = self._weight(len(group_sizes), size, x.dtype)
        return self.dot_general.projection(x, weight, RaggedCall(group_sizes))

    @nn.compact
    def _weight(self, groups: int, size: int, dtype: Any) -> jax.Array:
        shape = groups, size, self.features
        kernel = self.param("kernel", self.kernel_init, shape, self.param_dtype)
        return jnp.asarray(kernel, dtype)
