"""Operators with INT8 inputs and outputs: linear, GELU, LayerNorm, dropout, add.

In Jetfire's *INT8 data flow* (arXiv 2403.12422), activations and their gradients pass
from one operator to the next as INT8 values with one scale per block (32x32 in the
paper).  An operator dequantizes its input, computes in float32 and quantizes its
output:

=========== ========================== ================================== ============
operator    forward, y =               backward, dx =                     saves
=========== ========================== ================================== ============
Linear      Q(x Q(W) + b)              S(dy Q(W)'), dW = x' dy            x, Q(W)
Gelu        Q(gelu(x))                 S(dy * gelu'(x))                   x
LayerNorm   Q(normalized * g + b)      S(rstd * (h - mean(h) -            x, mean, rstd
                                       normalized * mean(h *
                                       normalized))), h = dy * g
Dropout     Q(x * mask / keep)         S(dy * mask / keep)                nothing
add         Q(a + b)                   dy, to both                        nothing
=========== ========================== ================================== ============

``Q`` rounds to nearest.  ``S`` rounds stochastically, and each use draws independent
noise.  Every backward pass is linear in ``dy``, so gradients are unbiased given the
saved values.  Parameter gradients are float32.  A NaN or an Inf turns its block
into NaN, and so everything that depends on the block; a block of zeros stays zero.

Each pass of an operator is one ``jax.jit`` program: no float activation leaves it.
"""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from fbq_jax import ops
from fbq_jax.core.nonlinear import SAVED_NAME
from fbq_jax.kernels import rounding
from fbq_jax.kernels.layer_sources import find_rstd, with_slope
from fbq_jax.kernels.quantized import Layout
from fbq_jax.quantized import Quantized

Params = Mapping[str, Any]
# What a pass returns: an array, and the residuals or the gradients of the parameters.
Result = tuple[Quantized, Any]
FloatResult = tuple[jax.Array, Any]

# Compiles one pass of an operator as a unit.
_unit = functools.partial(jax.jit, static_argnums=0)

_MASK_STREAM = 1


class Operator(Protocol):
    """One step of the data flow.  Operators are static arguments, hence hashable."""

    def forward(self, params: Params, x: Quantized, seed: jax.Array) -> Result:
        """Returns the output and the residuals of the backward pass.

        Args:
          params: float32 arrays by name.
          x: INT8 ``[1, M, C]`` in square blocks.
          seed: uint32 ``[]``, seeds the operator's noise.
        """

    def backward(self, saved: Any, dy: Quantized, seed: jax.Array) -> Result:
        """Returns the gradient of x and the float32 gradients of the parameters.

        Args:
          saved: the residuals that ``forward`` returned.
          dy: the gradient of the output.
          seed: the seed that ``forward`` received.
        """


def to_codes(x: jax.Array, side: int) -> Quantized:
    """Quantizes float ``[1, M, C]`` in ``side x side`` blocks, to nearest.

    A checkpoint policy can save the result (``fbq_jax.save_codes``).
    """
    # Nearest rounding draws no noise.
    seeds = jnp.zeros(x.shape[0], jnp.uint32)
    return checkpoint_name(_quantize(x, side, "nearest", seeds), SAVED_NAME)


def grad_to_codes(dy: jax.Array, side: int, seed: jax.Array) -> Quantized:
    """Quantizes float ``[1, M, C]`` in ``side x side`` blocks, stochastically.

    ``seed``, uint32 ``[]``, seeds the noise.
    """
    return _quantize(dy, side, "stochastic", seed[None])


def _quantize(
    x: jax.Array, side: int, mode: rounding.Rounding, seeds: jax.Array
) -> Quantized:
    layout = Layout(mode, (side, side))
    quantized = ops.quantize(x, seeds, rowwise=layout, colwise=None).rowwise
    assert quantized is not None
    return quantized


def _matmul(lhs: Quantized, rhs: Quantized) -> jax.Array:
    """Multiplies ``[1, M, K]`` with ``[1, K, N]``, in float32."""
    return ops.matmul(lhs, rhs.mT, dtype=jnp.float32)


class FloatOperator:
    """An ``Operator`` that quantizes float32 results; its two methods are abstract."""

    @_unit
    def forward(self, params: Params, x: Quantized, seed: jax.Array) -> Result:
        """Returns the quantized output and the residuals."""
        y, saved = self.compute(params, x, seed)
        return to_codes(y, x.sides[0]), saved

    @_unit
    def backward(self, saved: Any, dy: Quantized, seed: jax.Array) -> Result:
        """Returns the quantized gradient of x and the gradients of the parameters."""
        dx, grads = self.gradients(saved, dy, seed)
        return grad_to_codes(dx, dy.sides[0], seed), grads

    def compute(self, params: Params, x: Quantized, seed: jax.Array) -> FloatResult:
        """``forward`` with an output in float32."""
        raise NotImplementedError

    def gradients(self, saved: Any, dy: Quantized, seed: jax.Array) -> FloatResult:
        """``backward`` with a gradient of x in float32."""
        raise NotImplementedError


class SavedLinear(NamedTuple):
    """Both quantized operands of a linear layer."""

    x: Quantized
    w: Quantized


@dataclasses.dataclass(frozen=True)
class Linear(FloatOperator):
    """``x W + b``; the parameters are ``kernel [K, N]`` and an optional ``bias [N]``.

    INT8 products are exact inside a block; blocks are summed in float32.
    """

    use_bias: bool = True

    def compute(self, params: Params, x: Quantized, seed: jax.Array) -> FloatResult:
        """Returns the output and both operands."""
        del seed
        w = to_codes(params["kernel"][None], x.sides[0])
        y = _matmul(x, w)
        if self.use_bias:
            y += params["bias"][None, None, :]
        return y, SavedLinear(x, w)

    def gradients(
        self, saved: SavedLinear, dy: Quantized, seed: jax.Array
    ) -> FloatResult:
        """Returns the gradients of x, kernel and bias."""
        del seed
        dx = _matmul(dy, saved.w.mT)
        grads = {"kernel": _matmul(saved.x.mT, dy)[0]}
        if self.use_bias:
            grads["bias"] = jnp.sum(dy.dequantize(), axis=(0, 1))
        return dx, grads


_gelu = functools.partial(jax.nn.gelu, approximate=True)


@dataclasses.dataclass(frozen=True)
class Gelu(FloatOperator):
    """GELU in its tanh approximation, ``jax.nn.gelu(x, approximate=True)``."""

    def compute(self, params: Params, x: Quantized, seed: jax.Array) -> FloatResult:
        """Returns the output and x."""
        del params, seed
        return _gelu(x.dequantize()), x

    def gradients(
        self, saved: Quantized, dy: Quantized, seed: jax.Array
    ) -> FloatResult:
        """Returns the gradient of x."""
        del seed
        _, slope = with_slope(_gelu, saved.dequantize())
        return dy.dequantize() * slope, {}


class _SavedNorm(NamedTuple):
    """The quantized input, float32 statistics ``[1, M, 1]`` and ``scale [1, 1, C]``."""

    x: Quantized
    mean: jax.Array
    rstd: jax.Array
    scale: jax.Array


@dataclasses.dataclass(frozen=True)
class LayerNorm(FloatOperator):
    """Layer normalization with parameters ``scale [C]`` and ``bias [C]``.

    The statistics are computed from the dequantized input.
    """

    epsilon: float = 1e-6

    def compute(self, params: Params, x: Quantized, seed: jax.Array) -> FloatResult:
        """Returns the output, x and its statistics."""
        del seed
        values = x.dequantize()
        mean = jnp.mean(values, axis=-1, keepdims=True)
        centered = values - mean
        variance = jnp.mean(centered * centered, axis=-1, keepdims=True)
        rstd = find_rstd(variance, self.epsilon)
        scale, bias = (params[name][None, None, :] for name in ("scale", "bias"))
        return centered * rstd * scale + bias, _SavedNorm(x, mean, rstd, scale)

    def gradients(
        self, saved: _SavedNorm, dy: Quantized, seed: jax.Array
    ) -> FloatResult:
        """Returns the gradients of x, scale and bias."""
        del seed
        x, mean, rstd, scale = saved
        normalized = (x.dequantize() - mean) * rstd
        dy_values = dy.dequantize()
        grad = dy_values * scale
        dx = grad - jnp.mean(grad, axis=-1, keepdims=True)
        dx -= normalized * jnp.mean(grad * normalized, axis=-1, keepdims=True)
        grads = {
            "scale": jnp.sum(dy_values * normalized, axis=(0, 1)),
            "bias": jnp.sum(dy_values, axis=(0, 1)),
        }
        return rstd * dx, grads


@dataclasses.dataclass(frozen=True)
class Dropout(FloatOperator):
    """Zeros each value with probability ``rate`` and divides the rest by ``1 - rate``.

    The mask is a function of the seed, so the backward pass draws it again.  The
    probability is exact to 2**-16.
    """

    rate: float

    def compute(self, params: Params, x: Quantized, seed: jax.Array) -> FloatResult:
        """Returns the output; nothing is saved."""
        del params
        return self._drop(x, seed), ()

    def gradients(
        self, saved: tuple[()], dy: Quantized, seed: jax.Array
    ) -> FloatResult:
        """Returns the gradient of x."""
        del saved
        return self._drop(dy, seed), {}

    def _drop(self, x: Quantized, seed: jax.Array) -> jax.Array:
        _, rows, columns = x.shape
        mask_seed = rounding.fold(seed, _MASK_STREAM)
        noise = rounding.noise(mask_seed, rows, columns)[None]
        keep = 1.0 - self.rate
        return jnp.where(noise < keep - 0.5, x.dequantize() / keep, 0.0)


@jax.jit
def add(a: Quantized, b: Quantized) -> Quantized:
    """The sum of two activations, rounded to nearest."""
    return to_codes(a.dequantize() + b.dequantize(), a.sides[0])


@jax.jit
def add_grads(a: Quantized, b: Quantized, seed: jax.Array) -> Quantized:
    """The sum of two gradients, rounded stochastically."""
    return grad_to_codes(a.dequantize() + b.dequantize(), a.sides[0], seed)
