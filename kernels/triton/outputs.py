"""The outputs of quantization kernels, and their conversion to layouts.

A kernel always gets a pointer for each output.  An output that was not requested is an
array of shape ``[0]``, which the kernel does not access.
"""

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from fbq_jax.kernels.reference import (
    Block,
    CodeDtype,
    FallbackQuantized,
    Layouts,
    Quantized,
)

Shape = tuple[int, ...]


def output(
    shape: Shape, dtype: jax.typing.DTypeLike, *, wanted: object = True
) -> jax.ShapeDtypeStruct:
    """An output; without elements if ``wanted`` is false, such as None."""
    return jax.ShapeDtypeStruct(shape if wanted else (0,), dtype)


def rowwise_codes(
    shape: Shape, wanted: object = True, dtype: CodeDtype = "int8"
) -> jax.ShapeDtypeStruct:
    """Codes of matrices ``[B, R, C]``."""
    return output(shape, dtype, wanted=wanted)


def colwise_codes(
    shape: Shape, wanted: object = True, dtype: CodeDtype = "int8"
) -> jax.ShapeDtypeStruct:
    """Codes ``[B, C, R']`` of the transposed matrices ``[B, R, C]``.

    A thread stores 16 bytes at once, so R is padded to a multiple of 16.
    """
    batch, rows, columns = shape
    return output((batch, columns, -(-rows // 16) * 16), dtype, wanted=wanted)


def as_layouts(
    shape: Shape, rowwise: Sequence[jax.Array], colwise: Sequence[jax.Array]
) -> Layouts:
    """Layouts from the outputs of each, without padding of the columns."""

    def layout(
        codes: jax.Array, scales: jax.Array, sums: jax.Array | None = None
    ) -> Quantized | None:
        if codes.ndim == 1:
            return None
        has_sums = sums is not None and sums.ndim > 1
        return Quantized(codes, scales, sums if has_sums else None)

    trimmed = colwise[0][..., : shape[1]]
    return Layouts(layout(*rowwise), layout(trimmed, *colwise[1:]))


def as_fallback(shape: Shape, results: Sequence[jax.Array]) -> FallbackQuantized:
    """The quantized operand from the outputs of ``BlockOutputs.fallback``."""
    main, residual = Quantized(*results[:2]), Quantized(*results[3:5])
    colwise = as_layouts(shape, results[:3], results[6:9]).colwise
    if residual.codes.ndim == 1:
        no_metric = jnp.zeros((shape[0], 0, 0), jnp.float32)
        return FallbackQuantized(main, None, no_metric, colwise)
    return FallbackQuantized(main, residual, results[5], colwise)


class BlockOutputs:
    """The outputs of a kernel that quantizes matrices ``[B, R, C]`` block by block.

    Attributes:
      shape: ``(B, R, C)``.
      blocks: the numbers of blocks along R and C.
      programs: the number of blocks in all matrices.
      scales: one float32 per block, ``[B, R/r, C/c]``.
      sums: the layouts for which the kernel computes sums of codes.
      dtype: the dtype of the codes.
    """

    def __init__(
        self,
        shape: Shape,
        block: Block,
        sums: tuple[str, ...] = (),
        dtype: CodeDtype = "int8",
    ) -> None:
        self.sums, self.dtype = sums, dtype
        batch, rows, columns = self.shape = shape
        self.blocks = -(-rows // block[0]), -(-columns // block[1])
        self.programs = batch * math.prod(self.blocks)
        self.scales = output((batch, *self.blocks), jnp.float32)

    def rowwise(self, wanted: object) -> list[jax.ShapeDtypeStruct]:
        """Rowwise codes, scales and sums.  Scales are always written."""
        scales = self.scales
        sums = output(scales.shape, jnp.float32, wanted="rowwise" in self.sums)
        return [rowwise_codes(self.shape, wanted, self.dtype), scales, sums]

    def colwise(self, wanted: object) -> list[jax.ShapeDtypeStruct]:
        """Colwise codes, scales and sums.  Scales are always written."""
        scales = output((self.shape[0], *self.blocks[::-1]), jnp.float32)
        sums = output(scales.shape, jnp.float32, wanted="colwise" in self.sums)
        return [colwise_codes(self.shape, wanted, self.dtype), scales, sums]

    def fallback(
        self, rowwise: object, criterion: object, colwise: object
    ) -> list[jax.ShapeDtypeStruct]:
        """Main, residual, metric and colwise; the residual has no sums.

        Without a criterion, the residual and the metric are not written.
        """
        values = output(self.scales.shape, jnp.float32, wanted=criterion)
        residual_codes = rowwise_codes(self.shape, criterion)
        residual_and_metric = [residual_codes, values, values]
        return [*self.rowwise(rowwise), *residual_and_metric, *self.colwise(colwise)]


class RowBlockOutputs(BlockOutputs):
    """The outputs of a kernel with one scale per row and per column of a block.

    A kernel stores the scales of neighbouring rows, and of neighbouring columns, next
    to each other; ``as_layouts`` transposes them.

    Attributes:
      colwise_in_blocks: whether colwise codes have one scale per block instead.
    """

    def __init__(
        self,
        shape: Shape,
        block: Block,
        sums: tuple[str, ...] = (),
        dtype: CodeDtype = "int8",
        *,
        colwise_in_blocks: bool = False,
    ) -> None:
        super().__init__(shape, block, sums, dtype)
        self.colwise_in_blocks = colwise_in_blocks

    def rowwise(self, wanted: object) -> list[jax.ShapeDtypeStruct]:
        """Rowwise codes, scales and sums."""
        batch, rows, _ = self.shape
        codes, _, sums = super().rowwise(wanted)
        shape = batch, self.blocks[1], rows
        return [codes, output(shape, jnp.float32, wanted=wanted), sums]

    def colwise(self, wanted: object) -> list[jax.ShapeDtypeStruct]:
        """Colwise codes, scales and sums."""
        batch, _, columns = self.shape
        codes, scales, sums = super().colwise(wanted)
        if not self.colwise_in_blocks:
            shape = batch, self.blocks[0], columns
            scales = output(shape, jnp.float32, wanted=wanted)
        return [codes, scales, sums]

    def as_layouts(
        self, rowwise: Sequence[jax.Array], colwise: Sequence[jax.Array]
    ) -> Layouts:
        """Layouts from the outputs of each."""
        main, transposed = as_layouts(self.shape, rowwise, colwise)
        if not self.colwise_in_blocks:
            transposed = _transpose_scales(transposed)
        return Layouts(_transpose_scales(main), transposed)


def _transpose_scales(layout: Quantized | None) -> Quantized | None:
    return layout and layout._replace(scales=layout.scales.mT)
