"""The Hadamard transform of matrices, along their rows.

``H`` is orthogonal, ``H' H = I``, so ``(H X)' . (H dY) = X' . dY``: a GEMM whose
contraction runs over the rows may transform both operands before it quantizes them.
Each row of ``H`` has values of one magnitude, so an outlier of magnitude ``a`` becomes
``SIZE`` values of magnitude ``a / sqrt(SIZE)``.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

SIZE = 128
# Flips the signs of some rows first.  Without that, the first row of H would sum
# the rows of a group, and rows with one mean in common would grow an outlier there.
_FLIPS = 0x243F6A8885A308D313198A2E03707344  # 128 binary digits of pi


def _signs() -> np.ndarray:
    """``H * sqrt(SIZE)``, ``[SIZE, SIZE]`` of 1 and -1: Sylvester's matrix, flipped."""
    signs = np.ones((1, 1), np.int8)
    while len(signs) < SIZE:
        signs = np.block([[signs, signs], [signs, -signs]])
    flips = [1 - 2 * (_FLIPS >> row & 1) for row in range(SIZE)]
    return signs * np.array(flips, np.int8)


_SIGNS = _signs()


def transform_rows(x: jax.Array) -> jax.Array:
    """Multiplies each ``SIZE`` consecutive rows by ``H``.

    Rows of zeros fill the last group.  The products of a group are summed in float32.

    Args:
      x: bfloat16, float16 or float32 ``[B, R, C]``.

    Returns:
      float32 ``[B, ceil(R/SIZE) * SIZE, C]``.
    """
    batch, rows, columns = x.shape
    x = jnp.pad(x, ((0, 0), (0, -rows % SIZE), (0, 0)))
    groups = x.reshape(batch, -(-rows // SIZE), SIZE, columns)
    mixed = jnp.einsum(
        "ij,bgjc->bgic",
        jnp.asarray(_SIGNS, x.dtype),
        groups,
        precision=lax.Precision.HIGHEST,
        preferred_element_type=jnp.float32,
    )
    return (mixed * np.float32(SIZE**-0.5)).reshape(batch, -1, columns)
