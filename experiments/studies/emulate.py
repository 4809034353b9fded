"""Emulates matrix products of operands with any number of bits, in float32.

Blocks, scales and fallback are as in the library, so that 8 bits reproduce its values.
All rounding is to nearest.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

BLOCK = 128
FLOAT = 32  # from this number of bits on, values are not quantized


class Bits(NamedTuple):
    """The bits of the operands, and the fallback rate of X in the forward product."""

    x: jax.Array | int = FLOAT  # and of its residual
    w: jax.Array | int = FLOAT
    dy: jax.Array | int = FLOAT
    rate: jax.Array | float = 0.0


def quantize(x: jax.Array, bits: jax.Array | int) -> jax.Array:
    """Returns the quantized values of a float32 matrix [R, C], one scale per block."""
    tiles = _tiles(x)
    largest = jnp.ldexp(jnp.float32(1.0), jnp.asarray(bits) - 1) - 1
    amax = jnp.max(jnp.abs(tiles), axis=(1, 3), keepdims=True)
    scale = jnp.where(amax > 0, amax, 1.0) / largest
    values = jnp.round(tiles / scale) * scale
    return jnp.where(bits >= FLOAT, x, _matrix(values, x.shape))


def fall_back(
    x: jax.Array, bits: jax.Array | int, rate: jax.Array | float
) -> jax.Array:
    """Returns quantized values of a float32 matrix, with a second term in some blocks.

    The rate is the fraction of these blocks, which have the largest absmax.
    """
    main = quantize(x, bits)
    amax = jnp.max(jnp.abs(_tiles(x)), axis=(1, 3), keepdims=True)
    rank = jnp.argsort(jnp.argsort(-amax.reshape(-1))).reshape(amax.shape)
    falls_back = rank < jnp.round(rate * amax.size).astype(jnp.int32)
    residual = _tiles(quantize(x - main, bits))
    return main + _matrix(jnp.where(falls_back, residual, 0.0), x.shape)


def dot_general(how: Bits) -> Any:
    """Returns a `lax.dot_general` for `Llama` whose operands have these bits."""

    def multiply(lhs: jax.Array, rhs: jax.Array, *_: Any, **__: Any) -> jax.Array:
        # Llama only multiplies [..., K] by [K, N].
        y = _matmul(lhs.reshape(-1, lhs.shape[-1]), rhs, how)
        return y.reshape(*lhs.shape[:-1], -1)

    return multiply


@jax.custom_vjp
def _matmul(x: jax.Array, w: jax.Array, how: Bits) -> jax.Array:
    return _matmul_fwd(x, w, how)[0]


def _matmul_fwd(x: jax.Array, w: jax.Array, how: Bits) -> tuple[jax.Array, Any]:
    w = quantize(w, how.w)
    return fall_back(x, how.x, how.rate) @ w, (x, w, how)


def _matmul_bwd(saved: Any, dy: jax.Array) -> tuple[jax.Array, jax.Array, None]:
    x, w, how = saved
    dy = quantize(dy, how.dy)
    return dy @ w.T, quantize(x, how.x).T @ dy, None


_matmul.defvjp(_matmul_fwd, _matmul_bwd)


def _tiles(x: jax.Array) -> jax.Array:
    rows, columns = x.shape
    x = jnp.pad(x, ((0, -rows % BLOCK), (0, -columns % BLOCK)))
    return x.reshape(len(x) // BLOCK, BLOCK, -1, BLOCK)


def _matrix(tiles: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    i, r, j, c = tiles.shape
    return tiles.reshape(i * r, j * c)[: shape[0], : shape[1]]
