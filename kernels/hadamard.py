"""The Hadamard transform of matrices, along their rows.

``H`` is orthogonal, ``H' H = I``, so ``(H X)' . (H dY) = X' . dY``: a GEMM whose
contraction runs over the rows may transform both operands before it quantizes them.
Each row of ``H`` has values of one magnitude, so an outlier of magnitude ``a`` becomes
``SIZE`` values of magnitude ``a / sqrt(SIZE)``.

``H`` is Sylvester's matrix with the signs of some columns flipped, divided by
``sqrt(SIZE)``.  The transform is defined as seven stages of sums and differences of two
rows, in float32, and one product with ``SCALE``, so that every implementation rounds
the same values.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

SIZE = 128
SCALE = SIZE**-0.5
# The rows whose sign is flipped first.  Without that, the first row of H would sum the
# rows of a group, and rows with one mean in common would grow an outlier there.
_FLIPS = 0x243F6A8885A308D313198A2E03707344  # 128 binary digits of pi
#: The flips of 32 rows each, int32.
FLIPS = tuple(
    (_FLIPS >> first & 0x7FFFFFFF) - (_FLIPS >> first & 0x80000000)
    for first in range(0, SIZE, 32)
)


def pad_rows(x: jax.Array) -> jax.Array:
    """Appends rows of zeros to ``[..., R, C]``, up to a multiple of ``SIZE``."""
    rows = x.shape[-2]
    padding = -(-rows // SIZE) * SIZE - rows  # also a multiple for a symbolic size
    return jnp.pad(x, [*[(0, 0)] * (x.ndim - 2), (0, padding), (0, 0)])


def transform_rows(x: jax.Array) -> jax.Array:
    """Multiplies each ``SIZE`` consecutive rows by ``H``.

    The stage of distance ``d = 64, 32, ..., 1`` replaces rows ``a`` and ``b``, where
    ``b`` is ``d`` rows below ``a``, by ``a + b`` and ``a - b``.

    Args:
      x: bfloat16, float16 or float32 ``[B, R, C]``; R is a multiple of ``SIZE``.

    Returns:
      float32 ``[B, R, C]``.
    """
    batch, rows, columns = x.shape
    groups = x.astype(jnp.float32).reshape(batch, rows // SIZE, SIZE, columns)
    groups *= _signs()[None, None, :, None]
    for stage in reversed(range(int(math.log2(SIZE)))):
        distance = 2**stage
        pairs = groups.reshape(batch, rows // (2 * distance), 2, distance, columns)
        first, second = pairs[:, :, 0], pairs[:, :, 1]
        groups = jnp.stack([first + second, first - second], axis=2)
    # XLA multiplies SCALE with the inverse scales that follow, which rounds otherwise,
    # unless there is an operation between them.
    scaled = jnp.where(jnp.isnan(groups), groups, groups * np.float32(SCALE))
    return scaled.reshape(batch, rows, columns)


def _signs() -> jax.Array:
    """The sign of each row, float32 ``[SIZE]``, without an array of constants.

    Constants keep an op from being partitioned where ``jax.disable_jit`` is on.
    """
    row = jnp.arange(SIZE, dtype=jnp.int32)
    words = [np.int32(word) for word in FLIPS]
    flips = jnp.where(row < 32, words[0], words[1])
    flips = jnp.where(row < 64, flips, jnp.where(row < 96, words[2], words[3]))
    is_flipped = lax.shift_right_logical(flips, row % 32) & 1 == 1
    return jnp.where(is_flipped, np.float32(-1), np.float32(1))
