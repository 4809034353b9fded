"""Linear layers fused with the layers that feed them, without floats in between.

    a norm and a linear layer   rms_norm(x) . W
    a norm and a gated MLP      (silu(gate) * up) . W_down
                                where [gate, up] = rms_norm(x) . W_up

SwiGLU (arXiv 2002.05202) is the gate.  ``norm_mlp`` computes both.

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
from fbq_jax.core.matmul_vjp import SavedMatmul
from fbq_jax.core.nonlinear import SAVED_NAME, NormSpec, SavedNorm
from fbq_jax.core.quantize_operands import (
    GRAD_STREAM,
    LHS_STREAM,
    Spec,
    quantize_grad,
    seeds_of,
)
from fbq_jax.core.threshold import Scalars, Stats
from fbq_jax.kernels.packing import Packed
from fbq_jax.kernels.reference import Layouts, Quantized
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

    They need block scales in all three GEMMs and nearest rounding of X in the forward
    GEMM.  In dW, nothing falls back.  They always quantize: ``where_slower`` is
    ``"quantize"``.
    """
    return (
        recipe.in_blocks
        and recipe.fwd.lhs == "nearest"
        and not recipe.drhs.fallback
        and recipe.where_slower == "quantize"
    )


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
    op = functools.partial(ops.rms_norm_quantize, epsilon=spec.norm.epsilon)
    operands = x, jnp.broadcast_to(norm_scale, (len(x), *norm_scale.shape))
    y, stats, (normalized, rstd), saved = _quantize_and_multiply(
        spec, op, operands, weights[0], scalars[0], save=save
    )
    scale_row = jnp.expand_dims(norm_scale, range(x.ndim - 1))
    saved_norm = SavedNorm(normalized, rstd, scale_row)
    if len(weights) == 1:
        return (y, (stats,)), _SavedMLP(saved_norm, saved)
    y, down_stats, factors, saved_down = _quantize_and_multiply(
        spec, ops.silu_gate_quantize, (y,), weights[1], scalars[1], save=save
    )
    return (y, (stats, down_stats)), _SavedMLP(saved_norm, saved, factors, saved_down)


def _quantize_and_multiply(
    spec: FusedSpec,
    op: Callable[..., tuple[Any, ...]],
    operands: tuple[jax.Array, ...],
    w: jax.Array | Quantized,
    scalars: Scalars,
    *,
    save: bool,
) -> tuple[jax.Array, Stats, tuple[Any, ...], SavedMatmul | None]:
    """Multiplies the quantized output of a non-linear layer by w.

    Args:
      spec: static arguments.
      op: the op of ``fbq_jax.ops`` that computes and quantizes the layer's output.
      operands: the operands of ``op`` before its thresholds and seeds.
      w: the weight, one of those of ``norm_mlp``.
      scalars: the threshold and the seeds of the GEMM.
      save: whether there will be a backward pass.

    Returns:
      The product, the GEMM's stats, and the residuals of the layer and of the GEMM.
    """
    gemm, recipe, x = spec.gemm, spec.gemm.recipe, operands[0]
    operand, *residuals = op(
        *operands,
        jnp.broadcast_to(scalars.theta, x.shape[:1]),
        seeds_of(scalars.call_seed, LHS_STREAM, x),
        bits=spec.norm.bits,
        block=recipe.lhs_block,
        criterion=recipe.criterion,
        colwise=recipe.drhs.lhs if save and not isinstance(w, Quantized) else None,
        implementation=gemm.implementation,
    )
    residuals = checkpoint_name(tuple(residuals), SAVED_NAME)
    lhs = Layouts(operand.main, operand.colwise)
    residual, stats = threshold.apply(
        scalars,
        operand.metric,
        operand.residual,
        recipe,
        implementation=gemm.implementation,
    )
    seed = scalars.later_seed(stats)
    residuals_of_x = Layouts(residual, None)
    y, saved = matmul_vjp.forward(gemm, lhs, residuals_of_x, w, seed, save=save)
    return y, stats, residuals, saved


def _norm_mlp_bwd(
    spec: FusedSpec,
    saved: _SavedMLP,
    cotangents: tuple[jax.Array, tuple[Stats, ...]],
) -> tuple[jax.Array, jax.Array, tuple[jax.Array | None, ...], None]:
    dy, _ = cotangents
    gemm, recipe = spec.gemm, spec.gemm.recipe
    assert saved.up is not None
    frozen = saved.up.lhs is None
    dw_down: list[jax.Array | None] = []
    if saved.down is None or saved.gate is None:
        grad = quantize_grad(gemm, dy, saved.up.seed, frozen=frozen)
    else:
        grad = quantize_grad(gemm, dy, saved.down.seed, frozen=frozen)
        dhidden, *dw_down = matmul_vjp.backward(gemm, saved.down, grad)
        grad = ops.silu_gate_grad_quantize(
            dhidden,
            *saved.gate,
            seeds_of(saved.up.seed, GRAD_STREAM, dhidden),
            bits=spec.norm.bits,
            block=recipe.grad_block,
            rowwise=recipe.dlhs.lhs,
            colwise=recipe.drhs.rhs,
            sums=("colwise",) if gemm.bounds_sums else (),
            implementation=gemm.implementation,
        )
    dnormalized, dw = matmul_vjp.backward(gemm, saved.up, grad)
    dx, dscale = nonlinear.norm_bwd(
        spec.norm, saved.norm, dnormalized.astype(jnp.float32)
    )
    assert dscale is not None
    return dx.astype(gemm.lhs_dtype), dscale.reshape(-1), (dw, *dw_down), None


norm_mlp.defvjp(_norm_mlp, _norm_mlp_bwd)
