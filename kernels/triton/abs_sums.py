"""A bound on the partial sums of a GEMM, for codes without ``Quantized.sums``."""

import jax
import jax.numpy as jnp
import triton
import triton.language as tl

from fbq_jax.kernels.triton.launch import launch

BLOCK = 128


def max_abs_sum(codes: jax.Array) -> jax.Array:
    """The largest ``sum |codes|`` of a row in each block of 128 x 128.

        out[b, i, k] = max over rows r of block i of
                       sum |codes[b, r, 128 k : 128 (k + 1)]|

    Args:
      codes: int8 ``[B, N, K]``, N and K multiples of 128.

    Returns:
      float32 ``[B, N/128, K/128]``.
    """
    batch, rows, depth = codes.shape
    row_blocks, k_blocks = rows // BLOCK, depth // BLOCK
    (sums,) = launch(
        _max_abs_sum,
        codes,
        k_blocks,
        outputs=[jax.ShapeDtypeStruct((batch, row_blocks, k_blocks), jnp.float32)],
        grid=(batch * row_blocks * k_blocks,),
        BLOCK=BLOCK,
    )
    return sums


@triton.jit
def _max_abs_sum(codes, k_blocks, sums, BLOCK: tl.constexpr):
    """One program computes the largest row sum of one block."""
    program = tl.program_id(0)
    i, k = program // k_blocks, program % k_blocks
    row, column = tl.arange(0, BLOCK)[:, None], tl.arange(0, BLOCK)[None, :]
    codes += (i.to(tl.int64) * BLOCK * k_blocks + k) * BLOCK
    block = tl.load(codes + row * (k_blocks * BLOCK) + column).to(tl.int32)
    largest = tl.max(tl.sum(tl.abs(block), axis=1))
    tl.store(sums + program, largest.to(tl.float32))
