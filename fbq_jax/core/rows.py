"""X, W and dY in the forms that ops quantize."""

import abc
import dataclasses
import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fbq_jax import ops
from fbq_jax.core import threshold
from fbq_jax.core.noise import LHS_STREAM, seeds_of
from fbq_jax.core.spec import Spec
from fbq_jax.core.threshold import Scalars, Stats
from fbq_jax.kernels.grouped_reference import GroupedRows
from fbq_jax.kernels.reference import Block, Layouts, Quantized
from fbq_jax.kernels.rounding import CallSeed, Seeds, fold, fold_seeds
from fbq_jax.recipes.schema import Quantizer


class MatrixStack(NamedTuple):
    """Matrices, or tiles of the rows of groups, that a fused op quantizes.

    Attributes:
      values: ``[B, M, K]`` or ``[B, G, R, K]``.
      indices: int32 ``[B]``, the index of each matrix, which selects its noise.
      row_counts: int32 ``[B]``, the number of rows of each matrix; None for all.
    """

    values: jax.Array
    indices: jax.Array
    row_counts: jax.Array | None = None


class Wanted(NamedTuple):
    """The layouts that one op is to make.

    Attributes:
      rowwise: the quantizer of the rowwise layout, or None.
      colwise: the quantizer of the colwise layout, or None.
      sums: the layouts that get ``Quantized.sums``.
    """

    rowwise: Quantizer | None
    colwise: Quantizer | None
    sums: tuple[str, ...]

    @property
    def roundings(self) -> dict[str, Any]:
        """The roundings of both layouts, as ops take them."""
        return {
            "rowwise": self.rowwise and self.rowwise.rounding,
            "colwise": self.colwise and self.colwise.rounding,
        }


class FallbackCall(NamedTuple):
    """How ``quantize_operands.quantize_lhs`` is called for a recipe with a criterion.

    Attributes:
      spec: the static settings.
      scalars: the threshold and the seeds of the call.
      blocks: the number of blocks, as in ``threshold.apply``.
      colwise: the quantizer of the colwise layout, or None.
      frozen: whether the layer is frozen.
    """

    spec: Spec
    scalars: Scalars
    blocks: jax.Array | None
    colwise: Quantizer | None
    frozen: bool

    def select(
        self, metric: jax.Array, residual: Quantized | None
    ) -> tuple[Quantized, Stats]:
        """The second terms of blocks that fall back, and the stats.

        The arguments are those of ``threshold.apply``.
        """
        selected, stats = threshold.apply(
            self.scalars,
            metric,
            residual,
            self.spec.recipe,
            blocks=self.blocks,
            frozen=self.frozen,
            implementation=self.spec.implementation,
        )
        assert selected is not None
        return selected, stats


class Rows(abc.ABC):
    """Matrices, or rows in tiles that take the place of matrices."""

    @property
    @abc.abstractmethod
    def indices(self) -> jax.Array:
        """The index of each matrix or tile, int32, which selects its noise."""

    def quantize(
        self,
        spec: Spec,
        seed: CallSeed,
        stream: int,
        block: Block,
        as_rhs: tuple[str, ...] = (),
        *,
        rowwise: Quantizer | None,
        colwise: Quantizer | None,
    ) -> Layouts:
        """Quantizes in the layouts that have a quantizer.

        Args:
          spec: the static settings.
          seed: of the call.
          stream: of the noise.
          block: rows and columns of a block.
          as_rhs: the layouts that are the second operand of a GEMM.
          rowwise: the quantizer of the rowwise layout, or None.
          colwise: the quantizer of the colwise layout, or None.
        """
        quantizers = {"rowwise": rowwise, "colwise": colwise}
        if rowwise and colwise and not self._share_op(rowwise, colwise):
            one = functools.partial(self.quantize, spec, seed, stream, block, as_rhs)
            rowwise_codes = one(rowwise=rowwise, colwise=None).rowwise
            return Layouts(rowwise_codes, one(rowwise=None, colwise=colwise).colwise)
        if rowwise is None and colwise is None:
            return Layouts(None, None)
        sums = tuple(
            name
            for name in as_rhs
            if (q := quantizers[name]) and q.scales == "block" and spec.bounds_sums
        )
        seeds = seeds_of(seed, stream, self.indices)
        return self._quantize(spec, seeds, block, Wanted(rowwise, colwise, sums))

    def _share_op(self, rowwise: Quantizer, colwise: Quantizer) -> bool:
        """Whether one op quantizes both layouts."""
        scales = rowwise.scales, colwise.scales
        in_one_op = scales[0] == scales[1] or scales == ("row_block", "block")
        return in_one_op and rowwise[2:] == colwise[2:]

    @abc.abstractmethod
    def _quantize(
        self, spec: Spec, seeds: Seeds, block: Block, wanted: Wanted
    ) -> Layouts:
        """``quantize`` by one op."""

    @abc.abstractmethod
    def quantize_fallback(self, call: FallbackCall) -> tuple[Layouts, Quantized, Stats]:
        """``quantize_lhs`` for a recipe with a criterion."""


@dataclasses.dataclass(frozen=True)
class Matrices(Rows):
    """Matrices.

    Attributes:
      values: ``[B, M, K]`` or ``[B, G, R, K]``.
    """

    values: jax.Array

    @property
    def indices(self) -> jax.Array:
        """The index of each matrix, int32 ``[B]``."""
        return jnp.arange(self.values.shape[0], dtype=jnp.int32)

    def _quantize(
        self, spec: Spec, seeds: Seeds, block: Block, wanted: Wanted
    ) -> Layouts:
        quantizer, colwise = wanted.rowwise or wanted.colwise, wanted.colwise
        assert quantizer is not None
        # Only the two ops that make FP8 codes take their dtype.
        codes = spec.recipe.codes
        dtype: Any = {} if codes == "int8" else {"dtype": codes}
        if quantizer.scales == "row_block":
            quantize = functools.partial(
                ops.quantize_row_blocks,
                block=block,
                colwise_in_blocks=colwise is not None and colwise.scales == "block",
                sums=wanted.sums,
                **dtype,
            )
        elif quantizer.scales == "block":
            quantize = functools.partial(
                ops.quantize, block=block, sums=wanted.sums, **dtype
            )
        else:
            seeds = fold_seeds(seeds)
            quantize = functools.partial(
                ops.quantize_vectors,
                bound=spec.recipe.bound,
                per_tensor=quantizer.scales == "tensor",
            )
        x, seeds = _split_shards(self.values, seeds, quantizer.shards)
        layouts: Layouts = quantize(
            x,
            seeds,
            **wanted.roundings,
            implementation=spec.implementation,
        )
        return layouts

    def quantize_fallback(self, call: FallbackCall) -> tuple[Layouts, Quantized, Stats]:
        """Falls back in the forward product."""
        spec, scalars, _, colwise, _ = call
        recipe, block = spec.recipe, spec.recipe.lhs_block
        in_blocks = colwise is not None and colwise.scales == "block"
        main, residual, metric, colwise_codes = ops.quantize_fallback(
            self.values,
            jnp.broadcast_to(scalars.theta, self.indices.shape),
            seeds_of(scalars.call_seed, LHS_STREAM, self.indices),
            block=block,
            criterion=recipe.criterion,
            colwise=colwise.rounding if colwise is not None and in_blocks else None,
            implementation=spec.implementation,
        )
        if not in_blocks:
            colwise_codes = self.quantize(
                spec,
                scalars.call_seed,
                LHS_STREAM,
                block,
                rowwise=None,
                colwise=colwise,
            ).colwise
        selected, stats = call.select(metric, residual)
        return Layouts(main, colwise_codes), selected, stats


def _split_shards(x: jax.Array, seeds: Seeds, shards: int) -> tuple[jax.Array, Seeds]:
    """Splits the rows of ``[B, R, C]`` into shards that are quantized separately.

    Returns ``[B, P, R / P, C]`` and seeds ``[B, P]``; or the arguments, for one shard.
    The last shard is padded with zeros, which change neither scales nor sums.
    """
    if shards == 1:
        return x, seeds
    batch, rows, columns = x.shape
    size = -(-rows // shards)
    x = jnp.pad(x, ((0, 0), (0, size * shards - rows), (0, 0)))
    index = jnp.arange(shards, dtype=jnp.uint32)
    seeds = fold(fold_seeds(seeds)[:, None], index[None, :])
    return x.reshape(batch, shards, size, columns), seeds


@dataclasses.dataclass(frozen=True)
class TiledRows(Rows):
    """Rows in tiles, with scales in blocks.

    Attributes:
      rows: values ``[M, K]`` with their T tiles; or those of the devices of a mixture's
        experts, ``[D, C, R, K]``.
      tile_indices: int32 ``[T]`` or ``[D, C, T]``, the index of each tile on one
        device.
    """

    rows: GroupedRows
    tile_indices: jax.Array

    @property
    def indices(self) -> jax.Array:
        """``tile_indices``."""
        return self.tile_indices

    def _quantize(
        self, spec: Spec, seeds: Seeds, block: Block, wanted: Wanted
    ) -> Layouts:
        return ops.ragged_quantize(
            self.rows,
            seeds,
            block=block,
            **wanted.roundings,
            sums=wanted.sums,
            implementation=spec.implementation,
        )

    def quantize_fallback(self, call: FallbackCall) -> tuple[Layouts, Quantized, Stats]:
        """Falls back in the forward product."""
        spec, scalars, _, colwise, _ = call
        main, residual, metric, colwise_codes = ops.ragged_quantize_fallback(
            self.rows,
            jnp.broadcast_to(scalars.theta, self.indices.shape),
            seeds_of(scalars.call_seed, LHS_STREAM, self.indices),
            block=spec.recipe.lhs_block,
            criterion=spec.recipe.criterion,
            colwise=colwise and colwise.rounding,
            implementation=spec.implementation,
        )
        assert residual is not None
        # The threshold takes the tiles of several devices as one stack.
        stack = math.prod(metric.shape[:-2]), *metric.shape[-2:]
        residual = residual._replace(scales=residual.scales.reshape(stack))
        selected, stats = call.select(metric.reshape(stack), residual)
        selected = selected._replace(scales=selected.scales.reshape(metric.shape))
        return Layouts(main, colwise_codes), selected, stats
