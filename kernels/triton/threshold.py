"""The delay threshold on the device: ``threshold_reference.move_threshold``.

Each program selects the residuals of some blocks.  The first program of a threshold
also counts the blocks that fall back and moves the threshold.  A quantile costs several
passes over all metrics, but it is needed only if the threshold is unset or the fallback
rate is outside its range.
"""

import math

import jax
import jax.numpy as jnp
import triton
import triton.language as tl

from fbq_jax.kernels import threshold_reference
from fbq_jax.kernels.threshold_reference import MovedThreshold
from fbq_jax.kernels.triton.launch import launch

CHUNK = 2048  # blocks that a program processes at a time
UNSET = tl.constexpr(threshold_reference.UNSET)
INFINITY_BITS = tl.constexpr(0x7F800000)


def move_threshold(
    metric: jax.Array,
    residual_scales: jax.Array,
    theta: jax.Array,
    blocks: jax.Array,
    above: jax.Array,
    count: jax.Array,
    *,
    target_rate: tuple[float, float],
    alpha: float,
) -> MovedThreshold:
    """See ``threshold_reference.move_threshold``."""
    stack, size = metric.shape[0], math.prod(metric.shape[1:])
    chunk = min(CHUNK, triton.next_power_of_2(size))
    scalar = jax.ShapeDtypeStruct((stack,), jnp.float32)
    counts = jax.ShapeDtypeStruct((stack,), jnp.uint32)
    scales = jax.ShapeDtypeStruct(metric.shape, jnp.float32)
    results = launch(
        _move_threshold,
        metric,
        residual_scales,
        theta,
        blocks,
        above,
        count,
        size,
        outputs=[scalar, scalar, scalar, counts, scales],
        grid=(stack, triton.cdiv(size, chunk)),
        num_warps=8,
        CHUNK=chunk,
        LOW=target_rate[0],
        HIGH=target_rate[1],
        ALPHA=alpha,
    )
    return MovedThreshold(*results)


@triton.jit
def _move_threshold(
    metric,
    residual_scales,
    theta,
    blocks,
    above,
    counts,
    size,
    used_theta,
    rates,
    next_theta,
    next_counts,
    selected_scales,
    CHUNK: tl.constexpr,
    LOW: tl.constexpr,
    HIGH: tl.constexpr,
    ALPHA: tl.constexpr,
):
    """One program selects the residuals of a chunk of one threshold's blocks."""
    stack, program = tl.program_id(0), tl.program_id(1)
    row = stack.to(tl.int64) * size
    metric += row
    used = tl.load(theta + stack)
    is_set = used >= 0.0
    target = UNSET + 0.0
    if not is_set:
        target = _quantile(metric, size, tl.load(above + stack), CHUNK)
        used = target
    limit = tl.maximum(used, 0.0)
    block = program * CHUNK + tl.arange(0, CHUNK)
    falls_back = tl.load(metric + block, block < size, 0.0) > limit
    scales = tl.load(residual_scales + row + block, block < size, 0.0)
    scales = tl.where(falls_back, scales, 0.0)
    tl.store(selected_scales + row + block, scales, block < size)
    if program == 0:
        above_limit = _count_above(metric, size, limit, CHUNK)
        total = tl.maximum(tl.load(blocks + stack), 1).to(tl.float32)
        rate = tl.div_rn(above_limit.to(tl.float32), total)
        moved = used
        if (rate < LOW) | (rate > HIGH):
            if is_set:
                target = _quantile(metric, size, tl.load(above + stack), CHUNK)
            if target > 0.0:
                moved = target
                if (used > 0.0) & (used < float("inf")):
                    # div_rn takes no constant.
                    lowest = tl.div_rn(used, ALPHA + 0.0 * used)
                    moved = tl.minimum(tl.maximum(target, lowest), used * ALPHA)
        tl.store(used_theta + stack, used)
        tl.store(rates + stack, rate)
        tl.store(next_theta + stack, moved)
        tl.store(next_counts + stack, tl.load(counts + stack) + 1)


@triton.jit
def _count_above(metric, size, limit, CHUNK: tl.constexpr):
    """The number of blocks whose metric exceeds the limit."""
    count = 0
    for start in range(0, size, CHUNK):
        block = start + tl.arange(0, CHUNK)
        values = tl.load(metric + block, block < size, 0.0)
        count += tl.sum((values > limit).to(tl.int32), 0)
    return count


@triton.jit
def _quantile(metric, size, above, CHUNK: tl.constexpr):
    """The metric that ``above`` blocks exceed; ``UNSET`` if there is no quantile.

    Bits of non-negative floats have the order of the floats.  The bits of the quantile
    are the largest number that more than ``above`` of them reach; they are found from
    the highest bit to the lowest.
    """
    bits = metric.to(tl.pointer_type(tl.int32), bitcast=True)
    largest = 0
    for start in range(0, size, CHUNK):
        block = start + tl.arange(0, CHUNK)
        values = tl.load(bits + block, block < size, 0) & 0x7FFFFFFF
        largest = tl.maximum(largest, tl.max(values, 0))
    found = 0 * largest
    if largest < INFINITY_BITS:
        for n in range(31):
            candidate = found | (1 << (30 - n))
            count = 0
            for start in range(0, size, CHUNK):
                block = start + tl.arange(0, CHUNK)
                values = tl.load(bits + block, block < size, 0)
                count += tl.sum((values >= candidate).to(tl.int32), 0)
            found = tl.where(count > above, candidate, found)
    quantile = tl.cast(found, tl.float32, bitcast=True)
    return tl.where(found > 0, quantile, UNSET)
