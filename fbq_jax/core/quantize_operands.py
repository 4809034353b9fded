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
from fbq_jax.core import threshold
from fbq_jax.core.qtensor import QTensor
from fbq_jax.core.threshold import Scalars, Stats
from fbq_jax.kernels.reference import Block, Layouts, Quantized
from fbq_jax.kernels.rounding import CallSeed, Seeds, fold, fold_seeds
from fbq_jax.ops import dispatch
from fbq_jax.recipes.schema import Gemm, Quantizer, Recipe

# The independent noise streams of one call.
LHS_STREAM, RHS_STREAM, GRAD_STREAM, SUM_STREAM = range(4)


class GemmSpec(NamedTuple):
    """The static settings of one GEMM.

    Attributes:
      gemm: how the recipe quantizes it.
      block_shape: the sizes of a block along the M, K and N of this GEMM, for block
        scales.
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

        The one in Mosaic does, except for outputs of 4 bytes.
        """
        choice = dispatch.choose(
            "matmul", self.recipe.block_shape, implementation=self.implementation
        )
        dtypes = self.dtype, self.lhs_dtype, self.rhs_dtype
        has_16_bits = any(jnp.dtype(dtype).itemsize == 2 for dtype in dtypes)
        return choice.implementation == "mosaic" and has_16_bits

    @property
    def fwd(self) -> GemmSpec:
        """The settings of ``Y = X . W``."""
        recipe = self.recipe
        return GemmSpec(recipe.fwd, recipe.block_shape, self.dtype, self.implementation)

    @property
    def dlhs(self) -> GemmSpec:
        """The settings of ``dX = dY . W'``."""
        recipe, (m, k, n) = self.recipe, self.recipe.block_shape
        return GemmSpec(recipe.dlhs, (m, n, k), self.lhs_dtype, self.implementation)

    @property
    def drhs(self) -> GemmSpec:
        """The settings of ``dW = X' . dY``."""
        recipe, (m, k, n) = self.recipe, self.recipe.block_shape
        return GemmSpec(recipe.drhs, (k, m, n), self.rhs_dtype, self.implementation)


def quantize_lhs(
    spec: Spec,
    x: jax.Array,
    scalars: Scalars,
    blocks: jax.Array | None = None,
    *,
    save: bool,
) -> tuple[Layouts, Quantized | None, Stats]:
    """Quantizes X.

    Args:
      spec: the static settings.
      x: ``[B, M, K]`` or ``[B, G, R, K]``.
      scalars: the threshold and the seeds of the call.
      blocks: the number of blocks, as in ``threshold.apply``.
      save: whether the backward pass needs the colwise codes.

    Returns:
      The codes in the layouts that the INT8 GEMMs read, the residual of the rowwise
      codes, and the stats.
    """
    recipe = spec.recipe
    colwise = recipe.drhs.quantizers[0] if save else None
    if recipe.criterion is None:
        metric = jnp.zeros((x.shape[0], 0, 0), jnp.float32)
        stats = threshold.without_fallback(scalars, metric)
        seeds = seeds_of(scalars.later_seed(stats), LHS_STREAM, x)
        rowwise = recipe.fwd.quantizers[0]
        lhs = _quantize(
            spec, x, seeds, recipe.lhs_block, rowwise=rowwise, colwise=colwise
        )
        return lhs, None, stats
    seeds = seeds_of(scalars.call_seed, LHS_STREAM, x)
    in_blocks = colwise is not None and colwise.scales == "block"
    main, residual, metric, colwise_codes = ops.quantize_fallback(
        x,
        jnp.broadcast_to(scalars.theta, x.shape[:1]),
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
    residual, stats = threshold.apply(
        scalars,
        metric,
        residual,
        recipe,
        blocks=blocks,
        implementation=spec.implementation,
    )
    return Layouts(main, colwise_codes), residual, stats


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
    codes = forward_qtensor(recipe, w, recipe.rhs_block[::-1])
    floats = codes.dequantize(spec.rhs_dtype).mT
    seeds = seeds_of(seed, RHS_STREAM, floats)
    requantized = _quantize(
        spec, floats, seeds, recipe.rhs_block, ("rowwise",), rowwise=rows, colwise=None
    )
    return Layouts(requantized.rowwise, w)


def forward_qtensor(recipe: Recipe, codes: Quantized, block: Block) -> QTensor:
    """Codes of the forward GEMM; ``block`` is theirs if scales are per block."""
    row = 1, max(1, codes.codes.shape[2])
    return QTensor(codes, None, block if recipe.fwd.in_blocks else row)


def quantize_grad(
    spec: Spec, dy: jax.Array, seed: CallSeed, *, frozen: bool = False
) -> Layouts:
    """Quantizes dY, ``[B, M, N]``, in the layouts that INT8 GEMMs read.

    A frozen layer has no dW to read the colwise codes.  Its state, and so its seed, is
    the same in every step; the bits of dY seed the noise as well.
    """
    recipe = spec.recipe
    rows, columns = recipe.dlhs.quantizers[0], recipe.drhs.quantizers[1]
    if frozen:
        bits = lax.bitcast_convert_type(dy.astype(jnp.float32), jnp.uint32)
        seed, columns = fold(fold_seeds(seed), jnp.sum(bits, dtype=jnp.uint32)), None
    seeds = seeds_of(seed, GRAD_STREAM, dy)
    return _quantize(
        spec, dy, seeds, recipe.grad_block, ("colwise",), rowwise=rows, colwise=columns
    )


def seeds_of(seed: CallSeed, stream: int, x: jax.Array) -> Seeds:
    """The seeds of the matrices ``x [B, ...]`` in one of a call's streams of noise."""
    index = jnp.arange(x.shape[0], dtype=jnp.uint32)
    if not isinstance(seed, tuple):
        return fold(fold(seed, stream), index)
    layer, calls, not_earlier, streams = (
        jnp.broadcast_to(word, index.shape) for word in (*seed, jnp.uint32(stream))
    )
    return layer, calls, not_earlier, streams, index


def _quantize(
    spec: Spec,
    x: jax.Array,
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
    if rowwise is not None and colwise is not None and rowwise[1:] != colwise[1:]:
        one = functools.partial(_quantize, spec, x, seeds, block, as_rhs)
        rowwise_codes = one(rowwise=rowwise, colwise=None).rowwise
        return Layouts(rowwise_codes, one(rowwise=None, colwise=colwise).colwise)
    quantizer = rowwise or colwise
    if quantizer is None:
        return Layouts(None, None)
    if quantizer.scales == "block":
        wanted = {"rowwise": rowwise, "colwise": colwise}
        sums = tuple(name for name in as_rhs if wanted[name] and spec.bounds_sums)
        quantize = functools.partial(ops.quantize, block=block, sums=sums)
    else:
        seeds = fold_seeds(seeds)
        per_tensor = quantizer.scales == "tensor"
        quantize = functools.partial(
            ops.quantize_vectors, bound=spec.recipe.bound, per_tensor=per_tensor
        )
    return quantize(
        *_split_shards(x, seeds, quantizer.shards),
        rowwise=rowwise and rowwise.rounding,
        colwise=colwise and colwise.rounding,
        implementation=spec.implementation,
    )


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
