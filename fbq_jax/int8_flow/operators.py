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

from fbq_jax.core.nonlinear import SAVED_NAME
from fbq_jax.core.qtensor import QTensor, matmul, quantize
from fbq_jax.kernels import rounding
from fbq_jax.kernels.fused_reference import find_rstd, with_slope

Params = Mapping[str, Any]

# Compiles one pass of an operator as a unit.
unit = functools.partial(jax.jit, static_argnums=0)

_MASK_STREAM = 1


class Operator(Protocol):
    """One step of the data flow.  Operators are static arguments, hence hashable."""

    def forward(
        self, params: Params, x: QTensor, seed: jax.Array
    ) -> tuple[QTensor, Any]:
        """Returns the output and the residuals of the backward pass.

        Args:
          params: float32 arrays by name.
          x: INT8 ``[1, M, C]`` in square blocks.
          seed: uint32 ``[]``, seeds the operator's noise.
        """

    def backward(
        self, saved: Any, dy: QTensor, seed: jax.Array
    ) -> tuple[QTensor, dict[str, Any]]:
        """Returns the gradient of x and the float32 gradients of the parameters.

        Args:
          saved: the residuals that ``forward`` returned.
          dy: the gradient of the output.
          seed: the seed that ``forward`` received.
        """


def to_codes(x: jax.Array, side: int) -> QTensor:
    """Quantizes float ``[1, M, C]`` in ``side x side`` blocks, to nearest.

    A checkpoint policy can save the result (``fbq_jax.save_codes``).
    """
    return checkpoint_name(quantize(x, block=(side, side)), SAVED_NAME)


def grad_to_codes(dy: jax.Array, side: int, seed: jax.Array) -> QTensor:
    """Quantizes float ``[1, M, C]`` in ``side x side`` blocks, stochastically.

    ``seed``, uint32 ``[]``, seeds the noise.
    """
    return quantize(dy, block=(side, side), rounding="stochastic", seeds=seed[None])


class SavedLinear(NamedTuple):
    """Both quantized operands of a linear layer."""

    x: QTensor
    w: QTensor


@dataclasses.dataclass(frozen=True)
class Linear:
    """``x W + b``; the parameters are ``kernel [K, N]`` and an optional ``bias [N]``.

    INT8 products are exact inside a block; blocks are summed in float32.
    """

    use_bias: bool = True

    @unit
    def forward(
        self, params: Params, x: QTensor, seed: jax.Array
    ) -> tuple[QTensor, SavedLinear]:
        """Returns the quantized output and both operands."""
        del seed
        y, saved = linear(params, x, use_bias=self.use_bias)
        return to_codes(y, x.block[0]), saved

    @unit
    def backward(
        self, saved: SavedLinear, dy: QTensor, seed: jax.Array
    ) -> tuple[QTensor, dict[str, jax.Array]]:
        """Returns the gradients of x, kernel and bias."""
        dx, grads = linear_grads(saved, dy, use_bias=self.use_bias)
        return grad_to_codes(dx, dy.block[0], seed), grads


def linear(
    params: Params, x: QTensor, *, use_bias: bool
) -> tuple[jax.Array, SavedLinear]:
    """``x W + b`` in float32, not yet quantized, and both operands."""
    w = to_codes(params["kernel"][None], x.block[0])
    y = matmul(x, w, jnp.float32)
    if use_bias:
        y += params["bias"][None, None, :]
    return y, SavedLinear(x, w)


def linear_grads(
    saved: SavedLinear, dy: QTensor, *, use_bias: bool
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """The float32 gradients of x, not yet quantized, and of the parameters."""
    dx = matmul(dy, saved.w.mT, jnp.float32)
    grads = {"kernel": matmul(saved.x.mT, dy, jnp.float32)[0]}
    if use_bias:
        grads["bias"] = jnp.sum(dy.dequantize(), axis=(0, 1))
    return dx, grads


def _gelu(x: jax.Array) -> jax.Array:
    return jax.nn.gelu(x, approximate=True)


@dataclasses.dataclass(frozen=True)
class Gelu:
    """GELU in its tanh approximation, ``jax.nn.gelu(x, approximate=True)``."""

    @unit
    def forward(
        self, params: Params, x: QTensor, seed: jax.Array
    ) -> tuple[QTensor, QTensor]:
        """Returns the quantized output and x."""
        del params, seed
        return to_codes(_gelu(x.dequantize()), x.block[0]), x

    @unit
    def backward(
        self, saved: QTensor, dy: QTensor, seed: jax.Array
    ) -> tuple[QTensor, dict[str, jax.Array]]:
        """Returns the gradient of x."""
        _, slope = with_slope(_gelu, saved.dequantize())
        return grad_to_codes(dy.dequantize() * slope, dy.block[0], seed), {}


class _SavedNorm(NamedTuple):
    """The quantized input, float32 statistics ``[1, M, 1]`` and ``scale [1, 1, C]``."""

    x: QTensor
    mean: jax.Array
    rstd: jax.Array
    scale: jax.Array


@dataclasses.dataclass(frozen=True)
class LayerNorm:
    """Layer normalization with parameters ``scale [C]`` and ``bias [C]``.

    The statistics are computed from the dequantized input.
    """

    epsilon: float = 1e-6

    @unit
    def forward(
        self, params: Params, x: QTensor, seed: jax.Array
    ) -> tuple[QTensor, _SavedNorm]:
        """Returns the quantized output, x and its statistics."""
        del seed
        values = x.dequantize()
        mean = jnp.mean(values, axis=-1, keepdims=True)
        centered = values - mean
        variance = jnp.mean(centered * centered, axis=-1, keepdims=True)
        rstd = find_rstd(variance, self.epsilon)
        scale, bias = (params[name][None, None, :] for name in ("scale", "bias"))
        y = centered * rstd * scale + bias
        return to_codes(y, x.block[0]), _SavedNorm(x, mean, rstd, scale)

    @unit
    def backward(
        self, saved: _SavedNorm, dy: QTensor, seed: jax.Array
    ) -> tuple[QTensor, dict[str, jax.Array]]:
        """Returns the gradients of x, scale and bias."""
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
        return grad_to_codes(rstd * dx, dy.block[0], seed), grads


@dataclasses.dataclass(frozen=True)
class Dropout:
    """Zeros each value with probability ``rate`` and divides the rest by ``1 - rate``.

    The mask is a function of the seed, so the backward pass draws it again.  The
    probability is exact to 2**-16.
    """

    rate: float

    @unit
    def forward(
        self, params: Params, x: QTensor, seed: jax.Array
    ) -> tuple[QTensor, tuple[()]]:
        """Returns the quantized output; nothing is saved."""
        del params
        return to_codes(self._drop(x, seed), x.block[0]), ()

    @unit
    def backward(
        self, saved: tuple[()], dy: QTensor, seed: jax.Array
    ) -> tuple[QTensor, dict[str, jax.Array]]:
        """Returns the gradient of x."""
        del saved
        return grad_to_codes(self._drop(dy, seed), dy.block[0], seed), {}

    def _drop(self, x: QTensor, seed: jax.Array) -> jax.Array:
        _, rows, columns = x.shape
        mask_seed = rounding.fold(seed, _MASK_STREAM)
        noise = rounding.noise(mask_seed, rows, columns)[None]
        keep = 1.0 - self.rate
        return jnp.where(noise < keep - 0.5, x.dequantize() / keep, 0.0)


@jax.jit
def add(a: QTensor, b: QTensor) -> QTensor:
    """The sum of two activations, rounded to nearest."""
    return to_codes(a.dequantize() + b.dequantize(), a.block[0])


@jax.jit
def add_grads(a: QTensor, b: QTensor, seed: jax.Array) -> QTensor:
    """The sum of two gradients, rounded stochastically."""
    return grad_to_codes(a.dequantize() + b.dequantize(), a.block[0], seed)
