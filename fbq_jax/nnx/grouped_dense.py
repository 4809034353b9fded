"""A Flax NNX layer that multiplies groups of rows by one kernel each."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from fbq_jax.core.dot_call import ragged_dot_of
from fbq_jax.core.expert_exchange import ExchangedGroups

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
        ragged_dot = ragged_dot_of(self.dot_general)
        return ragged_dot(x, jnp.asarray(self.kernel[...], x.dtype), group_sizes)
