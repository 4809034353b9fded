"""A quantized convolution for Flax Linen and plain JAX."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
from flax import linen as nn
from jax import lax

from fbq_jax.core.conv import conv_general_dilated
from fbq_jax.linen.dot import check_dot_general, fallback_dot
from fbq_jax.linen.rules import RulesDot
from fbq_jax.linen.state import calling_module


@dataclasses.dataclass(frozen=True)
class FallbackConv:
    """``lax.conv_general_dilated`` of an activation and a kernel, quantized.

    It is the product of the convolution's windows with the kernel, as
    ``fbq_jax.core.conv`` says, which also says what windows cost: nothing for 1x1, a
    copy for patches, much memory for 3x3, of which ``nn.remat(nn.Conv)`` keeps none for
    the backward pass.  Strides, padding, dilations and feature groups are as for the
    float one.

    Attributes:
      dot_general: computes the product and, in a Linen module, keeps its state there:
        a ``FallbackDot``, a ``RulesDot`` or any other.  Where a rule says float, it is
        ``lax.conv_general_dilated`` that computes.

    Raises:
      TypeError: ``dot_general`` cannot be called, as a ``Recipe`` cannot; or
        ``lax.conv_general_dilated``'s own, where shapes do not fit.
      ValueError: likewise; or a ``batch_group_count``, a window that is larger than the
        padded input, ``out_sharding`` of several feature groups, or ``nn.ConvLocal``.

    >>> import jax.numpy as jnp
    >>> layer = nn.Conv(8, (3, 3), conv_general_dilated=fallback_conv)
    >>> variables = layer.init(jax.random.key(0), jnp.ones((1, 6, 6, 4)))
    >>> layer.apply(variables, jnp.ones((2, 6, 6, 4))).shape
    (2, 6, 6, 8)
    >>> sorted(variables)
    ['fallback', 'params']
    """

    dot_general: Callable[..., jax.Array] = fallback_dot

    def __post_init__(self) -> None:
        check_dot_general("FallbackConv", self.dot_general)

    def __call__(
        self, lhs: jax.Array, rhs: jax.Array, *args: Any, **kwargs: Any
    ) -> jax.Array:
        """``lax.conv_general_dilated(lhs, rhs, ...)``, quantized."""
        if isinstance(calling_module(), nn.ConvLocal):
            raise ValueError(
                "nn.ConvLocal has a kernel for each place and is no convolution; a "
                "quantized one goes to nn.Conv"
            )
        dot: Callable[..., jax.Array] | None = self.dot_general
        if isinstance(dot, RulesDot):
            dot = dot.of_layer()
        if dot is None:
            return lax.conv_general_dilated(lhs, rhs, *args, **kwargs)
        return conv_general_dilated(dot, lhs, rhs, *args, **kwargs)


fallback_conv = FallbackConv()
