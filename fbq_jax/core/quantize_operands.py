"""Quantization of X, W and dY as operands of the INT8 GEMMs.

INT8 tensor cores read both operands contiguously along the contraction.  So each matrix
is quantized in two layouts: X rowwise for Y and colwise for dW, W colwise for Y and
rowwise for dX, dY rowwise for dX and colwise for dW.  One op makes both layouts if both
have the same kind of scales.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from fbq_jax import ops
from fbq_jax.core import expert_codes, threshold
from fbq_jax.core.expert_codes import BlockScales, ExpertRows, TokenRows
from fbq_jax.core.qtensor import QTensor
from fbq_jax.core.threshold import Scalars, Stats
from fbq_jax.kernels import hadamard, reference
from fbq_jax.kernels.grouped_reference import GroupedRows
from fbq_jax.kernels.reference import Block, Layouts, Quantized
from fbq_jax.kernels.rounding import CallSeed, Seeds, fold, fold_seeds
from fbq_jax.ops import dispatch
from fbq_jax.recipes.schema import Gemm, Quantizer, Recipe


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


#: X or dY: matrices ``[B, M, K]`` or ``[B, G, R, K]``; or rows in T tiles, which take
#: the place of B matrices, on one device or on those of a mixture's experts.
Rows = jax.Array | GroupedRows | ExpertRows | TokenRows

# The independent noise streams of one call.
LHS_STREAM, RHS_STREAM, GRAD_STREAM, SUM_STREAM, RESIDUAL_STREAM = range(5)


class GemmSpec(NamedTuple):
    """The static settings of one GEMM.

    Attributes:
      gemm: how the recipe quantizes it.
      block_shape: the values along the M, K and N of this GEMM that share a scale, if K
        has several.
      dtype: the output's dtype.
      implementation: the ops' implementation; None lets the dispatcher choose.
    """

    gemm: Gemm
    block_shape: tuple[int, int, int]
    dtype: Any
    implementation: str | None


class Spec(NamedTuple):
    """The static settings of a layer's three GEMMs.

    Attributes:
      recipe: how the three GEMMs are quantized.
      dtype: the dtype of Y.
      lhs_dtype: the dtype of X and dX.
      rhs_dtype: the dtype of W and dW.
      implementation: the ops' implementation; None lets the dispatcher choose.
    """

    recipe: Recipe
    dtype: Any
    lhs_dtype: Any
    rhs_dtype: Any
    implementation: str | None

    @property
    def bounds_sums(self) -> bool:
        """Whether the kernel of a GEMM reads ``Quantized.sums`` of its rhs.

        The one in Mosaic does for INT8 codes, except for outputs of 4 bytes.
        """
        if self.recipe.codes != "int8":
            return False
        choice = dispatch.choose(
            "matmul", self.recipe.block_shape, implementation=self.implementation
        )
        dtypes = self.dtype, self.lhs_dtype, self.rhs_dtype
        has_16_bits = any(jnp.dtype(dtype).itemsize == 2 for dtype in dtypes)
        return choice.implementation == "mosaic" and has_16_bits

    @property
    def fwd(self) -> GemmSpec:
        """The settings of ``Y = X . W``."""
        return self._gemm(self.recipe.fwd, self.recipe.block_shape, self.dtype)

    @property
    def dlhs(self) -> GemmSpec:
        """The settings of ``dX = dY . W'``."""
        m, k, n = self.recipe.block_shape
        return self._gemm(self.recipe.dlhs, (m, n, k), self.lhs_dtype)

    @property
    def drhs(self) -> GemmSpec:
        """The settings of ``dW = X' . dY``."""
        m, k, n = self.recipe.block_shape
        return self._gemm(self.recipe.drhs, (k, m, n), self.rhs_dtype)

    def _gemm(self, gemm: Gemm, sizes: tuple[int, int, int], dtype: Any) -> GemmSpec:
        return GemmSpec(gemm, gemm.block_shape(sizes), dtype, self.implementation)


def quantize_lhs(
    spec: Spec,
    x: Rows,
    scalars: Scalars,
    blocks: jax.Array | None = None,
    *,
    save: bool,
    frozen: bool = False,
) -> tuple[Layouts, Layouts, Stats]:
    """Quantizes X.

    Args:
      spec: the static settings.
      x: the activation.
      scalars: the threshold and the seeds of the call.
      blocks: the number of blocks, as in ``threshold.apply``.
      save: whether the backward pass needs the colwise codes.
      frozen: whether the layer is frozen; its threshold, if it is unset, counts as 0.

    Returns:
      The codes in the layouts that the INT8 GEMMs read, the residuals of the layouts
      that have a second term, and the stats.
    """
    recipe = spec.recipe
    colwise = recipe.drhs.quantizers[0] if save else None
    if recipe.criterion is None:
        stack = _stack_index(x, recipe.lhs_block).size
        metric = jnp.zeros((stack, 0, 0), jnp.float32)
        stats = threshold.without_fallback(scalars, metric)
        seeds = seeds_of(scalars.later_seed(stats), LHS_STREAM, x, recipe.lhs_block)
        rowwise = recipe.fwd.quantizers[0]
        lhs = _quantize(
            spec, x, seeds, recipe.lhs_block, rowwise=rowwise, colwise=colwise
        )
        return lhs, Layouts(None, None), stats
    if isinstance(x, TokenRows):
        return _quantize_tokens(spec, x, scalars, blocks, colwise, frozen=frozen)
    seeds = seeds_of(scalars.call_seed, LHS_STREAM, x)
    in_blocks = colwise is not None and colwise.scales == "block"
    is_grouped = isinstance(x, GroupedRows | ExpertRows)
    quantize = ops.ragged_quantize_fallback if is_grouped else ops.quantize_fallback
    main, residual, metric, colwise_codes = quantize(
        x.rows if isinstance(x, ExpertRows) else x,
        jnp.broadcast_to(scalars.theta, _stack_index(x).shape),
        seeds,
        block=recipe.lhs_block,
        criterion=recipe.criterion,
        colwise=colwise.rounding if colwise is not None and in_blocks else None,
        implementation=spec.implementation,
    )
    if not in_blocks:
        colwise_codes = _quantize(
            spec, x, seeds, recipe.lhs_block, rowwise=None, colwise=colwise
        ).colwise
    used, stats = _apply_threshold(spec, scalars, metric, residual, blocks)
    # A frozen layer does not wait for its threshold to move: nothing reads the stats.
    residuals = Layouts(residual if frozen else used, None)
    if colwise is not None and recipe.drhs.fallback:
        assert not isinstance(x, GroupedRows | ExpertRows)
        assert used is not None
        assert colwise_codes is not None
        seeds = seeds_of(scalars.call_seed, RESIDUAL_STREAM, x)
        colwise_codes, second = _add_term(
            spec, x, seeds, main, used.scales > 0.0, colwise_codes
        )
        residuals = Layouts(used, second)
    return Layouts(main, colwise_codes), residuals, stats


def _apply_threshold(
    spec: Spec,
    scalars: Scalars,
    metric: jax.Array,
    residual: Quantized | None,
    blocks: jax.Array | None,
) -> tuple[Quantized | None, Stats]:
    """``threshold.apply``, which takes the tiles of several devices as one stack."""
    shape = metric.shape
    if metric.ndim == 5:
        assert residual is not None
        metric = metric.reshape(-1, *shape[3:])
        residual = residual._replace(scales=residual.scales.reshape(metric.shape))
    used, stats = threshold.apply(
        scalars,
        metric,
        residual,
        spec.recipe,
        blocks=blocks,
        implementation=spec.implementation,
    )
    return used and used._replace(scales=used.scales.reshape(shape)), stats


def _quantize_tokens(
    spec: Spec,
    x: TokenRows,
    scalars: Scalars,
    blocks: jax.Array | None,
    colwise: Quantizer | None,
    *,
    frozen: bool,
) -> tuple[Layouts, Layouts, Stats]:
    """``quantize_lhs`` with fallback by the largest value, which devices agree on."""
    block, recipe = spec.recipe.lhs_block, spec.recipe
    assert recipe.criterion == "absmax"  # ragged_dot checks it
    found, amax = expert_codes.find_scales(x, block)
    metric = reference.metric_of("absmax", found.scales, amax=amax)[:, None, :]
    second, _ = expert_codes.find_scales(x, block, found)
    limit = jnp.where(scalars.theta >= 0.0, scalars.theta, 0.0)
    scales = jnp.where(metric > limit, second.scales[:, None, :], 0.0)
    no_codes = jnp.zeros((0,), jnp.int8)
    residual = Quantized(no_codes, scales)
    used, stats = _apply_threshold(spec, scalars, metric, residual, blocks)
    assert used is not None
    lhs = expert_codes.quantize_tokens(
        x,
        seeds_of(scalars.call_seed, LHS_STREAM, x, block),
        found,
        block=block,
        rowwise="nearest",
        colwise=colwise and colwise.rounding,
    )
    scales = (residual if frozen else used).scales[:, 0]
    second = BlockScales(scales, second.inverse)
    term = expert_codes.quantize_residuals(x, found, second, block=block)
    return lhs, Layouts(term, None), stats


def _add_term(
    spec: Spec,
    x: jax.Array,
    seeds: Seeds,
    main: Quantized,
    fell_back: jax.Array,
    colwise: Quantized,
) -> tuple[Quantized, Quantized]:
    """The two terms of X' in dW.

    Args:
      spec: the static settings.
      x: as for ``quantize_lhs``.
      seeds: the seeds of the second term's noise.
      main: the rowwise codes of the forward GEMM, rounded to nearest.
      fell_back: bool, whether each block has a second term in the forward GEMM.
      colwise: X' in one term.

    Returns:
      In blocks that fell back, the codes of ``main`` and the rest of X, quantized; in
      the others, the codes of ``colwise`` and zeros.
    """
    block = spec.recipe.lhs_block
    falls = reference.repeat_blocks(fell_back, block, x.shape)
    scales = reference.repeat_blocks(main.scales, block, x.shape)
    codes = main.codes.astype(jnp.float32)
    rest = reference.residual_of(x.astype(jnp.float32), codes, scales)
    second = ops.quantize(
        jnp.where(falls, rest, 0.0),
        seeds,
        block=block,
        rowwise=None,
        colwise=spec.recipe.drhs.lhs,
        implementation=spec.implementation,
    ).colwise
    assert second is not None
    nearest, falls = (jnp.moveaxis(y, -1, 1) for y in (main.codes, falls))
    first = colwise._replace(codes=jnp.where(falls, nearest, colwise.codes))
    return first, second


def quantize_rhs(
    spec: Spec, w: jax.Array | Quantized, seed: CallSeed, *, save: bool
) -> Layouts:
    """Quantizes W, ``[B, K, N]``, in the layouts that INT8 GEMMs read.

    The weight of a frozen layer (``fbq_jax.core.frozen_weight``) is already stored as
    colwise codes.  Its rowwise codes are the same ones where both layouts of a weight
    share codes and scales, and otherwise those of the dequantized weight.  ``save``
    says whether the backward pass needs the rowwise codes.
    """
    recipe = spec.recipe
    rows = recipe.dlhs.quantizers[1] if save else None
    columns = recipe.fwd.quantizers[1]
    if not isinstance(w, Quantized):
        seeds = seeds_of(seed, RHS_STREAM, w)
        both = "rowwise", "colwise"
        return _quantize(
            spec, w, seeds, recipe.rhs_block, both, rowwise=rows, colwise=columns
        )
    if rows is None:
        return Layouts(None, w)
    if rows == columns and rows.scales == "block":
        return Layouts(Quantized(w.codes.mT, w.scales.mT), w)
    codes = forward_qtensor(recipe, w, spec.fwd.block_shape[:0:-1])
    floats = codes.dequantize(spec.rhs_dtype).mT
    seeds = seeds_of(seed, RHS_STREAM, floats)
    requantized = _quantize(
        spec, floats, seeds, recipe.rhs_block, ("rowwise",), rowwise=rows, colwise=None
    )
    return Layouts(requantized.rowwise, w)


def forward_qtensor(recipe: Recipe, codes: Quantized, block: Block) -> QTensor:
    """Codes of the forward GEMM; ``block`` is theirs if K has several scales."""
    row = 1, max(1, codes.codes.shape[2])
    return QTensor(codes, None, block if recipe.fwd.splits_contraction else row)


def frozen_seed(seed: CallSeed, dy: jax.Array) -> jax.Array:
    """The seed of the gradient's noise in a frozen layer, uint32 ``[]``.

    The state of such a layer, and so its seed, is the same in every step.  So the bits
    of dY, the gradient of its output, seed the noise as well.
    """
    bits = lax.bitcast_convert_type(dy.astype(jnp.float32), jnp.uint32)
    return fold(fold_seeds(seed), jnp.sum(bits, dtype=jnp.uint32))


def quantize_grad(spec: Spec, dy: Rows, seed: CallSeed, *, frozen: bool) -> Layouts:
    """Quantizes dY, ``[B, M, N]`` or rows in tiles, in the layouts of INT8 GEMMs.

    A frozen layer has no dW to read the colwise codes; ``frozen_seed`` makes its seed.
    """
    recipe = spec.recipe
    rows, columns = recipe.dlhs.quantizers[0], recipe.drhs.quantizers[1]
    if frozen:
        columns = None
    seeds = seeds_of(seed, GRAD_STREAM, dy, recipe.grad_block)
    return _quantize(
        spec, dy, seeds, recipe.grad_block, ("colwise",), rowwise=rows, colwise=columns
    )


def seeds_of(
    seed: CallSeed, stream: int, x: Rows | MatrixStack, block: Block | None = None
) -> Seeds:
    """The seeds of the matrices or tiles of x in one of a call's streams of noise.

    ``TokenRows`` have those of all tiles on one device, with the rows of ``block``.
    """
    index = _stack_index(x, block).astype(jnp.uint32)
    if not isinstance(seed, tuple):
        return fold(fold(seed, stream), index)
    layer, calls, not_earlier, streams = (
        jnp.broadcast_to(word, index.shape) for word in (*seed, jnp.uint32(stream))
    )
    return layer, calls, not_earlier, streams, index


def _stack_index(x: Rows | MatrixStack, block: Block | None = None) -> jax.Array:
    """The index of each matrix or tile, int32."""
    if isinstance(x, ExpertRows | MatrixStack):
        return x.indices
    if isinstance(x, TokenRows):
        assert block is not None
        return jnp.arange(x.plan.tile_count(block[0]), dtype=jnp.int32)
    stack = x.first_rows if isinstance(x, GroupedRows) else x
    return jnp.arange(stack.shape[0], dtype=jnp.int32)


def _quantize(
    spec: Spec,
    x: Rows,
    seeds: Seeds,
    block: Block,
    as_rhs: tuple[str, ...] = (),
    *,
    rowwise: Quantizer | None,
    colwise: Quantizer | None,
) -> Layouts:
    """Quantizes a matrix in the layouts that have a quantizer.

    ``as_rhs`` names the layouts that are the second operand of a GEMM.
    """
    if rowwise and colwise and not _share_op(rowwise, colwise):
        one = functools.partial(_quantize, spec, x, seeds, block, as_rhs)
        rowwise_codes = one(rowwise=rowwise, colwise=None).rowwise
        return Layouts(rowwise_codes, one(rowwise=None, colwise=colwise).colwise)
    quantizer = rowwise or colwise
    if quantizer is None:
        return Layouts(None, None)
    # Only the two ops that make FP8 codes take their dtype.
    codes = spec.recipe.codes
    dtype = {} if codes == "int8" else {"dtype": codes}
    if isinstance(x, TokenRows):
        return expert_codes.quantize_tokens(
            x,
            seeds,
            expert_codes.find_scales(x, block)[0],
            block=block,
            rowwise=rowwise and rowwise.rounding,
            colwise=colwise and colwise.rounding,
            sums="colwise" in as_rhs and spec.bounds_sums,
        )
    if isinstance(x, ExpertRows):
        x = x.rows
    wanted = {"rowwise": rowwise, "colwise": colwise}
    sums = tuple(
        name
        for name in as_rhs
        if (layout := wanted[name]) and layout.scales == "block" and spec.bounds_sums
    )
    if quantizer.scales == "row_block":
        assert not isinstance(x, GroupedRows)
        quantize = functools.partial(
            ops.quantize_row_blocks,
            block=block,
            colwise_in_blocks=colwise is not None and colwise.scales == "block",
            hadamard=quantizer.hadamard,
            sums=sums,
            **dtype,
        )
    elif quantizer.scales == "block":
        op = ops.ragged_quantize if isinstance(x, GroupedRows) else ops.quantize
        quantize = functools.partial(op, block=block, sums=sums, **dtype)
    else:
        assert not isinstance(x, GroupedRows)  # its scales are in blocks
        seeds = fold_seeds(seeds)
        per_tensor = quantizer.scales == "tensor"
        quantize = functools.partial(
            ops.quantize_vectors,
            bound=spec.recipe.bound,
            per_tensor=per_tensor,
            hadamard=quantizer.hadamard,
        )
    if not isinstance(x, GroupedRows):
        x, seeds = _split_shards(x, seeds, quantizer.shards)
        x = hadamard.pad_rows(x) if quantizer.hadamard else x
    return quantize(
        x,
        seeds,
        rowwise=rowwise and rowwise.rounding,
        colwise=colwise and colwise.rounding,
        implementation=spec.implementation,
    )


def _share_op(rowwise: Quantizer, colwise: Quantizer) -> bool:
    """Whether one op quantizes both layouts."""
    scales = rowwise.scales, colwise.scales
    in_one_op = scales[0] == scales[1] or scales == ("row_block", "block")
    return in_one_op and rowwise[2:] == colwise[2:]


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
