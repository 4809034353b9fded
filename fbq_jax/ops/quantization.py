"""The op that quantizes a matrix, a norm, a gate or a gate's gradient.

In addition to the shapes of ``kernels.reference.quantize``, the values of a source may
be ``[B, G, R, C]``, with ``G * R`` rows; colwise codes are then ``[B, C, G, R]``.  Rows
in groups may belong to several ``problems``.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fbq_jax.kernels.quantized import (
    CodeDtype,
    Criterion,
    Layout,
    Layouts,
    Quantized,
    Term,
)
from fbq_jax.kernels.rounding import Seeds, fold, fold_seeds
from fbq_jax.kernels.sources import Matrix, Source
from fbq_jax.ops.dispatch import Request
from fbq_jax.ops.op import LocalOp, Op, call, register
from fbq_jax.ops.problems import lead_of, map_problems
from fbq_jax.sharding.local_ops import Shard
from fbq_jax.sharding.rule_language import (
    UNSHARDED,
    UNSHARDED_AXIS,
    AxisWords,
    ShardingRule,
    block_axis,
    row_axes,
)

# The granularity of operands without blocks: the rows of a kernel's tile, and the
# columns that a thread stores at once.
VECTOR_GRANULARITY = (64, 16)


def quantize(
    source: Source | jax.Array,
    seeds: Seeds,
    theta: jax.Array | None = None,
    *,
    rowwise: Layout | None,
    colwise: Layout | None,
    criterion: Criterion | None = None,
    bound: float = 127.0,
    dtype: CodeDtype = "int8",
    shards: int = 1,
    implementation: str | None = None,
) -> Layouts:
    """Quantizes a source in one or both layouts; see ``reference.quantize``.

    Args:
      source: what to quantize; an array stands for its ``Matrix``.
      seeds: the seeds of stochastic rounding.
      theta: the thresholds of fallback; None without a criterion.
      rowwise: how the matrices are quantized, or None to omit this layout.
      colwise: how their transposes are quantized, or None to omit this layout.
      criterion: of fallback, in the rowwise layout; None for no fallback.
      bound: the value that the largest magnitude is scaled to in INT8.
      dtype: the dtype of the codes.
      shards: P, the parts that the rows of matrices without groups are split into, in
        the colwise layout.  Each part has its own scales and noise, and codes are
        ``[B, P, C, R / P]``.
      implementation: as in ``dispatch.choose``.
    """
    if isinstance(source, jax.Array):
        source = Matrix(source)
    if rowwise is None and colwise is None:
        return Layouts(None, None)
    how: dict[str, Any] = {"bound": bound, "dtype": dtype}
    if rowwise and colwise and not _in_one_pass(rowwise, colwise, criterion, shards):
        run: Callable[..., Layouts] = functools.partial(
            quantize, source, seeds, implementation=implementation, **how
        )
        main = run(theta, rowwise=rowwise, colwise=None, criterion=criterion)
        transposed = run(rowwise=None, colwise=colwise, shards=shards)
        return main._replace(colwise=transposed.colwise)
    if shards > 1:
        assert isinstance(source, Matrix)
        source, seeds = _split_shards(source.values, seeds, shards)
    options = how | {"rowwise": rowwise, "colwise": colwise, "criterion": criterion}
    operands = source, seeds, theta if criterion is not None else None
    layouts: Layouts = call(QUANTIZE, operands, options, implementation)
    return layouts


def _in_one_pass(
    rowwise: Layout, colwise: Layout, criterion: Criterion | None, shards: int
) -> bool:
    """Whether one kernel makes both layouts."""
    if shards > 1:
        return False
    if not (rowwise.is_split and colwise.is_split):
        per_tensor = [layout.block == (None, None) for layout in (rowwise, colwise)]
        is_split = rowwise.is_split or colwise.is_split
        return not is_split and per_tensor[0] == per_tensor[1]
    if rowwise.block == colwise.block:
        return True
    return rowwise.block[0] == 1 and criterion is None


def _split_shards(x: jax.Array, seeds: Seeds, shards: int) -> tuple[Matrix, jax.Array]:
    """Splits the rows of ``[B, R, C]`` into shards that are quantized separately.

    Returns ``[B, P, R / P, C]`` and seeds ``[B, P]``.  The last shard is padded with
    zeros, which change neither scales nor sums.
    """
    batch, rows, columns = x.shape
    size = -(-rows // shards)
    x = jnp.pad(x, ((0, 0), (0, size * shards - rows), (0, 0)))
    index = jnp.arange(shards, dtype=jnp.uint32)
    seeds = fold(fold_seeds(seeds)[:, None], index[None, :])
    return Matrix(x.reshape(batch, shards, size, columns)), seeds


def _request(
    source: Source,
    _seeds: Seeds,
    _theta: jax.Array | None,
    *,
    rowwise: Layout | None,
    colwise: Layout | None,
    dtype: CodeDtype,
    **_options: Any,
) -> Request:
    blocks = [layout.block for layout in (rowwise, colwise) if layout is not None]
    kind, packs = KINDS[type(source)], None
    if kind.most_rows is not None:
        packs = source.values.shape[-1] // kind.halves[0], kind.most_rows
    return Request(
        "quantize",
        Request.sides_of(*blocks),
        dtype,
        grouped=source.row_counts is not None,
        packs=packs,
    )


# The sharding rule follows from the source and from the granularity of the layouts.


def _rule(
    source: Source,
    seeds: Seeds,
    theta: jax.Array | None,
    *,
    rowwise: Layout | None,
    colwise: Layout | None,
    criterion: Criterion | None,
    **_options: Any,
) -> ShardingRule:
    sides = _sides(rowwise, colwise)
    stack = "b"
    if isinstance(source, Matrix) and source.first_rows is not None:
        stack = f"{lead_of(source.first_rows)}t"
    elif _has_parts(seeds):
        stack = "b p"
    operand, saved, rows, columns = KINDS[type(source)].words(source, stack, sides)

    def words(layout: Layout, *axes: AxisWords) -> Quantized:
        # The scale of a whole matrix is stored once per row.
        block = layout.block if layout.is_split else (1, None)
        scales = [_scale_word(*x) for x in zip(axes, block, strict=True)]
        per_block = f"{stack} {' '.join(scales)}"
        sums = per_block if layout.sums else None
        names: Any = f"{stack} {axes[0].codes} {axes[1].codes}", per_block, sums
        return Quantized(Term(*names), None, block)

    main = transposed = metric = None
    if rowwise is not None:
        main = words(rowwise, rows, columns)
        if criterion is not None:
            main = Quantized(main.main, main.main._replace(sums=None), main.block)
            metric = main.scales
    if colwise is not None:
        flipped = colwise._replace(block=colwise.block[::-1])
        transposed = words(flipped, columns, rows)
    splittable = ""
    is_plain = isinstance(source, Matrix) and source.first_rows is None
    if is_plain and sides != VECTOR_GRANULARITY and criterion is None:
        splittable = "ij" if source.values.ndim == 3 else "j"
    seed_words = jax.tree.map(lambda _: stack, seeds)
    operands = operand, seed_words, None if theta is None else stack
    results = Layouts(main, transposed, metric, saved)
    return ShardingRule(operands, results, splittable=splittable)


def _sides(rowwise: Layout | None, colwise: Layout | None) -> tuple[int, int]:
    """The rows and columns that stay on one device, of a shard of whole units."""
    blocks = [layout.block for layout in (rowwise, colwise) if layout is not None]
    sides: list[int] = []
    for axis in zip(*blocks, strict=True):
        sides.append(max((side for side in axis if side is not None), default=1))
    has_vectors = any(None in block for block in blocks)
    return VECTOR_GRANULARITY if has_vectors else (sides[0], sides[1])


def _scale_word(axis: AxisWords, side: int | None) -> str:
    """The word of an axis of scales; one per single row is sharded like codes."""
    if side is None:
        return UNSHARDED
    return axis.codes if side == 1 else axis.scales


# The words of a source, of what it saves, and of the rows and columns it makes.
SourceWords = tuple[Any, Any, AxisWords, AxisWords]


class SourceKind(NamedTuple):
    """What the op knows of a kind of source.

    Attributes:
      words: makes the words of a source, whose arrays have a stack on their leading
        axes, from these and from the rows and columns that stay on one device.
      halves: of the columns of the values, and of those made of them: both 1, but for
        gates, which make one column from two halves, or two from one.
      most_rows: the most rows of a block that a kernel holds, of a source that saves
        packed values; None if it saves nothing.
    """

    words: Callable[[Any, str, tuple[int, int]], SourceWords]
    halves: tuple[int, int] = (1, 1)
    most_rows: int | None = None


def _matrix_words(source: Matrix, stack: str, sides: tuple[int, int]) -> SourceWords:
    shape = source.values.shape
    columns = block_axis("j", shape[-1], sides[1])
    if source.first_rows is not None:
        # Each device has all rows, of which it quantizes some tiles.
        lead = stack.removesuffix("t")
        words = words_of(source, f"{lead}{UNSHARDED} {columns.codes}", stack, stack)
        return words, (), UNSHARDED_AXIS, columns
    rows = rows_of(shape, stack, sides[0])
    words = words_of(source, f"{stack} {rows.codes} {columns.codes}")
    return words, (), rows, columns


#: Each kind of source; ``fbq_jax.ops.fused_sources`` adds norms and gates.
KINDS: dict[type, SourceKind] = {Matrix: SourceKind(_matrix_words)}


def words_of(source: Source, *words: Any) -> Any:
    """The words of a source's arrays, in its tree."""
    return jax.tree.unflatten(jax.tree.structure(source), jax.tree.leaves(words))


def rows_of(shape: tuple[int, ...], stack: str, side: int) -> AxisWords:
    """The words of the rows of a source."""
    if stack == "b p":
        return block_axis("i", shape[2], side)
    return row_axes(shape, side)


def _has_parts(seeds: Seeds) -> bool:
    """Whether the parts of matrices have scales and seeds of their own."""
    return not isinstance(seeds, tuple) and seeds.ndim == 2


def _on_shard(
    run: LocalOp, shard: Shard, operands: tuple[Any, ...], options: dict[str, Any]
) -> Layouts:
    source, seeds, theta = operands
    if isinstance(source, Matrix) and source.first_rows is not None:
        return _tiles_on_shard(run, shard, source, seeds, theta, options)
    groups = source.values.shape[1] if "g" in shard.rule.operands[0].values else 1
    halves, halves_made = KINDS[type(source)].halves
    columns = source.values.shape[-1] // halves * halves_made
    offset = shard.global_offset(groups, source.values.shape[-2], columns)
    options = options | {"global_offset": offset}
    layouts = options["rowwise"], options["colwise"]
    if _sides(*layouts) == VECTOR_GRANULARITY:
        amax_reduce = shard.amax_reduce(*map(_shared_axes, layouts))
        if amax_reduce is not None:
            options = options | {"amax_reduce": amax_reduce}
    function = shard.quantizer(run)
    if _has_parts(seeds):
        function = functools.partial(_quantize_parts, function)
    quantized: Layouts = shard.run(function, operands, **options)
    return quantized


def _shared_axes(layout: Layout | None) -> str:
    """The factors along which devices share scales."""
    if layout is None:
        return ""
    rows, columns = layout.block
    return ("gi" if rows is None else "") + ("j" if columns is None else "")


def _quantize_parts(
    quantize: Callable[..., Layouts],
    source: Matrix,
    seeds: jax.Array,
    theta: None,
    **options: Any,
) -> Layouts:
    """Quantizes parts ``[B, P, R, C]`` as matrices ``[B * P, R, C]``."""
    x = source.values
    merged = Matrix(x.reshape(seeds.size, *x.shape[2:]))
    layouts = quantize(merged, seeds.reshape(-1), theta, **options)
    return jax.tree.map(lambda y: y.reshape(*x.shape[:2], *y.shape[1:]), layouts)


def _tiles_on_shard(
    run: LocalOp,
    shard: Shard,
    source: Matrix,
    seeds: Seeds,
    theta: jax.Array | None,
    options: dict[str, Any],
) -> Layouts:
    """Quantizes this device's tiles and columns, with the noise at their offset."""
    assert source.m is not None
    offset = shard.global_offset(1, source.m, source.values.shape[-1])

    def quantize(
        values: jax.Array,
        seeds: Seeds,
        theta: jax.Array | None,
        first_rows: jax.Array,
        row_counts: jax.Array,
        _: Any,
    ) -> Any:
        matrix = Matrix(values, first_rows, row_counts, source.m)
        return run(matrix, seeds, theta, **options, global_offset=offset)

    tiles = source.values, seeds, theta, source.first_rows, source.row_counts
    layouts: Layouts = map_problems(quantize, tiles)
    return layouts


def _stacks(source: Source, *_: Any) -> bool:
    return not isinstance(source, Matrix) or source.first_rows is None


QUANTIZE = register(Op("quantize", _request, _rule, _on_shard, stacks=_stacks))
