"""The K blocks a GEMM with fallback takes, as lists that its K loop walks.

A residual is used in some blocks only.  A branch around its product would stop the
compiler from pipelining the loads, so the loop over K becomes a loop over a list of
steps that says, for each, which block to multiply and where it comes from.
"""

import math

import jax
import jax.numpy as jnp
import triton
import triton.language as tl

from fbq_jax.kernels.triton.launch import launch

CHUNK = 1024


def steps(
    scales: jax.Array,
    residual_scales: jax.Array,
    *,
    unused: int = 0,
    far: float = math.inf,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Lists, for each row block, the products it is the sum of.

    Args:
      scales: float32 ``[B, I, J]``, of the blocks of the first term.
      residual_scales: float32 ``[B, I, J]``; a block is taken where this is not 0
        (neither is a NaN).
      unused: entries to add at the end of each list.
      far: blocks whose scale is more than so many times the geometric mean of their row
        block's come after the others.

    Returns:
      ``order``, int32 ``[B, I, 2 J + unused]``: ``2 j`` for block ``j`` of the first
      term, after it ``2 j + 1`` for that of the residual if it is taken, in order of
      ``j`` but for those that are far.  ``scales``, float32, likewise: the steps'
      scales.  ``counts`` and ``near``, int32 ``[B, I]``: how many steps there are, and
      how many of blocks that are not far; order and scales are 0 beyond.
    """
    batch, rows, blocks = scales.shape
    length = 2 * blocks + unused
    order, step_scales, counts, near = launch(
        _steps,
        scales,
        residual_scales,
        blocks,
        outputs=[
            jax.ShapeDtypeStruct((batch, rows, length), jnp.int32),
            jax.ShapeDtypeStruct((batch, rows, length), jnp.float32),
            jax.ShapeDtypeStruct((batch, rows), jnp.int32),
            jax.ShapeDtypeStruct((batch, rows), jnp.int32),
        ],
        grid=(batch * rows,),
        num_warps=4,
        num_stages=1,
        CHUNK=min(CHUNK, triton.next_power_of_2(blocks)),
        UNUSED=unused,
        FAR=far,
    )
    return order, step_scales, counts, near


@triton.jit
def _steps(
    scales,
    residual_scales,
    blocks,
    order,
    step_scales,
    counts,
    near,
    CHUNK: tl.constexpr,
    UNUSED: tl.constexpr,
    FAR: tl.constexpr,
):
    row = tl.program_id(0)
    scales += row.to(tl.int64) * blocks
    residual_scales += row.to(tl.int64) * blocks
    order += row.to(tl.int64) * (2 * blocks + UNUSED)
    step_scales += row.to(tl.int64) * (2 * blocks + UNUSED)
    logarithms, positive = 0.0, 0.0
    for start in range(0, blocks, CHUNK):
        scale, _ = _load(scales, residual_scales, start, blocks, CHUNK)
        logarithms += tl.sum(tl.where(scale > 0.0, tl.log2(scale), 0.0), 0)
        positive += tl.sum((scale > 0.0).to(tl.float32), 0)
    limit = FAR * tl.exp2(logarithms / tl.maximum(positive, 1.0))
    near_steps = 0
    for start in range(0, blocks, CHUNK):
        scale, residual_scale = _load(scales, residual_scales, start, blocks, CHUNK)
        is_near = (start + tl.arange(0, CHUNK) < blocks) & ~(scale > limit)
        taken = residual_scale != 0.0
        near_steps += tl.sum(tl.where(is_near, 1 + taken.to(tl.int32), 0), 0)
    near_before, far_before, untaken_before = 0, near_steps, 0
    for start in range(0, blocks, CHUNK):
        j = start + tl.arange(0, CHUNK)
        inside = j < blocks
        scale, residual_scale = _load(scales, residual_scales, start, blocks, CHUNK)
        is_far, taken = scale > limit, residual_scale != 0.0
        own = tl.where(inside, 1 + taken.to(tl.int32), 0)
        near_own, far_own = tl.where(is_far, 0, own), tl.where(is_far, own, 0)
        untaken = (inside & ~taken).to(tl.int32)
        near_until = near_before + tl.cumsum(near_own, 0)
        far_until = far_before + tl.cumsum(far_own, 0)
        untaken_until = untaken_before + tl.cumsum(untaken, 0)
        main = tl.where(is_far, far_until, near_until) - own
        tl.store(order + main, 2 * j, inside)
        tl.store(step_scales + main, scale, inside)
        # A block whose residual is not taken owns one of the unused places at the end.
        other = tl.where(taken, main + 1, 2 * blocks - untaken_until)
        tl.store(order + other, tl.where(taken, 2 * j + 1, 0), inside)
        tl.store(step_scales + other, residual_scale, inside)
        near_before += tl.sum(near_own, 0)
        far_before += tl.sum(far_own, 0)
        untaken_before += tl.sum(untaken, 0)
    for i in tl.static_range(UNUSED):
        tl.store(order + 2 * blocks + i, 0)
        tl.store(step_scales + 2 * blocks + i, 0.0)
    tl.store(near + row, near_steps)
    tl.store(counts + row, far_before)


@triton.jit
def _load(scales, residual_scales, start, blocks, CHUNK: tl.constexpr):
    """The scales of some blocks and of their residuals, 0 beyond the last."""
    j = start + tl.arange(0, CHUNK)
    inside = j < blocks
    return tl.load(scales + j, inside, 0.0), tl.load(residual_scales + j, inside, 0.0)
