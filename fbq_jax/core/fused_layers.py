"""Linear layers fused with the layers that feed them, without floats in between.

    a norm and a linear layer   rms_norm(x) . W
    a norm and a gated MLP      (silu(gate) * up) . W_down
                                where [gate, up] = rms_norm(x) . W_up

SwiGLU (arXiv 2002.05202) is the gate.  ``norm_mlp`` computes both, and
``fbq_jax.core.fused_experts`` the second without a norm, for a mixture of experts.

The results equal ``fbq_jax.nonlinear`` followed by ``fbq_jax.core.matmul_vjp``, except
that a bfloat16 or float16 gate is rounded once instead of twice.  The fused
quantization ops of ``fbq_jax.kernels.fused_reference`` write the GEMMs' operands, so
these exist in memory only as INT8 values.  The backward pass reads the quantized
operands of each GEMM and the packed values of the norm and of the gate's two factors.
The only floats that it reads are scales and the norm's ``rstd``.

``fuses`` tells which recipes these layers support.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from fbq_jax import ops
from fbq_jax.core import matmul_vjp, nonlinear, threshold
from fbq_jax.core.gemms import DENSE, Gemms
from fbq_jax.core.matmul_vjp import SavedMatmul
from fbq_jax.core.noise import GRAD_STREAM, LHS_STREAM, seeds_of
from fbq_jax.core.nonlinear import SAVED_NAME, NormSpec, SavedNorm
from fbq_jax.core.rows import MatrixStack
from fbq_jax.core.spec import Spec
from fbq_jax.core.threshold import Scalars, Stats
from fbq_jax.kernels.fused_reference import GateQuantized, NormQuantized
from fbq_jax.kernels.packing import Packed
from fbq_jax.kernels.reference import FallbackQuantized, Layouts, Quantized
from fbq_jax.kernels.rounding import Seeds
from fbq_jax.recipes.schema import Recipe


class FusedSpec(NamedTuple):
    """Static arguments: the GEMMs, which share one spec, and the norm.

    Attributes:
      gemm: recipe, dtypes and implementation; ``lhs_dtype`` is the dtype of x.
      norm: epsilon and bits; ``centered`` is False.
    """

    gemm: Spec
    norm: NormSpec


class _SavedMLP(NamedTuple):
    """The residuals of a norm and its linear layer; and of a gate and its own, or None.

    ``gate`` are the packed factors of the gradients of gate and up.
    """

    norm: SavedNorm
    up: SavedMatmul | None
    gate: tuple[Packed, Packed] | None = None
    down: SavedMatmul | None = None


def fuses(recipe: Recipe) -> bool:
    """Whether the fused layers support a recipe.

    They need INT8 with block scales in all three GEMMs; or, in INT8 or FP8, a scale per
    row of a block for the lhs of each GEMM.  X is rounded to nearest in the forward
    GEMM.  They always quantize: ``where_slower`` is ``"quantize"``.

    Raises:
      TypeError: ``recipe`` is not a ``Recipe``.
    """
    if not isinstance(recipe, Recipe):
        raise TypeError(
            f"fuses takes a Recipe, such as fbq_jax.recipes.fallback; got {recipe!r}"
        )
    return (
        (recipe.in_blocks or _in_row_blocks(recipe))
        and recipe.fwd.lhs == "nearest"
        and recipe.where_slower == "quantize"
    )


def _in_row_blocks(recipe: Recipe) -> bool:
    """Whether both outputs of the fused ops have scales per row of a block."""
    gemms = recipe.fwd, recipe.dlhs, recipe.drhs
    if any(gemm.in_floats or not gemm.splits_contraction for gemm in gemms):
        return False
    return {gemm.scales[0] for gemm in gemms} == {"row_block"}


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def norm_mlp(
    spec: FusedSpec,
    x: jax.Array,
    norm_scale: jax.Array,
    weights: tuple[jax.Array | Quantized, ...],
    scalars: tuple[Scalars, ...],
) -> tuple[jax.Array, tuple[Stats, ...]]:
    """Applies a norm and a linear layer; or, with two weights, a norm and a gated MLP.

    Args:
      spec: static arguments; x, the hidden layer and the output of an MLP share one
        dtype.
      x: bfloat16, float16 or float32 ``[B, M, K]`` or ``[B, G, R, K]``, as for
        ``matmul_vjp.matmul``.
      norm_scale: float32 ``[K]``.
      weights: of the linear layer, float ``[B, K, N]``; or of the MLP, float
        ``[B, K, 2 F]``, the kernels of gate and up as ``fused_reference.join_gate_up``
        joins them, and ``[B, F, N]``.  A frozen layer has colwise INT8 values.
      scalars: the threshold and the seeds of each GEMM.

    Returns:
      ``[B, M, N]`` or ``[B, G, R, N]`` in ``spec.gemm.dtype``, and the stats of each
      GEMM.
    """
    return _norm_mlp(spec, x, norm_scale, weights, scalars, save=False)[0]


def _norm_mlp(
    spec: FusedSpec,
    x: jax.Array,
    norm_scale: jax.Array,
    weights: tuple[jax.Array | Quantized, ...],
    scalars: tuple[Scalars, ...],
    *,
    save: bool = True,
) -> tuple[tuple[jax.Array, tuple[Stats, ...]], _SavedMLP]:
    gemm, bits = spec.gemm, spec.norm.bits
    norm = (
        ops.rms_norm_quantize
        if gemm.recipe.in_blocks
        else ops.rms_norm_quantize_row_blocks
    )
    op = functools.partial(
        norm,
        x,
        jnp.broadcast_to(norm_scale, (len(x), *norm_scale.shape)),
        epsilon=spec.norm.epsilon,
        bits=bits,
    )
    y, stats, (normalized, rstd), saved = _quantize_and_multiply(
        gemm, op, DENSE.stack(x), weights[0], scalars[0], DENSE, save=save
    )
    scale_row = jnp.expand_dims(norm_scale, range(x.ndim - 1))
    saved_norm = SavedNorm(normalized, rstd, scale_row)
    if len(weights) == 1:
        return (y, (stats,)), _SavedMLP(saved_norm, saved)
    y, down_stats, factors, saved_down = multiply_gated(
        gemm, y, weights[1], scalars[1], bits=bits, save=save
    )
    return (y, (stats, down_stats)), _SavedMLP(saved_norm, saved, factors, saved_down)


def multiply_gated(
    gemm: Spec,
    gate_up: jax.Array,
    w: jax.Array | Quantized,
    scalars: Scalars,
    gemms: Gemms = DENSE,
    *,
    bits: int,
    interleaved: bool = True,
    save: bool,
) -> tuple[jax.Array, Stats, tuple[Packed, Packed], SavedMatmul | None]:
    """Multiplies ``silu(gate) * up`` by w.

    Args:
      gemm: static arguments.
      gate_up: gate and up, the output of a GEMM.
      w: the weight, as in ``norm_mlp``.
      scalars: the threshold and the seeds of the GEMM.
      gemms: runs the GEMM.
      bits: bits per value that the gate saves, 4 to 12.
      interleaved: how gate and up are joined (``fused_reference.join_gate_up``).
      save: whether there will be a backward pass.

    Returns:
      The product, the GEMM's stats, and the residuals of the gate and of the GEMM.
    """
    matrices = gemms.stack(gate_up)

    def op(theta: jax.Array, seeds: Seeds, **options: Any) -> GateQuantized:
        return ops.silu_gate_quantize(
            matrices.values,
            theta,
            seeds,
            matrices.row_counts,
            bits=bits,
            interleaved=interleaved,
            **options,
        )

    if not gemm.recipe.in_blocks:
        assert matrices.row_counts is None
        assert interleaved
        op = functools.partial(
            ops.silu_gate_quantize_row_blocks, matrices.values, bits=bits
        )
    return _quantize_and_multiply(gemm, op, matrices, w, scalars, gemms, save=save)


def _quantize_and_multiply(
    gemm: Spec,
    op: Callable[..., NormQuantized | GateQuantized],
    x: MatrixStack,
    w: jax.Array | Quantized,
    scalars: Scalars,
    gemms: Gemms,
    *,
    save: bool,
) -> tuple[jax.Array, Stats, Any, SavedMatmul | None]:
    """Multiplies the quantized output of a non-linear layer by w.

    Args:
      gemm: static arguments.
      op: computes and quantizes the layer's output, given thresholds, seeds and the
        options of ``ops.quantize_fallback``; or, unless the recipe has all scales per
        block, given seeds and the options of ``ops.quantize_row_blocks``.
      x: the layer's input.
      w: the weight, one of those of ``norm_mlp``.
      scalars: the threshold and the seeds of the GEMM.
      gemms: runs the GEMM.
      save: whether there will be a backward pass.

    Returns:
      The product, the GEMM's stats, and the residuals of the layer and of the GEMM.
    """
    recipe, frozen = gemm.recipe, isinstance(w, Quantized)
    run = functools.partial(
        op, block=recipe.lhs_block, implementation=gemm.implementation
    )
    seeds = seeds_of(scalars.call_seed, LHS_STREAM, x.indices)
    colwise = recipe.drhs.lhs if save and not frozen else None
    if recipe.in_blocks:
        theta = jnp.broadcast_to(scalars.theta, x.indices.shape)
        operand, *residuals = run(
            theta, seeds, criterion=recipe.criterion, colwise=colwise
        )
    else:
        operand, *residuals = run(
            seeds, rowwise=recipe.fwd.lhs, colwise=colwise, dtype=recipe.codes
        )
    if isinstance(operand, Layouts):
        assert operand.rowwise is not None
        no_metric = jnp.zeros((x.indices.size, 0, 0), jnp.float32)
        operand = FallbackQuantized(operand.rowwise, None, no_metric, operand.colwise)
    residuals = checkpoint_name(tuple(residuals), SAVED_NAME)
    residual, stats = threshold.apply(
        scalars,
        operand.metric,
        operand.residual,
        recipe,
        blocks=gemms.count_blocks(gemm, operand.main.codes),
        frozen=frozen,
        implementation=gemm.implementation,
    )
    seed = scalars.later_seed(stats)
    lhs, residual = gemms.unstack((Layouts(operand.main, operand.colwise), residual))
    y, saved = matmul_vjp.forward(gemm, lhs, residual, w, seed, gemms, save=save)
    return y, stats, residuals, saved


def _norm_mlp_bwd(
    spec: FusedSpec,
    saved: _SavedMLP,
    cotangents: tuple[jax.Array, tuple[Stats, ...]],
) -> tuple[jax.Array, jax.Array, tuple[jax.Array | None, ...], None]:
    dy, _ = cotangents
    gemm = spec.gemm
    assert saved.up is not None
    dw_down: list[jax.Array | None] = []
    if saved.down is None or saved.gate is None:
        grad = matmul_vjp.quantize_cotangent(gemm, saved.up, dy)
    else:
        grad, *dw_down = gated_bwd(
            gemm, saved.up, saved.gate, saved.down, dy, bits=spec.norm.bits
        )
    dnormalized, dw = matmul_vjp.backward(gemm, saved.up, grad)
    dx, dscale = nonlinear.norm_bwd(
        spec.norm, saved.norm, dnormalized.astype(jnp.float32)
    )
    assert dscale is not None
    return dx.astype(gemm.lhs_dtype), dscale.reshape(-1), (dw, *dw_down), None


def gated_bwd(
    gemm: Spec,
    up: SavedMatmul,
    gate: tuple[Packed, Packed],
    down: SavedMatmul,
    dy: jax.Array,
    *,
    bits: int,
    interleaved: bool = True,
) -> tuple[Layouts, jax.Array | None]:
    """The backward pass of ``multiply_gated``.

    Args:
      gemm: static arguments.
      up: the residuals of the GEMM whose output are gate and up.
      gate: those of the gate.
      down: those of the GEMM after the gate.
      dy: the gradient of its output.
      bits: as in ``multiply_gated``.
      interleaved: as in ``multiply_gated``.

    Returns:
      The quantized gradient of gate and up, as the GEMMs before the gate read it, and
      dW of the GEMM after the gate; None in a frozen layer.
    """
    recipe = gemm.recipe
    grad = matmul_vjp.quantize_cotangent(gemm, down, dy)
    dhidden, dw = matmul_vjp.backward(gemm, down, grad)
    matrices = up.gemms.stack(dhidden)
    frozen = up.lhs is None
    seeds = seeds_of(matmul_vjp.grad_seed(up, dy), GRAD_STREAM, matrices.indices)
    operands = matrices.values, *gate, seeds
    colwise_in_blocks = recipe.drhs.scales[1] == "block" and not frozen
    options = {
        "bits": bits,
        "block": recipe.grad_block,
        "rowwise": recipe.dlhs.lhs,
        "colwise": None if frozen else recipe.drhs.rhs,
        "sums": ("colwise",) if gemm.bounds_sums and colwise_in_blocks else (),
        "implementation": gemm.implementation,
    }
    if recipe.in_blocks:
        quantized = ops.silu_gate_grad_quantize(
            *operands, matrices.row_counts, interleaved=interleaved, **options
        )
    else:
        quantized = ops.silu_gate_grad_quantize_row_blocks(
            *operands,
            colwise_in_blocks=colwise_in_blocks,
            dtype=recipe.codes,
            **options,
        )
    return up.gemms.unstack(quantized), dw


norm_mlp.defvjp(_norm_mlp, _norm_mlp_bwd)
