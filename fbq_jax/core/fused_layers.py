"""Linear layers together with the layer before them, which leaves no floats behind.

    norm_matmul   rms_norm(x) . W
    gated_mlp     (silu(gate) * up) . W_down    where [gate, up] = rms_norm(x) . W_up

The numbers are those of ``fbq_jax.nonlinear`` and ``fbq_jax.core.matmul_vjp`` one after
another (but for a gate in bfloat16 or float16, which here is rounded once).  The
operands of the GEMMs come quantized from the ops of ``fbq_jax.kernels.fused_reference``
and are in no other form in memory.  Kept for the backward pass are INT8 codes of each
GEMM's operands, packed codes of the norm and of the gate's two factors, and no floats
but scales and the norm's ``rstd``.

A recipe with other scales than those of blocks, with a GEMM in floats, or that rounds X
stochastically in the forward GEMM, asks for what these ops do not give; ``fuses``
tells.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from fbq_jax import ops
from fbq_jax.core import matmul_vjp, nonlinear
from fbq_jax.core.dot_general import resolve
from fbq_jax.core.matmul_vjp import LHS_NAME, RHS_NAME
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
from fbq_jax.kernels.fused_reference import Operand
from fbq_jax.kernels.packing import Packed
from fbq_jax.kernels.reference import Layouts, Quantized
from fbq_jax.recipes.schema import Recipe


class Measured(NamedTuple):
    """The threshold that a GEMM used and the metric of each block of its lhs."""

    theta: jax.Array
    metric: jax.Array


def fuses(recipe: Recipe) -> bool:
    """Whether the layers here can follow a recipe."""
    return recipe.in_blocks and recipe.fwd.lhs == "nearest"


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def norm_matmul(
    spec: Spec,
    norm: NormSpec,
    x: jax.Array,
    norm_scale: jax.Array,
    w: jax.Array | Quantized,
    theta: jax.Array,
    seed: jax.Array,
) -> tuple[jax.Array, Measured]:
    """Multiplies the root mean square normalization of x with w.

    Args:
      spec: of the GEMM; ``lhs_dtype`` is that of x.
      norm: epsilon and bits; without means.
      x: bfloat16, float16 or float32 ``[B, M, K]`` or ``[B, G, R, K]``, as for
        ``matmul_vjp``.
      norm_scale: float32 ``[K]``.
      w: ``[B, K, N]``; of a frozen layer, its codes by columns.
      theta: float32 ``[]``; below 0, it is set from the operand's own blocks.
      seed: uint32 ``[]``, of the noise.

    Returns:
      ``[B, M, N]`` or ``[B, G, R, N]`` in the spec's dtype, and ``Measured``.
    """
    y, measured, _, _ = _norm_forward(
        spec, norm, x, norm_scale, w, theta, seed, save=False
    )
    return y, measured


class _SavedMatmul(NamedTuple):
    """X by columns, W by rows, and the seed of dY's noise."""

    lhs: Quantized
    rhs: Quantized
    seed: jax.Array


def _norm_forward(
    spec: Spec,
    norm: NormSpec,
    x: jax.Array,
    norm_scale: jax.Array,
    w: jax.Array | Quantized,
    theta: jax.Array,
    seed: jax.Array,
    *,
    save: bool,
) -> tuple[jax.Array, Measured, SavedNorm, tuple[Operand, Layouts]]:
    def layer(x: jax.Array) -> jax.Array:
        return nonlinear.rms_norm(x, norm_scale, epsilon=norm.epsilon, bits=norm.bits)

    theta = resolve(theta, x, spec.recipe, spec.implementation, layer=layer)
    operand, normalized, rstd = ops.rms_norm_quantize(
        x,
        jnp.broadcast_to(norm_scale, (len(x), *norm_scale.shape)),
        _thetas(theta, x),
        seeds_of(seed, LHS_STREAM, x),
        epsilon=norm.epsilon,
        bits=norm.bits,
        block=spec.recipe.lhs_block,
        criterion=spec.recipe.criterion,
        colwise=spec.recipe.drhs.lhs if save else None,
        implementation=spec.implementation,
    )
    y, rhs = _multiply(spec, operand, w, seed, save=save)
    normalized, rstd = checkpoint_name((normalized, rstd), SAVED_NAME)
    row = jnp.expand_dims(norm_scale, range(x.ndim - 1))
    saved = SavedNorm(normalized, rstd, row)
    return y, Measured(theta, operand.metric), saved, (operand, rhs)


def _thetas(theta: jax.Array, x: jax.Array) -> jax.Array:
    return jnp.broadcast_to(jnp.maximum(theta, 0.0), x.shape[:1])


def _multiply(
    spec: Spec,
    operand: Operand,
    w: jax.Array | Quantized,
    seed: jax.Array,
    *,
    save: bool,
) -> tuple[jax.Array, Layouts]:
    rhs = quantize_rhs(spec, w, seed, save=save)
    lhs = Layouts(operand.main, operand.colwise)
    return matmul_vjp.forward(spec, lhs, operand.residual, rhs), rhs


def _saved_matmul(operands: tuple[Operand, Layouts], seed: jax.Array) -> _SavedMatmul:
    operand, rhs = operands
    assert operand.colwise is not None
    assert rhs.rowwise is not None
    return _SavedMatmul(
        checkpoint_name(operand.colwise, LHS_NAME),
        checkpoint_name(rhs.rowwise, RHS_NAME),
        seed,
    )


def _norm_matmul_fwd(
    spec: Spec,
    norm: NormSpec,
    x: jax.Array,
    norm_scale: jax.Array,
    w: jax.Array | Quantized,
    theta: jax.Array,
    seed: jax.Array,
) -> tuple[tuple[jax.Array, Measured], tuple[SavedNorm, _SavedMatmul]]:
    y, measured, saved, operands = _norm_forward(
        spec, norm, x, norm_scale, w, theta, seed, save=True
    )
    return (y, measured), (saved, _saved_matmul(operands, seed))


def _norm_matmul_bwd(
    spec: Spec,
    norm: NormSpec,
    saved: tuple[SavedNorm, _SavedMatmul],
    cotangents: tuple[jax.Array, Measured],
) -> tuple[jax.Array, jax.Array, jax.Array, None, None]:
    dy, _ = cotangents
    grad = quantize_grad(spec, dy, saved[1].seed)
    return (*_norm_backward(spec, norm, *saved, grad), None, None)


def _norm_backward(
    spec: Spec, norm: NormSpec, saved: SavedNorm, codes: _SavedMatmul, grad: Layouts
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The gradients of x, gain and w."""
    dy = matmul_vjp.grad_of_lhs(spec, codes.rhs, grad)
    dw = matmul_vjp.grad_of_rhs(spec, codes.lhs, grad, codes.seed)
    dx, dgain = nonlinear.norm_bwd(norm, saved, dy.astype(jnp.float32))
    assert dgain is not None
    return dx.astype(spec.lhs_dtype), dgain.reshape(-1), dw


norm_matmul.defvjp(_norm_matmul_fwd, _norm_matmul_bwd)


class GatedSpecs(NamedTuple):
    """What is static of ``gated_mlp``: both GEMMs, of one recipe, and the norm."""

    up: Spec
    down: Spec
    norm: NormSpec


class _SavedGated(NamedTuple):
    norm: SavedNorm
    up: _SavedMatmul
    by_gate: Packed
    by_up: Packed
    down: _SavedMatmul


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def gated_mlp(
    specs: GatedSpecs,
    x: jax.Array,
    norm_scale: jax.Array,
    w_up: jax.Array | Quantized,
    w_down: jax.Array | Quantized,
    thetas: tuple[jax.Array, jax.Array],
    seeds: tuple[jax.Array, jax.Array],
) -> tuple[jax.Array, tuple[Measured, Measured]]:
    """A norm, SwiGLU (arXiv 2002.05202) and the GEMM that follows.

    Args:
      specs: what is static; ``down.lhs_dtype`` is ``up.dtype``.
      x: bfloat16, float16 or float32 ``[B, M, K]`` or ``[B, G, R, K]``, as for
        ``matmul_vjp``.
      norm_scale: float32 ``[K]``.
      w_up: ``[B, K, 2 F]``, of the gate and of up, as ``fused_reference.join_gate_up``
        puts them together; or codes, likewise.
      w_down: ``[B, F, N]``; or codes.
      thetas: of both GEMMs, float32 ``[]``; below 0, set from the operand's own blocks.
      seeds: of both GEMMs, uint32 ``[]``.

    Returns:
      ``[B, M, N]`` or ``[B, G, R, N]``, and ``Measured`` of both GEMMs.
    """
    return _gated_forward(
        specs, x, norm_scale, w_up, w_down, thetas, seeds, save=False
    )[0]


def _gated_forward(
    specs: GatedSpecs,
    x: jax.Array,
    norm_scale: jax.Array,
    w_up: jax.Array | Quantized,
    w_down: jax.Array | Quantized,
    thetas: tuple[jax.Array, jax.Array],
    seeds: tuple[jax.Array, jax.Array],
    *,
    save: bool,
) -> tuple[
    tuple[jax.Array, tuple[Measured, Measured]], tuple[SavedNorm, Packed, Packed, list]
]:
    def layer(gate_up: jax.Array) -> jax.Array:
        return nonlinear.silu_gate(
            *fused_reference.split_gate_up(gate_up), bits=specs.norm.bits
        )

    recipe = specs.up.recipe
    gate_up, up_measured, saved, up_operands = _norm_forward(
        specs.up,
        specs.norm,
        x,
        norm_scale,
        w_up,
        thetas[0],
        seeds[0],
        save=save,
    )
    theta = resolve(thetas[1], gate_up, recipe, specs.down.implementation, layer=layer)
    operand, by_gate, by_up = ops.silu_gate_quantize(
        gate_up,
        _thetas(theta, x),
        seeds_of(seeds[1], LHS_STREAM, x),
        bits=specs.norm.bits,
        block=recipe.lhs_block,
        criterion=recipe.criterion,
        colwise=recipe.drhs.lhs if save else None,
        implementation=specs.down.implementation,
    )
    y, rhs = _multiply(specs.down, operand, w_down, seeds[1], save=save)
    measured = up_measured, Measured(theta, operand.metric)
    return (y, measured), (saved, by_gate, by_up, [up_operands, (operand, rhs)])


def _gated_mlp_fwd(
    specs: GatedSpecs,
    x: jax.Array,
    norm_scale: jax.Array,
    w_up: jax.Array | Quantized,
    w_down: jax.Array | Quantized,
    thetas: tuple[jax.Array, jax.Array],
    seeds: tuple[jax.Array, jax.Array],
) -> tuple[tuple[jax.Array, tuple[Measured, Measured]], _SavedGated]:
    out, (norm, by_gate, by_up, operands) = _gated_forward(
        specs, x, norm_scale, w_up, w_down, thetas, seeds, save=True
    )
    by_gate, by_up = checkpoint_name((by_gate, by_up), SAVED_NAME)
    up, down = (_saved_matmul(*pair) for pair in zip(operands, seeds, strict=True))
    return out, _SavedGated(norm, up, by_gate, by_up, down)


def _gated_mlp_bwd(
    specs: GatedSpecs,
    saved: _SavedGated,
    cotangents: tuple[jax.Array, tuple[Measured, Measured]],
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array, None, None]:
    dy, _ = cotangents
    recipe = specs.up.recipe
    grad = quantize_grad(specs.down, dy, saved.down.seed)
    hidden = matmul_vjp.grad_of_lhs(specs.down, saved.down.rhs, grad)
    dw_down = matmul_vjp.grad_of_rhs(specs.down, saved.down.lhs, grad, saved.down.seed)
    grad = ops.silu_gate_grad_quantize(
        hidden,
        saved.by_gate,
        saved.by_up,
        seeds_of(saved.up.seed, GRAD_STREAM, hidden),
        bits=specs.norm.bits,
        block=recipe.grad_block,
        rowwise=recipe.dlhs.lhs,
        colwise=recipe.drhs.rhs,
        implementation=specs.up.implementation,
    )
    dx, dgain, dw_up = _norm_backward(specs.up, specs.norm, saved.norm, saved.up, grad)
    return dx, dgain, dw_up, dw_down, None, None


gated_mlp.defvjp(_gated_mlp_fwd, _gated_mlp_bwd)
