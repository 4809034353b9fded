"""The three GEMMs of a linear layer in INT8, as a ``jax.custom_vjp``.

    Y = R(X) . Q(W)        dX = S(dY) . Q(W)'        dW = S(X)' . S(dY)

with ``Q``, ``R`` and ``S`` nearest codes, nearest codes plus residual, and stochastic
codes, as the recipe has them (arXiv 2503.08040).  The forward pass leaves
two sets of codes and scales for the backward pass, X's and W's, and no floats.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from fbq_jax import qtensor
from fbq_jax.kernels import rounding
from fbq_jax.qtensor import QTensor
from fbq_jax.recipe import Recipe

# checkpoint_names of what the forward pass saves for the backward pass.
LHS_NAME = "fbq_lhs"
RHS_NAME = "fbq_rhs"

# Streams of the noise of one call.
_LHS_STREAM, _RHS_STREAM, _GRAD_STREAM = range(3)


class Spec(NamedTuple):
    """What is static: the recipe, and the dtypes of Y, dX and dW."""

    recipe: Recipe
    dtype: Any
    lhs_dtype: Any
    rhs_dtype: Any


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def matmul(
    spec: Spec, x: jax.Array, w: jax.Array, theta: jax.Array, seed: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Multiplies and measures.

    Args:
      spec: what is static.
      x: ``[B, M, K]``, the activation.
      w: ``[B, K, N]``, the weight.
      theta: float32 ``[]``, the threshold of fallback.
      seed: uint32 ``[]``, of the noise of stochastic rounding.

    Returns:
      ``[B, M, N]``, and the criterion's metric of each block of x, float32
      ``[B, ceil(M/m), ceil(K/k)]`` (``[B, 0, 0]`` without a criterion).
    """
    lhs, metric = _quantize_lhs(spec.recipe, x, theta, seed)
    rhs = _quantize_rhs(spec.recipe, w, seed)
    return qtensor.matmul(lhs, rhs, spec.dtype), metric


def _matmul_fwd(
    spec: Spec, x: jax.Array, w: jax.Array, theta: jax.Array, seed: jax.Array
) -> tuple[tuple[jax.Array, jax.Array], tuple[QTensor, QTensor, jax.Array]]:
    recipe = spec.recipe
    lhs, metric = _quantize_lhs(recipe, x, theta, seed)
    rhs = _quantize_rhs(recipe, w, seed)
    y = qtensor.matmul(lhs, rhs, spec.dtype)
    if recipe.drhs.lhs == recipe.fwd.lhs:
        saved = QTensor(lhs.main, None, lhs.block)
    else:
        saved = qtensor.quantize(
            x,
            block=recipe.lhs_block,
            rounding=recipe.drhs.lhs,
            seeds=_seeds(seed, _LHS_STREAM, x),
        )
    saved, rhs = checkpoint_name(saved, LHS_NAME), checkpoint_name(rhs, RHS_NAME)
    return (y, metric), (saved, rhs, seed)


def _matmul_bwd(
    spec: Spec,
    saved: tuple[QTensor, QTensor, jax.Array],
    cotangents: tuple[jax.Array, jax.Array],
) -> tuple[jax.Array, jax.Array, None, None]:
    lhs, rhs, seed = saved
    dy, _ = cotangents
    grad = qtensor.quantize(
        dy,
        block=spec.recipe.grad_block,
        rounding=spec.recipe.dlhs.lhs,
        seeds=_seeds(seed, _GRAD_STREAM, dy),
    )
    dx = qtensor.matmul(grad, rhs.mT, spec.lhs_dtype)
    dw = qtensor.matmul(lhs.mT, grad, spec.rhs_dtype)
    return dx, dw, None, None


matmul.defvjp(_matmul_fwd, _matmul_bwd)


def _quantize_lhs(
    recipe: Recipe, x: jax.Array, theta: jax.Array, seed: jax.Array
) -> tuple[QTensor, jax.Array]:
    block = recipe.lhs_block
    if recipe.criterion is not None:
        return qtensor.quantize_fallback(
            x, theta, block=block, criterion=recipe.criterion
        )
    seeds = _seeds(seed, _LHS_STREAM, x)
    lhs = qtensor.quantize(x, block=block, rounding=recipe.fwd.lhs, seeds=seeds)
    return lhs, jnp.zeros((x.shape[0], 0, 0), jnp.float32)


def _quantize_rhs(recipe: Recipe, w: jax.Array, seed: jax.Array) -> QTensor:
    return qtensor.quantize(
        w,
        block=recipe.rhs_block,
        rounding=recipe.fwd.rhs,
        seeds=_seeds(seed, _RHS_STREAM, w),
    )


def _seeds(seed: jax.Array, stream: int, x: jax.Array) -> jax.Array:
    """One seed for each matrix of the stack ``x [B, ...]``."""
    index = jnp.arange(x.shape[0], dtype=jnp.uint32)
    return rounding.fold(rounding.fold(seed, stream), index)
