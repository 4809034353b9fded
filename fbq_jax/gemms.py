"""The three GEMMs of a linear layer in INT8, as a ``jax.custom_vjp``.

    Y = R(X) . Q(W)        dX = S(dY) . Q(W)'        dW = S(X)' . S(dY)

with ``Q``, ``R`` and ``S`` nearest codes, nearest codes plus residual, and stochastic
codes, as the recipe has them (arXiv 2503.08040).  The forward pass leaves two sets of
codes and scales for the backward pass, X's and W's, and no floats.

Both operands of a GEMM are contiguous along its contraction, as tensor cores take them:
X is needed by rows for Y and by columns for dW, W by columns for Y and by rows for dX,
dY by rows for dX and by columns for dW.  One op gives both, unless the backward GEMMs
have scales of their own (``backward_scales="row"``): then X and W are quantized again.
"""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from fbq_jax import dispatch
from fbq_jax.kernels.reference import Layouts, Quantized
from fbq_jax.kernels.rounding import Rounding, fold
from fbq_jax.recipe import Recipe

# checkpoint_names of what the forward pass saves for the backward pass.
LHS_NAME = "fbq_lhs"
RHS_NAME = "fbq_rhs"

# Streams of the noise of one call.
LHS_STREAM, RHS_STREAM, GRAD_STREAM = range(3)


class Spec(NamedTuple):
    """What is static: the recipe, the dtypes of Y, dX and dW, who computes."""

    recipe: Recipe
    dtype: Any
    lhs_dtype: Any
    rhs_dtype: Any
    implementation: str | None


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def matmul(
    spec: Spec, x: jax.Array, w: jax.Array, theta: jax.Array, seed: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Multiplies and measures.

    Args:
      spec: what is static.
      x: ``[B, M, K]``, the activation; or ``[B, G, R, K]``, where M is two axes and
        R a multiple of the recipe's side of a block along M.
      w: ``[B, K, N]``, the weight.
      theta: float32 ``[]``, the threshold of fallback.
      seed: uint32 ``[]``, of the noise of stochastic rounding.

    Returns:
      ``[B, M, N]`` or ``[B, G, R, N]``, and the criterion's metric of each block of x,
      float32 ``[B, ceil(M/m), ceil(K/k)]`` or ``[B, G, R/m, ceil(K/k)]`` (``[B, 0, 0]``
      without a criterion).
    """
    lhs, residual, metric = quantize_lhs(spec, x, theta, seed, columns=None)
    rhs = quantize_rhs(spec, w, seed, rows=None)
    return forward(spec, lhs, residual, rhs), metric


def _matmul_fwd(
    spec: Spec, x: jax.Array, w: jax.Array, theta: jax.Array, seed: jax.Array
) -> tuple[
    tuple[jax.Array, jax.Array], tuple[Quantized | None, Quantized | None, jax.Array]
]:
    recipe = spec.recipe
    if recipe.backward_scales == "block":
        columns, rows = recipe.drhs.lhs, recipe.dlhs.rhs
        lhs, residual, metric = quantize_lhs(spec, x, theta, seed, columns=columns)
        rhs = quantize_rhs(spec, w, seed, rows=rows)
        saved_lhs, saved_rhs = lhs.columns, rhs.rows
    else:
        lhs, residual, metric = quantize_lhs(spec, x, theta, seed, columns=None)
        rhs = quantize_rhs(spec, w, seed, rows=None)
        saved_lhs = dispatch.quantize_vectors(
            x,
            seeds_of(seed, LHS_STREAM, x),
            rows=None,
            columns=recipe.drhs.lhs,
            implementation=spec.implementation,
        ).columns
        saved_rhs = dispatch.quantize_vectors(
            w,
            seeds_of(seed, RHS_STREAM, w),
            rows=recipe.dlhs.rhs,
            columns=None,
            implementation=spec.implementation,
        ).rows
    y = forward(spec, lhs, residual, rhs)
    saved_lhs = checkpoint_name(saved_lhs, LHS_NAME)
    saved_rhs = checkpoint_name(saved_rhs, RHS_NAME)
    return (y, metric), (saved_lhs, saved_rhs, seed)


def _matmul_bwd(
    spec: Spec,
    saved: tuple[Quantized, Quantized, jax.Array],
    cotangents: tuple[jax.Array, jax.Array],
) -> tuple[jax.Array, jax.Array, None, None]:
    lhs, rhs, seed = saved
    dy, _ = cotangents
    grad = quantize_grad(spec, dy, seed)
    dx, dw = backward(spec, lhs, rhs, grad)
    return dx, dw, None, None


matmul.defvjp(_matmul_fwd, _matmul_bwd)


def forward(
    spec: Spec, lhs: Layouts, residual: Quantized | None, rhs: Layouts
) -> jax.Array:
    """Y, of X by rows and W by columns."""
    assert lhs.rows is not None
    assert rhs.columns is not None
    return dispatch.matmul(
        lhs.rows,
        residual,
        rhs.columns,
        blocks=spec.recipe.sides,
        dtype=spec.dtype,
        implementation=spec.implementation,
    )


def quantize_lhs(
    spec: Spec,
    x: jax.Array,
    theta: jax.Array,
    seed: jax.Array,
    *,
    columns: Rounding | None,
) -> tuple[Layouts, Quantized | None, jax.Array]:
    """X by rows and, where asked for, by columns; its residual; its blocks' metric."""
    recipe, seeds = spec.recipe, seeds_of(seed, LHS_STREAM, x)
    if recipe.criterion is None:
        lhs = dispatch.quantize(
            x,
            seeds,
            block=recipe.lhs_block,
            rows=recipe.fwd.lhs,
            columns=columns,
            implementation=spec.implementation,
        )
        return lhs, None, jnp.zeros((x.shape[0], 0, 0), jnp.float32)
    main, residual, metric, transposed = dispatch.quantize_fallback(
        x,
        jnp.broadcast_to(theta, x.shape[:1]),
        seeds,
        block=recipe.lhs_block,
        criterion=recipe.criterion,
        columns=columns,
        implementation=spec.implementation,
    )
    return Layouts(main, transposed), residual, metric


def quantize_rhs(
    spec: Spec, w: jax.Array, seed: jax.Array, *, rows: Rounding | None
) -> Layouts:
    """W by columns and, where asked for, by rows."""
    return dispatch.quantize(
        w,
        seeds_of(seed, RHS_STREAM, w),
        block=spec.recipe.rhs_block,
        rows=rows,
        columns=spec.recipe.fwd.rhs,
        implementation=spec.implementation,
    )


def seeds_of(seed: jax.Array, stream: int, x: jax.Array) -> jax.Array:
    """One seed, uint32 ``[B]``, for each matrix of the stack ``x [B, ...]``."""
    index = jnp.arange(x.shape[0], dtype=jnp.uint32)
    return fold(fold(seed, stream), index)


def quantize_grad(spec: Spec, dy: jax.Array, seed: jax.Array) -> Layouts:
    """The codes of dY, by rows and by columns."""
    recipe, seeds = spec.recipe, seeds_of(seed, GRAD_STREAM, dy)
    if recipe.backward_scales == "block":
        return dispatch.quantize(
            dy,
            seeds,
            block=recipe.grad_block,
            rows=recipe.dlhs.lhs,
            columns=recipe.drhs.rhs,
            implementation=spec.implementation,
        )
    return dispatch.quantize_vectors(
        dy,
        seeds,
        rows=recipe.dlhs.lhs,
        columns=recipe.drhs.rhs,
        implementation=spec.implementation,
    )


def backward(
    spec: Spec, lhs: Quantized, rhs: Quantized, grad: Layouts
) -> tuple[jax.Array, jax.Array]:
    """The gradients dX and dW, of X by columns, W by rows and dY."""
    assert grad.rows is not None
    assert grad.columns is not None
    if spec.recipe.backward_scales == "block":
        m, k, n = spec.recipe.sides
        dlhs_blocks, drhs_blocks = (m, n, k), (k, m, n)
    else:
        *rows_axes, columns = (max(1, size) for size in grad.rows.codes.shape[1:])
        rows = math.prod(rows_axes)
        dlhs_blocks, drhs_blocks = (1, columns, 1), (1, rows, 1)
    dx = dispatch.matmul(
        grad.rows,
        None,
        rhs,
        blocks=dlhs_blocks,
        dtype=spec.lhs_dtype,
        implementation=spec.implementation,
    )
    dw = dispatch.matmul(
        lhs,
        None,
        grad.columns,
        blocks=drhs_blocks,
        dtype=spec.rhs_dtype,
        implementation=spec.implementation,
    )
    return dx, dw
