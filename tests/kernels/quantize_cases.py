"""Checks of the quantizing ops that hold for every implementation, bit for bit.

Each check takes a module that implements the op and compares it with ``reference``.
"""

import functools
import types

import jax
import jax.numpy as jnp
import numpy as np

from fbq_jax.kernels import reference, rounding
from tests import oracle
from tests.kernels.test_reference import heavy

# shape, dtype, block, rowwise, colwise.
QUANTIZE = [
    ((1, 256, 256), "bfloat16", (128, 128), "nearest", "nearest"),
    ((1, 144, 304), "bfloat16", (128, 128), "stochastic", "stochastic"),
    ((2, 100, 141), "float32", (64, 128), "nearest", "stochastic"),
    ((3, 40, 64), "float16", (32, 32), None, "stochastic"),
    ((1, 300, 264), "float32", (256, 64), "stochastic", None),
    ((2, 40, 258), "bfloat16", (32, 256), "stochastic", "nearest"),
    ((1, 200, 51), "float16", (256, 256), "nearest", "nearest"),
    ((1, 270, 140), "bfloat16", (256, 128), "stochastic", "stochastic"),
    ((1, 1, 1), "bfloat16", (128, 128), "nearest", "stochastic"),
]
# shape, dtype, rowwise, colwise.
VECTORS = [
    ((1, 128, 256), "bfloat16", "stochastic", "stochastic"),
    ((2, 70, 141), "float32", "nearest", "stochastic"),
    ((3, 20, 144), "float16", None, "stochastic"),
    ((1, 131, 176), "bfloat16", "stochastic", None),
    ((1, 1, 300), "float32", "stochastic", "nearest"),
    ((2, 130, 1), "bfloat16", "nearest", "nearest"),
]
# shape, dtype, block, rowwise, colwise.
ROW_BLOCKS = [
    ((1, 256, 256), "bfloat16", (128, 128), "nearest", "stochastic"),
    ((2, 100, 141), "float32", (64, 128), "stochastic", "stochastic"),
    ((3, 40, 64), "float16", (32, 32), None, "nearest"),
    ((1, 300, 90), "bfloat16", (128, 32), "stochastic", None),
    ((1, 270, 260), "bfloat16", (256, 256), "stochastic", "stochastic"),
    ((1, 1, 1), "float32", (128, 128), "nearest", "nearest"),
]
# The same, with one scale per block of colwise codes.
COLWISE_IN_BLOCKS = [
    ((1, 256, 272), "bfloat16", (128, 128), "stochastic", "stochastic"),
    ((2, 100, 141), "float32", (64, 128), "nearest", "stochastic"),
    ((3, 40, 64), "float16", (32, 32), "stochastic", "nearest"),
    ((1, 270, 260), "bfloat16", (256, 128), "stochastic", "stochastic"),
    ((1, 1, 1), "float32", (128, 128), "nearest", "nearest"),
]
# Both layouts with FP8 codes.
FLOAT8 = [
    ((1, 144, 304), "bfloat16", (128, 128), "nearest", "nearest"),
    ((2, 100, 141), "float32", (64, 128), "nearest", None),
    ((3, 40, 64), "float16", (32, 32), None, "nearest"),
]
# shape, dtype, block, criterion, thresholds, colwise.
FALLBACK = [
    ((1, 256, 272), "bfloat16", (128, 128), "absmax", (150.0,), "stochastic"),
    ((2, 100, 141), "float32", (64, 64), "l1", (500.0, 200.0), "nearest"),
    ((1, 150, 310), "float16", (32, 128), "l1_rel", (0.5,), None),
    ((1, 190, 40), "float32", (256, 256), "l1_rel", (0.0,), "stochastic"),
    ((3, 33, 65), "bfloat16", (256, 64), "absmax", (np.inf, 0.0, np.nan), "stochastic"),
]
SPECIAL_DTYPES = ("float32", "bfloat16", "float16")


def seeds(batch: int) -> jax.Array:
    return jnp.asarray([5, 2**32 - 1, 2**31][:batch], jnp.uint32)


def several_seeds(batch: int) -> tuple[jax.Array, ...]:
    """Five seeds of each matrix, for a kernel to fold."""
    return tuple(seeds(batch) + jnp.uint32(n) for n in range(5))


def special(dtype: str, block: reference.Block) -> jax.Array:
    """3 x 5 blocks with NaN, Inf, zeros and extreme values: ``[3, 5, *block]``."""
    blocks = np.array(heavy((3, 5, *block)))
    blocks[0, 0, 3, 7] = np.nan
    blocks[0, 1, -1, -1] = np.inf
    blocks[0, 2, 0, 0] = -np.inf
    blocks[0, 3] = 0.0
    blocks[0, 4] = np.copysign(2.0**-119, blocks[0, 4])  # counts as zero
    blocks[1, 0] = 0.0
    blocks[1, 0, 2, 2] = 2.0**-118  # the smallest that is not zero
    blocks[1, 1] = 0.0
    blocks[1, 1, 2, 2] = np.nextafter(np.float32(2.0**-118), np.float32(0))
    blocks[1, 2] /= np.abs(blocks[1, 2]).max()
    blocks[1, 2] *= float(jnp.finfo(dtype).max)
    blocks[1, 3, 1, 1], blocks[1, 3, 1, 2] = np.nan, np.inf
    blocks[1, 4] = -77.0
    # 127 / 113 rounds up and 113 times it to above 127: codes must stay below 128.
    blocks[2, 0] = 113.0
    blocks[2, 1] = -113.0
    with np.errstate(over="ignore"):
        return jnp.asarray(blocks).astype(dtype)


def check_quantize(
    ops: types.ModuleType,
    x: jax.Array,
    block: reference.Block,
    rowwise,
    colwise,
    *,
    sums: bool = True,
    **codes,
) -> None:
    layouts = {"rowwise": rowwise, "colwise": colwise}
    summed = tuple(name for name, rounding in layouts.items() if rounding and sums)
    args = {"block": block, **layouts, "sums": summed, **codes}
    got = ops.quantize(x, seeds(len(x)), **args)
    want = _reference("quantize", **args)(x, seeds(len(x)))
    check_quantized(got.rowwise, want.rowwise, block)
    check_quantized(got.colwise, want.colwise, block[::-1])


def check_vectors(
    ops: types.ModuleType, x: jax.Array, rowwise, colwise, **scaling
) -> None:
    args = {"rowwise": rowwise, "colwise": colwise, **scaling}
    got = ops.quantize_vectors(x, seeds(len(x)), **args)
    want = _reference("quantize_vectors", **args)(x, seeds(len(x)))
    check_quantized(got.rowwise, want.rowwise, (1, x.shape[2]))
    check_quantized(got.colwise, want.colwise, (1, x.shape[1]))


def check_row_blocks(
    ops: types.ModuleType,
    x: jax.Array,
    block: reference.Block,
    rowwise,
    colwise,
    **options,
) -> None:
    args = {"block": block, "rowwise": rowwise, "colwise": colwise, **options}
    operands = x, several_seeds(len(x))
    got = ops.quantize_row_blocks(*operands, **args)
    want = _reference("quantize_row_blocks", **args)(*operands)
    check_quantized(got.rowwise, want.rowwise, (1, block[1]))
    columns = block[1] if options.get("colwise_in_blocks") else 1
    check_quantized(got.colwise, want.colwise, (columns, block[0]))


def check_colwise_in_blocks(ops: types.ModuleType, x: jax.Array, *options) -> None:
    check_row_blocks(ops, x, *options, colwise_in_blocks=True, sums=("colwise",))


def check_special_row_blocks(ops: types.ModuleType, dtype: str) -> None:
    """The special blocks as rows of 64 values, then as columns."""
    x = special(dtype, (4, 64)).reshape(1, 15 * 4, 64)
    check_row_blocks(ops, x, (32, 64), "stochastic", "nearest")
    check_row_blocks(ops, x.mT, (64, 32), "nearest", "stochastic")
    x = special(dtype, (32, 64)).swapaxes(1, 2).reshape(1, 96, 320)
    check_colwise_in_blocks(ops, x, (32, 64), "stochastic", "nearest")


def check_float8(
    ops: types.ModuleType,
    row_blocks: types.ModuleType,
    x: jax.Array,
    block: reference.Block,
    rowwise,
    colwise,
) -> None:
    codes = {"dtype": "float8_e4m3fn"}
    check_quantize(ops, x, block, rowwise, colwise, sums=False, **codes)
    check_row_blocks(row_blocks, x, block, rowwise, colwise, **codes)


def check_special_float8(
    ops: types.ModuleType, row_blocks: types.ModuleType, dtype: str
) -> None:
    """The special blocks, as blocks and as rows and columns; and ties of codes."""
    x = special(dtype, (32, 64)).swapaxes(1, 2).reshape(1, 96, 320)
    check_float8(ops, row_blocks, x, (32, 64), "nearest", "nearest")
    x = special(dtype, (4, 64)).reshape(1, 60, 64)
    check_float8(ops, row_blocks, x, (32, 64), "nearest", "nearest")
    grid = oracle.float8_magnitudes()
    x = np.concatenate([grid, (grid[1:] + grid[:-1]) / 2, -grid, [448.0, 0.0, -3e-4]])
    x = np.pad(x.astype(np.float32), (0, 1), constant_values=448.0).reshape(2, -1)
    check_float8(
        ops, row_blocks, jnp.asarray(x[None], dtype), (32, 256), *["nearest"] * 2
    )


def check_special_vectors(ops: types.ModuleType, dtype: str) -> None:
    """The special blocks as rows, then as columns."""
    x = special(dtype, (4, 64)).reshape(1, 15, 256)
    check_vectors(ops, x, "stochastic", None)
    check_vectors(ops, x.mT, None, "stochastic", bound=127.5)


def check_per_tensor_scale(ops: types.ModuleType, x: jax.Array) -> None:
    check_vectors(ops, x, "stochastic", "nearest", bound=127.5, per_tensor=True)


def check_fallback(
    ops: types.ModuleType,
    x: jax.Array,
    block: reference.Block,
    criterion: reference.Criterion,
    theta: tuple[float, ...],
    colwise,
) -> None:
    args = {"block": block, "criterion": criterion, "colwise": colwise}
    operands = x, jnp.asarray(theta, jnp.float32), several_seeds(len(x))
    got = ops.quantize_fallback(*operands, **args)
    want = _reference("quantize_fallback", **args)(*operands)
    check_quantized(got.main, want.main, block)
    check_quantized(got.colwise, want.colwise, block[::-1])
    check_quantized(got.residual, want.residual, block, unused=0.0)
    # An implementation may sum in any order.
    rtol = 0.0 if criterion == "absmax" else 2e-6
    np.testing.assert_allclose(got.metric, want.metric, rtol=rtol, atol=0.0)


def check_special(
    ops: types.ModuleType,
    dtype: str,
    block: reference.Block = (32, 64),
    *,
    sums: bool = True,
) -> None:
    r, c = block
    x = special(dtype, block).swapaxes(1, 2).reshape(1, 3 * r, 5 * c)
    check_quantize(ops, x, block, "stochastic", "nearest", sums=sums)
    criterion = "l1_rel" if dtype == "float32" else "absmax"
    check_fallback(ops, x, block, criterion, (0.0,), None)


def check_large_metrics(
    ops: types.ModuleType,
    criterion: reference.Criterion,
    block: reference.Block = (64, 64),
) -> None:
    """Sums of magnitudes beyond float32's give a finite metric."""
    largest = float(np.finfo(np.float32).max)
    tops = [1.0, 1e30, 1e36, 1e37, 1e38, 0.99 * largest]
    blocks = np.tanh(np.array(heavy((len(tops), *block)), np.float64))
    blocks *= np.reshape(tops, (-1, 1, 1)) / np.abs(blocks).max((1, 2), keepdims=True)
    x = np.concatenate([*blocks.astype(np.float32)], 1)
    *_, exact = oracle.quantize_fallback(x, 0.0, block, criterion)
    theta, options = jnp.zeros(1), {"block": block, "colwise": None}
    got = ops.quantize_fallback(
        jnp.asarray(x)[None], theta, seeds(1), criterion=criterion, **options
    )
    np.testing.assert_allclose(got.metric[0], exact, rtol=2e-6)
    assert np.all(np.asarray(got.residual.scales) > 0.0)


def check_global_offset(
    quantize: types.ModuleType,
    vectors: types.ModuleType,
    row_blocks: types.ModuleType,
) -> None:
    """A shard draws the noise of the global matrix, even with rows of two places."""
    matrix = np.asarray(heavy((1, 256, 200), dtype=np.float32))
    # All blocks and vectors have the same amax, so only the noise tells codes apart.
    matrix = jnp.asarray(np.where(matrix > 0, 1.0, np.tanh(matrix)), jnp.float32)
    rows, column = np.r_[64:128, 192:256], 72
    shard = matrix[:, rows, column:]
    offset = rounding.GlobalOffset(
        jnp.asarray(rows[:: rounding.ROW_GROUP], jnp.uint32),
        jnp.asarray([column], jnp.uint32),
    )
    modes = {"rowwise": "stochastic", "colwise": "stochastic"}
    block = {"block": (64, 32)}
    for ops, name, options in (
        (quantize, "quantize", block | modes),
        (vectors, "quantize_vectors", modes),
        (row_blocks, "quantize_row_blocks", block | modes),
    ):
        op = functools.partial(getattr(ops, name), **options)
        got = op(shard, seeds(1), global_offset=offset)
        want = _reference(name, **options)(matrix, seeds(1))
        np.testing.assert_array_equal(
            got.rowwise.codes, want.rowwise.codes[:, rows, column:]
        )
        np.testing.assert_array_equal(
            got.colwise.codes, want.colwise.codes[:, column:, rows]
        )


@functools.cache
def _reference(name: str, **kwargs):
    return jax.jit(functools.partial(getattr(reference, name), **kwargs))


def check_quantized(got, want, block: reference.Block, unused=np.nan) -> None:
    """Compares bits, except for codes whose scale is NaN or ``unused``."""
    if want is None:
        assert got is None
        return
    _check_equal(got.scales, want.scales)
    used = ~(np.isnan(want.scales) | (np.asarray(want.scales) == unused))
    used = np.repeat(np.repeat(used, block[0], 1), block[1], 2)
    used = used[:, : want.codes.shape[1], : want.codes.shape[2]]
    assert got.codes.shape == want.codes.shape
    assert got.codes.dtype == want.codes.dtype
    np.testing.assert_array_equal(
        *(np.where(used, np.asarray(y.codes).view(np.int8), 0) for y in (got, want))
    )
    check_sums(got, want, block, exact=block[0] * block[1] <= 2**14)


def check_sums(got, want, block: reference.Block, *, exact: bool) -> None:
    """Compares sums in blocks with a usable scale; those of parts are upper bounds."""
    assert (got.sums is None) == (want.sums is None)
    if want.sums is None:
        return
    usable = ~np.isnan(want.scales)
    sums, expected = np.asarray(got.sums)[usable], np.asarray(want.sums)[usable]
    if exact:
        np.testing.assert_array_equal(sums, expected)
    assert np.all(sums >= expected)
    assert np.all(sums <= 127 * max(block))


def _check_equal(got, want) -> None:
    np.testing.assert_array_equal(got, want)
    assert got.dtype == want.dtype
