"""Checks that every implementation of the ops of ``grouped_reference`` must pass.

Each check takes a module with the ops, or one of them.
"""

import functools
from collections.abc import Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fbq_jax.kernels import grouped_reference, reference
from fbq_jax.kernels.grouped_reference import GroupedRows, assign_tiles
from fbq_jax.kernels.reference import Quantized
from tests import oracle
from tests.kernels import quantize_cases
from tests.kernels.test_reference import heavy

_assign_tiles = jax.jit(assign_tiles, static_argnums=(1, 2))


class Case(NamedTuple):
    """The GEMMs of rows in groups.

    Attributes:
      rows: M, of which the last may be in no group.
      sizes: the number of rows of each group.
      matrix: ``(K, N)``.
      blocks: ``(m, k, n)``, the block shape.
      fallback: fraction of lhs' blocks with a residual; None for no residual operand.
      first_group: the group that the first matrix of rhs belongs to; rows of groups
        before it, and of the last one, are another device's.
    """

    rows: int
    sizes: tuple[int, ...]
    matrix: tuple[int, int]
    blocks: tuple[int, int, int]
    fallback: float | None
    first_group: int = 0


SIDE_128 = (128, 128, 128)
CASES = {
    "aligned": Case(512, (256, 128, 128), (256, 256), SIDE_128, None),
    "uneven": Case(700, (200, 0, 128, 1, 259, 0), (300, 330), SIDE_128, None),
    "uneven, fallback": Case(400, (0, 130, 0, 200, 3), (400, 140), SIDE_128, 0.4),
    "one group with everything": Case(300, (0, 300, 0), (128, 450), SIDE_128, 0.3),
    "no group with anything": Case(200, (0, 0), (128, 128), SIDE_128, None),
    "other devices' groups": Case(
        500, (130, 90, 0, 140, 60), (128, 130), SIDE_128, 0.5, 1
    ),
    "256x256x256 blocks": Case(700, (300, 20, 257), (280, 300), (256, 256, 256), 0.3),
    "128x256x128 blocks": Case(300, (140, 100), (300, 100), (128, 256, 128), None),
}
# Rows in blocks that a GPU without Hopper's kernel multiplies, too.
SMALL_CASES = {
    "32x32x32 blocks": Case(150, (33, 0, 64, 40), (100, 80), (32, 32, 32), 0.3),
    "64x128x32 blocks": Case(150, (65, 3, 64), (140, 70), (64, 128, 32), 0.4),
}


FAST = "uneven, fallback", "other devices' groups"  # These cover most of the others.


def params(cases: Iterable[str]) -> list[Any]:
    """The names of cases as parameters of a test; slow ones are exhaustive."""
    marks = [pytest.mark.exhaustive]
    return [pytest.param(name, marks=marks * (name not in FAST)) for name in cases]


class Problem(NamedTuple):
    """The operands of a case's GEMMs.

    Attributes:
      lhs: codes of X by rows, ``[T, m, K]``.
      residual: its second term, or None.
      rhs: codes of the matrices, ``[G, N, K]``.
      lhs_columns: codes of X by columns, ``[T, K, m]``.
      grad_columns: codes of dY by columns, ``[T, N, m]``.
      groups: ``[T]``, relative to the first matrix.
    """

    lhs: Quantized
    residual: Quantized | None
    rhs: Quantized
    lhs_columns: Quantized
    grad_columns: Quantized
    groups: jax.Array


def problem(case: Case) -> Problem:
    """Random codes and positive scales; those of residuals that are not used are 0.

    Codes of tiles without rows are random, and their scales 0.
    """
    rng = np.random.default_rng(0)
    (K, N), (m, k, n) = case.matrix, case.blocks
    tiles = _assign_tiles(jnp.asarray(case.sizes), case.rows, m)
    used = np.asarray(tiles.row_counts) > 0

    def quantized(shape: tuple[int, int, int], block, rate=1.0) -> Quantized:
        codes = rng.integers(-127, 128, shape).astype(np.int8)
        blocks = (
            shape[0],
            *(-(-size // b) for size, b in zip(shape[1:], block, strict=True)),
        )
        scales = rng.uniform(0.5, 2.0, blocks) * (rng.random(blocks) < rate)
        return Quantized(jnp.asarray(codes), jnp.asarray(scales, jnp.float32))

    def of_tiles(rows: int, columns: int, block, rate=1.0) -> Quantized:
        x = quantized((len(used), rows, columns), block, rate)
        return x._replace(scales=jnp.where(used[:, None, None], x.scales, 0.0))

    residual = None if case.fallback is None else of_tiles(m, K, (m, k), case.fallback)
    return Problem(
        of_tiles(m, K, (m, k)),
        residual,
        quantized((_size(case), N, K), (n, k)),
        of_tiles(K, m, (k, m)),
        of_tiles(N, m, (n, m)),
        tiles.groups - case.first_group,
    )


def _size(case: Case) -> int:
    """The number of matrices."""
    return len(case.sizes) - case.first_group - (case.first_group > 0)


def _is_valid(case: Case, groups: jax.Array) -> np.ndarray:
    return (np.asarray(groups) >= 0) & (np.asarray(groups) < _size(case))


def check_matmul(ragged_matmul, case: Case, dtype=jnp.float32) -> None:
    m, k, n = case.blocks
    lhs, residual, rhs, _, _, groups = problem(case)
    y = ragged_matmul(lhs, residual, rhs, groups, block_shape=case.blocks, dtype=dtype)
    assert (y.shape, y.dtype) == ((len(groups), m, case.matrix[1]), dtype)
    values = oracle.dequantize_stack(lhs, (m, k))
    if residual is not None:
        values += oracle.dequantize_stack(residual, (m, k))
    valid = _is_valid(case, groups)
    matrices = oracle.dequantize_stack(rhs, (n, k))[np.asarray(groups)[valid]]
    # The other tiles hold anything, also NaNs that a cast would warn of.
    y = np.asarray(y)[valid].astype(np.float64)
    _check_close(y, values[valid] @ matrices.mT, dtype)


def check_contraction(ragged_contraction, case: Case, dtype=jnp.float32) -> None:
    m, k, n = case.blocks
    *_, lhs, rhs, groups = problem(case)
    y = ragged_contraction(
        lhs, rhs, groups, size=_size(case), block_shape=(k, m, n), dtype=dtype
    )
    assert (y.shape, y.dtype) == ((_size(case), *case.matrix), dtype)
    values = oracle.dequantize_stack(lhs, (k, m))
    products = values @ oracle.dequantize_stack(rhs, (n, m)).mT
    expected = np.zeros(y.shape)
    for t in np.flatnonzero(_is_valid(case, groups)):
        expected[int(groups[t])] += products[t]
    for got, want in zip(np.asarray(y, np.float64), expected, strict=True):
        _check_close(got, want, dtype)


def _check_close(got: np.ndarray, want: np.ndarray, dtype) -> None:
    if not np.any(want):
        assert not np.any(got)
        return
    limit = 1e-5 if dtype == jnp.float32 else 2e-3
    assert oracle.relative(got, want) <= limit


def check_nan_stays_in_its_group(ops) -> None:
    """A NaN shows in the products of its tile and its group, and nowhere else."""
    case = Case(400, (150, 130, 100), (128, 128), SIDE_128, 0.5)
    lhs, residual, rhs, lhs_columns, grad_columns, groups = problem(case)
    options = {"block_shape": SIDE_128, "dtype": jnp.bfloat16}
    bad = lhs._replace(scales=lhs.scales.at[2].set(jnp.nan))
    y = ops.ragged_matmul(bad, residual, rhs, groups, **options)
    is_nan = np.isnan(np.asarray(y, np.float32)).all((1, 2))
    np.testing.assert_array_equal(is_nan[:5], [False, False, True, False, False])
    bad = rhs._replace(scales=rhs.scales.at[1].set(jnp.nan))
    y = ops.ragged_matmul(lhs, residual, bad, groups, **options)
    is_nan = np.isnan(np.asarray(y, np.float32)).all((1, 2))
    np.testing.assert_array_equal(is_nan[:5], groups[:5] == 1)
    scales = grad_columns.scales.at[2].set(jnp.nan)
    bad = grad_columns._replace(scales=scales)
    dw = ops.ragged_contraction(lhs_columns, bad, groups, size=3, **options)
    is_nan = np.isnan(np.asarray(dw, np.float32)).all((1, 2))
    np.testing.assert_array_equal(is_nan, [False, True, False])


# rows, sizes, columns, dtype, block, rowwise, colwise.
QUANTIZE = [
    (300, (130, 0, 128, 5), 272, "bfloat16", (128, 128), "stochastic", "stochastic"),
    (200, (70, 0, 33, 1, 80), 141, "float32", (64, 128), "nearest", "stochastic"),
    (90, (0, 0, 90, 0), 51, "float16", (32, 32), None, "nearest"),
    (300, (270, 0, 20), 140, "bfloat16", (256, 256), "stochastic", "nearest"),
    (40, (0, 0), 64, "bfloat16", (32, 64), "stochastic", "stochastic"),
]
# rows, sizes, columns, dtype, block, criterion, theta, colwise.
FALLBACK = [
    (300, (130, 0, 128, 5), 272, "bfloat16", (128, 128), "absmax", 150.0, "stochastic"),
    (200, (70, 0, 33, 1, 80), 141, "float32", (64, 64), "l1", 300.0, "nearest"),
    (280, (20, 258), 70, "bfloat16", (256, 256), "l1_rel", 0.1, "stochastic"),
]


def grouped_rows(rows, sizes, columns, dtype, m) -> GroupedRows:
    """Rows with outliers; those in no group are NaN."""
    x = heavy((rows, columns), dtype=dtype).at[sum(sizes) :].set(jnp.nan)
    tiles = _assign_tiles(jnp.asarray(sizes), rows, m)
    return GroupedRows(x, tiles.first_rows, tiles.row_counts)


def seeds(x: GroupedRows) -> tuple[jax.Array, ...]:
    """Five seeds of each tile, to be folded."""
    index = jnp.arange(len(x.first_rows), dtype=jnp.uint32)
    return tuple(index * 7 + jnp.uint32(n) for n in range(5))


def check_quantize(
    ops, rows, sizes, columns, dtype, block, rowwise, colwise, *, sums: bool = True
) -> None:
    x = grouped_rows(rows, sizes, columns, dtype, block[0])
    layouts = {"rowwise": rowwise, "colwise": colwise}
    args = {"block": block, **layouts}
    if sums:
        args["sums"] = tuple(name for name, rounding in layouts.items() if rounding)
    got = ops.ragged_quantize(x, seeds(x), **args)
    want = _reference("ragged_quantize", **args)(x, seeds(x))
    check_quantized(got.rowwise, want.rowwise, block)
    check_quantized(got.colwise, want.colwise, block[::-1])


def check_fallback(
    ops, rows, sizes, columns, dtype, block, criterion, theta, colwise
) -> None:
    x = grouped_rows(rows, sizes, columns, dtype, block[0])
    args = {"block": block, "criterion": criterion, "colwise": colwise}
    operands = x, jnp.full(len(x.first_rows), theta), seeds(x)
    got = ops.ragged_quantize_fallback(*operands, **args)
    want = _reference("ragged_quantize_fallback", **args)(*operands)
    check_quantized(got.main, want.main, block)
    check_quantized(got.colwise, want.colwise, block[::-1])
    check_quantized(got.residual, want.residual, block)
    assert 0 < np.mean(np.asarray(want.residual.scales) > 0) < 1
    # An implementation may sum in any order.
    rtol = 0.0 if criterion == "absmax" else 2e-6
    np.testing.assert_allclose(got.metric, want.metric, rtol=rtol, atol=0.0)


# Codes of blocks whose scale is 0 need not be written.
check_quantized = functools.partial(quantize_cases.check_quantized, unused=0.0)


@functools.cache
def _reference(name: str, **kwargs):
    return jax.jit(functools.partial(getattr(grouped_reference, name), **kwargs))


def random_sizes(rng: np.random.Generator, rows: int, groups: int) -> np.ndarray:
    """The sizes of groups: even, uneven, of some groups only, or of one."""
    shares = rng.choice(
        [
            np.ones(groups),
            rng.random(groups) ** 4 + 1e-6,
            (rng.random(groups) < 0.3) + 1e-9,
            np.arange(groups) == rng.integers(groups),
        ]
    )
    total = rows if rng.random() < 0.5 else rng.integers(rows + 1)
    return rng.multinomial(total, shares / shares.sum()).astype(np.int32)


def check_random_problems(ops, expected_ops, seed: int, loads: int, side: int) -> None:
    """Random loads of a random shape and recipe, against another implementation."""
    rng = np.random.default_rng(seed)
    rows, K, N = (int(size) for size in rng.integers(1, 700, 3))
    groups = int(rng.integers(1, 20))
    m, k, n = (int(max(side, x)) for x in rng.choice([32, 64, 128, 256], 3))
    criterion = str(rng.choice(["absmax", "l1", "l1_rel"]))
    is_bf16, roundings = rng.random() < 0.5, ["nearest", "stochastic"]
    dtype = jnp.bfloat16 if is_bf16 else jnp.float32
    modes = {"rowwise": str(rng.choice(roundings)), "colwise": "stochastic"}
    tops = {"absmax": 300.0, "l1": 2.0 * m * k, "l1_rel": 0.2}

    def run(ops, x, w, theta, sizes):
        tiles = assign_tiles(sizes, rows, m)
        of_rows = functools.partial(
            GroupedRows, first_rows=tiles.first_rows, row_counts=tiles.row_counts
        )
        count = len(tiles.groups)
        seeds = jnp.arange(count, dtype=jnp.uint32)
        thetas = jnp.full(count, theta)
        options = {"criterion": criterion, "colwise": "stochastic"}
        lhs = ops.ragged_quantize_fallback(
            of_rows(x), thetas, seeds, block=(m, k), **options
        )
        grad = ops.ragged_quantize(of_rows(x), seeds, block=(m, k), **modes)
        rhs = ops.quantize(
            w,
            jnp.arange(groups, dtype=jnp.uint32),
            block=(n, k),
            rowwise="nearest",
            colwise=None,
        ).rowwise
        y = ops.ragged_matmul(
            lhs.main,
            lhs.residual,
            rhs,
            tiles.groups,
            block_shape=(m, k, n),
            dtype=jnp.float32,
        )
        y = jnp.where((tiles.row_counts > 0)[:, None, None], y, 0.0)
        dw = ops.ragged_contraction(
            lhs.colwise,
            grad.colwise,
            tiles.groups,
            size=groups,
            block_shape=(k, m, k),
            dtype=jnp.float32,
        )
        codes = (lhs.main, (m, k)), (lhs.residual, (m, k)), (lhs.colwise, (k, m))
        codes += (grad.rowwise, (m, k)), (grad.colwise, (k, m))
        # Codes of blocks with scale 0 have no meaning.
        values = [reference.dequantize(*pair) for pair in codes]
        return values, [x.scales for x, _ in codes], lhs.metric, (y, dw)

    @jax.jit
    def compare(*args):
        values, scales, metric, products = run(ops, *args)
        want_values, want_scales, want_metric, want = run(expected_ops, *args)
        equal = jax.tree.map(
            lambda a, b: jnp.all(a == b), (values, scales), (want_values, want_scales)
        )
        difference = jnp.abs(metric - want_metric) / jnp.maximum(want_metric, 1e-30)
        errors = jax.tree.map(
            lambda a, b: jnp.linalg.norm(a - b) / jnp.maximum(jnp.linalg.norm(b), 1e-9),
            products,
            want,
        )
        return equal, jnp.max(difference), errors

    keys = jax.random.split(jax.random.key(seed), 3)
    x = jax.random.normal(keys[0], (rows, K))
    x *= jnp.where(jax.random.uniform(keys[1], x.shape) < 1e-3, 200.0, 1.0)
    w = jax.random.normal(keys[2], (groups, N, K), jnp.bfloat16)
    for _ in range(loads):
        sizes = random_sizes(rng, rows, groups)
        theta = jnp.float32(rng.random() * tops[criterion])
        result = compare(x.astype(dtype), w, theta, jnp.asarray(sizes))
        equal, metric, errors = jax.device_get(result)
        what = f"seed {seed}, sizes {sizes.tolist()}, theta {theta}"
        assert all(jax.tree.leaves(equal)), f"{what}: codes or scales differ"
        assert metric <= (0.0 if criterion == "absmax" else 2e-6), what
        assert max(errors) <= 1e-5, f"{what}: products differ by {errors}"
