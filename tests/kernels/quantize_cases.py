"""Cases of ``quantize`` for every implementation, and checks against ``reference``.

Matrices and the gradients of gates have the same bits everywhere.  Functions such as
``exp`` differ in their last bits.  So the scales of norms and gates may differ a
little, and their codes by one close to a tie.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fbq_jax.kernels import packing, reference, rounding
from fbq_jax.kernels.layer_sources import Gate, GateGrad, Norm, SavedNorm
from fbq_jax.kernels.quantized import CRITERIA, Layout, Layouts, Quantized, Term
from fbq_jax.kernels.rounding import MatrixSeeds
from fbq_jax.kernels.sources import Matrix, Source
from fbq_jax.kernels.tiles import assign_tiles
from tests import oracle

FLOAT8 = {"dtype": "float8_e4m3fn"}
WIDE = {"bound": 127.5}
SPECIAL_DTYPES = ("float32", "bfloat16", "float16")


def heavy(shape, seed=0, dtype=np.float32):
    """Normal values of different magnitudes, with a few large outliers."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal(shape) * np.exp(rng.standard_normal(shape))
    x[rng.random(shape) < 1e-3] *= 200.0
    return jax.device_put(x.astype(dtype))  # jnp.asarray would compile a program


class Case(NamedTuple):
    """A call of ``quantize``.

    Attributes:
      source: makes the source.
      rowwise: the rowwise layout, or None.
      colwise: the colwise layout, or None.
      options: further options, and the thresholds ``theta``.
    """

    source: Callable[[], Source]
    rowwise: Layout | None
    colwise: Layout | None
    options: dict[str, Any] = {}  # noqa: RUF012 (never changed)

    @property
    def sides(self) -> set[int | None]:
        """The sides of the blocks."""
        layouts = [layout for layout in self[1:3] if layout is not None]
        return {side for layout in layouts for side in layout.block}

    def with_sums(self, sums: bool = True) -> "Case":
        """The same with sums of codes in all layouts, or in none."""
        layouts = [layout and layout._replace(sums=sums) for layout in self[1:3]]
        return Case(self.source, *layouts, self.options)


def near(r: int | None, c: int | None, *, sums: bool = False) -> Layout:
    """A layout that is rounded to nearest."""
    return Layout("nearest", (r, c), sums)


def noisy(r: int | None, c: int | None, *, sums: bool = False) -> Layout:
    """A layout with stochastic rounding."""
    return Layout("stochastic", (r, c), sums)


# Sources.


def matrix(shape: tuple[int, int, int], dtype: str) -> Callable[[], Matrix]:
    """Matrices ``[B, R, C]``."""
    return lambda: Matrix(heavy(shape, dtype=dtype))


_assign_tiles = jax.jit(assign_tiles, static_argnums=(1, 2))


def grouped(
    rows: int, sizes: tuple[int, ...], columns: int, dtype: str, m: int
) -> Callable[[], Matrix]:
    """Rows in groups of some sizes; the rows after the last group are NaN."""

    def make() -> Matrix:
        x = heavy((rows, columns), dtype=dtype).at[sum(sizes) :].set(jnp.nan)
        tiles = _assign_tiles(jnp.asarray(sizes), rows, m)
        return Matrix(x, tiles.first_rows, tiles.row_counts, m)

    return make


def norm(shape: tuple[int, int, int], dtype: str, bits: int) -> Callable[[], Norm]:
    """Norms of ``shape``."""

    def make() -> Norm:
        noise = jax.random.normal(jax.random.key(0), (shape[0], shape[2]))
        return Norm(heavy(shape, dtype=dtype), 1.0 + 0.5 * noise, 1e-5, bits)

    return make


def gate(
    shape: tuple[int, int, int],
    dtype: str,
    bits: int,
    row_counts: tuple[int, ...] | None = None,
    interleaved: bool = True,
) -> Callable[[], Gate]:
    """Gates whose output has this shape; missing rows hold a NaN and large values."""

    def make() -> Gate:
        values = heavy((*shape[:2], 2 * shape[2]), dtype=dtype)
        values = _fill_missing_rows(values, row_counts, _garbage(values))
        return Gate(values, _counts(row_counts), bits, interleaved)

    return make


def gate_grad(
    shape: tuple[int, int, int],
    dtype: str,
    bits: int,
    row_counts: tuple[int, ...] | None = None,
    interleaved: bool = True,
) -> Callable[[], GateGrad]:
    """Gradients of gates, with dy of this shape, whose missing rows are as in ``gate``.

    As a gate leaves them, factors have zeros in missing rows, and anything where a
    matrix has no rows.
    """

    def make() -> GateGrad:
        pack = jax.jit(packing.quantize, static_argnums=1)
        factors = [
            _fill_missing_rows(heavy(shape, seed), row_counts, 0.0) for seed in (1, 2)
        ]
        data, scales = pack(jnp.stack(factors, 1), bits)
        is_empty = np.array(row_counts or [1] * shape[0]) == 0
        scales = jnp.where(is_empty[:, None, None, None], jnp.nan, scales)
        packed = packing.Packed(data, scales.at[0, 1, 1, 0].set(0.0))
        packed = packing.as_words(packed)
        dy = heavy(shape, dtype=dtype)
        dy = _fill_missing_rows(dy, row_counts, _garbage(dy))
        return GateGrad(dy, packed, _counts(row_counts), bits, interleaved)

    return make


def _counts(row_counts: tuple[int, ...] | None) -> jax.Array | None:
    return None if row_counts is None else jnp.array(row_counts, jnp.int32)


def _garbage(x: jax.Array) -> np.ndarray:
    garbage = np.full(x.shape[1:], 3e4)
    garbage[:, 1] = np.nan
    return garbage


def _fill_missing_rows(
    x: jax.Array, row_counts: tuple[int, ...] | None, value: Any
) -> jax.Array:
    """Matrices ``[B, R, C]`` with a value in missing rows."""
    if row_counts is None:
        return x
    is_row = np.arange(x.shape[1])[None, :, None] < np.array(row_counts)[:, None, None]
    return jnp.where(is_row, x, jnp.asarray(value, x.dtype))


# Tables: a source's arguments, both layouts, and options.


def _cases(make: Callable[..., Any], count: int, table: list[Any]) -> list[Case]:
    """The cases of a table whose first columns are the arguments of ``make``."""
    return [Case(make(*row[:count]), *row[count:]) for row in table]


def _fallback(criterion: str, *theta: float) -> dict[str, Any]:
    return {"criterion": criterion, "theta": theta}


absmax, l1, l1_rel = (functools.partial(_fallback, c) for c in CRITERIA)
_matrices = functools.partial(_cases, matrix, 2)
_groups = functools.partial(_cases, grouped, 5)

BLOCKS = [
    case.with_sums()
    for case in _matrices(
        [
            ((1, 256, 256), "bfloat16", near(128, 128), near(128, 128)),
            ((1, 144, 304), "bfloat16", noisy(128, 128), noisy(128, 128)),
            ((2, 100, 141), "float32", near(64, 128), noisy(64, 128)),
            ((3, 40, 64), "float16", None, noisy(32, 32)),
            ((1, 300, 264), "float32", noisy(256, 64), None),
            ((2, 40, 258), "bfloat16", noisy(32, 256), near(32, 256)),
            ((1, 200, 51), "float16", near(256, 256), near(256, 256)),
            ((1, 270, 140), "bfloat16", noisy(256, 128), noisy(256, 128)),
            ((1, 1, 1), "bfloat16", near(128, 128), noisy(128, 128)),
        ]
    )
]
FALLBACK = _matrices(
    [
        # This threshold is the metric of a block, which does not exceed it.
        ((1, 256, 272), "bfloat16", near(128, 128), noisy(128, 128), absmax(924.0)),
        ((2, 100, 141), "float32", near(64, 64), near(64, 64), l1(500.0, 200.0)),
        ((1, 150, 310), "float16", near(32, 128), None, l1_rel(0.5)),
        ((1, 190, 40), "float32", near(256, 256), noisy(256, 256), l1_rel(0.0)),
        (
            *((3, 33, 65), "bfloat16", near(256, 64), noisy(256, 64)),
            absmax(np.inf, 0.0, np.nan),
        ),
    ]
)
VECTORS = _matrices(
    [
        ((1, 128, 256), "bfloat16", noisy(1, None), noisy(None, 1)),
        ((2, 70, 141), "float32", near(1, None), noisy(None, 1)),
        ((3, 20, 144), "float16", None, noisy(None, 1)),
        ((1, 131, 176), "bfloat16", noisy(1, None), None),
        ((1, 1, 300), "float32", noisy(1, None), near(None, 1)),
        ((2, 130, 1), "bfloat16", near(1, None), near(None, 1)),
    ]
)
PER_TENSOR = Case(
    matrix((2, 70, 141), "float32"), noisy(None, None), near(None, None), WIDE
)
# One scale per row of a block, and per column of a block.
ROWS = _matrices(
    [
        ((1, 256, 256), "bfloat16", near(1, 128), noisy(128, 1)),
        ((2, 100, 141), "float32", noisy(1, 128), noisy(64, 1)),
        ((3, 40, 64), "float16", None, near(32, 1)),
        ((1, 300, 90), "bfloat16", noisy(1, 32), None),
        ((1, 270, 260), "bfloat16", noisy(1, 256), noisy(256, 1)),
        ((1, 1, 1), "float32", near(1, 128), near(128, 1)),
    ]
)
# One scale per row of a block, and per block.
ROWS_AND_BLOCKS = _matrices(
    [
        ((1, 256, 272), "bfloat16", noisy(1, 128), noisy(128, 128, sums=True)),
        ((2, 100, 141), "float32", near(1, 128), noisy(64, 128, sums=True)),
        ((3, 40, 64), "float16", noisy(1, 32), near(32, 32, sums=True)),
        ((1, 270, 260), "bfloat16", noisy(1, 128), noisy(256, 128, sums=True)),
        ((1, 1, 1), "float32", near(1, 128), near(128, 128, sums=True)),
    ]
)
FLOAT8_BLOCKS = _matrices(
    [
        ((1, 144, 304), "bfloat16", near(128, 128), near(128, 128), FLOAT8),
        ((2, 100, 141), "float32", near(64, 128), None, FLOAT8),
        ((3, 40, 64), "float16", None, near(32, 32), FLOAT8),
    ]
)
FLOAT8_ROWS = _matrices(
    [
        ((1, 144, 304), "bfloat16", near(1, 128), near(128, 1), FLOAT8),
        ((2, 100, 141), "float32", near(1, 128), None, FLOAT8),
        ((3, 40, 64), "float16", None, near(32, 1), FLOAT8),
    ]
)
_LARGE_GROUPS = 300, (130, 0, 128, 5), 272, "bfloat16", 128
_SMALL_GROUPS = 200, (70, 0, 33, 1, 80), 141, "float32", 64
GROUPED = [
    case.with_sums()
    for case in _groups(
        [
            (*_LARGE_GROUPS, noisy(128, 128), noisy(128, 128)),
            (*_SMALL_GROUPS, near(64, 128), noisy(64, 128)),
            (90, (0, 0, 90, 0), 51, "float16", 32, None, near(32, 32)),
            (300, (270, 0, 20), 140, "bfloat16", 256, noisy(256, 256), near(256, 256)),
            (40, (0, 0), 64, "bfloat16", 32, noisy(32, 64), noisy(32, 64)),
        ]
    )
]
GROUPED_FALLBACK = _groups(
    [
        (*_LARGE_GROUPS, near(128, 128), noisy(128, 128), absmax(150.0)),
        (*_SMALL_GROUPS, near(64, 64), near(64, 64), l1(300.0)),
        (
            *(280, (20, 258), 70, "bfloat16", 256),
            *(near(256, 256), noisy(256, 256), l1_rel(0.1)),
        ),
    ]
)
GROUPED_ROWS = _groups(
    [
        (
            *(90, (30, 0, 41), 130, "bfloat16", 32),
            *(noisy(1, 128), noisy(32, 128, sums=True)),
        ),
        (*_LARGE_GROUPS, near(1, 128), noisy(128, 1)),
        (*_SMALL_GROUPS, near(1, 128), near(64, 1), FLOAT8),
        (300, (270, 0, 20), 140, "bfloat16", 256, noisy(1, 256), noisy(256, 256)),
        (40, (0, 0), 64, "bfloat16", 32, noisy(1, 64), None),
    ]
)
# XLA gathers this.
GATHERED = _groups([(70, (40, 30), 65, "float32", 64, near(1, None), noisy(None, 1))])
# Norms and gates: shape of the output, dtype, bits.
_LAYERS = [
    ((1, 100, 128), "bfloat16", 10, near(128, 128), noisy(128, 128), absmax(9.0)),
    ((2, 50, 128), "float32", 7, near(64, 128), near(64, 128), l1_rel(0.01, 0.02)),
    ((1, 33, 256), "float16", 12, near(32, 128), None),
    ((1, 20, 72), "bfloat16", 10, near(32, 128), near(32, 128), l1(9.0)),
]
# The gradients of gates, by the shape of dy.
_GRADS = [
    ((1, 140, 128), "bfloat16", 10, noisy(128, 128), noisy(128, 128, sums=True)),
    ((2, 50, 128), "float32", 11, near(64, 128), noisy(64, 128, sums=True)),
    ((1, 40, 256), "float16", 4, None, near(32, 128, sums=True)),
    ((1, 20, 72), "bfloat16", 10, noisy(32, 128), near(32, 128, sums=True)),
]
# All three, with one scale per row of a block.
_IN_ROWS = [
    ((1, 100, 128), "bfloat16", 10, near(1, 128), noisy(128, 1)),
    ((1, 140, 256), "bfloat16", 10, noisy(1, 128), noisy(128, 128)),
    ((2, 50, 128), "float32", 7, near(1, 128), near(64, 128), FLOAT8),
    ((1, 33, 256), "bfloat16", 12, near(1, 128), near(32, 1), FLOAT8),
    ((1, 33, 128), "float16", 12, noisy(1, 128), None),
    ((1, 40, 128), "bfloat16", 4, None, noisy(32, 1)),
    ((1, 20, 72), "bfloat16", 10, noisy(1, 128), near(32, 128)),
]
_WITH_SUMS = (*_IN_ROWS[1][:-1], noisy(128, 128, sums=True))
_GRADS_IN_ROWS = [_IN_ROWS[0], _WITH_SUMS, *_IN_ROWS[2:]]
NORMS, NORMS_IN_ROWS = _cases(norm, 3, _LAYERS), _cases(norm, 3, _IN_ROWS)
GATES, GATES_IN_ROWS = _cases(gate, 3, _LAYERS), _cases(gate, 3, _IN_ROWS)
GRADS, GRADS_IN_ROWS = (
    _cases(gate_grad, 3, table) for table in (_GRADS, _GRADS_IN_ROWS)
)
# Matrices of which rows are missing: also their counts, and whether gate and up are
# interleaved.
_THREE, _TWO = (32, 0, 19), (5, 64)
GATES_OF_TILES = _cases(
    gate,
    5,
    [
        (
            *((3, 32, 256), "bfloat16", 10, _THREE, False),
            *(near(32, 128), noisy(32, 128), absmax(2.0)),
        ),
        ((2, 64, 256), "float16", 7, _TWO, True, near(64, 128), None),
        (
            *((2, 32, 128), "float32", 12, (32, 0), False),
            *(near(32, 128), near(32, 128), l1_rel(0.01)),
        ),
        (
            *((3, 128, 72), "bfloat16", 10, (1, 128, 0), False),
            *(near(128, 128), near(128, 128), l1(9.0)),
        ),
        ((2, 32, 256), "float32", 10, None, False, near(32, 128), None),
        ((2, 32, 128), "bfloat16", 10, (7, 0), True, near(1, 128), noisy(32, 1)),
        ((3, 32, 256), "bfloat16", 10, _THREE, False, near(1, 128), None),
        (
            *((2, 64, 256), "float32", 12, _TWO, False),
            *(near(1, 128), near(64, 1), FLOAT8),
        ),
    ],
)
GRADS_OF_TILES = _cases(
    gate_grad,
    5,
    [
        (
            *((3, 32, 256), "bfloat16", 10, _THREE, False),
            *(noisy(32, 128), noisy(32, 128, sums=True)),
        ),
        ((2, 64, 256), "float16", 7, _TWO, True, None, near(64, 128, sums=True)),
        ((2, 32, 128), "float32", 12, (0, 32), False, near(32, 128), None),
        (
            *((3, 128, 72), "bfloat16", 4, (1, 128, 0), False),
            *(near(128, 128), near(128, 128, sums=True)),
        ),
        (
            *((2, 32, 256), "float32", 10, None, False),
            *(near(32, 128), near(32, 128, sums=True)),
        ),
        ((2, 32, 128), "bfloat16", 10, (7, 0), True, near(1, 128), noisy(32, 1)),
        (
            *((3, 32, 256), "bfloat16", 10, _THREE, False),
            *(noisy(1, 128), noisy(32, 128, sums=True)),
        ),
        (
            *((2, 64, 256), "float32", 12, _TWO, False),
            *(near(1, 128), near(64, 1), FLOAT8),
        ),
    ],
)


ALL = [*BLOCKS, *FALLBACK, *VECTORS, PER_TENSOR, *ROWS, *ROWS_AND_BLOCKS]
ALL += [*FLOAT8_BLOCKS, *FLOAT8_ROWS, *GROUPED, *GROUPED_FALLBACK]
ALL += [*GROUPED_ROWS, *GATHERED]
ALL += [*NORMS, *GATES, *GRADS, *NORMS_IN_ROWS, *GATES_IN_ROWS, *GRADS_IN_ROWS]
ALL += [*GATES_OF_TILES, *GRADS_OF_TILES]


def of_bits(bits: int) -> list[Case]:
    """Chunks of some widths, at some positions in a word."""
    args = (1, 32, 128), "bfloat16", bits
    return [Case(make(*args), near(32, 128), None) for make in (gate, gate_grad)]


# Special values.


def special(dtype: str, block: tuple[int, int]) -> jax.Array:
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
    blocks[2, 2] = -(2.0**-117)  # the smallest that is not zero in FP8
    with np.errstate(over="ignore"):
        return jnp.asarray(blocks).astype(dtype)


def special_blocks(dtype: str, block: tuple[int, int] = (32, 64)) -> list[Case]:
    """The special blocks."""
    x = _in_place(dtype, block)
    options = {"criterion": "l1_rel" if dtype == "float32" else "absmax", "theta": 0.0}
    layouts = noisy(*block, sums=True), near(*block, sums=True)
    return [Case(x, *layouts), Case(x, near(*block), None, options)]


def special_vectors(dtype: str) -> list[Case]:
    """The special blocks as rows, then as columns."""
    x = special(dtype, (4, 64)).reshape(1, 15, 256)
    return [
        Case(lambda: Matrix(x), noisy(1, None), None),
        Case(lambda: Matrix(x.mT), None, noisy(None, 1), WIDE),
    ]


def special_rows(dtype: str) -> list[Case]:
    """The special blocks as rows of 64 values, then as columns; and as blocks."""
    x = special(dtype, (4, 64)).reshape(1, 15 * 4, 64)
    return [
        Case(lambda: Matrix(x), noisy(1, 64), near(32, 1)),
        Case(lambda: Matrix(x.mT), near(1, 32), noisy(64, 1)),
        Case(_in_place(dtype, (32, 64)), noisy(1, 64), near(32, 64, sums=True)),
    ]


def _in_place(dtype: str, block: tuple[int, int]) -> Callable[[], Matrix]:
    """A matrix of the special blocks."""
    r, c = block
    blocks = special(dtype, block).swapaxes(1, 2)
    return lambda: Matrix(blocks.reshape(1, 3 * r, 5 * c))


def special_float8(dtype: str) -> list[Case]:
    """The special blocks, as blocks and as rows and columns; and codes and ties."""
    rows = special(dtype, (4, 64)).reshape(1, 60, 64)
    grid = oracle.float8_magnitudes()
    x = np.concatenate([grid, (grid[1:] + grid[:-1]) / 2])[:-1].astype(np.float32)
    x = np.concatenate([x, np.nextafter(x, 448), np.nextafter(x, 0), [-3e-4]])
    x = np.pad(x, (0, -len(x) % 255)).reshape(1, -1, 255)
    # With a largest magnitude of 448, the scale is 1.
    x = np.pad(np.concatenate([x, -x], 1), [(0, 0)] * 2 + [(0, 1)], constant_values=448)
    sources = (
        (_in_place(dtype, (32, 64)), 64),
        (lambda: Matrix(rows), 64),
        (lambda: Matrix(jnp.asarray(x, dtype)), 256),
    )
    return [
        Case(source, *layouts, FLOAT8)
        for source, c in sources
        for layouts in ((near(32, c), near(32, c)), (near(1, c), near(32, 1)))
    ]


# Checks.

Quantize = Callable[..., Layouts]
_definition = jax.jit(
    reference.quantize,
    static_argnames=("rowwise", "colwise", "criterion", "bound", "dtype"),
)


def plain_seeds(batch: int) -> jax.Array:
    """The seed of each matrix."""
    return jnp.resize(jnp.asarray([5, 2**32 - 1, 2**31], jnp.uint32), batch)


def folded_seeds(batch: int) -> MatrixSeeds:
    """The seeds of each matrix, for a kernel to fold."""
    seeds = plain_seeds(batch)
    place = 8 * jnp.arange(batch, dtype=jnp.uint32) + jnp.uint32(2 * 3 + 1)
    return MatrixSeeds(seeds, seeds + jnp.uint32(1), place)


def _call(case: Case) -> tuple[Source, jax.Array | None, dict[str, Any]]:
    """The source, the thresholds of all matrices, and the other options of a case."""
    source, options = case.source(), dict(case.options)
    theta = options.pop("theta", None)
    if theta is not None:
        theta = jnp.asarray(theta, jnp.float32)
        theta = jnp.broadcast_to(theta, (source.shape[0],))
    return source, theta, options


def check(quantize: Quantize, case: Case, *, folds: bool = True) -> Layouts:
    """Compares an implementation with the definition, and returns its results.

    Args:
      quantize: the implementation.
      case: what to quantize.
      folds: whether the implementation folds seeds.
    """
    source, theta, options = _call(case)
    batch = source.shape[0]
    operands = source, folded_seeds(batch) if folds else plain_seeds(batch), theta
    options |= {"rowwise": case.rowwise, "colwise": case.colwise}
    got, want = quantize(*operands, **options), _definition(*operands, **options)
    jax.tree.map(_check_type, got, want)
    if source.row_counts is not None:
        got, want = (_check_empty(x, source.row_counts) for x in (got, want))
    check_operands = _check_close
    if _is_exact(source):
        is_grouped = source.row_counts is not None
        check_operands = functools.partial(_check_exact, is_grouped=is_grouped)
    check_operands(got.rowwise, want.rowwise)
    check_operands(got.colwise, want.colwise)
    if want.metric is not None:
        # An implementation may sum in any order.
        rtol = 0.0 if options["criterion"] == "absmax" else 2e-6
        rtol = rtol if _is_exact(source) else 1e-3
        np.testing.assert_allclose(got.metric, want.metric, rtol=rtol, atol=0.0)
    _check_saved(source, got.saved, want.saved)
    return want


def _is_exact(source: Source) -> bool:
    return isinstance(source, Matrix | GateGrad)


def _check_type(got: jax.Array, want: jax.Array) -> None:
    assert got.shape == want.shape
    assert got.dtype == want.dtype


def _check_empty(layouts: Layouts, row_counts: jax.Array) -> Layouts:
    """The results of matrices with rows; the other ones have scales of 0."""
    is_empty = np.asarray(row_counts) == 0
    for leaf in jax.tree.leaves(layouts._replace(saved=())):
        if leaf.dtype == jnp.float32:
            np.testing.assert_array_equal(leaf[is_empty], 0.0)
    return jax.tree.map(lambda x: np.asarray(x)[~is_empty], layouts)


def _check_exact(
    got: Quantized | None, want: Quantized | None, *, is_grouped: bool
) -> None:
    """Compares bits, except for the codes of scales that are NaN, and unused ones."""
    if got is None or want is None:
        assert got is want
        return
    # Codes of rows that a tile lacks need not be written.
    _check_term(got.main, want.main, want, unused=0.0 if is_grouped else np.nan)
    if want.residual is not None:
        _check_term(got.residual, want.residual, want, unused=0.0)
        if is_grouped:
            assert 0 < np.mean(np.asarray(want.residual.scales) > 0) < 1


def _check_term(got: Term, want: Term, operand: Quantized, *, unused: float) -> None:
    """Compares bits, except for codes whose scale is NaN or ``unused``."""
    np.testing.assert_array_equal(got.scales, want.scales)
    scales = _spread(want.scales, operand)
    used = ~(np.isnan(scales) | (scales == unused))
    codes = (np.where(used, np.asarray(y.codes).view(np.int8), 0) for y in (got, want))
    np.testing.assert_array_equal(*codes)
    if want.sums is None:
        return
    # Those of parts are upper bounds, and those of garbage have no meaning.
    usable = ~np.isnan(want.scales)
    sums, expected = np.asarray(got.sums)[usable], np.asarray(want.sums)[usable]
    if np.prod(operand.block) <= 2**14:
        np.testing.assert_array_equal(sums, expected)
    assert np.all(sums >= expected)
    assert np.all(sums <= 127 * max(operand.block))


def _check_close(got: Quantized | None, want: Quantized | None) -> None:
    if got is None or want is None:
        assert got is want
        return
    np.testing.assert_allclose(got.scales, want.scales, rtol=1e-5)
    scales = _spread(want.scales, want)
    used = ~np.isnan(scales)
    codes = [np.where(used, np.asarray(x.codes, np.float32), 0.0) for x in (got, want)]
    difference = np.abs(codes[0] - codes[1])
    # Steps of FP8 are an eighth of a value, or the smallest one.
    is_int8 = want.codes.dtype == jnp.int8
    steps = 1.0 if is_int8 else np.maximum(np.abs(codes[1]) / 7.9, 2.0**-9)
    assert np.all(difference <= steps)
    assert np.mean(difference > 0) < 0.01
    if want.residual is None:
        assert got.residual is None
        return
    # The residual depends on the last bits of main, so only their sum is compared.
    taken = np.asarray(want.residual.scales) > 0
    np.testing.assert_array_equal(np.asarray(got.residual.scales) > 0, taken)
    taken = _spread(taken, want)
    values = [
        sum(np.asarray(x.codes, np.float32) * _spread(x.scales, want) for x in y.terms)
        for y in (got, want)
    ]
    difference = np.abs(np.where(taken, values[0] - values[1], 0.0))
    steps = np.where(taken, scales, 1.0)
    assert np.all(difference <= 0.6 * steps)
    assert np.mean(difference > 0.02 * steps) < 0.01


def _check_saved(source: Source, got: Any, want: Any) -> None:
    if isinstance(want, SavedNorm):
        np.testing.assert_allclose(got.rstd, want.rstd, rtol=1e-6)
        got, want = got.normalized, want.normalized
    if not want:
        return
    np.testing.assert_allclose(got.scales, want.scales, rtol=1e-5)
    size, bits = source.shape[2], source.bits
    codes = [
        np.asarray(packing.unpack(jnp.asarray(x.data), size, bits)) for x in (got, want)
    ]
    used = np.repeat(~np.isnan(want.scales), packing.GROUP, -1)[..., :size]
    difference = np.abs(np.where(used, codes[0] - codes[1], 0))
    assert difference.max() <= 1
    assert difference.mean() < 0.01


def _spread(per_block: Any, operand: Quantized) -> np.ndarray:
    """One value per block as one per code."""
    per_block, shape = np.asarray(per_block), operand.shape
    for axis, side in ((1, operand.block[0]), (2, operand.block[1])):
        per_block = np.repeat(per_block, side or shape[axis], axis)
    return per_block[:, : shape[1], : shape[2]]


def check_against_oracle(case: Case) -> Layouts:
    """Compares the definition with NumPy, and returns its results."""
    source, theta, options = _call(case)
    assert isinstance(source, Matrix)
    seeds = folded_seeds(source.shape[0])
    layouts = {"rowwise": case.rowwise, "colwise": case.colwise}
    got = _definition(source, seeds, theta, **layouts, **options)
    for i, x in enumerate(np.asarray(source.values)):
        seed = oracle.fold(int(seeds.layer[i]), (int(seeds.calls[i]) - 1) % 2**32)
        noise = oracle.noise(int(oracle.fold(oracle.fold(seed, 3), i)), x.shape)
        for name, layout in layouts.items():
            operand = getattr(got, name)
            if layout is None:
                assert operand is None
                continue
            codes, scales = _oracle_codes(x, layout, noise, **options)
            if name == "colwise":
                codes, scales = codes.T, scales.T
            if not layout.is_split:
                scales = np.broadcast_to(scales, (len(codes), 1))
            found = np.asarray(operand.codes[i]).view(codes.dtype)
            np.testing.assert_array_equal(found, codes)
            np.testing.assert_array_equal(operand.scales[i], scales)
            if layout.sums:
                _check_sums(operand, i)
        if theta is not None:
            _, (codes, scales), _, metric = oracle.quantize_fallback(
                x, theta[i], case.rowwise.block, options["criterion"]
            )
            np.testing.assert_array_equal(got.rowwise.residual.codes[i], codes)
            np.testing.assert_array_equal(got.rowwise.residual.scales[i], scales)
            np.testing.assert_allclose(got.metric[i], metric, rtol=1e-5)
    return got


def _oracle_codes(
    x: np.ndarray,
    layout: Layout,
    noise: np.ndarray,
    *,
    dtype: str = "int8",
    bound: float = 127.0,
    criterion: str | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    del criterion  # of residuals
    pairs = zip(layout.block, x.shape, strict=True)
    block = tuple(side or size for side, size in pairs)
    if dtype == FLOAT8["dtype"]:
        return oracle.quantize_float8(x, block)[:2]
    drawn = noise if layout.rounding == "stochastic" else None
    return oracle.quantize(x, block, drawn, bound)[:2]


def _check_sums(operand: Quantized, i: int) -> None:
    """The sums of a matrix's codes are those of the largest row of each block."""
    codes, sums = (np.asarray(x[i], np.int32) for x in (operand.codes, operand.sums))
    codes = np.abs(codes)
    for index, where in oracle.blocks(codes.shape, operand.block):
        assert sums[index] == codes[where].sum(1).max()


def check_special_layers(quantize: Quantize, dtype: str) -> None:
    """NaN, Inf and zeros are exactly where the definition has them."""
    shape, bits = (1, 96, 128), 10
    x = np.array(heavy(shape, dtype=np.float32))
    x[0, 3, 5], x[0, 40, 100], x[0, 41, 7] = np.nan, np.inf, -np.inf
    x[0, 1] = 0.0
    x[0, 64:] = 0.0
    gate_up = jnp.asarray(np.concatenate([x, heavy(shape, 1)], -1)).astype(dtype)
    x = jnp.asarray(x).astype(dtype)
    blocks = near(32, 128), near(32, 128), {"criterion": "absmax", "theta": 0.0}

    def layer(source: Source, *how: Any) -> Layouts:
        return check(quantize, Case(lambda: source, *how), folds=False)

    found = layer(Norm(x, jnp.ones((1, shape[2])), 1e-5, bits), *blocks)
    assert np.isnan(found.rowwise.scales).sum() == 2
    assert (np.asarray(found.rowwise.scales) == 0).sum() == 1
    assert np.isnan(found.saved.normalized.scales).sum() == 3
    assert (np.asarray(found.saved.normalized.scales) == 0).sum() == 33
    found = layer(Gate(gate_up, None, bits), *blocks)
    assert np.isnan(found.rowwise.scales).sum() == 2
    in_rows = layer(Gate(gate_up, None, bits), near(1, 128), near(32, 1))
    assert np.isnan(in_rows.rowwise.scales).sum() == 3
    assert np.isnan(in_rows.colwise.scales).sum() == 3
    layer(GateGrad(x, found.saved, None, bits), near(32, 128), None)


def check_large_metrics(
    quantize: Quantize, criterion: str, block: tuple[int, int] = (64, 64)
) -> None:
    """Sums of magnitudes beyond float32's give a finite metric."""
    largest = float(np.finfo(np.float32).max)
    tops = [1.0, 1e30, 1e36, 1e37, 1e38, 0.99 * largest]
    blocks = np.tanh(np.array(heavy((len(tops), *block)), np.float64))
    blocks *= np.reshape(tops, (-1, 1, 1)) / np.abs(blocks).max((1, 2), keepdims=True)
    x = np.concatenate([*blocks.astype(np.float32)], 1)
    *_, exact = oracle.quantize_fallback(x, 0.0, block, criterion)
    operands = Matrix(jnp.asarray(x)[None]), plain_seeds(1), jnp.zeros(1)
    options = {"rowwise": near(*block), "colwise": None, "criterion": criterion}
    got = quantize(*operands, **options)
    np.testing.assert_allclose(got.metric[0], exact, rtol=2e-6)
    assert np.all(np.asarray(got.rowwise.residual.scales) > 0.0)


def check_global_offset(quantize: Quantize) -> None:
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
    for rowwise, colwise in (
        (noisy(64, 32), noisy(64, 32)),
        (noisy(1, None), noisy(None, 1)),
        (noisy(1, 32), noisy(64, 1)),
    ):
        how = {"rowwise": rowwise, "colwise": colwise}
        got = quantize(Matrix(shard), plain_seeds(1), global_offset=offset, **how)
        want = _definition(Matrix(matrix), plain_seeds(1), **how)
        equal = np.testing.assert_array_equal
        equal(got.rowwise.codes, want.rowwise.codes[:, rows, column:])
        equal(got.colwise.codes, want.colwise.codes[:, column:, rows])
