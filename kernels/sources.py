"""What ``quantize`` quantizes: matrices, or what they are computed from.

Sources are stacks of matrices ``[B, R, C]``.  Where experts have rows of their own
(``fbq_jax.kernels.tiles``), the matrices are tiles of ``m`` rows, and ``row_counts``
has the number of rows of each.  The rest of a tile counts as zeros, whatever it holds.
A tile without rows has scales, sums and a metric of 0; its codes and what it saves have
no meaning.
"""

import dataclasses
import functools
from typing import Any, Protocol

import jax

from fbq_jax.kernels.tiles import gather_tiles

Shape = tuple[int, int, int]


class Source(Protocol):
    """A ``Matrix``, or the output of a layer (``fbq_jax.kernels.layer_sources``)."""

    @property
    def values(self) -> jax.Array:
        """The input of the layer, or the matrices."""

    @property
    def row_counts(self) -> jax.Array | None:
        """int32 ``[B]``, the number of rows of each matrix; None for R."""

    @property
    def shape(self) -> Shape:
        """The shape ``(B, R, C)`` of the matrices."""

    def compute(self) -> tuple[jax.Array, Any]:
        """The matrices, and what the layer saves for its backward pass."""


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["values", "first_rows", "row_counts"],
    meta_fields=["m"],
)
@dataclasses.dataclass(frozen=True)
class Matrix:
    """Matrices ``[B, R, C]``; or rows ``[M, C]``, of which T tiles are quantized.

    Attributes:
      values: bfloat16, float16 or float32.
      first_rows: int32 ``[T]``, the first row of each tile; None for matrices.
      row_counts: int32 ``[T]``, the number of rows of each tile; None for matrices.
      m: the rows of a tile; None for matrices.
    """

    values: jax.Array
    first_rows: jax.Array | None = None
    row_counts: jax.Array | None = None
    m: int | None = None

    @property
    def shape(self) -> Shape:
        """The shape ``(B, R, C)`` of the matrices or tiles."""
        if self.first_rows is None:
            batch, rows, columns = self.values.shape
            return batch, rows, columns
        assert self.m is not None
        return self.first_rows.shape[0], self.m, self.values.shape[1]

    def compute(self) -> tuple[jax.Array, tuple[()]]:
        """The values of the matrices or tiles."""
        if self.first_rows is None:
            return self.values, ()
        assert self.row_counts is not None
        assert self.m is not None
        tiles = gather_tiles(self.values, self.first_rows, self.row_counts, self.m)
        return tiles, ()
