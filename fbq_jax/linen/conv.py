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

    It multiplies the windows of the convolution with the kernel
    (``fbq_jax.core.conv``).  Windows cost no memory for 1x1 kernels, one copy of the
    input for patches and nine for 3x3 kernels.  ``nn.remat(nn.Conv)`` recomputes them
    in the backward pass.  Strides, padding, dilations and feature groups are supported.

    Attributes:
      dot_general: computes the product and, in a Linen module, keeps its state there: a
        ``FallbackDot``, a ``RulesDot`` or any other ``dot_general``.  A layer that a
        ``RulesDot`` leaves unquantized runs ``lax.conv_general_dilated``.

    Raises:
      TypeError: ``dot_general`` is not callable (a ``Recipe`` is not), or the shapes do
        not fit, as in ``lax.conv_general_dilated``.
      ValueError: the shapes do not fit, as in ``lax.conv_general_dilated``; or
        ``batch_group_count`` is not 1, a window is larger than the padded input,
        ``out_sharding`` is set and there are several feature groups, or the layer is
        ``nn.ConvLocal``.

    >>> import jax.numpy as jnp
    >>> layer = nn.Conv(8, (3, 3), conv_general_dilated=fallback_conv)
    >>> x = jnp.ones((2, 6, 6, 4))
    >>> y, variables = jax.eval_shape(layer.init_with_output, jax.random.key(0), x)
    >>> y.shape
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
                "nn.ConvLocal has a kernel for each position and is not a convolution: "
                "use fallback_conv with nn.Conv"
            )
        dot: Callable[..., jax.Array] | None = self.dot_general
        if isinstance(dot, RulesDot):
            dot = dot.of_layer(rhs.shape)
        if dot is None:
            return lax.conv_general_dilated(lhs, rhs, *args, **kwargs)
        return conv_general_dilated(dot, lhs, rhs, *args, **kwargs)


fallback_conv = FallbackConv()
