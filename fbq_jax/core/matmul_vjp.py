"""The three GEMMs of a linear layer, as a ``jax.custom_vjp``.

    Y = X . W        dX = dY . W'        dW = X' . dY

each in INT8 or in floats, as the recipe has it.  The forward pass leaves for the
backward pass what its GEMMs read of X and W: codes and scales, and floats only where a
GEMM is in floats.
"""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from fbq_jax import ops
from fbq_jax.core.qtensor import QTensor
from fbq_jax.core.quantize_operands import (
    SUM_STREAM,
    Spec,
    quantize_grad,
    quantize_lhs,
    quantize_rhs,
    seeds_of,
)
from fbq_jax.kernels.reference import Block, Layouts, Quantized
from fbq_jax.recipes.schema import Gemm

# checkpoint_names of the codes that the forward pass saves for the backward pass.
LHS_NAME = "fbq_lhs"
RHS_NAME = "fbq_rhs"


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def matmul(
    spec: Spec,
    x: jax.Array,
    w: jax.Array | Quantized,
    theta: jax.Array,
    seed: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """Multiplies and measures.

    Args:
      spec: what is static.
      x: ``[B, M, K]``, the activation; or ``[B, G, R, K]``, where M is two axes and
        R a multiple of the recipe's side of a block along M.
      w: ``[B, K, N]``, the weight; of a frozen layer, its codes by columns.
      theta: float32 ``[]``, the threshold of fallback.
      seed: uint32 ``[]``, of the noise of stochastic rounding.

    Returns:
      ``[B, M, N]`` or ``[B, G, R, N]``, and the criterion's metric of each block of x,
      float32 ``[B, ceil(M/m), ceil(K/k)]`` or ``[B, G, R/m, ceil(K/k)]`` (``[B, 0, 0]``
      without a criterion).
    """
    lhs, residual, metric = quantize_lhs(spec, x, theta, seed, save=False)
    rhs = quantize_rhs(spec, w, seed, save=False)
    return _output(spec, x, w, lhs, residual, rhs), metric


class _Saved(NamedTuple):
    """X and W as the backward GEMMs read them, and the seed of dY's noise.

    X is codes by columns, or in floats as it lies; or its forward codes, by rows.  W is
    codes by rows, or in floats as it lies; or its forward codes, by columns.
    """

    lhs: Quantized | jax.Array
    rhs: Quantized | jax.Array
    seed: jax.Array


def _matmul_fwd(
    spec: Spec,
    x: jax.Array,
    w: jax.Array | Quantized,
    theta: jax.Array,
    seed: jax.Array,
) -> tuple[tuple[jax.Array, jax.Array], _Saved]:
    dlhs, drhs = spec.recipe.dlhs, spec.recipe.drhs
    lhs, residual, metric = quantize_lhs(spec, x, theta, seed, save=True)
    rhs = quantize_rhs(spec, w, seed, save=True)
    assert not isinstance(w, Quantized)  # quantize_rhs saves nothing of codes
    y = _output(spec, x, w, lhs, residual, rhs)
    saved_lhs = _to_save(drhs, x, lhs.rowwise, lhs.colwise, LHS_NAME)
    saved_rhs = _to_save(dlhs, w, rhs.colwise, rhs.rowwise, RHS_NAME)
    return (y, metric), _Saved(saved_lhs, saved_rhs, seed)


def _output(
    spec: Spec,
    x: jax.Array,
    w: jax.Array | Quantized,
    lhs: Layouts,
    residual: Quantized | None,
    rhs: Layouts,
) -> jax.Array:
    """Y, in INT8 or in floats."""
    if spec.recipe.fwd.in_floats:
        assert not isinstance(w, Quantized)
        return _float_product(x, w, spec.dtype)
    return forward(spec, lhs, residual, rhs)


def _to_save(
    gemm: Gemm,
    floats: jax.Array,
    forward_codes: Quantized | None,
    codes: Quantized | None,
    name: str,
) -> Quantized | jax.Array:
    """What a backward GEMM reads of X or W.

    Floats have no name for a checkpoint policy: ``save_codes`` saves none.
    """
    if gemm.in_floats and gemm.keeps == "floats":
        return floats
    saved = forward_codes if gemm.in_floats else codes
    assert saved is not None
    return checkpoint_name(saved, name)


def _matmul_bwd(
    spec: Spec, saved: _Saved, cotangents: tuple[jax.Array, jax.Array]
) -> tuple[jax.Array, jax.Array, None, None]:
    lhs, rhs, seed = saved
    dy, _ = cotangents
    grad = quantize_grad(spec, dy, seed)
    if spec.recipe.dlhs.in_floats:
        dx = _float_product(dy, _transposed_rhs(spec, rhs), spec.lhs_dtype)
    else:
        assert isinstance(rhs, Quantized)
        dx = grad_of_lhs(spec, rhs, grad)
    if spec.recipe.drhs.in_floats:
        dw = _float_product(_transposed_lhs(spec, lhs), dy, spec.rhs_dtype)
    else:
        assert isinstance(lhs, Quantized)
        dw = grad_of_rhs(spec, lhs, grad, seed)
    return dx, dw, None, None


matmul.defvjp(_matmul_fwd, _matmul_bwd)


def forward(
    spec: Spec, lhs: Layouts, residual: Quantized | None, rhs: Layouts
) -> jax.Array:
    """Y, of X by rows and W by columns."""
    assert lhs.rowwise is not None
    assert rhs.colwise is not None
    gemm, sides = spec.recipe.fwd, spec.recipe.block_shape
    return _product(spec, gemm, sides, lhs.rowwise, residual, rhs.colwise, spec.dtype)


def grad_of_lhs(spec: Spec, rhs: Quantized, grad: Layouts) -> jax.Array:
    """The gradient dX, of W and dY by rows."""
    assert grad.rowwise is not None
    m, k, n = spec.recipe.block_shape
    gemm, sides = spec.recipe.dlhs, (m, n, k)
    return _product(spec, gemm, sides, grad.rowwise, None, rhs, spec.lhs_dtype)


def grad_of_rhs(
    spec: Spec, lhs: Quantized, grad: Layouts, seed: jax.Array
) -> jax.Array:
    """The gradient dW, of X and dY by columns."""
    assert grad.colwise is not None
    m, k, n = spec.recipe.block_shape
    gemm, sides = spec.recipe.drhs, (k, m, n)
    operands = lhs, None, grad.colwise
    seeds = None
    if gemm.reduce == "int8":
        seeds = seeds_of(seed, SUM_STREAM, lhs.codes)
    return _product(spec, gemm, sides, *operands, spec.rhs_dtype, seeds)


def _product(
    spec: Spec,
    gemm: Gemm,
    sides: tuple[int, int, int],
    lhs: Quantized,
    residual: Quantized | None,
    rhs: Quantized,
    dtype: Any,
    seeds: jax.Array | None = None,
) -> jax.Array:
    """A product in INT8, of blocks with these sides if the GEMM has block scales."""
    first = 2 if gemm.shards == 1 else 3
    contraction = max(1, math.prod(rhs.codes.shape[first:]))
    return ops.matmul(
        lhs,
        residual,
        rhs,
        block_shape=sides if gemm.in_blocks else (1, contraction, 1),
        dtype=dtype,
        reduce=gemm.reduce,
        seeds=seeds,
        implementation=spec.implementation,
    )


def _float_product(lhs: jax.Array, rhs: jax.Array, dtype: Any) -> jax.Array:
    """``[B, M, K]`` times ``[B, K, N]`` in their own floats, rounded once.

    Devices sum their parts of it in ``dtype``, unless its operands are of a larger one.
    """
    common = lhs.dtype if lhs.dtype == rhs.dtype else jnp.float32
    return lax.dot_general(
        lhs.astype(common),
        rhs.astype(common),
        (((2,), (1,)), ((0,), (0,))),
        preferred_element_type=jnp.promote_types(common, dtype),
    ).astype(dtype)


def _transposed_lhs(spec: Spec, lhs: Quantized | jax.Array) -> jax.Array:
    """X' in floats, of what was saved for a product in floats."""
    if isinstance(lhs, Quantized):
        lhs = _dequantized(spec, lhs, spec.recipe.lhs_block, spec.lhs_dtype)
    return lhs.mT


def _transposed_rhs(spec: Spec, rhs: Quantized | jax.Array) -> jax.Array:
    """W' in floats, likewise."""
    if isinstance(rhs, Quantized):
        k, n = spec.recipe.rhs_block
        return _dequantized(spec, rhs, (n, k), spec.rhs_dtype)
    return rhs.mT


def _dequantized(spec: Spec, x: Quantized, block: Block, dtype: Any) -> jax.Array:
    """The values of the forward GEMM's codes; ``block`` is that of block scales."""
    row = 1, max(1, x.codes.shape[2])
    of_codes = block if spec.recipe.fwd.in_blocks else row
    return QTensor(x, None, of_codes).dequantize(dtype)
