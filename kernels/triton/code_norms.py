"""Norms of INT8 codes, which bound the partial sums of a GEMM."""

import jax
import jax.numpy as jnp
import triton
import triton.language as tl

from fbq_jax.kernels.triton.launch import launch

BLOCK = 128


def max_squared_norms(codes: jax.Array) -> jax.Array:
    """The largest squared norm of a row of codes in each block of 128 x 128.

        out[b, i, k] = max over rows r of block i of
                       sum of codes[b, r, 128 k : 128 (k + 1)] ** 2

    Args:
      codes: int8 ``[B, N, K]``, N and K multiples of 128.

    Returns:
      int32 ``[B, N/128, K/128]``.
    """
    batch, rows, depth = codes.shape
    row_blocks, k_blocks = rows // BLOCK, depth // BLOCK
    (norms,) = launch(
        _max_squared_norm,
        codes,
        k_blocks,
        outputs=[jax.ShapeDtypeStruct((batch, row_blocks, k_blocks), jnp.int32)],
        grid=(batch * row_blocks * k_blocks,),
        BLOCK=BLOCK,
    )
    return norms


@triton.jit
def _max_squared_norm(codes, k_blocks, norms, BLOCK: tl.constexpr):
    """One program computes the largest squared norm of one block."""
    program = tl.program_id(0)
    i, k = program // k_blocks, program % k_blocks
    row, column = tl.arange(0, BLOCK)[:, None], tl.arange(0, BLOCK)[None, :]
    codes += (i.to(tl.int64) * BLOCK * k_blocks + k) * BLOCK
    block = tl.load(codes + row * (k_blocks * BLOCK) + column).to(tl.int32)
    tl.store(norms + program, tl.max(tl.sum(block * block, axis=1)))
