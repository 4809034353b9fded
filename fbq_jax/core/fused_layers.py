"""Linear layers fused with the layers that feed them, without floats in between.

    norm_matmul   rms_norm(x) . W
    gated_mlp     (silu(gate) * up) . W_down    where [gate, up] = rms_norm(x) . W_up

The results equal ``fbq_jax.nonlinear`` followed by ``fbq_jax.core.matmul_vjp``, except
that a bfloat16 or float16 gate is rounded once instead of twice.  The fused
quantization ops of ``fbq_jax.kernels.fused_reference`` write the GEMMs' operands, so
these exist in memory only as INT8 values.  The backward pass reads the quantized
operands of each GEMM and the packed values of the norm and of the gate's two factors.
The only floats that it reads are scales and the norm's ``rstd``.

``fuses`` tells which recipes these layers support.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from fbq_jax import ops
from fbq_jax.core import matmul_vjp, nonlinear
from fbq_jax.core.dot_general import resolve
from fbq_jax.core.matmul_vjp import LHS_NAME, RHS_NAME, SavedMatmul
from fbq_jax.core.nonlinear import SAVED_NAME, NormSpec, SavedNorm
from fbq_jax.core.quantize_operands import (
    GRAD_STREAM,
    LHS_STREAM,
    Spec,
    quantize_grad,
    quantize_rhs,
    seeds_of,
)
from fbq_jax.kernels import fused_reference
from fbq_jax.kernels.packing import Packed
from fbq_jax.kernels.reference import FallbackQuantized, Layouts, Quantized
from fbq_jax.recipes.schema import Recipe


class FusedSpec(NamedTuple):
    """Static arguments: the GEMMs, which share one spec, and the norm.

    Attributes:
      gemm: recipe, dtypes and implementation; ``lhs_dtype`` is the dtype of x.
      norm: epsilon and bits; ``centered`` is False.
    """

    gemm: Spec
    norm: NormSpec


class GemmScalars(NamedTuple):
    """Traced scalars of one GEMM.

    Attributes:
      theta: float32 ``[]``, the fallback threshold; below 0, it is set from the
        operand's own blocks.
      seed: uint32 ``[]``, seeds the noise of stochastic rounding.
    """

    theta: jax.Array
    seed: jax.Array


class GemmStats(NamedTuple):
    """Measurements of one GEMM in the forward pass.

    Attributes:
      theta: float32 ``[]``, the threshold in use.
      metric: float32, the metric of each block of the left operand.
    """

    theta: jax.Array
    metric: jax.Array


class _SavedGated(NamedTuple):
    norm: SavedNorm
    up: SavedMatmul | None
    gate_factor: Packed
    up_factor: Packed
    down: SavedMatmul | None


def fuses(recipe: Recipe) -> bool:
    """Whether the fused layers support a recipe.

    They need block scales in all three GEMMs and nearest rounding of X in the forward
    GEMM.
    """
    return recipe.in_blocks and recipe.fwd.lhs == "nearest"


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def norm_matmul(
    spec: FusedSpec,
    x: jax.Array,
    norm_scale: jax.Array,
    w: jax.Array | Quantized,
    scalars: tuple[GemmScalars],
) -> tuple[jax.Array, tuple[GemmStats]]:
    """Multiplies the root mean square normalization of x by w.

    Args:
      spec: static arguments.
      x: bfloat16, float16 or float32 ``[B, M, K]`` or ``[B, G, R, K]``, as for
        ``matmul_vjp.matmul``.
      norm_scale: float32 ``[K]``.
      w: float ``[B, K, N]``, or the colwise INT8 values of a frozen layer.
      scalars: threshold and seed of the GEMM.

    Returns:
      ``[B, M, N]`` or ``[B, G, R, N]`` in ``spec.gemm.dtype``, and the GEMM's stats.
    """
    return _norm_matmul(spec, x, norm_scale, w, scalars, save=False)[0]


def _norm_matmul(
    spec: FusedSpec,
    x: jax.Array,
    norm_scale: jax.Array,
    w: jax.Array | Quantized,
    scalars: tuple[GemmScalars],
    *,
    save: bool = True,
) -> tuple[tuple[jax.Array, tuple[GemmStats]], tuple[SavedNorm, SavedMatmul | None]]:
    theta, operand, saved_norm = _quantize_norm(spec, x, norm_scale, *scalars, save)
    y, saved = _multiply(spec.gemm, operand, w, scalars[0].seed, save=save)
    return (y, (GemmStats(theta, operand.metric),)), (saved_norm, saved)


def _quantize_norm(
    spec: FusedSpec,
    x: jax.Array,
    norm_scale: jax.Array,
    scalars: GemmScalars,
    save: bool,
) -> tuple[jax.Array, FallbackQuantized, SavedNorm]:
    """The threshold, the norm's quantized output, and the norm's residuals."""
    gemm, norm = spec
    recipe = gemm.recipe

    def layer(x: jax.Array) -> jax.Array:
        return nonlinear.rms_norm(x, norm_scale, epsilon=norm.epsilon, bits=norm.bits)

    theta = resolve(gemm, scalars.theta, x, layer=layer)
    operand, normalized, rstd = ops.rms_norm_quantize(
        x,
        jnp.broadcast_to(norm_scale, (len(x), *norm_scale.shape)),
        _thetas(theta, x),
        seeds_of(scalars.seed, LHS_STREAM, x),
        epsilon=norm.epsilon,
        bits=norm.bits,
        block=recipe.lhs_block,
        criterion=recipe.criterion,
        colwise=recipe.drhs.lhs if save else None,
        implementation=gemm.implementation,
    )
    normalized, rstd = checkpoint_name((normalized, rstd), SAVED_NAME)
    scale_row = jnp.expand_dims(norm_scale, range(x.ndim - 1))
    return theta, operand, SavedNorm(normalized, rstd, scale_row)


def _thetas(theta: jax.Array, x: jax.Array) -> jax.Array:
    """One threshold, at least 0, for each matrix of the stack x."""
    return jnp.broadcast_to(jnp.maximum(theta, 0.0), x.shape[:1])


def _multiply(
    spec: Spec,
    operand: FallbackQuantized,
    w: jax.Array | Quantized,
    seed: jax.Array,
    *,
    save: bool,
) -> tuple[jax.Array, SavedMatmul | None]:
    """Y, and the GEMM's residuals if ``save``."""
    rhs = quantize_rhs(spec, w, seed, save=save)
    lhs = Layouts(operand.main, operand.colwise)
    y = matmul_vjp.forward(spec, lhs, operand.residual, rhs)
    if not save:
        return y, None
    assert lhs.colwise is not None
    assert rhs.rowwise is not None
    saved_lhs = checkpoint_name(lhs.colwise, LHS_NAME)
    saved_rhs = checkpoint_name(rhs.rowwise, RHS_NAME)
    return y, SavedMatmul(saved_lhs, saved_rhs, seed)


def _norm_matmul_bwd(
    spec: FusedSpec,
    saved: tuple[SavedNorm, SavedMatmul],
    cotangents: tuple[jax.Array, tuple[GemmStats]],
) -> tuple[jax.Array, jax.Array, jax.Array, None]:
    saved_norm, saved_matmul = saved
    dy, _ = cotangents
    grad = quantize_grad(spec.gemm, dy, saved_matmul.seed)
    dnormalized, dw = _matmul_grads(spec.gemm, saved_matmul, grad)
    return (*_norm_grads(spec, saved_norm, dnormalized), dw, None)


def _matmul_grads(
    spec: Spec, saved: SavedMatmul, grad: Layouts
) -> tuple[jax.Array, jax.Array]:
    """Multiplies the quantized dY: returns dX and dW."""
    dx = matmul_vjp.grad_of_lhs(spec, saved, grad)
    return dx, matmul_vjp.grad_of_rhs(spec, saved, grad)


def _norm_grads(
    spec: FusedSpec, saved: SavedNorm, dy: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """The gradients of x and ``norm_scale``."""
    dx, dscale = nonlinear.norm_bwd(spec.norm, saved, dy.astype(jnp.float32))
    assert dscale is not None
    return dx.astype(spec.gemm.lhs_dtype), dscale.reshape(-1)


norm_matmul.defvjp(_norm_matmul, _norm_matmul_bwd)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def gated_mlp(
    spec: FusedSpec,
    x: jax.Array,
    norm_scale: jax.Array,
    w_up: jax.Array | Quantized,
    w_down: jax.Array | Quantized,
    scalars: tuple[GemmScalars, GemmScalars],
) -> tuple[jax.Array, tuple[GemmStats, GemmStats]]:
    """Applies a norm, SwiGLU (arXiv 2002.05202) and the down projection.

    Args:
      spec: static arguments; x, the hidden layer and the output share one dtype.
      x: bfloat16, float16 or float32 ``[B, M, K]`` or ``[B, G, R, K]``, as for
        ``matmul_vjp.matmul``.
      norm_scale: float32 ``[K]``.
      w_up: float ``[B, K, 2 F]``, the kernels of gate and up as
        ``fused_reference.join_gate_up`` joins them, or the colwise INT8 values of a
        frozen layer.
      w_down: float ``[B, F, N]``, or the colwise INT8 values of a frozen layer.
      scalars: thresholds and seeds of both GEMMs.

    Returns:
      ``[B, M, N]`` or ``[B, G, R, N]``, and the stats of both GEMMs.
    """
    return _gated_mlp(spec, x, norm_scale, w_up, w_down, scalars, save=False)[0]


def _gated_mlp(
    spec: FusedSpec,
    x: jax.Array,
    norm_scale: jax.Array,
    w_up: jax.Array | Quantized,
    w_down: jax.Array | Quantized,
    scalars: tuple[GemmScalars, GemmScalars],
    *,
    save: bool = True,
) -> tuple[tuple[jax.Array, tuple[GemmStats, GemmStats]], _SavedGated]:
    (gate_up, up_stats), (saved_norm, saved_up) = _norm_matmul(
        spec, x, norm_scale, w_up, scalars[:1], save=save
    )
    theta, operand, factors = _quantize_gate(spec, gate_up, scalars[1], save)
    y, saved_down = _multiply(spec.gemm, operand, w_down, scalars[1].seed, save=save)
    stats = *up_stats, GemmStats(theta, operand.metric)
    saved = _SavedGated(saved_norm, saved_up, *factors, saved_down)
    return (y, stats), saved


def _quantize_gate(
    spec: FusedSpec, gate_up: jax.Array, scalars: GemmScalars, save: bool
) -> tuple[jax.Array, FallbackQuantized, tuple[Packed, Packed]]:
    """The threshold, the gate's quantized output, and the factors of its gradients."""
    gemm, norm = spec
    recipe = gemm.recipe

    def layer(gate_up: jax.Array) -> jax.Array:
        gate, up = fused_reference.split_gate_up(gate_up)
        return nonlinear.silu_gate(gate, up, bits=norm.bits)

    theta = resolve(gemm, scalars.theta, gate_up, layer=layer)
    operand, *factors = ops.silu_gate_quantize(
        gate_up,
        _thetas(theta, gate_up),
        seeds_of(scalars.seed, LHS_STREAM, gate_up),
        bits=norm.bits,
        block=recipe.lhs_block,
        criterion=recipe.criterion,
        colwise=recipe.drhs.lhs if save else None,
        implementation=gemm.implementation,
    )
    return theta, operand, checkpoint_name(tuple(factors), SAVED_NAME)


def _gated_mlp_bwd(
    spec: FusedSpec,
    saved: _SavedGated,
    cotangents: tuple[jax.Array, tuple[GemmStats, GemmStats]],
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array, None]:
    dy, _ = cotangents
    gemm, recipe = spec.gemm, spec.gemm.recipe
    assert saved.up is not None
    assert saved.down is not None
    grad = quantize_grad(gemm, dy, saved.down.seed)
    dhidden, dw_down = _matmul_grads(gemm, saved.down, grad)
    dgate_up = ops.silu_gate_grad_quantize(
        dhidden,
        saved.gate_factor,
        saved.up_factor,
        seeds_of(saved.up.seed, GRAD_STREAM, dhidden),
        bits=spec.norm.bits,
        block=recipe.grad_block,
        rowwise=recipe.dlhs.lhs,
        colwise=recipe.drhs.rhs,
        implementation=gemm.implementation,
    )
    dnormalized, dw_up = _matmul_grads(gemm, saved.up, dgate_up)
    return (*_norm_grads(spec, saved.norm, dnormalized), dw_up, dw_down, None)


gated_mlp.defvjp(_gated_mlp, _gated_mlp_bwd)
