"""How each op is cut over devices, and what the devices tell each other.

Operands are cut between blocks, whose codes and scales depend on nothing else, and each
device is told where its shard lies, so that it draws the noise that one device alone
would draw there.  So N devices give the codes and scales of one, bit for bit, without a
word between them, but for these:

- scales of whole rows or columns are agreed on, as the maxima of the shards' maxima;
- a product whose contraction is cut is summed over the devices in float32, and rounded
  once; each device gets the part of the sum that the result's sharding gives it.

What a device needs of a product's operands and does not have, it fetches as codes.

Rows may be two axes ``[..., G, R, ...]``, sequences and their tokens, of which both can
be cut, as long as blocks do not straddle sequences.  Kernels see them as one.
"""

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from fbq_jax.kernels import packing
from fbq_jax.kernels.packing import Packed
from fbq_jax.kernels.producers import GateQuantized, NormQuantized, Operand
from fbq_jax.kernels.reference import (
    Block,
    FallbackQuantized,
    Join,
    Layouts,
    Quantized,
)
from fbq_jax.kernels.rounding import SPAN, Origin
from fbq_jax.partition import Axes, Shards, parse, partitioned

# What stays together of vectors, which have no blocks: a tile of the kernel's rows, and
# what is stored at once.
_VECTORS = (64, 16)


def sharded(
    op: str, function: Callable[..., Any], options: Mapping[str, Any]
) -> Callable[..., Any]:
    """An op that is cut over the mesh of its operands.

    Args:
      op: one of ``fbq_jax.dispatch.OPS``.
      function: computes it on one device, of matrices ``[B, R, C]``; also takes
        ``options``.
      options: the op's own.
    """
    axes_of = functools.partial(_AXES[op], **options)
    return partitioned(axes_of, functools.partial(_local, op, function, options))


def _local(
    op: str,
    function: Callable[..., Any],
    options: Mapping[str, Any],
    axes: Axes,
    shards: Shards,
) -> Callable[..., Any]:
    """What a device does with its shards."""

    def local(*operands: Any) -> Any:
        merged = jax.tree.map(_merge, axes.operands, operands)
        placed = dict(options)
        if op == "matmul":
            placed |= _local_product(options, merged, shards.names(axes.contracted))
        if op in _NOISE_COLUMNS:
            columns = _NOISE_COLUMNS[op](operands[0].shape[-1])
            placed["origin"] = _origin(shards, operands[0].shape, columns)
        if op == "quantize_vectors":
            placed["join"] = Join(_join(shards.names("j")), _join(shards.names("gi")))
        results = function(*merged, **placed)
        groups = _groups(axes.operands, operands)
        results = jax.tree.map(
            functools.partial(_split, groups), axes.results, results
        )
        if op == "matmul":
            results = _sum(results, axes, shards).astype(options["dtype"])
        return results

    return local


def _merge(words: str, x: jax.Array) -> jax.Array:
    """The axis "g" and the one after it as one."""
    letters = [letter for letter, _ in parse(words)]
    if "g" not in letters:
        return x
    at = letters.index("g")
    return x.reshape(*x.shape[:at], x.shape[at] * x.shape[at + 1], *x.shape[at + 2 :])


def _split(groups: int, words: str, x: jax.Array) -> jax.Array:
    """The reverse of ``_merge``."""
    letters = [letter for letter, _ in parse(words)]
    if "g" not in letters:
        return x
    at = letters.index("g")
    return x.reshape(
        *x.shape[:at], groups, x.shape[at] // max(groups, 1), *x.shape[at + 1 :]
    )


def _groups(words: Any, arrays: Any) -> int:
    """The size of the axis "g"."""
    sizes = {
        size
        for of, x in zip(jax.tree.leaves(words), jax.tree.leaves(arrays), strict=True)
        for (letter, _), size in zip(parse(of), x.shape, strict=True)
        if letter == "g"
    }
    return sizes.pop() if sizes else 1


def _origin(shards: Shards, shape: tuple[int, ...], columns: int) -> Origin | None:
    """Where a shard ``[B, R, C]`` or ``[B, G, R, C]`` lies in the whole matrix."""
    if not shards.names("gij"):
        return None
    groups, rows = (1, *shape[1:-1])[-2:]
    row = jnp.arange(0, groups * rows, SPAN, jnp.uint32)
    group = shards.index("g") * groups + row // max(rows, 1)
    row = shards.index("i") * rows + row % max(rows, 1)
    column = shards.index("j") * columns
    return Origin(group * (rows * shards.count("i")) + row, column[None])


# Of the ops that draw noise: the columns of what they round, given those of the operand.
_NOISE_COLUMNS: dict[str, Callable[[int], int]] = {
    "quantize": lambda c: c,
    "quantize_vectors": lambda c: c,
    "quantize_fallback": lambda c: c,
    "rms_norm_quantize": lambda c: c,
    "silu_gate_quantize": lambda c: c // 2,
    "silu_gate_grad_quantize": lambda c: 2 * c,
}


def _join(names: tuple[str, ...]) -> Callable[[jax.Array], jax.Array]:
    """The maximum over devices, of the bits, of which NaN's are the largest."""

    def join(amax: jax.Array) -> jax.Array:
        if not names:
            return amax
        bits = lax.pmax(lax.bitcast_convert_type(amax, jnp.int32), names)
        return lax.bitcast_convert_type(bits, jnp.float32)

    return join


def _local_product(
    options: Mapping[str, Any],
    operands: tuple[Quantized, Quantized | None, Quantized],
    summed: tuple[str, ...],
) -> dict[str, Any]:
    """The options of a device's part of a product."""
    local = dict(options)
    if summed:
        local["dtype"] = jnp.dtype(jnp.float32)
    lhs, _, rhs = operands
    if _one_scale_a_row(rhs, options["blocks"]):
        local["blocks"] = (1, lhs.codes.shape[2], 1)
    return local


def _one_scale_a_row(rhs: Quantized, blocks: tuple[int, int, int]) -> bool:
    return blocks[0] == blocks[2] == 1 and math.prod(rhs.scales.shape[2:]) == 1


def _sum(product: jax.Array, axes: Axes, shards: Shards) -> jax.Array:
    """The sum over devices, each of which gets its part."""
    names = shards.names(axes.contracted)
    for axis, (letter, _) in enumerate(parse(axes.results)):
        scattered = shards.scattered.get(letter, ())
        if scattered:
            product = lax.psum_scatter(
                product, scattered, scatter_dimension=axis, tiled=True
            )
            names = tuple(name for name in names if name not in scattered)
    return lax.psum(product, names) if names else product


# The axes of the ops: b for the stack, g and i for rows, j for columns; in a product i,
# n for its columns and k for the contraction.


def _word(letter: str, together: int = 1) -> str:
    return letter if together == 1 else f"{letter}{together}"


def _blocks(letter: str, size: int, side: int) -> tuple[str, str]:
    """The words of an axis of elements and of the one of its blocks."""
    if size % side or size < 2 * side:
        return ".", "."
    return _word(letter, side), letter


def _rows(shape: tuple[int, ...], side: int) -> tuple[str, str]:
    """The words of the rows of ``[B, R, C]`` or ``[B, G, R, C]`` and of their blocks."""
    row, of_blocks = _blocks("i", shape[-2], side)
    if len(shape) == 3:
        return row, of_blocks
    assert shape[2] % side == 0, "a block straddles two sequences"
    return f"g {row}", f"g {of_blocks}"


def _layouts(
    elements: tuple[str, str], blocks: tuple[str, str]
) -> tuple[Quantized, Quantized]:
    """Codes and scales by rows and by columns."""
    return (
        Quantized(*(f"b {row} {column}" for row, column in (elements, blocks))),
        Quantized(*(f"b {column} {row}" for row, column in (elements, blocks))),
    )


def _matrix(shape: tuple[int, ...], block: Block) -> tuple[Quantized, Quantized]:
    row, column = _rows(shape, block[0]), _blocks("j", shape[-1], block[1])
    return _layouts((row[0], column[0]), (row[1], column[1]))


def _quantize(
    x: jax.Array,
    seeds: jax.Array,
    *,
    block: Block,
    rows: object,
    columns: object,
) -> Axes:
    del seeds
    by_rows, by_columns = _matrix(x.shape, block)
    results = Layouts(
        None if rows is None else by_rows, None if columns is None else by_columns
    )
    return Axes((by_rows.codes, "b"), results)


def _quantize_vectors(
    x: jax.Array, seeds: jax.Array, *, rows: object, columns: object
) -> Axes:
    del seeds
    side, unit = _VECTORS
    row = _blocks("i", x.shape[-2], side)[0]
    column = _blocks("j", x.shape[-1], unit)[0]
    if x.ndim == 4:
        assert x.shape[2] % SPAN == 0
        row = f"g {row}"
    return Axes(
        (f"b {row} {column}", "b"),
        Layouts(
            None if rows is None else Quantized(f"b {row} {column}", f"b {row} ."),
            None if columns is None else Quantized(f"b {column} {row}", f"b {column} ."),
        ),
    )


def _quantize_fallback(
    x: jax.Array,
    theta: jax.Array,
    seeds: jax.Array,
    *,
    block: Block,
    criterion: object,
    columns: object,
) -> Axes:
    del theta, seeds, criterion
    main, by_columns = _matrix(x.shape, block)
    results = FallbackQuantized(
        main, main, main.scales, None if columns is None else by_columns
    )
    return Axes((main.codes, "b", "b"), results)


def _block_metric(x: jax.Array, *, block: Block, criterion: object) -> Axes:
    del criterion
    main, _ = _matrix(x.shape, block)
    return Axes((main.codes,), main.scales)


def _matmul(
    lhs: Quantized,
    residual: Quantized | None,
    rhs: Quantized,
    *,
    blocks: tuple[int, int, int],
    dtype: object,
) -> Axes:
    del dtype
    m, k, n = blocks
    columns, of_blocks = _blocks("n", rhs.codes.shape[1], n)
    depth, depth_of_blocks = _blocks("k", rhs.codes.shape[-1], k)
    one_scale_a_row = _one_scale_a_row(rhs, blocks)
    if one_scale_a_row:
        depth, depth_of_blocks = _blocks("k", rhs.codes.shape[-1], _VECTORS[1])[0], "."
    contracted = "k" if depth != "." else ""
    if rhs.codes.ndim == 4:  # [B, N, G, R]: what is contracted are rows
        rows, rows_of_blocks = _blocks("i", lhs.codes.shape[1], m)
        depth, contracted = f"g {depth}", f"g{contracted}"
        if not one_scale_a_row:
            depth_of_blocks = f"g {depth_of_blocks}"
    else:
        rows, rows_of_blocks = _rows(lhs.codes.shape, m)
    left = Quantized(f"b {rows} {depth}", f"b {rows_of_blocks} {depth_of_blocks}")
    right = Quantized(
        f"b {columns} {depth}", f"b {of_blocks} {depth_of_blocks}"
    )
    operands = left, None if residual is None else left, right
    return Axes(operands, f"b {rows} {columns}", contracted)


def _operand(
    main: Quantized, by_columns: Quantized, criterion: object, columns: object
) -> Operand:
    fallback = criterion is not None
    return Operand(
        main,
        main if fallback else None,
        main.scales if fallback else "b . .",
        by_columns if columns is not None else None,
    )


def _rms_norm_quantize(
    x: jax.Array,
    gain: jax.Array,
    theta: jax.Array,
    seeds: jax.Array,
    *,
    epsilon: float,
    bits: int,
    block: Block,
    criterion: object,
    columns: object,
) -> Axes:
    del gain, theta, seeds, epsilon
    row, row_of_blocks = _rows(x.shape, block[0])
    main, by_columns = _layouts((row, "."), (row_of_blocks, "."))
    packed = Packed(tuple(f"b {row} ." for _ in packing.chunk_widths(bits)), f"b {row} .")
    return Axes(
        (main.codes, "b .", "b", "b"),
        NormQuantized(
            _operand(main, by_columns, criterion, columns), packed, f"b {row} ."
        ),
    )


def _turns(size: int, together: int) -> Callable[[int], str]:
    """Words of arrays that are cut where so many of ``size`` columns stay together."""
    whole = size % together or size < 2 * together
    return lambda n: "." if whole else _word("j", n)


def _packed(row: str, of: Callable[[int], str], together: int, bits: int) -> Packed:
    """Packed codes, cut where so many values stay together, and scales."""
    planes = [
        f"b {row} {of(together * width // 8)}" for width in packing.chunk_widths(bits)
    ]
    return Packed(tuple(planes), f"b {row} {of(together // packing.GROUP)}")


def _silu_gate_quantize(
    gate_up: jax.Array,
    theta: jax.Array,
    seeds: jax.Array,
    *,
    bits: int,
    block: Block,
    criterion: object,
    columns: object,
) -> Axes:
    del theta, seeds
    row, row_of_blocks = _rows(gate_up.shape, block[0])
    together = max(block[1], packing.GROUP)
    of = _turns(gate_up.shape[-1] // 2, together)
    main, by_columns = _layouts(
        (row, of(together)), (row_of_blocks, of(together // block[1]))
    )
    packed = _packed(row, of, together, bits)
    return Axes(
        (f"b {row} {of(2 * together)}", "b", "b"),
        GateQuantized(_operand(main, by_columns, criterion, columns), packed, packed),
    )


def _silu_gate_grad_quantize(
    dy: jax.Array,
    by_gate: Packed,
    by_up: Packed,
    seeds: jax.Array,
    *,
    bits: int,
    block: Block,
    rows: object,
    columns: object,
) -> Axes:
    del by_gate, by_up, seeds
    row, row_of_blocks = _rows(dy.shape, block[0])
    of = _turns(dy.shape[-1], packing.GROUP)
    both = 2 * packing.GROUP
    by_rows, by_columns = _layouts((row, of(both)), (row_of_blocks, of(both // block[1])))
    packed = _packed(row, of, packing.GROUP, bits)
    results = Layouts(
        None if rows is None else by_rows, None if columns is None else by_columns
    )
    return Axes((f"b {row} {of(packing.GROUP)}", packed, packed, "b"), results)


_AXES: dict[str, Callable[..., Axes]] = {
    "quantize": _quantize,
    "quantize_vectors": _quantize_vectors,
    "quantize_fallback": _quantize_fallback,
    "block_metric": _block_metric,
    "matmul": _matmul,
    "rms_norm_quantize": _rms_norm_quantize,
    "silu_gate_quantize": _silu_gate_quantize,
    "silu_gate_grad_quantize": _silu_gate_grad_quantize,
}
