"""A Flax NNX layer that multiplies groups of rows by one kernel each."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from fbq_jax.core.dot_call import RaggedCall, ragged_dot_of
from fbq_jax.core.expert_exchange import ExchangedGroups
from fbq_jax.core.grouped_projection import GroupedDot, GroupedProjection
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
      dot_general: its ``ragged_dot`` multiplies; ``lax.dot_general`` for
        ``lax.ragged_dot``.
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

    def __call__(
        self, x: jax.Array, group_sizes: jax.Array | ExchangedGroups
    ) -> jax.Array:
        """Maps rows ``[M, K]`` in groups of sizes ``[G]`` to ``[M, N]``.

        ``ExchangedGroups`` say which shapes they take and give.
        """
        weight = jnp.asarray(self.kernel[...], x.dtype)
        return ragged_dot_of(self.dot_general)(x, weight, group_sizes)

    @PlainMethod
    def projection(
        self, x: jax.Array, group_sizes: jax.Array | ExchangedGroups, size: int
    ) -> GroupedProjection | None:
        """The layer's product with rows ``[M, size]`` that are computed from x.

        None if the layer's op computes products at once only.
        """
        del size
        if not isinstance(self.dot_general, GroupedDot):
            return None
        weight = jnp.asarray(self.kernel[...], x.dtype)
        return self.dot_general.projection(x, weight, RaggedCall(group_sizes))
