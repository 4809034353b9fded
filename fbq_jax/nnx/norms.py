"""Flax NNX norms that save INT10 for the backward pass."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from flax.nnx.nn.dtypes import promote_dtype

from fbq_jax.core import nonlinear


class RMSNorm(nnx.Module):
    """``nnx.RMSNorm`` over the last axis, with the same parameters and output.

    ``fbq_jax.nonlinear.rms_norm`` computes it and says what the backward pass saves.

    Args:
      num_features: C, the size of the last axis.
      epsilon: added to the mean square.
      dtype: dtype of the output; None promotes the input's and the parameters' dtypes.
      param_dtype: dtype of the parameters.
      use_scale: whether the norm has a parameter ``scale [C]``.
      scale_init: the scale's initializer.
      bits: bits per value saved for the backward pass, 4 to 12.
      rngs: seeds the parameters.

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
        """Normalizes ``[..., C]`` over its last axis."""
        scale = None if self.scale is None else self.scale[...]
        x, scale = promote_dtype((x, scale), dtype=self.dtype)
        return nonlinear.rms_norm(x, scale, epsilon=self.epsilon, bits=self.bits)


class LayerNorm(nnx.Module):
    """``nnx.LayerNorm`` over the last axis, with the same parameters and output.

    ``fbq_jax.nonlinear.layer_norm`` computes it and says what the backward pass saves.

    Args:
      num_features: C, the size of the last axis.
      epsilon: added to the variance.
      dtype: dtype of the output; None promotes the input's and the parameters' dtypes.
      param_dtype: dtype of the parameters.
      use_bias: whether the norm has a parameter ``bias [C]``.
      use_scale: whether the norm has a parameter ``scale [C]``.
      bias_init: the bias's initializer.
      scale_init: the scale's initializer.
      bits: bits per value saved for the backward pass, 4 to 12.
      rngs: seeds the parameters.
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
        # Flax draws the scale first; both come from one stream.
        self.scale = _param(use_scale, scale_init, num_features, param_dtype, rngs)
        self.bias = _param(use_bias, bias_init, num_features, param_dtype, rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Normalizes ``[..., C]`` over its last axis."""
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
    """A parameter ``[size]``, or None where the norm does not use it."""
    if not used:
        return nnx.data(None)
    return nnx.Param(init(rngs.params(), (size,), dtype))
