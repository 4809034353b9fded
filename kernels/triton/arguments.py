"""The arguments and results of quantization kernels, by name.

A kernel always gets a pointer for each array.  An output that was not requested is an
array of shape ``[0]``, and the seeds take the place of an input that is None.  The
kernel accesses neither.
"""

import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import triton

from fbq_jax.kernels.quantized import CodeDtype, Layout, Quantized, Term
from fbq_jax.kernels.rounding import GlobalOffset, Seeds, no_offset
from fbq_jax.kernels.sources import Shape
from fbq_jax.kernels.triton.launch import launch


def launch_on_blocks(
    kernel: triton.JITFunction,
    inputs: Mapping[str, Any],
    outputs: Mapping[str, jax.ShapeDtypeStruct],
    *,
    shape: Shape,
    block: tuple[int, int],
    unit: int,
    **options: Any,
) -> dict[str, jax.Array]:
    """Runs one program per block of matrices ``[B, R, C]``.

    Args:
      kernel: takes some of the inputs, ``rows``, ``units`` and some of the outputs, in
        this order.
      inputs: arrays by the names of the kernel's arguments, with ``noise_inputs``.
      outputs: shapes and dtypes by the names of the kernel's arguments.
      shape: ``(B, R, C)``.
      block: the rows and columns of a block.
      unit: a constant of the kernel, ``C / units``.
      **options: further arguments of ``launch``.

    Returns:
      The kernel's outputs.
    """
    batch, rows, columns = shape
    sizes = {"rows": rows, "units": columns // unit}
    every = {k: inputs["seeds"] if x is None else x for k, x in inputs.items()} | sizes
    names = [name for name in kernel.arg_names if name in outputs]
    results = launch(
        kernel,
        *(every[name] for name in kernel.arg_names if name in every),
        outputs=[outputs[name] for name in names],
        grid=(batch * triton.cdiv(rows, block[0]) * triton.cdiv(columns, block[1]),),
        **options,
    )
    return dict(zip(names, results, strict=True))


def noise_inputs(
    seeds: Seeds, global_offset: GlobalOffset | None, rows: int, *layouts: Layout | None
) -> dict[str, jax.Array]:
    """The seeds and the offset of the noise.

    A single array takes the place of all seeds.  Without stochastic rounding they are
    zeros, so that a later kernel may overwrite the number of calls.
    """
    if not any(layout and layout.rounding == "stochastic" for layout in layouts):
        seeds = jnp.zeros_like(seeds[0] if isinstance(seeds, tuple) else seeds)
    arrays = seeds if isinstance(seeds, tuple) else (seeds,) * 3
    offset = jnp.concatenate(global_offset or no_offset(rows))
    names = "seeds", "calls", "places", "global_offset"
    return dict(zip(names, (*arrays, offset), strict=True))


def column_unit(columns: int) -> int:
    """A divisor of the number of columns, to be a constant of a kernel.

    With it, the compiler knows that each row starts at a multiple of the unit, and
    loads that many elements at once.
    """
    return math.gcd(columns, 16)


def mode_of(layout: Layout | None, dtype: CodeDtype) -> str | None:
    """The mode of a layout (``block_codes``)."""
    if layout is None:
        return None
    return "float8" if dtype == "float8_e4m3fn" else layout.rounding


def output(
    shape: tuple[int, ...], dtype: jax.typing.DTypeLike, *, wanted: object = True
) -> jax.ShapeDtypeStruct:
    """An output; without elements if ``wanted`` is false, such as None."""
    return jax.ShapeDtypeStruct(shape if wanted else (0,), dtype)


def rowwise_outputs(
    shape: Shape, layout: Layout | None, dtype: CodeDtype = "int8"
) -> dict[str, jax.ShapeDtypeStruct]:
    """Codes, scales and sums of matrices ``[B, R, C]``."""
    return _outputs("", shape, layout, dtype, shape[2])


def colwise_outputs(
    shape: Shape, layout: Layout | None, dtype: CodeDtype = "int8"
) -> dict[str, jax.ShapeDtypeStruct]:
    """Codes, scales and sums of the transposes of matrices ``[B, R, C]``.

    A thread stores 16 bytes at once, so rows of codes are padded to multiples of 16.
    """
    width = -(-shape[1] // 16) * 16
    return _outputs("colwise_", *_transpose(shape, layout), dtype, width)


def _outputs(
    prefix: str, shape: Shape, layout: Layout | None, dtype: CodeDtype, width: int
) -> dict[str, jax.ShapeDtypeStruct]:
    """Outputs for matrices ``[B, N, K]``, with rows of codes of a width.

    The scales of rows are ``[B, K/k, N]``: a program stores its block's scales next to
    each other, as the GEMM reads them.
    """
    batch, n, k = shape
    scales: tuple[int, ...] = (0,)
    if layout is not None and layout.is_split:
        down, across = (
            size if side is None else triton.cdiv(size, side)
            for size, side in zip((n, k), layout.block, strict=True)
        )
        is_of_rows = layout.block[0] == 1
        scales = (batch, across, n) if is_of_rows else (batch, down, across)
    return {
        f"{prefix}codes": output((batch, n, width), dtype, wanted=layout),
        f"{prefix}scales": output(scales, jnp.float32),
        f"{prefix}sums": output(scales, jnp.float32, wanted=layout and layout.sums),
    }


def rowwise_operand(
    found: Mapping[str, jax.Array], shape: Shape, layout: Layout | None
) -> Quantized | None:
    """The operand of ``rowwise_outputs``, without its residual."""
    return _operand("", found, shape, layout)


def colwise_operand(
    found: Mapping[str, jax.Array], shape: Shape, layout: Layout | None
) -> Quantized | None:
    """The operand of ``colwise_outputs``, without padding."""
    return _operand("colwise_", found, *_transpose(shape, layout))


def _operand(
    prefix: str, found: Mapping[str, jax.Array], shape: Shape, layout: Layout | None
) -> Quantized | None:
    if layout is None:
        return None
    scales = found[f"{prefix}scales"]
    if not layout.is_split:
        layout = layout._replace(block=(1, None))
    elif layout.block[0] == 1:
        scales = scales.mT
    sums = found[f"{prefix}sums"] if layout.sums else None
    codes = found[f"{prefix}codes"][..., : shape[2]]
    return Quantized(Term(codes, scales, sums), None, layout.block)


def _transpose(shape: Shape, layout: Layout | None) -> tuple[Shape, Layout | None]:
    batch, rows, columns = shape
    return (batch, columns, rows), layout and layout._replace(block=layout.block[::-1])
