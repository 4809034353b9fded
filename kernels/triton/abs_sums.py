"""How large the sums of a GEMM with an INT8 operand can become."""

import jax
import jax.numpy as jnp
import triton
import triton.language as tl

from fbq_jax.kernels.triton.launch import launch

SIDE = 128


def longest(codes: jax.Array) -> jax.Array:
    """The largest sum of magnitudes of 128 codes that a product takes together.

    Args:
      codes: int8 ``[B, N, K]``, N and K multiples of 128.

    Returns:
      int32 ``[B, N/128]``: of the sums of ``|codes|`` over ``[n, 128 k : 128 (k + 1)]``
      the largest of each 128 rows.
    """
    batch, rows, depth = codes.shape
    down, across = rows // SIDE, depth // SIDE
    (sums,) = launch(
        _longest,
        codes,
        across,
        outputs=[jax.ShapeDtypeStruct((batch, down, across), jnp.int32)],
        grid=(batch * down * across,),
        num_warps=4,
        num_stages=1,
        SIDE=SIDE,
    )
    return jnp.max(sums, axis=2)


@triton.jit
def _longest(codes, across, sums, SIDE: tl.constexpr):
    program = tl.program_id(0)
    i, k = program // across, program % across
    row, column = tl.arange(0, SIDE)[:, None], tl.arange(0, SIDE)[None, :]
    codes += (i.to(tl.int64) * SIDE * across + k) * SIDE
    block = tl.load(codes + row * (across * SIDE) + column).to(tl.int32)
    tl.store(sums + program, tl.max(tl.sum(tl.abs(block), axis=1)))
