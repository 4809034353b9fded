"""The axes of each op, in the words of ``fbq_jax.sharding.assignment``.

The letters are b for the stack of matrices; p for parts of them with scales of their
own; g and i for their rows, j for their columns; in a product i for its rows, n for its
columns and k for the contraction.  Elements of a block stay together.

Rows may be two axes ``[..., G, R, ...]``, sequences and their tokens, of which both can
be cut; no block straddles two sequences.
"""

from collections.abc import Callable
from typing import Any

import jax

from fbq_jax.kernels import packing
from fbq_jax.kernels.fused_reference import GateQuantized, NormQuantized, Operand
from fbq_jax.kernels.packing import Packed
from fbq_jax.kernels.reference import (
    Block,
    FallbackQuantized,
    Layouts,
    Quantized,
)
from fbq_jax.sharding.assignment import Axes

# What stays together where there are no blocks: a tile of the kernel's rows, and what
# a thread stores at once.
VECTORS = (64, 16)


def one_scale_a_row(rhs: Quantized, block_shape: tuple[int, int, int]) -> bool:
    """Whether a product, or each part of its contraction, has no scales inside it."""
    return block_shape[0] == block_shape[2] == 1 and rhs.scales.shape[-1] == 1


def in_parts(rhs: Quantized, block_shape: tuple[int, int, int]) -> bool:
    """Whether a contraction is of parts ``[B, P, ., R]`` with scales of their own."""
    return block_shape[0] == block_shape[2] == 1 and rhs.scales.ndim == 4


def _word(letter: str, together: int = 1) -> str:
    return letter if together == 1 else f"{letter}{together}"


def _blocks(letter: str, size: int, side: int) -> tuple[str, str]:
    """The words of an axis of elements and of the one of its blocks."""
    if size % side or size < 2 * side:
        return ".", "."
    return _word(letter, side), letter


def _rows(shape: tuple[int, ...], side: int) -> tuple[str, str]:
    """Those of the rows of ``[B, R, C]`` or ``[B, G, R, C]`` and of their blocks."""
    elements, blocks = _blocks("i", shape[-2], side)
    if len(shape) == 3:
        return elements, blocks
    assert shape[2] % side == 0, "a block straddles two sequences"
    return f"g {elements}", f"g {blocks}"


def _layouts(
    row: tuple[str, str], column: tuple[str, str], stack: str = "b"
) -> tuple[Quantized, Quantized]:
    """Codes and scales by rows and by columns."""
    each = list(zip(row, column, strict=True))
    return (
        Quantized(*(f"{stack} {i} {j}" for i, j in each)),  # type: ignore[arg-type]
        Quantized(*(f"{stack} {j} {i}" for i, j in each)),  # type: ignore[arg-type]
    )


def _wanted(words: Any, rounding: str | None) -> Any:
    return None if rounding is None else words


def quantize(
    x: jax.Array,
    seeds: jax.Array,
    *,
    block: Block,
    rowwise: str | None,
    colwise: str | None,
) -> Axes:
    """Of ``reference.quantize``."""
    del seeds
    by_rows, by_columns = _layouts(
        _rows(x.shape, block[0]), _blocks("j", x.shape[-1], block[1])
    )
    results = Layouts(_wanted(by_rows, rowwise), _wanted(by_columns, colwise))
    agreed = "ij" if x.ndim == 3 else "j"
    return Axes((by_rows.codes, "b"), results, agreed=agreed)


def quantize_vectors(
    x: jax.Array,
    seeds: jax.Array,
    *,
    rowwise: str | None,
    colwise: str | None,
    bound: float,
    per_tensor: bool,
) -> Axes:
    """Of ``reference.quantize_vectors``."""
    del bound, per_tensor
    side, unit = VECTORS
    stack = "b" if seeds.ndim == 1 else "b p"
    row = _blocks("i", x.shape[-2], side)[0]
    if x.ndim == 4 and seeds.ndim == 1:
        row = f"g {row}"
    column = _blocks("j", x.shape[-1], unit)[0]
    by_rows, _ = _layouts((row, row), (column, "."), stack)
    _, by_columns = _layouts((row, "."), (column, column), stack)
    results = Layouts(_wanted(by_rows, rowwise), _wanted(by_columns, colwise))
    return Axes((by_rows.codes, stack), results)


def quantize_fallback(
    x: jax.Array,
    theta: jax.Array,
    seeds: jax.Array,
    *,
    block: Block,
    criterion: str,
    colwise: str | None,
) -> Axes:
    """Of ``reference.quantize_fallback``."""
    del theta, seeds, criterion
    main, by_columns = _layouts(
        _rows(x.shape, block[0]), _blocks("j", x.shape[-1], block[1])
    )
    results = FallbackQuantized(main, main, main.scales, _wanted(by_columns, colwise))
    return Axes((main.codes, "b", "b"), results)


def block_metric(x: jax.Array, *, block: Block, criterion: str) -> Axes:
    """Of ``reference.block_metric``."""
    del criterion
    main, _ = _layouts(_rows(x.shape, block[0]), _blocks("j", x.shape[-1], block[1]))
    return Axes((main.codes,), main.scales)


def matmul(
    lhs: Quantized,
    residual: Quantized | None,
    rhs: Quantized,
    *seeds: jax.Array,
    block_shape: tuple[int, int, int],
    dtype: Any,
    reduce: str | None,
) -> Axes:
    """Of ``reference.matmul``; also of what is contracted over rows that are two.

    Or over parts.  Seeds, one array, are those of a sum in INT8.
    """
    del dtype, reduce
    m, k, n = block_shape
    stack = "b"
    columns = _blocks("n", rhs.codes.shape[1], n)
    depth = _blocks("k", rhs.codes.shape[-1], k)
    if vectors := one_scale_a_row(rhs, block_shape):
        depth = _blocks("k", rhs.codes.shape[-1], VECTORS[1])[0], "."
    contracted = depth[0][0].strip(".")
    if in_parts(rhs, block_shape):  # [B, P, N, R]
        stack, contracted = "b p", f"p{contracted}"
        rows, columns = (
            _blocks(letter, x.codes.shape[2], 1)
            for letter, x in (("i", lhs), ("n", rhs))
        )
    elif rhs.codes.ndim == 4:  # [B, N, G, R]
        rows = _blocks("i", lhs.codes.shape[1], m)
        depth = f"g {depth[0]}", "." if vectors else f"g {depth[1]}"
        contracted = f"g{contracted}"
    else:
        rows = _rows(lhs.codes.shape, m)
    left, _ = _layouts(rows, depth, stack)
    right, _ = _layouts(columns, depth, stack)
    operands = left, None if residual is None else left, right, *("b" for _ in seeds)
    return Axes(operands, f"b {rows[0]} {columns[0]}", contracted)


def ragged_matmul(
    lhs: Quantized,
    residual: Quantized | None,
    rhs: Quantized,
    groups: jax.Array,
    *,
    block_shape: tuple[int, int, int],
    dtype: Any,
) -> Axes:
    """Of ``ragged.ragged_matmul``; t for its tiles, g for the groups."""
    del lhs, groups, dtype
    _, k, n = block_shape
    columns = _blocks("n", rhs.codes.shape[1], n)
    depth = _blocks("k", rhs.codes.shape[2], k)
    left = Quantized(f"t . {depth[0]}", f"t . {depth[1]}")  # type: ignore[arg-type]
    right = Quantized(*(f"g {n} {k}" for n, k in zip(columns, depth, strict=True)))  # type: ignore[arg-type]
    operands = left, None if residual is None else left, right, "t"
    return Axes(operands, f"t . {columns[0]}", f"{depth[0][0].strip('.')}g")


def ragged_contraction(
    lhs: Quantized,
    rhs: Quantized,
    groups: jax.Array,
    *,
    size: int,
    block_shape: tuple[int, int, int],
    dtype: Any,
) -> Axes:
    """Of ``ragged.ragged_contraction``, likewise."""
    del groups, size, dtype
    k, _, n = block_shape
    rows = _blocks("k", lhs.codes.shape[1], k)
    columns = _blocks("n", rhs.codes.shape[1], n)
    left, right = (
        Quantized(f"t {codes} .", f"t {scales} .")  # type: ignore[arg-type]
        for codes, scales in (rows, columns)
    )
    return Axes((left, right, "t"), f"g {rows[0]} {columns[0]}", "t")


def _operand(
    main: Quantized,
    by_columns: Quantized,
    criterion: str | None,
    colwise: str | None,
) -> Operand:
    by_columns = _wanted(by_columns, colwise)
    if criterion is None:
        return Operand(main, None, "b . .", by_columns)  # type: ignore[arg-type]
    return Operand(main, main, main.scales, by_columns)


def _turns(size: int, together: int) -> Callable[[int], str]:
    """Words for arrays that are cut where so many of ``size`` columns stay together."""
    whole = size % together or size < 2 * together
    return lambda n: "." if whole else _word("j", n)


def _packed(row: str, of: Callable[[int], str], together: int, bits: int) -> Packed:
    """Packed codes and their scales."""
    widths = packing.chunk_widths(bits)
    planes = [f"b {row} {of(together * width // 8)}" for width in widths]
    scales = f"b {row} {of(together // packing.GROUP)}"
    return Packed(tuple(planes), scales)  # type: ignore[arg-type]


def rms_norm_quantize(
    x: jax.Array,
    norm_scale: jax.Array,
    theta: jax.Array,
    seeds: jax.Array,
    *,
    epsilon: float,
    bits: int,
    block: Block,
    criterion: str | None,
    colwise: str | None,
) -> Axes:
    """Of ``producers.rms_norm_quantize``, whose means are of whole rows."""
    del norm_scale, theta, seeds, epsilon
    rows = _rows(x.shape, block[0])
    main, by_columns = _layouts(rows, (".", "."))
    operand = _operand(main, by_columns, criterion, colwise)
    packed = _packed(rows[0], lambda _: ".", packing.GROUP, bits)
    rstd: Any = f"b {rows[0]} ."
    return Axes((main.codes, "b .", "b", "b"), NormQuantized(operand, packed, rstd))


def silu_gate_quantize(
    gate_up: jax.Array,
    theta: jax.Array,
    seeds: jax.Array,
    *,
    bits: int,
    block: Block,
    criterion: str | None,
    colwise: str | None,
) -> Axes:
    """Of ``producers.silu_gate_quantize``."""
    del theta, seeds
    rows = _rows(gate_up.shape, block[0])
    together = max(block[1], packing.GROUP)
    of = _turns(gate_up.shape[-1] // 2, together)
    main, by_columns = _layouts(rows, (of(together), of(together // block[1])))
    operand = _operand(main, by_columns, criterion, colwise)
    packed = _packed(rows[0], of, together, bits)
    operands = f"b {rows[0]} {of(2 * together)}", "b", "b"
    return Axes(operands, GateQuantized(operand, packed, packed))


def silu_gate_grad_quantize(
    dy: jax.Array,
    by_gate: Packed,
    by_up: Packed,
    seeds: jax.Array,
    *,
    bits: int,
    block: Block,
    rowwise: str | None,
    colwise: str | None,
) -> Axes:
    """Of ``producers.silu_gate_grad_quantize``."""
    del by_gate, by_up, seeds
    together = packing.GROUP
    of = _turns(dy.shape[-1], together)
    row = _rows(dy.shape, block[0])
    by_rows, by_columns = _layouts(
        row, (of(2 * together), of(2 * together // block[1]))
    )
    results = Layouts(_wanted(by_rows, rowwise), _wanted(by_columns, colwise))
    packed = _packed(row[0], of, together, bits)
    return Axes((f"b {row[0]} {of(together)}", packed, packed, "b"), results)
