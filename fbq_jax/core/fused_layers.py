"""Linear layers fused with the layers that feed them, without floats in between.

    a norm and a linear layer   rms_norm(x) . W
    a norm and a gated MLP      (silu(gate) * up) . W_down
                                where [gate, up] = rms_norm(x) . W_up

SwiGLU (arXiv 2002.05202) is the gate.  ``norm_mlp`` computes both, and the second
without a norm for a mixture of experts.

The results equal ``fbq_jax.nonlinear`` followed by ``fbq_jax.core.gemms``, except
that a bfloat16 or float16 gate is rounded once instead of twice.  ``quantize`` takes
the norm and the gate as its source (``fbq_jax.kernels.layer_sources``), so the operands
of the GEMMs exist in memory only as INT8 values.  The backward pass reads the quantized
operands of each GEMM and the packed values of the norm and of the gate's two factors.
The only floats that it reads are scales and the norm's ``rstd``.

``fuses`` tells which recipes these layers support.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from fbq_jax.core import gemms, nonlinear
from fbq_jax.core.gemms import (
    MATRICES,
    Rows,
    SavedMatmul,
    Spec,
    quantize_activation,
    quantize_in_layouts,
)
from fbq_jax.core.nonlinear import SAVED_NAME, NormSpec, SavedNorm
from fbq_jax.core.threshold import GRAD_STREAM, Scalars, Stats, seeds_of
from fbq_jax.kernels.layer_sources import Gate, GateGrad, Norm
from fbq_jax.kernels.packing import Packed
from fbq_jax.kernels.quantized import Layouts
from fbq_jax.kernels.sources import Source
from fbq_jax.recipes.schema import Recipe


class FusedSpec(NamedTuple):
    """Static arguments: the GEMMs of each linear layer, and the norm.

    Attributes:
      layers: recipe, dtypes and implementation; layers differ in their recipes only,
        and ``lhs_dtype`` is the dtype of x.
      norm: epsilon and bits; ``centered`` is False.
    """

    layers: tuple[Spec, ...]
    norm: NormSpec


class _SavedMLP(NamedTuple):
    """The residuals of a norm or None and its linear layer; and of a gate and its own.

    ``gate`` are the packed factors of the gradients of gate and up.
    """

    norm: SavedNorm | None
    up: SavedMatmul | None
    gate: Packed | None = None
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
    norm_scale: jax.Array | None,
    weights: tuple[jax.Array | None, ...],
    codes: tuple[Layouts | None, ...],
    scalars: tuple[Scalars, ...],
    rows: tuple[Rows, Rows] = (MATRICES, MATRICES),
) -> tuple[jax.Array, tuple[Stats, ...]]:
    """Applies a norm and a linear layer; or, with two weights, a norm and a gated MLP.

    Args:
      spec: static arguments; x, the hidden layer and the output of an MLP share one
        dtype.
      x: bfloat16, float16 or float32 ``[B, M, K]`` or ``[B, G, R, K]``, as for
        ``gemms.matmul``.
      norm_scale: float32 ``[K]``; None for no norm in front of the MLP.
      weights: of the linear layer, float ``[B, K, N]``; or of the MLP, float
        ``[B, K, 2 F]``, the kernels of gate and up as ``layer_sources.join_gate_up``
        joins them, or without a norm up after gate, and ``[B, F, N]``.  A frozen layer
        has None.
      codes: the weights as they were quantized before; None to quantize them here.
      scalars: the threshold and the seeds of each GEMM.
      rows: how the rows of x, and those of the hidden layer, lie.

    Returns:
      ``[B, M, N]`` or ``[B, G, R, N]`` in the dtype of the layers, and the stats of
      each GEMM.
    """
    args = x, norm_scale, weights, codes, scalars, rows
    return _norm_mlp(spec, *args, save=False)[0]


def _norm_mlp(
    spec: FusedSpec,
    x: jax.Array,
    norm_scale: jax.Array | None,
    weights: tuple[jax.Array | None, ...],
    codes: tuple[Layouts | None, ...],
    scalars: tuple[Scalars, ...],
    rows: tuple[Rows, Rows],
    *,
    save: bool = True,
) -> tuple[tuple[jax.Array, tuple[Stats, ...]], _SavedMLP]:
    gemm, bits, saved_norm = spec.layers[0], spec.norm.bits, None
    if norm_scale is None:
        (y, stats), saved = gemms.matmul_fwd(
            gemm, x, weights[0], scalars[0], codes[0], rows[0], save=save
        )
    else:
        scales = jnp.broadcast_to(norm_scale, (len(x), *norm_scale.shape))
        norm = Norm(x, scales, spec.norm.epsilon, bits)
        _, _, indices = rows[0].stack(x)
        y, stats, (normalized, rstd), saved = _quantize_and_multiply(
            gemm, norm, indices, weights[0], codes[0], scalars[0], rows[0], save=save
        )
        scale_row = jnp.expand_dims(norm_scale, range(x.ndim - 1))
        saved_norm = SavedNorm(normalized, rstd, scale_row)
    if len(weights) == 1:
        return (y, (stats,)), _SavedMLP(saved_norm, saved)
    y, down_stats, factors, saved_down = _multiply_gated(
        spec.layers[1],
        y,
        weights[1],
        codes[1],
        scalars[1],
        rows[1],
        bits=bits,
        interleaved=norm_scale is not None,
        save=save,
    )
    return (y, (stats, down_stats)), _SavedMLP(saved_norm, saved, factors, saved_down)


def _multiply_gated(
    gemm: Spec,
    gate_up: jax.Array,
    w: jax.Array | None,
    codes: Layouts | None,
    scalars: Scalars,
    rows: Rows,
    *,
    bits: int,
    interleaved: bool,
    save: bool,
) -> tuple[jax.Array, Stats, Packed, SavedMatmul | None]:
    """Multiplies ``silu(gate) * up`` by w.

    Args:
      gemm: static arguments.
      gate_up: gate and up, the output of a GEMM.
      w: the weight, as in ``norm_mlp``.
      codes: its codes, as in ``norm_mlp``.
      scalars: the threshold and the seeds of the GEMM.
      rows: how the rows of ``gate_up`` lie.
      bits: bits per value that the gate saves, 4 to 12.
      interleaved: how gate and up are joined (``layer_sources.join_gate_up``).
      save: whether there will be a backward pass.

    Returns:
      The product, the GEMM's stats, and the residuals of the gate and of the GEMM.
    """
    values, row_counts, indices = rows.stack(gate_up)
    gate = Gate(values, row_counts, bits, interleaved)
    return _quantize_and_multiply(
        gemm, gate, indices, w, codes, scalars, rows, save=save
    )


def _quantize_and_multiply(
    gemm: Spec,
    source: Source,
    indices: jax.Array,
    w: jax.Array | None,
    codes: Layouts | None,
    scalars: Scalars,
    rows: Rows,
    *,
    save: bool,
) -> tuple[jax.Array, Stats, Any, SavedMatmul | None]:
    """Multiplies the quantized output of a non-linear layer by w.

    Args:
      gemm: static arguments.
      source: the layer.
      indices: the index of each matrix, which selects its noise.
      w: one weight, as in ``norm_mlp``.
      codes: its codes.
      scalars: the threshold and the seeds of the GEMM.
      rows: how the rows of the layer's input lie.
      save: whether there will be a backward pass.

    Returns:
      The product, the GEMM's stats, and the residuals of the layer and of the GEMM.
    """
    frozen = w is None
    layouts, stats = quantize_activation(
        gemm,
        source,
        indices,
        scalars,
        gemm.lhs(save=save and not frozen),
        rows,
        frozen=frozen,
    )
    residuals = checkpoint_name(layouts.saved, SAVED_NAME)
    seed = scalars.later_seed(stats)
    lhs = rows.unstack(layouts._replace(metric=None, saved=()))
    y, saved = gemms.forward(gemm, lhs, w, codes, seed, rows, save=save)
    return y, stats, residuals, saved


def _norm_mlp_bwd(
    spec: FusedSpec,
    saved: _SavedMLP,
    cotangents: tuple[jax.Array, tuple[Stats, ...]],
) -> tuple[Any, ...]:
    dy, _ = cotangents
    gemm = spec.layers[0]
    assert saved.up is not None
    dw_down: list[jax.Array | None] = []
    if saved.down is None or saved.gate is None:
        grad = gemms.quantize_cotangent(gemm, saved.up, dy)
    else:
        grad, *dw_down = _gated_bwd(
            spec.layers,
            saved.up,
            saved.gate,
            saved.down,
            dy,
            bits=spec.norm.bits,
            interleaved=saved.norm is not None,
        )
    dx, dw = gemms.backward(gemm, saved.up, grad)
    dscale = None
    if saved.norm is not None:
        dx, dscale = nonlinear.norm_bwd(spec.norm, saved.norm, dx.astype(jnp.float32))
        assert dscale is not None
        dx, dscale = dx.astype(gemm.lhs_dtype), dscale.reshape(-1)
    return dx, dscale, (dw, *dw_down), None, None, None


def _gated_bwd(
    layers: tuple[Spec, ...],
    up: SavedMatmul,
    gate: Packed,
    down: SavedMatmul,
    dy: jax.Array,
    *,
    bits: int,
    interleaved: bool,
) -> tuple[Layouts, jax.Array | None]:
    """The backward pass of ``_multiply_gated``.

    Args:
      layers: static arguments of the GEMMs before and after the gate.
      up: the residuals of the GEMM whose output is gate and up.
      gate: the residuals of the gate.
      down: the residuals of the GEMM after the gate.
      dy: the gradient of this GEMM's output.
      bits: as in ``_multiply_gated``.
      interleaved: as in ``_multiply_gated``.

    Returns:
      The quantized gradient of gate and up, as the GEMMs before the gate read it, and
      dW of the GEMM after the gate; None in a frozen layer.
    """
    before, after = layers
    grad = gemms.quantize_cotangent(after, down, dy)
    dhidden, dw = gemms.backward(after, down, grad)
    values, row_counts, indices = up.rows.stack(dhidden)
    seeds = seeds_of(gemms.grad_seed(up, dy), GRAD_STREAM, indices)
    source = GateGrad(values, gate, row_counts, bits, interleaved)
    plan = before.grad(frozen=up.lhs is None)
    quantized = quantize_in_layouts(before, source, seeds, plan)
    return up.rows.unstack(quantized), dw


norm_mlp.defvjp(_norm_mlp, _norm_mlp_bwd)
