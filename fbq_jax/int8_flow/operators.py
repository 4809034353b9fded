"""Operators that take and give INT8: linear, GELU, LayerNorm, dropout, add.

Jetfire's *INT8 data flow* (arXiv 2403.12422): activations and their gradients go from
one operator to the next as codes with a scale for each block, 32x32 in the paper.  An
operator dequantizes what it reads, computes in float32 and quantizes what it gives:

=========== ========================== ================================== ============
operator    forward, y =               backward, dx =                     keeps
=========== ========================== ================================== ============
Linear      Q(x W + b), W in codes     S(dy W'), dW = x' dy               x, W
Gelu        Q(gelu(x))                 S(dy * gelu'(x))                   x
LayerNorm   Q(normalized * g + b)      S(rstd * (h - mean(h) -            x, mean, rstd
                                       normalized * mean(h *
                                       normalized))), h = dy * g
Dropout     Q(x * mask / keep)         S(dy * mask / keep)                nothing
add         Q(a + b)                   dy, to both                        nothing
=========== ========================== ================================== ============

``Q`` rounds to nearest and ``S`` stochastically, each use with noise of its own, so
that gradients are unbiased: given what the forward pass keeps, every backward pass is
linear in ``dy``.  The gradients of parameters are float32.  A NaN or an Inf makes its
block NaN, and so all that depends on the block; a block of zeros stays zero.

An operator is compiled as a unit (``jax.jit``): the floats in it are its own.
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

# Decorates the passes of an operator.
unit = functools.partial(jax.jit, static_argnums=0)

_MASK_STREAM = 1


class Operator(Protocol):
    """A step of the data flow; hashable, for it is static."""

    def forward(
        self, params: Params, x: QTensor, seed: jax.Array
    ) -> tuple[QTensor, Any]:
        """Gives the output, and what the backward pass reads.

        Args:
          params: float32 arrays by name.
          x: ``[1, M, C]`` in square blocks.
          seed: uint32 ``[]``, of the noise.
        """

    def backward(
        self, saved: Any, dy: QTensor, seed: jax.Array
    ) -> tuple[QTensor, dict[str, Any]]:
        """Gives the gradients of x and, in float32, of the parameters.

        Args:
          saved: what ``forward`` gave.
          dy: the gradient of its output.
          seed: the one that ``forward`` had.
        """


def to_codes(x: jax.Array, side: int) -> QTensor:
    """Quantizes float ``[1, M, C]`` in blocks of ``side``, to nearest.

    A checkpoint policy may save the codes (``fbq_jax.save_codes``).
    """
    return checkpoint_name(quantize(x, block=(side, side)), SAVED_NAME)


def grad_to_codes(dy: jax.Array, side: int, seed: jax.Array) -> QTensor:
    """Likewise, stochastically, with the noise of ``seed``, uint32 ``[]``."""
    return quantize(dy, block=(side, side), rounding="stochastic", seeds=seed[None])


class SavedLinear(NamedTuple):
    """The codes of both operands."""

    x: QTensor
    w: QTensor


@dataclasses.dataclass(frozen=True)
class Linear:
    """``x W + b``, of ``kernel [K, N]`` and, if it has one, ``bias [N]``.

    Products are of INT8, exact in a block and summed over blocks in float32.
    """

    use_bias: bool = True

    @unit
    def forward(
        self, params: Params, x: QTensor, seed: jax.Array
    ) -> tuple[QTensor, SavedLinear]:
        """The output's codes."""
        del seed
        y, saved = linear(params, x, use_bias=self.use_bias)
        return to_codes(y, x.block[0]), saved

    @unit
    def backward(
        self, saved: SavedLinear, dy: QTensor, seed: jax.Array
    ) -> tuple[QTensor, dict[str, jax.Array]]:
        """The gradients of x, kernel and bias."""
        dx, grads = linear_grads(saved, dy, use_bias=self.use_bias)
        return grad_to_codes(dx, dy.block[0], seed), grads


def linear(
    params: Params, x: QTensor, *, use_bias: bool
) -> tuple[jax.Array, SavedLinear]:
    """``x W + b`` in float32, before it is quantized."""
    w = to_codes(params["kernel"][None], x.block[0])
    y = matmul(x, w, jnp.float32)
    if use_bias:
        y += params["bias"][None, None, :]
    return y, SavedLinear(x, w)


def linear_grads(
    saved: SavedLinear, dy: QTensor, *, use_bias: bool
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """The gradients of x, before it is quantized, and of the parameters."""
    dx = matmul(dy, saved.w.mT, jnp.float32)
    grads = {"kernel": matmul(saved.x.mT, dy, jnp.float32)[0]}
    if use_bias:
        grads["bias"] = jnp.sum(dy.dequantize(), axis=(0, 1))
    return dx, grads


def _gelu(x: jax.Array) -> jax.Array:
    return jax.nn.gelu(x, approximate=True)


@dataclasses.dataclass(frozen=True)
class Gelu:
    """``jax.nn.gelu``, by the hyperbolic tangent, as GPT-2 has it."""

    @unit
    def forward(
        self, params: Params, x: QTensor, seed: jax.Array
    ) -> tuple[QTensor, QTensor]:
        """The output's codes."""
        del params, seed
        return to_codes(_gelu(x.dequantize()), x.block[0]), x

    @unit
    def backward(
        self, saved: QTensor, dy: QTensor, seed: jax.Array
    ) -> tuple[QTensor, dict[str, jax.Array]]:
        """The gradient of x."""
        _, slope = with_slope(_gelu, saved.dequantize())
        return grad_to_codes(dy.dequantize() * slope, dy.block[0], seed), {}


class _SavedNorm(NamedTuple):
    """Codes, and float32 statistics of each row ``[1, M, 1]``."""

    x: QTensor
    mean: jax.Array
    rstd: jax.Array
    scale: jax.Array


@dataclasses.dataclass(frozen=True)
class LayerNorm:
    """Layer normalization with a ``scale [C]`` and a ``bias [C]``.

    Its statistics are those of the values that the codes of x stand for.
    """

    epsilon: float = 1e-6

    @unit
    def forward(
        self, params: Params, x: QTensor, seed: jax.Array
    ) -> tuple[QTensor, _SavedNorm]:
        """The output's codes."""
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
        """The gradients of x, scale and bias."""
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
    """Zeros a value with probability ``rate``, and divides the others by ``1 - rate``.

    The mask is a function of the seed, drawn again in the backward pass.  Its
    probability is exact to 2**-16.
    """

    rate: float

    @unit
    def forward(
        self, params: Params, x: QTensor, seed: jax.Array
    ) -> tuple[QTensor, tuple[()]]:
        """The output's codes."""
        del params
        return to_codes(self._drop(x, seed), x.block[0]), ()

    @unit
    def backward(
        self, saved: tuple[()], dy: QTensor, seed: jax.Array
    ) -> tuple[QTensor, dict[str, jax.Array]]:
        """The gradient of x."""
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
    """The sum of activations, rounded to nearest."""
    return to_codes(a.dequantize() + b.dequantize(), a.block[0])


@jax.jit
def add_grads(a: QTensor, b: QTensor, seed: jax.Array) -> QTensor:
    """The sum of gradients, rounded stochastically."""
    return grad_to_codes(a.dequantize() + b.dequantize(), a.block[0], seed)
