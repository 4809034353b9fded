"""The delay threshold on the device: ``threshold_reference.move_threshold``.

Each program selects the residuals of some blocks.  The first program of a threshold
also counts the blocks that fall back and moves the threshold.  A quantile costs several
passes over all metrics, but it is needed only if the threshold is unset or the fallback
rate is outside its range.

A layer's next state takes the place of its state in memory.  Otherwise XLA would copy
it there, at one launch for each scalar.
"""

import math

import jax
import jax.numpy as jnp
import triton
import triton.language as tl

from fbq_jax.kernels import quantized, threshold_reference
from fbq_jax.kernels.threshold_reference import MovedThreshold
from fbq_jax.kernels.triton.launch import launch

CHUNK = 2048  # blocks that are counted at a time
SELECTED = 8192  # blocks of which a program selects the residuals
UNSET = tl.constexpr(quantized.UNSET)
SMALLEST = tl.constexpr(threshold_reference.SMALLEST)
SMALLEST_BITS = tl.constexpr(0x00800000)
INFINITY_BITS = tl.constexpr(0x7F800000)


def move_threshold(
    metric: jax.Array,
    residual_scales: jax.Array,
    theta: jax.Array,
    blocks: jax.Array,
    above: jax.Array,
    count: jax.Array,
    rate: jax.Array | None = None,
    *,
    target_rate: tuple[float, float],
    alpha: float,
) -> MovedThreshold:
    """See ``threshold_reference.move_threshold``."""
    stack, size = metric.shape[0], math.prod(metric.shape[1:])
    # The next theta, count and rate take the memory of the old ones, unless several
    # programs read theta.
    in_place = {} if rate is None or size > SELECTED else {2: 2, 5: 3, 6: 1}
    selected = min(SELECTED, triton.next_power_of_2(size))
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
        theta if rate is None else rate,  # not read
        size,
        outputs=[scalar, scalar, scalar, counts, scales],
        grid=(stack, triton.cdiv(size, selected)),
        num_warps=8,
        in_place=in_place,
        CHUNK=min(CHUNK, selected),
        SELECTED=selected,
        TARGET=(*target_rate, alpha),
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
    _old_rates,
    size,
    used_theta,
    rates,
    next_theta,
    next_counts,
    selected_scales,
    CHUNK: tl.constexpr,
    SELECTED: tl.constexpr,
    TARGET: tl.constexpr,
):
    """One program selects the residuals of some of one threshold's blocks.

    ``TARGET`` is ``(low, high, alpha)``: the range of the rate, and the largest factor.
    """
    LOW: tl.constexpr = TARGET[0]
    HIGH: tl.constexpr = TARGET[1]
    ALPHA: tl.constexpr = TARGET[2]
    stack, program = tl.program_id(0), tl.program_id(1)
    row = stack.to(tl.int64) * size
    metric += row
    used = tl.load(theta + stack)
    is_set = used >= 0.0
    target = UNSET + 0.0
    if not is_set:
        target = _quantile(
            metric, size, tl.load(above + stack), tl.load(blocks + stack), LOW, CHUNK
        )
        used = target
    limit = tl.maximum(used, 0.0)
    block = program * SELECTED + tl.arange(0, SELECTED)
    values = tl.load(metric + block, block < size, 0.0)
    falls_back = (values > limit) & (values >= SMALLEST)
    scales = tl.load(residual_scales + row + block, block < size, 0.0)
    scales = tl.where(falls_back, scales, 0.0)
    tl.store(selected_scales + row + block, scales, block < size)
    if program == 0:
        rate = _rate(*_count_blocks(metric, size, limit, CHUNK))
        moved = used
        if (rate < LOW) | (rate > HIGH):
            if is_set:
                target = _quantile(
                    metric,
                    size,
                    tl.load(above + stack),
                    tl.load(blocks + stack),
                    LOW,
                    CHUNK,
                )
            if target > 0.0:
                moved = target
                if (used > 0.0) & (used < float("inf")):
                    lowest = used * (1.0 / ALPHA)
                    moved = tl.minimum(tl.maximum(target, lowest), used * ALPHA)
        tl.store(used_theta + stack, used)
        tl.store(rates + stack, rate)
        tl.store(next_theta + stack, moved)
        tl.store(next_counts + stack, tl.load(counts + stack) + 1)


@triton.jit
def _rate(number, total):
    return tl.div_rn(number.to(tl.float32), tl.maximum(total, 1).to(tl.float32))


@triton.jit
def _count_blocks(metric, size, limit, CHUNK: tl.constexpr):
    """The number of blocks that fall back, and of those that count."""
    above, total = 0, 0
    for start in range(0, size, CHUNK):
        block = start + tl.arange(0, CHUNK)
        values = tl.load(metric + block, block < size, 0.0)
        falls_back = (values > limit) & (values >= SMALLEST)
        above += tl.sum(falls_back.to(tl.int32), 0)
        total += tl.sum((~(values < SMALLEST)).to(tl.int32), 0)  # NaN counts
    return above, total


@triton.jit
def _count_reaching(bits, size, least, CHUNK: tl.constexpr):
    """The number of metrics whose bits are at least ``least``."""
    count = 0
    for start in range(0, size, CHUNK):
        block = start + tl.arange(0, CHUNK)
        values = tl.load(bits + block, block < size, 0) & 0x7FFFFFFF
        count += tl.sum((values >= least).to(tl.int32), 0)
    return count


@triton.jit
def _quantile(metric, size, above, blocks, LOW: tl.constexpr, CHUNK: tl.constexpr):
    """The metric that ``above`` blocks exceed; ``UNSET`` if there is no quantile.

    Bits of non-negative floats have the order of the floats.  The bits of the quantile
    are the largest number that more than ``above`` of them reach; they are found from
    the highest bit to the lowest.
    """
    bits = metric.to(tl.pointer_type(tl.int32), bitcast=True)
    total = _count_reaching(bits, size, SMALLEST_BITS, CHUNK)
    found = 0 * total
    if (total > 0) & (_count_reaching(bits, size, INFINITY_BITS, CHUNK) == 0):
        scaled = above.to(tl.float32) * _rate(total, blocks)
        above = tl.minimum(_round(scaled), total - 1)
        for n in range(31):
            candidate = found | (1 << (30 - n))
            count = _count_reaching(bits, size, candidate, CHUNK)
            found = tl.where(count > above, candidate, found)
        greater = _count_reaching(bits, size, found + 1, CHUNK)
        not_less = _count_reaching(bits, size, found, CHUNK)
        # The float just below the quantile gives a rate nearer to the middle.
        if (_rate(greater, total) < LOW) & (greater + not_less < 2 * above):
            found -= 1
    quantile = tl.cast(found, tl.float32, bitcast=True)
    return tl.where(found > 0, quantile, UNSET)


@triton.jit
def _round(x):
    """The nearest integer to a float of at least 0, with ties to even, as int32."""
    whole = x.to(tl.int32)
    rest = x - whole.to(tl.float32)
    return whole + ((rest > 0.5) | ((rest == 0.5) & (whole % 2 == 1))).to(tl.int32)
