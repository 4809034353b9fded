"""Quantization in one pass over a source, in one or both layouts.

One program computes and quantizes one block (``sources``).  Scales of vectors take two
passes (``quantize_vectors``).
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import triton

from fbq_jax.kernels.layer_sources import (
    Gate,
    GateGrad,
    Norm,
    SavedNorm,
    mean_square_rstd,
)
from fbq_jax.kernels.packing import GROUP, Packed
from fbq_jax.kernels.quantized import CodeDtype, Criterion, Layout, Layouts, Term
from fbq_jax.kernels.reference import NO_AMAX_REDUCE, AmaxReduce, check_layouts
from fbq_jax.kernels.rounding import GlobalOffset, MatrixSeeds, Seeds
from fbq_jax.kernels.sources import Matrix, Source
from fbq_jax.kernels.triton import sources
from fbq_jax.kernels.triton.arguments import (
    column_unit,
    colwise_operand,
    colwise_outputs,
    launch_on_blocks,
    mode_of,
    noise_inputs,
    output,
    rowwise_operand,
    rowwise_outputs,
)
from fbq_jax.kernels.triton.block_quantize import Config
from fbq_jax.kernels.triton.quantize_vectors import quantize_vectors

# The most values of a block that registers hold.
HELD_VALUES = 2**14
# The rows of a part of the block of a norm or a gate, the fastest on an H200.
PART_ROWS = 32
# Programs that leave warps idle, as in decoding: more warps each end sooner.
FEW_PROGRAMS = 128
# The most rows of the block of a gate's gradient: registers hold its factors, too.
MOST_GRAD_ROWS = 128


def quantize(
    source: Source,
    seeds: Seeds,
    theta: jax.Array | None = None,
    *,
    rowwise: Layout | None,
    colwise: Layout | None,
    criterion: Criterion | None = None,
    bound: float = 127.0,
    dtype: CodeDtype = "int8",
    global_offset: GlobalOffset | None = None,
    amax_reduce: AmaxReduce = NO_AMAX_REDUCE,
) -> Layouts:
    """See ``reference.quantize``.

    XLA computes a source that no kernel computes and quantizes at once.

    Raises:
      ValueError: blocks have another bound than 127 or share maxima with other devices;
        FP8 codes have scales of whole vectors; or rows, columns or vectors have sums.
    """
    check_layouts(rowwise, colwise, criterion, dtype)
    blocks = _Blocks(rowwise, colwise, criterion, dtype)
    noise = seeds, global_offset
    in_blocks = all(x is None or x.is_split for x in (rowwise, colwise))
    for layout in (rowwise, colwise):
        if layout is not None and layout.sums and {1, None} & {*layout.block}:
            raise ValueError(f"only blocks have sums of codes; got {layout}")
    if in_blocks and (bound != 127.0 or amax_reduce is not NO_AMAX_REDUCE):
        raise ValueError(
            "Triton kernels scale blocks to 127, and reduce no maxima over devices; "
            f"got {bound=} and {amax_reduce=}"
        )
    if not in_blocks and dtype != "int8":
        raise ValueError(f"scales of whole vectors are of INT8 codes, not of {dtype}")
    if in_blocks and blocks.can_fuse(source):
        return _quantize_blocks(source, theta, blocks, noise)
    values, saved = source.compute()
    if in_blocks:
        found = _quantize_blocks(Matrix(values), theta, blocks, noise)
    else:
        found = quantize_vectors(
            values,
            *noise,
            rowwise=rowwise,
            colwise=colwise,
            bound=bound,
            amax_reduce=amax_reduce,
        )
    return found._replace(saved=saved)


class _Blocks(NamedTuple):
    """The options of a quantization in blocks."""

    rowwise: Layout | None
    colwise: Layout | None
    criterion: Criterion | None
    dtype: CodeDtype

    @property
    def in_rows(self) -> bool:
        """Whether a layout has scales of single rows or columns of blocks."""
        return (self.rowwise is not None and self.rowwise.block[0] == 1) or (
            self.colwise is not None and self.colwise.block[1] == 1
        )

    @property
    def shape(self) -> tuple[int, int]:
        """The rows and columns of the block of a program.

        Scales of single rows leave the rows of a block open, and scales of single
        columns its columns.
        """
        first, last = self.rowwise or self.colwise, self.colwise or self.rowwise
        assert first is not None
        assert last is not None
        r, c = last.block[0], first.block[1]
        assert r is not None
        assert c is not None
        if r == 1:
            r = min(128, HELD_VALUES // c)
        if c == 1:
            c = min(128, HELD_VALUES // r)
        return r, c

    def can_fuse(self, source: Source) -> bool:
        """Whether a kernel computes and quantizes a source."""
        layouts = [x for x in (self.rowwise, self.colwise) if x is not None]
        if isinstance(source, Matrix) or not layouts:
            return bool(layouts)
        r, c = self.shape
        width = source.values.shape[2] // (1 + isinstance(source, Gate))
        # Each row of a block is one group of packed codes.
        fits = c == GROUP and width % GROUP == 0
        if isinstance(source, GateGrad):
            return fits and r <= MOST_GRAD_ROWS
        return fits and not any(x.sums for x in layouts)


def _quantize_blocks(
    source: Source,
    theta: jax.Array | None,
    blocks: _Blocks,
    noise: tuple[Seeds, GlobalOffset | None],
) -> Layouts:
    """Quantizes by the kernel of a source."""
    rowwise, colwise, criterion, dtype = blocks
    if rowwise is None and colwise is None:
        return Layouts(None, None)
    r, c = blocks.shape
    if isinstance(source, Matrix) and blocks.in_rows and r * c > HELD_VALUES:
        # Alone, a layout leaves one side of the block open.
        of_rows, of_columns = (
            _quantize_blocks(source, theta, alone, noise)
            for alone in (blocks._replace(colwise=None), blocks._replace(rowwise=None))
        )
        return Layouts(of_rows.rowwise, of_columns.colwise)
    shape = source.shape
    if isinstance(source, Matrix):
        # A program need not load and round rows that the only row of blocks lacks.
        r = min(r, max(16, triton.next_power_of_2(shape[1])))
    kernel, inputs, unit = _kernel_of(source)
    config = Config(
        r=r,
        c=c,
        held=True,
        parts=1,
        column_unit=unit,
        rowwise=mode_of(rowwise, dtype),
        colwise=mode_of(colwise, dtype),
        in_rows=blocks.in_rows,
        colwise_in_blocks=bool(blocks.in_rows and colwise and colwise.block[1] != 1),
        row_sums=bool(rowwise and rowwise.sums),
        column_sums=bool(colwise and colwise.sums),
        criterion=criterion,
        folds_seeds=isinstance(noise[0], MatrixSeeds),
        is_grouped=source.row_counts is not None,
        bits=getattr(source, "bits", 0),
        interleaved=getattr(source, "interleaved", False),
    )
    config, num_warps = _schedule(source, config)
    outputs = rowwise_outputs(shape, rowwise, dtype)
    per_block = output(outputs["scales"].shape, jnp.float32, wanted=criterion)
    found = launch_on_blocks(
        kernel,
        inputs | noise_inputs(*noise, shape[1], rowwise, colwise) | {"theta": theta},
        outputs
        | colwise_outputs(shape, colwise, dtype)
        | {
            "residual_codes": output(shape, dtype, wanted=criterion),
            "residual_scales": per_block,
            "metrics": per_block,
        }
        | _packed_outputs(source),
        shape=shape,
        block=(r, c),
        unit=unit,
        num_warps=num_warps,
        CONFIG=config,
    )
    main, metric = rowwise_operand(found, shape, rowwise), None
    if criterion is not None:
        assert main is not None
        metric = found["metrics"]
        residual = Term(found["residual_codes"], found["residual_scales"])
        main = dataclasses.replace(main, residual=residual)
    transposed = colwise_operand(found, shape, colwise)
    if not isinstance(source, Norm | Gate):
        return Layouts(main, transposed, metric)
    packed = Packed(found["packed"], found["packed_scales"])
    is_norm = isinstance(source, Norm)
    saved = SavedNorm(packed, inputs["rstd"]) if is_norm else packed
    return Layouts(main, transposed, metric, saved)


def _kernel_of(
    source: Source,
) -> tuple[triton.JITFunction, dict[str, Any], int]:
    """The kernel of a source, its inputs, and the divisor of columns."""
    inputs: dict[str, Any] = {"x": source.values, "row_counts": source.row_counts}
    match source:
        case Matrix():
            inputs["first_rows"] = source.first_rows
            return sources.quantize_matrix, inputs, column_unit(source.shape[2])
        case Norm():
            inputs["norm_scale"] = source.scale
            inputs["rstd"] = mean_square_rstd(source.values, source.epsilon)
            return sources.quantize_norm, inputs, GROUP
        case Gate():
            return sources.quantize_gate, inputs, GROUP
    assert isinstance(source, GateGrad)
    inputs["packed"], inputs["packed_scales"] = source.factors
    return sources.quantize_gate_grad, inputs, 2 * GROUP


def _packed_outputs(source: Source) -> dict[str, jax.ShapeDtypeStruct]:
    """What a norm or a gate saves, packed."""
    if not isinstance(source, Norm | Gate):
        return {}
    batch, rows, columns = source.shape
    lead = (batch, rows) if isinstance(source, Norm) else (batch, 2, rows)
    groups = columns // GROUP
    return {
        "packed": output((*lead, groups * GROUP // 32 * source.bits), jnp.uint32),
        "packed_scales": output((*lead, groups), jnp.float32),
    }


def _schedule(source: Source, config: Config) -> tuple[Config, int]:
    """Chooses the parts of a block, and ``num_warps`` of ``launch``.

    Fewer warps share more work, such as the noise keys and reductions, but each thread
    then holds more elements.
    """
    size, itemsize = config.r * config.c, source.values.dtype.itemsize
    if isinstance(source, GateGrad):
        return config, max(1, size // 2**11)
    if isinstance(source, Norm | Gate):
        parts = max(1, config.r // PART_ROWS)
        # A norm is faster in parts than held.
        held = parts == 1 or (isinstance(source, Gate) and size <= HELD_VALUES)
        num_warps = max(1, size // (2**11 if config.in_rows else 2**10)) if held else 4
        return config._replace(held=held, parts=parts), num_warps
    if config.in_rows:
        return config, max(1, size // (2**12 if itemsize == 2 else 2**11))
    if size > HELD_VALUES:
        return config._replace(held=False, parts=size // 2**13), 8
    batch, rows, columns = source.shape
    blocks = batch * triton.cdiv(rows, config.r) * triton.cdiv(columns, config.c)
    if blocks <= FEW_PROGRAMS:
        return config, min(8, max(1, size // 2**9))
    many_registers = (config.row_sums and config.column_sums) or (
        "stochastic" in (config.rowwise, config.colwise)
        and (config.criterion is not None or itemsize == 4)
    )
    return config, max(1, size // (2**11 if many_registers else 2**12))
