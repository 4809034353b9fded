"""Flax NNX's norms, with INT10 saved for the backward pass."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from flax.nnx.nn.dtypes import promote_dtype

from fbq_jax.core import nonlinear


class RMSNorm(nnx.Module):
    """``nnx.RMSNorm`` over the last axis: the same parameters, the same output.

    Args:
      num_features: the size C of the last axis.
      epsilon: added to the mean square.
      dtype: of the output; None takes that of the input and parameters together.
      param_dtype: of the parameters.
      use_scale: whether there is a parameter ``scale``, ``[C]``.
      scale_init: its initializer.
      bits: of each value saved for the backward pass, 4 to 12.
      rngs: for the parameters.

    >>> norm = RMSNorm(8, rngs=nnx.Rngs(0))
    >>> norm(jnp.ones((2, 8))).shape
    (2, 8)
    """

    def __init__(
        self,
        num_features: int,
        *,
        epsilon: float = 1e-6,
        dtype: Any = None,
        param_dtype: Any = jnp.float32,
        use_scale: bool = True,
        scale_init: nnx.initializers.Initializer = nnx.initializers.ones,
        bits: int = 10,
        rngs: nnx.Rngs,
    ):
        self.epsilon, self.dtype, self.bits = epsilon, dtype, bits
        self.scale = _param(use_scale, scale_init, num_features, param_dtype, rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Normalizes ``[..., C]``."""
        scale = None if self.scale is None else self.scale[...]
        x, scale = promote_dtype((x, scale), dtype=self.dtype)
        return nonlinear.rms_norm(x, scale, epsilon=self.epsilon, bits=self.bits)


class LayerNorm(nnx.Module):
    """``nnx.LayerNorm`` over the last axis: the same parameters, the same output.

    Args:
      num_features: the size C of the last axis.
      epsilon: added to the variance.
      dtype: of the output; None takes that of the input and parameters together.
      param_dtype: of the parameters.
      use_bias: whether there is a parameter ``bias``, ``[C]``.
      use_scale: whether there is a parameter ``scale``, ``[C]``.
      bias_init: the bias' initializer.
      scale_init: the scale's initializer.
      bits: of each value saved for the backward pass, 4 to 12.
      rngs: for the parameters.
    """

    def __init__(
        self,
        num_features: int,
        *,
        epsilon: float = 1e-6,
        dtype: Any = None,
        param_dtype: Any = jnp.float32,
        use_bias: bool = True,
        use_scale: bool = True,
        bias_init: nnx.initializers.Initializer = nnx.initializers.zeros,
        scale_init: nnx.initializers.Initializer = nnx.initializers.ones,
        bits: int = 10,
        rngs: nnx.Rngs,
    ):
        self.epsilon, self.dtype, self.bits = epsilon, dtype, bits
        # The scale first, as in Flax: they draw from one stream.
        self.scale = _param(use_scale, scale_init, num_features, param_dtype, rngs)
        self.bias = _param(use_bias, bias_init, num_features, param_dtype, rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Normalizes ``[..., C]``."""
        scale = None if self.scale is None else self.scale[...]
        bias = None if self.bias is None else self.bias[...]
        x, scale, bias = promote_dtype((x, scale, bias), dtype=self.dtype)
        return nonlinear.layer_norm(
            x, scale, bias, epsilon=self.epsilon, bits=self.bits
        )


def _param(
    used: bool,
    init: nnx.initializers.Initializer,
    size: int,
    dtype: Any,
    rngs: nnx.Rngs,
) -> nnx.Param | None:
    if not used:
        return nnx.data(None)
    return nnx.Param(init(rngs.params(), (size,), dtype))
