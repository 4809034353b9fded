"""Emulates matrix products of operands with any number of bits, in float32.

Blocks, scales and fallback are as in the library, so that 8 bits reproduce its values.
All rounding is to nearest.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from experiments import second_terms
from experiments.second_terms import Operand

FLOAT = 32  # from this number of bits on, values are not quantized


class Bits(NamedTuple):
    """The bits of the operands, and the fallback rate of X in the forward product."""

    x: jax.Array | int = FLOAT  # and of its residual
    w: jax.Array | int = FLOAT
    dy: jax.Array | int = FLOAT
    rate: jax.Array | float = 0.0


def quantize(
    x: jax.Array, bits: jax.Array | int, rate: jax.Array | float = 0.0
) -> jax.Array:
    """Returns the quantized values of a float32 matrix, one scale per block.

    The rate is the fraction of blocks with a second term, which have the largest
    absmax.
    """
    values = second_terms.rounded(x, Operand(bits, 128, rate, "absmax"))
    return jnp.where(bits >= FLOAT, x, values)


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
    return quantize(x, how.x, how.rate) @ w, (x, w, how)


def _matmul_bwd(saved: Any, dy: jax.Array) -> tuple[jax.Array, jax.Array, None]:
    x, w, how = saved
    dy = quantize(dy, how.dy)
    return dy @ w.T, quantize(x, how.x).T @ dy, None


_matmul.defvjp(_matmul_fwd, _matmul_bwd)
