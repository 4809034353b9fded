"""Quantization of X, W and dY as operands of the INT8 GEMMs.

INT8 tensor cores read both operands contiguously along the contraction.  So each matrix
is quantized in two layouts: X rowwise for Y and colwise for dW, W colwise for Y and
rowwise for dX, dY rowwise for dX and colwise for dW.  One op makes both layouts if both
have the same kind of scales.
"""

import jax
import jax.numpy as jnp

from fbq_jax.core import threshold
from fbq_jax.core.noise import GRAD_STREAM, LHS_STREAM, RHS_STREAM
from fbq_jax.core.qtensor import QTensor
from fbq_jax.core.rows import FallbackCall, Matrices, Rows
from fbq_jax.core.spec import Spec
from fbq_jax.core.threshold import Scalars, Stats
from fbq_jax.core.weights_once import mark_constant
from fbq_jax.kernels.reference import Block, Layouts, Quantized
from fbq_jax.kernels.rounding import CallSeed
from fbq_jax.recipes.schema import Recipe


def quantize_lhs(
    spec: Spec,
    x: Rows,
    scalars: Scalars,
    blocks: jax.Array | None = None,
    *,
    save: bool,
    frozen: bool = False,
) -> tuple[Layouts, Quantized | None, Stats]:
    """Quantizes X.

    Args:
      spec: the static settings.
      x: the activation.
      scalars: the threshold and the seeds of the call.
      blocks: the number of blocks, as in ``threshold.apply``.
      save: whether the backward pass needs the colwise codes.
      frozen: whether the layer is frozen; its threshold, if it is unset, counts as 0.

    Returns:
      The codes in the layouts that the INT8 GEMMs read, the second term of the rowwise
      codes or None, and the stats.
    """
    recipe = spec.recipe
    colwise = recipe.drhs.quantizers[0] if save else None
    if recipe.criterion is not None:
        call = FallbackCall(spec, scalars, blocks, colwise, frozen)
        return x.quantize_fallback(call)
    stack = x.indices.size
    metric = jnp.zeros((stack, 0, 0), jnp.float32)
    stats = threshold.without_fallback(scalars, metric)
    lhs = x.quantize(
        spec,
        scalars.later_seed(stats),
        LHS_STREAM,
        recipe.lhs_block,
        rowwise=recipe.fwd.quantizers[0],
        colwise=colwise,
    )
    return lhs, None, stats


def quantize_rhs(
    spec: Spec,
    w: jax.Array | Quantized,
    seed: CallSeed,
    *,
    save: bool,
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
    if isinstance(w, Quantized):
        if rows is None:
            return Layouts(None, w)
        if rows == columns and rows.scales == "block":
            return Layouts(Quantized(w.codes.mT, w.scales.mT), w)
        codes = forward_qtensor(recipe, w, spec.fwd.block_shape[:0:-1])
        floats, columns = codes.dequantize(spec.rhs_dtype).mT, None
    else:
        floats = w

    def quantize(w: jax.Array, seed: CallSeed) -> Layouts:
        return Matrices(w).quantize(
            spec,
            seed,
            RHS_STREAM,
            recipe.rhs_block,
            ("rowwise", "colwise"),
            rowwise=rows,
            colwise=columns,
        )

    if not any(x and x.rounding == "stochastic" for x in (rows, columns)):
        seed = jnp.zeros((), jnp.uint32)  # not read, so codes depend on W only
    layouts = mark_constant(quantize)(floats, seed)
    return Layouts(layouts.rowwise, w) if isinstance(w, Quantized) else layouts


def forward_qtensor(recipe: Recipe, codes: Quantized, block: Block) -> QTensor:
    """Codes of the forward GEMM; ``block`` is theirs if K has several scales."""
    row = 1, codes.codes.shape[2] or 1  # max takes no symbolic size
    return QTensor(codes, None, block if recipe.fwd.splits_contraction else row)


def quantize_grad(spec: Spec, dy: Rows, seed: CallSeed, *, frozen: bool) -> Layouts:
    """Quantizes dY, ``[B, M, N]`` or rows in tiles, in the layouts of INT8 GEMMs.

    A frozen layer has no dW to read the colwise codes; ``noise.frozen_seed`` makes its
    seed.
    """
    recipe = spec.recipe
    return dy.quantize(
        spec,
        seed,
        GRAD_STREAM,
        recipe.grad_block,
        ("colwise",),
        rowwise=recipe.dlhs.quantizers[0],
        colwise=None if frozen else recipe.drhs.quantizers[1],
    )
