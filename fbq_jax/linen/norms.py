"""Flax Linen norms that save INT10 for the backward pass."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax.linen.dtypes import canonicalize_dtype

from fbq_jax.core import nonlinear


class RMSNorm(nn.Module):
    """``nn.RMSNorm`` over the last axis, with the same parameters and output.

    ``fbq_jax.nonlinear.rms_norm`` computes it and says what the backward pass saves.

    Attributes:
      epsilon: added to the mean square.
      dtype: dtype of the output; None promotes the input's and the parameters' dtypes.
      param_dtype: dtype of the parameters.
      use_scale: whether the norm has a parameter ``scale [C]``.
      scale_init: the scale's initializer.
      bits: bits per value saved for the backward pass, 4 to 12.

    >>> norm = RMSNorm()
    >>> x = jnp.ones((2, 8))
    >>> variables = norm.init(jax.random.key(0), x)
    >>> jax.tree.map(jnp.shape, variables)
    {'params': {'scale': (8,)}}
    """

    epsilon: float = 1e-6
    dtype: Any = None
    param_dtype: Any = jnp.float32
    use_scale: bool = True
    scale_init: nn.initializers.Initializer = nn.initializers.ones
    bits: int = 10

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Normalizes ``[..., C]`` over its last axis."""
        scale = None
        if self.use_scale:
            scale = self.param("scale", self.scale_init, x.shape[-1:], self.param_dtype)
        dtype = canonicalize_dtype(x, scale, dtype=self.dtype)
        y = nonlinear.rms_norm(
            x.astype(jnp.float32), scale, epsilon=self.epsilon, bits=self.bits
        )
        return y.astype(dtype)


class LayerNorm(nn.Module):
    """``nn.LayerNorm`` over the last axis, with the same parameters and output.

    ``fbq_jax.nonlinear.layer_norm`` computes it and says what the backward pass saves.

    Attributes:
      epsilon: added to the variance.
      dtype: dtype of the output; None promotes the input's and the parameters' dtypes.
      param_dtype: dtype of the parameters.
      use_bias: whether the norm has a parameter ``bias [C]``.
      use_scale: whether the norm has a parameter ``scale [C]``.
      bias_init: the bias's initializer.
      scale_init: the scale's initializer.
      bits: bits per value saved for the backward pass, 4 to 12.
    """

    epsilon: float = 1e-6
    dtype: Any = None
    param_dtype: Any = jnp.float32
    use_bias: bool = True
    use_scale: bool = True
    bias_init: nn.initializers.Initializer = nn.initializers.zeros
    scale_init: nn.initializers.Initializer = nn.initializers.ones
    bits: int = 10

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Normalizes ``[..., C]`` over its last axis."""
        scale = bias = None
        if self.use_scale:
            scale = self.param("scale", self.scale_init, x.shape[-1:], self.param_dtype)
        if self.use_bias:
            bias = self.param("bias", self.bias_init, x.shape[-1:], self.param_dtype)
        dtype = canonicalize_dtype(x, scale, bias, dtype=self.dtype)
        y = nonlinear.layer_norm(
            x.astype(jnp.float32), scale, bias, epsilon=self.epsilon, bits=self.bits
        )
        return y.astype(dtype)
