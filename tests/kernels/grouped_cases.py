"""Checks that every implementation of the ops on tiles of groups must pass.

Each check takes an object with the ops, or one of them.
"""

from collections.abc import Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fbq_jax.kernels.quantized import Layout, Quantized
from fbq_jax.kernels.sources import Matrix
from fbq_jax.kernels.tiles import assign_tiles
from tests import oracle
from tests.kernels.gemm_cases import random_operand, values, with_scales

_assign_tiles = jax.jit(assign_tiles, static_argnums=(1, 2))


class Case(NamedTuple):
    """The GEMMs of rows in groups.

    Attributes:
      rows: M, of which the last may be in no group.
      sizes: the number of rows of each group.
      matrix: ``(K, N)``.
      blocks: ``(m, k, n)``, the values along M, K and N that share a scale.
      fallback: fraction of lhs' blocks with a residual; None for no residual operand.
      first_group: the group that the first matrix of rhs belongs to; rows of groups
        before it, and of the last one, are another device's.
      tile: the rows of a tile; None for m.
      columns: in the contraction, the values along K and N that share a scale; None for
        k and n.
      dtype: dtype of the codes.
    """

    rows: int
    sizes: tuple[int, ...]
    matrix: tuple[int, int]
    blocks: tuple[int, int, int]
    fallback: float | None = None
    first_group: int = 0
    tile: int | None = None
    columns: tuple[int, int] | None = None
    dtype: str = "int8"


SIDE_128 = (128, 128, 128)
CASES = {
    "aligned": Case(512, (256, 128, 128), (256, 256), SIDE_128),
    "uneven": Case(700, (200, 0, 128, 1, 259, 0), (300, 330), SIDE_128),
    "uneven, fallback": Case(400, (0, 130, 0, 200, 3), (400, 140), SIDE_128, 0.4),
    "one group with everything": Case(300, (0, 300, 0), (128, 450), SIDE_128, 0.3),
    "no group with anything": Case(200, (0, 0), (128, 128), SIDE_128),
    "other devices' groups": Case(
        500, (130, 90, 0, 140, 60), (128, 130), SIDE_128, 0.5, 1
    ),
    "256x256x256 blocks": Case(700, (300, 20, 257), (280, 300), (256, 256, 256), 0.3),
    "128x256x128 blocks": Case(300, (140, 100), (300, 100), (128, 256, 128)),
}
# Scales of single rows; in the contraction, of columns of X and perhaps of dY.
_ROWS = 500, (130, 90, 0, 140, 60), (300, 330)
_FEW_ROWS = 200, (130, 0, 50), (140, 150)
ROW_CASES = {
    "scales of rows": Case(
        *_ROWS, (1, 128, 128), first_group=1, tile=128, columns=(1, 128)
    ),
    "scales of rows and columns": Case(*_ROWS, (1, 128, 1), tile=128, columns=(1, 1)),
    "scales of rows of 256x256 tiles": Case(
        600, (300, 20, 257), (280, 300), (1, 256, 256), tile=256, columns=(1, 256)
    ),
    "FP8": Case(
        *_FEW_ROWS, (1, 128, 128), tile=128, columns=(1, 128), dtype="float8_e4m3fn"
    ),
    "FP8 by block": Case(*_FEW_ROWS, SIDE_128, dtype="float8_e4m3fn"),
}
# Rows in blocks that a GPU without Hopper's kernel multiplies, too.
SMALL_CASES = {
    "32x32x32 blocks": Case(150, (33, 0, 64, 40), (100, 80), (32, 32, 32), 0.3),
    "64x128x32 blocks": Case(150, (65, 3, 64), (140, 70), (64, 128, 32), 0.4),
    "scales of rows of small tiles": Case(
        150, (33, 0, 64, 40), (100, 80), (1, 32, 32), tile=32, columns=(1, 1)
    ),
    "scales of rows, fallback": Case(
        150, (65, 3, 64), (140, 70), (1, 64, 32), 0.4, tile=64, columns=(1, 32)
    ),
}


LIMITS = {jnp.float32: 1e-5, jnp.bfloat16: 2e-3}  # of errors

# These cover most of the others.
FAST = "uneven, fallback", "other devices' groups", "scales of rows", "FP8"


def params(cases: Iterable[str]) -> list[Any]:
    """The names of cases as parameters of a test; slow ones are exhaustive."""
    marks = [pytest.mark.exhaustive]
    return [pytest.param(name, marks=marks * (name not in FAST)) for name in cases]


class Problem(NamedTuple):
    """The operands of a case's GEMMs.

    Attributes:
      lhs: X rowwise, ``[T, m, K]``.
      rhs: the matrices, ``[G, N, K]``.
      lhs_columns: X colwise, ``[T, K, m]``.
      grad_columns: dY colwise, ``[T, N, m]``.
      groups: ``[T]``, relative to the first matrix.
    """

    lhs: Quantized
    rhs: Quantized
    lhs_columns: Quantized
    grad_columns: Quantized
    groups: jax.Array


def problem(case: Case) -> Problem:
    """Random operands.  Codes of tiles without rows are random, and their scales 0."""
    rng = np.random.default_rng(0)
    (K, N), (m, k, n) = case.matrix, case.blocks
    rows, (i, j) = case.tile or m, case.columns or (k, n)
    tiles = _assign_tiles(jnp.asarray(case.sizes), case.rows, rows)
    is_used = np.asarray(tiles.row_counts)[:, None, None] > 0

    def of_tiles(shape, block, fallback=None) -> Quantized:
        shape = len(is_used), *shape
        x = random_operand(rng, shape, block, fallback, case.dtype)
        for term in ("main", "residual")[: len(x.terms)]:
            x = with_scales(x, lambda scales: jnp.where(is_used, scales, 0.0), term)
        return x

    return Problem(
        of_tiles((rows, K), (m, k), case.fallback),
        random_operand(rng, (_size(case), N, K), (n, k), dtype=case.dtype),
        of_tiles((K, rows), (i, rows)),
        of_tiles((N, rows), (j, rows)),
        tiles.groups - case.first_group,
    )


def _size(case: Case) -> int:
    """The number of matrices."""
    return len(case.sizes) - case.first_group - (case.first_group > 0)


def _is_valid(case: Case, groups: jax.Array) -> np.ndarray:
    return (np.asarray(groups) >= 0) & (np.asarray(groups) < _size(case))


def check_matmul(matmul, case: Case, dtype=jnp.float32, tolerance=None) -> None:
    lhs, rhs, _, _, groups = problem(case)
    y = matmul(lhs, rhs, groups, dtype=dtype)
    assert (y.shape, y.dtype) == ((*lhs.shape[:2], case.matrix[1]), dtype)
    valid = _is_valid(case, groups)
    matrices = values(rhs)[np.asarray(groups)[valid]]
    # The other tiles hold anything, also NaNs that a cast would warn of.
    y = np.asarray(y)[valid].astype(np.float64)
    _check_close(y, values(lhs)[valid] @ matrices.mT, tolerance or LIMITS[dtype])


def check_contract(contract, case: Case, dtype=jnp.float32, tolerance=None) -> None:
    *_, lhs, rhs, groups = problem(case)
    y = contract(lhs, rhs, groups, size=_size(case), dtype=dtype)
    assert (y.shape, y.dtype) == ((_size(case), *case.matrix), dtype)
    products = values(lhs) @ values(rhs).mT
    expected = np.zeros(y.shape)
    for t in np.flatnonzero(_is_valid(case, groups)):
        expected[int(groups[t])] += products[t]
    for got, want in zip(np.asarray(y, np.float64), expected, strict=True):
        _check_close(got, want, tolerance or LIMITS[dtype])


def _check_close(got: np.ndarray, want: np.ndarray, tolerance: float) -> None:
    if not np.any(want):
        assert not np.any(got)
    else:
        assert oracle.relative(got, want) <= tolerance


def check_nan_stays_in_its_group(ops) -> None:
    """A NaN shows in the products of its tile and its group, and nowhere else."""
    case = Case(400, (150, 130, 100), (128, 128), SIDE_128, 0.5)
    lhs, rhs, lhs_columns, grad_columns, groups = problem(case)

    def is_nan(y: jax.Array) -> np.ndarray:
        return np.isnan(np.asarray(y, np.float32)).all((1, 2))

    bad = with_scales(lhs, lambda scales: scales.at[2].set(jnp.nan))
    y = ops.matmul(bad, rhs, groups, dtype=jnp.bfloat16)
    np.testing.assert_array_equal(is_nan(y)[:5], [False, False, True, False, False])
    bad = with_scales(rhs, lambda scales: scales.at[1].set(jnp.nan))
    y = ops.matmul(lhs, bad, groups, dtype=jnp.bfloat16)
    np.testing.assert_array_equal(is_nan(y)[:5], groups[:5] == 1)
    bad = with_scales(grad_columns, lambda scales: scales.at[2].set(jnp.nan))
    dw = ops.contract(lhs_columns, bad, groups, size=3, dtype=jnp.bfloat16)
    np.testing.assert_array_equal(is_nan(dw), [False, True, False])


def _parts(x: Quantized) -> list[Any]:
    """The values, scales and sums of each term; codes of scale 0 have no meaning."""
    return [
        (Quantized(term, None, x.block).dequantize(), term.scales, term.sums)
        for term in x.terms
    ]


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
    rounding = str(rng.choice(roundings))
    tops = {"absmax": 300.0, "l1": 2.0 * m * k, "l1_rel": 0.2}

    def run(ops, x, w, theta, sizes):
        tiles = assign_tiles(sizes, rows, m)
        source = Matrix(x, tiles.first_rows, tiles.row_counts, m)
        seeds = jnp.arange(len(tiles.groups), dtype=jnp.uint32)
        columns = {"colwise": Layout("stochastic", (m, k))}
        nearest = {"rowwise": Layout("nearest", (m, k)), "criterion": criterion}
        lhs = ops.quantize(
            source, seeds, jnp.full(len(seeds), theta), **nearest, **columns
        )
        of_grad = {"rowwise": Layout(rounding, (m, k))} | columns
        grad = ops.quantize(source, seeds, **of_grad)
        of_groups = jnp.arange(groups, dtype=jnp.uint32)
        layouts = {"rowwise": Layout("nearest", (n, k)), "colwise": None}
        rhs = ops.quantize(Matrix(w), of_groups, **layouts).rowwise
        y = ops.matmul(lhs.rowwise, rhs, tiles.groups, dtype=jnp.float32)
        y = jnp.where((tiles.row_counts > 0)[:, None, None], y, 0.0)
        options = {"size": groups, "dtype": jnp.float32}
        dw = ops.contract(lhs.colwise, grad.colwise, tiles.groups, **options)
        layouts = lhs.rowwise, lhs.colwise, grad.rowwise, grad.colwise
        return [_parts(x) for x in layouts], lhs.metric, (y, dw)

    @jax.jit
    def compare(*args):
        parts, metric, products = run(ops, *args)
        want_parts, want_metric, want = run(expected_ops, *args)
        equal = jax.tree.map(lambda a, b: jnp.all(a == b), parts, want_parts)
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
