"""Checks of the fused quantization ops that hold for every implementation.

Each check takes a module that implements the op and compares it with
``fused_reference``.  Functions such as ``exp`` differ in their last bits, so scales may
differ a little, and codes by one close to a tie.  Equal floats give equal results.
"""

import functools
import types

import jax
import jax.numpy as jnp
import numpy as np

from fbq_jax.kernels import fused_reference, packing
from tests.kernels.quantize_cases import check_sums, seeds, several_seeds
from tests.kernels.test_reference import heavy

# shape of the output, dtype, bits, block, criterion, thresholds, colwise.
QUANTIZE = [
    ((1, 100, 128), "bfloat16", 10, (128, 128), "absmax", (9.0,), "stochastic"),
    ((2, 50, 128), "float32", 7, (64, 128), "l1_rel", (0.01, 0.02), "nearest"),
    ((1, 33, 256), "float16", 12, (32, 128), None, (0.0,), None),
    ((1, 20, 72), "bfloat16", 10, (32, 128), "l1", (9.0,), "nearest"),
]
# With one scale per row of a block: shape of the output, or of dy, dtype, bits, block,
# rowwise, colwise, whether colwise codes have one scale per block, dtype of the codes.
ROW_BLOCKS = [
    (
        *((1, 100, 128), "bfloat16", 10, (128, 128), "nearest", "stochastic"),
        *(False, "int8"),
    ),
    (
        *((1, 140, 256), "bfloat16", 10, (128, 128), "stochastic", "stochastic"),
        *(True, "int8"),
    ),
    (
        *((2, 50, 128), "float32", 7, (64, 128), "nearest", "nearest"),
        *(True, "float8_e4m3fn"),
    ),
    (
        *((1, 33, 256), "bfloat16", 12, (32, 128), "nearest", "nearest"),
        *(False, "float8_e4m3fn"),
    ),
    ((1, 33, 128), "float16", 12, (32, 128), "stochastic", None, False, "int8"),
    ((1, 40, 128), "bfloat16", 4, (32, 128), None, "stochastic", True, "int8"),
    ((1, 20, 72), "bfloat16", 10, (32, 128), "stochastic", "nearest", True, "int8"),
]
# shape of dy, dtype, bits, block, rowwise, colwise.
GRAD = [
    ((1, 140, 128), "bfloat16", 10, (128, 128), "stochastic", "stochastic"),
    ((2, 50, 128), "float32", 11, (64, 128), "nearest", "stochastic"),
    ((1, 40, 256), "float16", 4, (32, 128), None, "nearest"),
    ((1, 20, 72), "bfloat16", 10, (32, 128), "stochastic", "nearest"),
]
# The same, for matrices of which rows are missing: row counts, interleaved.
QUANTIZE_TILES = [
    (
        ((3, 32, 256), "bfloat16", 10, (32, 128), "absmax", (2.0,) * 3, "stochastic"),
        *((32, 0, 19), False),
    ),
    (((2, 64, 256), "float16", 7, (64, 128), None, (0.0,) * 2, None), (5, 64), True),
    (
        ((2, 32, 128), "float32", 12, (32, 128), "l1_rel", (0.01,) * 2, "nearest"),
        *((32, 0), False),
    ),
    (
        ((3, 128, 72), "bfloat16", 10, (128, 128), "l1", (9.0,) * 3, "nearest"),
        *((1, 128, 0), False),
    ),
    (((2, 32, 256), "float32", 10, (32, 128), None, (0.0,) * 2, None), None, False),
]
GRAD_TILES = [
    (
        ((3, 32, 256), "bfloat16", 10, (32, 128), "stochastic", "stochastic"),
        *((32, 0, 19), False),
    ),
    (((2, 64, 256), "float16", 7, (64, 128), None, "nearest"), (5, 64), True),
    (((2, 32, 128), "float32", 12, (32, 128), "nearest", None), (0, 32), False),
    (
        ((3, 128, 72), "bfloat16", 4, (128, 128), "nearest", "nearest"),
        (1, 128, 0),
        False,
    ),
    (((2, 32, 256), "float32", 10, (32, 128), "nearest", "nearest"), None, False),
]


def check_norm(
    ops: types.ModuleType, shape, dtype, bits, block, criterion, theta, colwise
) -> None:
    args = {
        "epsilon": 1e-5,
        "bits": bits,
        "block": block,
        "criterion": criterion,
        "colwise": colwise,
    }
    norm_scale = 1.0 + 0.5 * jax.random.normal(jax.random.key(0), (shape[0], shape[2]))
    operands = heavy(shape, dtype=dtype), norm_scale, jnp.asarray(theta, jnp.float32)
    got = ops.rms_norm_quantize(*operands, several_seeds(shape[0]), **args)
    want = _definition("rms_norm_quantize", **args)(*operands, several_seeds(shape[0]))
    np.testing.assert_allclose(got.rstd, want.rstd, rtol=1e-6)
    _check_operand(got.operand, want.operand, block)
    _check_packed(got.normalized, want.normalized, shape[2], bits)


def check_gate(
    ops: types.ModuleType,
    shape,
    dtype,
    bits,
    block,
    criterion,
    theta,
    colwise,
    row_counts=None,
    interleaved=True,
) -> None:
    args = {"bits": bits, "block": block, "criterion": criterion, "colwise": colwise}
    args["interleaved"] = interleaved
    gate_up = heavy((*shape[:2], 2 * shape[2]), dtype=dtype)
    gate_up = with_garbage(gate_up, row_counts)
    operands = gate_up, jnp.asarray(theta, jnp.float32), several_seeds(shape[0])
    counts = row_counts and jnp.array(row_counts, jnp.int32)
    got = ops.silu_gate_quantize(*operands, counts, **args)
    want = _definition("silu_gate_quantize", **args)(*operands, counts)
    got, want = (_with_rows(x, row_counts, ("operand",)) for x in (got, want))
    _check_operand(got.operand, want.operand, block)
    for packed, expected in zip(got[1:], want[1:], strict=True):
        _check_packed(packed, expected, shape[2], bits)


def check_grad(
    ops: types.ModuleType,
    shape,
    dtype,
    bits,
    block,
    rowwise,
    colwise,
    row_counts=None,
    interleaved=True,
    *,
    sums=True,
) -> None:
    """Compares bits: the same factors give the same products."""
    pack = jax.jit(packing.quantize, static_argnums=1)
    factors = []
    for seed in (1, 2):
        # silu_gate_quantize leaves zeros in missing rows, and anything without rows.
        factor = pack(without_rows(heavy(shape, seed), row_counts, 0.0), bits)
        is_empty = np.array(row_counts or [1]) == 0
        scales = jnp.where(is_empty[:, None, None], jnp.nan, factor.scales)
        factors.append(factor._replace(scales=scales))
    gate_factor, up_factor = factors
    scales = up_factor.scales.at[0, 1, 0].set(0.0)
    up_factor = up_factor._replace(scales=scales)
    args = {"bits": bits, "block": block, "rowwise": rowwise, "colwise": colwise}
    args["sums"] = ("colwise",) if colwise and sums else ()
    args["interleaved"] = interleaved
    dy = with_garbage(heavy(shape, dtype=dtype), row_counts)
    counts = row_counts and jnp.array(row_counts, jnp.int32)
    operands = dy, gate_factor, up_factor, several_seeds(shape[0]), counts
    got = ops.silu_gate_grad_quantize(*operands, **args)
    want = _definition("silu_gate_grad_quantize", **args)(*operands)
    got, want = (_with_rows(x, row_counts, ("rowwise", "colwise")) for x in (got, want))
    if args["sums"]:
        check_sums(got.colwise, want.colwise, block, exact=False)
        got, want = (x._replace(colwise=x.colwise[:2]) for x in (got, want))
    jax.tree.map(np.testing.assert_array_equal, got, want)


def check_norm_row_blocks(ops: types.ModuleType, shape, dtype, bits, *case) -> None:
    options = row_block_options(*case)
    args = options | {"epsilon": 1e-5, "bits": bits}
    norm_scale = 1.0 + 0.5 * jax.random.normal(jax.random.key(0), (shape[0], shape[2]))
    operands = heavy(shape, dtype=dtype), norm_scale, several_seeds(shape[0])
    got = ops.rms_norm_quantize_row_blocks(*operands, **args)
    want = _definition("rms_norm_quantize_row_blocks", **args)(*operands)
    np.testing.assert_allclose(got.rstd, want.rstd, rtol=1e-6)
    _check_row_blocks(got.operand, want.operand, **options)
    _check_packed(got.normalized, want.normalized, shape[2], bits)


def check_gate_row_blocks(ops: types.ModuleType, shape, dtype, bits, *case) -> None:
    options = row_block_options(*case)
    args = options | {"bits": bits}
    gate_up = heavy((*shape[:2], 2 * shape[2]), dtype=dtype)
    operands = gate_up, several_seeds(shape[0])
    got = ops.silu_gate_quantize_row_blocks(*operands, **args)
    want = _definition("silu_gate_quantize_row_blocks", **args)(*operands)
    _check_row_blocks(got.operand, want.operand, **options)
    for packed, expected in zip(got[1:], want[1:], strict=True):
        _check_packed(packed, expected, shape[2], bits)


def check_grad_row_blocks(ops: types.ModuleType, shape, dtype, bits, *case) -> None:
    """Compares bits, as ``check_grad`` does."""
    options = row_block_options(*case)
    if options["dtype"] == "int8" and options["colwise"]:
        options["sums"] = ("colwise",) if options["colwise_in_blocks"] else ()
    args = options | {"bits": bits}
    pack = jax.jit(packing.quantize, static_argnums=1)
    factors = [pack(heavy(shape, seed), bits) for seed in (1, 2)]
    operands = heavy(shape, dtype=dtype), *factors, several_seeds(shape[0])
    got = ops.silu_gate_grad_quantize_row_blocks(*operands, **args)
    want = _definition("silu_gate_grad_quantize_row_blocks", **args)(*operands)
    if options.get("sums"):
        check_sums(got.colwise, want.colwise, options["block"], exact=False)
        got, want = (x._replace(colwise=x.colwise[:2]) for x in (got, want))
    jax.tree.map(np.testing.assert_array_equal, got, want)


def row_block_options(block, rowwise, colwise, colwise_in_blocks, dtype):
    """The options of the ops with one scale per row of a block."""
    return {
        "block": block,
        "rowwise": rowwise,
        "colwise": colwise,
        "colwise_in_blocks": colwise_in_blocks,
        "dtype": dtype,
    }


def with_garbage(x: jax.Array, row_counts: tuple[int, ...] | None) -> jax.Array:
    """Matrices ``[B, R, C]`` with a NaN and large values in missing rows."""
    garbage = np.full(x.shape[1:], 3e4)
    garbage[:, 1] = np.nan
    return without_rows(x, row_counts, garbage)


def without_rows(x: jax.Array, row_counts: tuple[int, ...] | None, value) -> jax.Array:
    """Matrices ``[B, R, C]`` with a value in missing rows."""
    if row_counts is None:
        return x
    row = np.arange(x.shape[1])[None, :, None]
    is_row = row < np.array(row_counts)[:, None, None]
    return jnp.where(is_row, x, jnp.asarray(value, x.dtype))


def _with_rows(results, row_counts, quantized: tuple[str, ...]):
    """The results of matrices with rows; the other ones have scales of 0.

    Args:
      results: a named tuple.
      row_counts: the number of rows of each matrix; None if no row is missing.
      quantized: the fields with codes.
    """
    if row_counts is None:
        return results
    is_empty = np.array(row_counts) == 0
    for field in quantized:
        for leaf in jax.tree.leaves(getattr(results, field)):
            if leaf.dtype == jnp.float32:
                np.testing.assert_array_equal(leaf[is_empty], 0.0)
    return jax.tree.map(lambda x: x[~is_empty], results)


def check_special(ops: types.ModuleType, dtype: str) -> None:
    """NaN, Inf and zeros are exactly where the definition has them."""
    shape, block, bits = (1, 96, 128), (32, 128), 10
    x = np.array(heavy(shape, dtype=np.float32))
    x[0, 3, 5], x[0, 40, 100], x[0, 41, 7] = np.nan, np.inf, -np.inf
    x[0, 1] = 0.0
    x[0, 64:] = 0.0
    gate_up = jnp.asarray(np.concatenate([x, heavy(shape, 1)], -1)).astype(dtype)
    x = jnp.asarray(x).astype(dtype)
    theta, norm_scale = jnp.zeros(1), jnp.ones((1, shape[2]))
    args = {"bits": bits, "block": block, "criterion": "absmax", "colwise": "nearest"}

    norm_args = args | {"epsilon": 1e-5}
    got = ops.rms_norm_quantize(x, norm_scale, theta, seeds(1), **norm_args)
    norm = _definition("rms_norm_quantize", **norm_args)
    want = norm(x, norm_scale, theta, seeds(1))
    assert np.isnan(want.operand.main.scales).sum() == 2
    assert (np.asarray(want.operand.main.scales) == 0).sum() == 1
    assert np.isnan(want.normalized.scales).sum() == 3
    assert (np.asarray(want.normalized.scales) == 0).sum() == 33
    _check_operand(got.operand, want.operand, block)
    _check_packed(got.normalized, want.normalized, shape[2], bits)

    got = ops.silu_gate_quantize(gate_up, theta, seeds(1), **args)
    want = _definition("silu_gate_quantize", **args)(gate_up, theta, seeds(1))
    assert np.isnan(want.operand.main.scales).sum() == 2
    _check_operand(got.operand, want.operand, block)
    for packed, expected in zip(got[1:], want[1:], strict=True):
        _check_packed(packed, expected, shape[2], bits)

    in_rows = {"bits": bits, "block": block, "rowwise": "nearest", "colwise": "nearest"}
    gate = _definition("silu_gate_quantize_row_blocks", **in_rows)
    of_rows = gate(gate_up, seeds(1))
    assert np.isnan(of_rows.operand.rowwise.scales).sum() == 3
    assert np.isnan(of_rows.operand.colwise.scales).sum() == 3
    _check_row_blocks(
        ops.silu_gate_quantize_row_blocks(gate_up, seeds(1), **in_rows).operand,
        of_rows.operand,
        block=block,
        colwise_in_blocks=False,
    )

    grad_args = {"bits": bits, "block": block, "rowwise": "nearest", "colwise": None}
    dy = x
    got = ops.silu_gate_grad_quantize(dy, *want[1:], seeds(1), **grad_args)
    grad = _definition("silu_gate_grad_quantize", **grad_args)
    want = grad(dy, *want[1:], seeds(1))
    _check_codes(got.rowwise, want.rowwise, block)


@functools.cache
def _definition(name: str, **kwargs):
    return jax.jit(functools.partial(getattr(fused_reference, name), **kwargs))


def _check_operand(got, want, block) -> None:
    _check_codes(got.main, want.main, block)
    _check_codes(got.colwise, want.colwise, block[::-1])
    np.testing.assert_allclose(got.metric, want.metric, rtol=1e-3)
    if want.residual is None:
        assert got.residual is None
        return
    # The residual depends on the last bits of main, so only their sum is compared.
    taken = np.asarray(want.residual.scales) > 0
    np.testing.assert_array_equal(np.asarray(got.residual.scales) > 0, taken)
    values = [
        _values(part.main, block) + _values(part.residual, block)
        for part in (got, want)
    ]
    taken = _spread(taken, block, want.main.codes.shape)
    step = _spread(want.main.scales, block, want.main.codes.shape)
    difference = np.abs(np.where(taken, values[0] - values[1], 0.0))
    assert np.all(difference <= 0.6 * np.where(taken, step, 1.0))
    assert np.mean(difference > 0.02 * np.where(taken, step, 1.0)) < 0.01


def _check_row_blocks(got, want, *, block, colwise_in_blocks, **_options) -> None:
    _check_codes(got.rowwise, want.rowwise, (1, block[1]))
    width = block[1] if colwise_in_blocks else 1
    _check_codes(got.colwise, want.colwise, (width, block[0]))


def _check_codes(got, want, block) -> None:
    """Compares scales, and codes except where the scale is NaN."""
    if want is None:
        assert got is None
        return
    np.testing.assert_allclose(got.scales, want.scales, rtol=1e-5)
    used = ~np.isnan(_spread(want.scales, block, want.codes.shape))
    assert got.codes.dtype == want.codes.dtype
    if got.codes.dtype == jnp.int8:
        _check_close(np.where(used, got.codes, 0), np.where(used, want.codes, 0))
        return
    # Steps are an eighth of a value, or the smallest one.
    a, b = (np.where(used, x.codes.astype(np.float32), 0.0) for x in (got, want))
    assert np.all(np.abs(a - b) <= np.maximum(np.abs(b) / 7.9, 2.0**-9))
    assert np.mean(a != b) < 0.01


def _check_packed(got, want, size: int, bits: int) -> None:
    np.testing.assert_allclose(got.scales, want.scales, rtol=1e-5)
    assert [p.shape for p in got.planes] == [p.shape for p in want.planes]
    codes = [np.asarray(packing.unpack(p.planes, size, bits)) for p in (got, want)]
    used = ~np.isnan(_spread(want.scales, (1, packing.GROUP), codes[0].shape))
    _check_close(*(np.where(used, c, 0) for c in codes))


def _check_close(got, want) -> None:
    difference = np.abs(got.astype(np.int32) - want.astype(np.int32))
    assert difference.max() <= 1
    assert difference.mean() < 0.01


def _values(quantized, block):
    spread = _spread(quantized.scales, block, quantized.codes.shape)
    return spread * np.asarray(quantized.codes, np.float32)


def _spread(per_block, block, shape):
    per_block = np.repeat(np.repeat(np.asarray(per_block), block[0], 1), block[1], 2)
    return per_block[:, : shape[1], : shape[2]]
