"""The three GEMMs of a linear layer, as a ``jax.custom_vjp``.

    Y = X . W        dX = dY . W'        dW = X' . dY

The recipe decides whether each GEMM runs in INT8 or unquantized.  The forward pass
saves X and W in the form that the backward GEMMs read: INT8 codes and scales, or the
operand itself for an unquantized GEMM.
"""

import dataclasses
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
    Product,
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


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class DenseProducts:
    """Runs the INT8 GEMMs of a dense layer, on stacks of matrices.

    ``fbq_jax.core.ragged_dot.GroupedProducts`` does the same for groups of rows.
    """

    def split_rows(self, x: jax.Array) -> jax.Array:
        """X or dY in the form that the ops quantize."""
        return x

    def multiply(
        self,
        product: Product,
        lhs: Quantized,
        residual: Quantized | None,
        rhs: Quantized,
        seeds: jax.Array | None = None,
    ) -> jax.Array:
        """Multiplies lhs and its residual with rhs, for Y or dX.

        ``seeds`` are for the noise of a sum in INT8.
        """
        gemm = product.gemm
        first = 2 if gemm.shards == 1 else 3
        contraction = max(1, math.prod(rhs.codes.shape[first:]))
        vectors = 1, contraction, 1
        return ops.matmul(
            lhs,
            residual,
            rhs,
            block_shape=product.block_shape if gemm.in_blocks else vectors,
            dtype=product.dtype,
            reduce=gemm.reduce,
            seeds=seeds,
            implementation=product.implementation,
        )

    def contract_rows(
        self, product: Product, lhs: Quantized, rhs: Quantized, seed: jax.Array
    ) -> jax.Array:
        """Multiplies X' with dY, for dW."""
        seeds = None
        if product.gemm.reduce == "int8":
            seeds = seeds_of(seed, SUM_STREAM, lhs.codes)
        return self.multiply(product, lhs, None, rhs, seeds)


DENSE = DenseProducts()


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def matmul(
    spec: Spec,
    x: jax.Array,
    w: jax.Array | Quantized,
    theta: jax.Array,
    seed: jax.Array,
    products: DenseProducts = DENSE,
) -> tuple[jax.Array, jax.Array]:
    """Multiplies X with W and measures the blocks of X.

    Args:
      spec: the static settings.
      x: ``[B, M, K]``, the activation; or ``[B, G, R, K]``, with M as two axes and R a
        multiple of the block's rows.
      w: ``[B, K, N]``, the weight; in a frozen layer, its colwise codes.
      theta: float32 ``[]``, the threshold of fallback.
      seed: uint32 ``[]``, seeds stochastic rounding.
      products: runs the GEMMs.

    Returns:
      ``[B, M, N]`` or ``[B, G, R, N]``, and the criterion's metric of each block of x,
      float32 ``[B, ceil(M/m), ceil(K/k)]`` or ``[B, G, R/m, ceil(K/k)]`` (``[B, 0, 0]``
      without a criterion).
    """
    return _matmul(spec, x, w, theta, seed, products, save=False)[0]


class SavedMatmul(NamedTuple):
    """The values that the forward pass saves for the backward pass.

    Attributes:
      lhs: the colwise codes of X for a dW in INT8; otherwise X itself or its rowwise
        forward codes.
      rhs: the rowwise codes of W for a dX in INT8; otherwise W itself or its colwise
        forward codes.
      seed: seeds the noise of dY.
      products: runs the GEMMs.
    """

    lhs: Quantized | jax.Array
    rhs: Quantized | jax.Array
    seed: jax.Array
    products: DenseProducts = DENSE


def _matmul(
    spec: Spec,
    x: jax.Array,
    w: jax.Array | Quantized,
    theta: jax.Array,
    seed: jax.Array,
    products: DenseProducts,
    *,
    save: bool = True,
) -> tuple[tuple[jax.Array, jax.Array], SavedMatmul | None]:
    recipe, rows = spec.recipe, products.split_rows(x)
    lhs, residual, metric = quantize_lhs(spec, rows, theta, seed, save=save)
    rhs = quantize_rhs(spec, w, seed, save=save)
    if recipe.fwd.in_floats:
        assert not isinstance(w, Quantized)  # a frozen forward GEMM is in INT8
        y = _float_matmul(x, w, spec.dtype)
    else:
        y = forward(spec, lhs, residual, rhs, products)
    if not save:
        return (y, metric), None
    saved_lhs = _to_save(recipe.drhs, x, lhs.rowwise, lhs.colwise, LHS_NAME)
    saved_rhs = _to_save(recipe.dlhs, w, rhs.colwise, rhs.rowwise, RHS_NAME)
    return (y, metric), SavedMatmul(saved_lhs, saved_rhs, seed, products)


def _to_save(
    gemm: Gemm,
    operand: jax.Array | Quantized,
    forward_codes: Quantized | None,
    codes: Quantized | None,
    name: str,
) -> Quantized | jax.Array:
    """The form in which a backward GEMM reads X or W.

    Only codes get a checkpoint name, so ``save_codes`` recomputes an unquantized
    operand.
    """
    if gemm.in_floats and gemm.keeps == "floats":
        return operand
    saved = forward_codes if gemm.in_floats else codes
    assert saved is not None
    return checkpoint_name(saved, name)


def _matmul_bwd(
    spec: Spec, saved: SavedMatmul, cotangents: tuple[jax.Array, jax.Array]
) -> tuple[jax.Array, jax.Array, None, None, None]:
    dy, _ = cotangents
    grad = quantize_grad(spec, saved.products.split_rows(dy), saved.seed)
    if spec.recipe.dlhs.in_floats:
        dx = _float_matmul(dy, _transposed_rhs(spec, saved.rhs), spec.lhs_dtype)
    else:
        dx = grad_of_lhs(spec, saved, grad)
    if spec.recipe.drhs.in_floats:
        dw = _float_matmul(_transposed_lhs(spec, saved.lhs), dy, spec.rhs_dtype)
    else:
        dw = grad_of_rhs(spec, saved, grad)
    return dx, dw, None, None, None


matmul.defvjp(_matmul, _matmul_bwd)


def forward(
    spec: Spec,
    lhs: Layouts,
    residual: Quantized | None,
    rhs: Layouts,
    products: DenseProducts = DENSE,
) -> jax.Array:
    """Y, from the rowwise codes of X and the colwise codes of W."""
    assert lhs.rowwise is not None
    assert rhs.colwise is not None
    return products.multiply(spec.fwd, lhs.rowwise, residual, rhs.colwise)


def grad_of_lhs(spec: Spec, saved: SavedMatmul, grad: Layouts) -> jax.Array:
    """The gradient dX, from the rowwise codes of W and dY."""
    assert isinstance(saved.rhs, Quantized)
    assert grad.rowwise is not None
    return saved.products.multiply(spec.dlhs, grad.rowwise, None, saved.rhs)


def grad_of_rhs(spec: Spec, saved: SavedMatmul, grad: Layouts) -> jax.Array:
    """The gradient dW, from the colwise codes of X and dY."""
    assert isinstance(saved.lhs, Quantized)
    assert grad.colwise is not None
    return saved.products.contract_rows(spec.drhs, saved.lhs, grad.colwise, saved.seed)


def _float_matmul(lhs: jax.Array, rhs: jax.Array, dtype: Any) -> jax.Array:
    """``[B, M, K]`` times ``[B, K, N]``, unquantized, rounded once to ``dtype``.

    Devices sum their partial products in ``dtype`` or the operands' dtype, whichever is
    wider.
    """
    common = lhs.dtype if lhs.dtype == rhs.dtype else jnp.float32
    return lax.dot_general(
        lhs.astype(common),
        rhs.astype(common),
        (((2,), (1,)), ((0,), (0,))),
        preferred_element_type=jnp.promote_types(common, dtype),
    ).astype(dtype)


def _transposed_lhs(spec: Spec, lhs: Quantized | jax.Array) -> jax.Array:
    """X', dequantized if its codes were saved."""
    if isinstance(lhs, Quantized):
        lhs = _dequantize(spec, lhs, spec.recipe.lhs_block, spec.lhs_dtype)
    return lhs.mT


def _transposed_rhs(spec: Spec, rhs: Quantized | jax.Array) -> jax.Array:
    """W', dequantized if its codes were saved; colwise codes are W' already."""
    if isinstance(rhs, Quantized):
        k, n = spec.recipe.rhs_block
        return _dequantize(spec, rhs, (n, k), spec.rhs_dtype)
    return rhs.mT


def _dequantize(spec: Spec, x: Quantized, block: Block, dtype: Any) -> jax.Array:
    """The values of forward codes; ``block`` is their block if scales are per block."""
    row = 1, max(1, x.codes.shape[2])
    code_block = block if spec.recipe.fwd.in_blocks else row
    return QTensor(x, None, code_block).dequantize(dtype)
