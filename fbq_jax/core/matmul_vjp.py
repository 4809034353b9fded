"""The three GEMMs of a linear layer, as a ``jax.custom_vjp``.

    Y = X . W        dX = dY . W'        dW = X' . dY

The recipe decides whether each GEMM runs in INT8 or unquantized.  The forward pass
saves X and W in the form that the backward GEMMs read: INT8 codes and scales, or the
operand itself for an unquantized GEMM.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from fbq_jax import ops
from fbq_jax.core import threshold
from fbq_jax.core.gemms import DENSE, Gemms
from fbq_jax.core.noise import frozen_seed
from fbq_jax.core.quantize_operands import (
    forward_qtensor,
    quantize_grad,
    quantize_lhs,
    quantize_rhs,
)
from fbq_jax.core.spec import Spec
from fbq_jax.core.threshold import Scalars, Stats
from fbq_jax.kernels.reference import Layouts, Quantized
from fbq_jax.kernels.rounding import CallSeed
from fbq_jax.ops import products
from fbq_jax.recipes.schema import Gemm
from fbq_jax.sharding.manual_axes import warn_of_copies

# checkpoint_names of the codes that the forward pass saves for the backward pass, and
# of the seed of dY's noise.  The seed of a layer with state is ready after its forward
# quantization, which a backward pass that recomputes the seed would have to repeat.
LHS_NAME = "fbq_lhs"
RHS_NAME = "fbq_rhs"
SEED_NAME = "fbq_seed"


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def matmul(
    spec: Spec,
    x: jax.Array,
    w: jax.Array | Quantized,
    scalars: Scalars,
    gemms: Gemms = DENSE,
) -> tuple[jax.Array, Stats]:
    """Multiplies X with W and measures the blocks of X.

    Args:
      spec: the static settings.
      x: ``[B, M, K]``, the activation; or ``[B, G, R, K]``, with M as two axes and R a
        multiple of the block's rows.
      w: ``[B, K, N]``, the weight; in a frozen layer, its colwise codes.
      scalars: the threshold and the seeds of the call.
      gemms: runs the INT8 GEMMs.

    Returns:
      ``[B, M, N]`` or ``[B, G, R, N]``, and the stats.  Their metric is float32
      ``[B, ceil(M/m), ceil(K/k)]`` or ``[B, G, R/m, ceil(K/k)]`` (``[B, 0, 0]`` without
      a criterion).
    """
    return matmul_fwd(spec, x, w, scalars, gemms, save=False)[0]


class SavedMatmul(NamedTuple):
    """The values that the forward pass saves for the backward pass.

    Attributes:
      lhs: the colwise codes of X for a dW in INT8; otherwise X itself or its rowwise
        forward codes.  None in a frozen layer, which has no dW.
      rhs: the rowwise codes of W for a dX in INT8; otherwise W itself or its colwise
        forward codes.
      seed: seeds the noise of dY.
      gemms: runs the INT8 GEMMs.
    """

    lhs: Quantized | jax.Array | None
    rhs: Quantized | jax.Array
    seed: CallSeed
    gemms: Gemms = DENSE


def matmul_fwd(
    spec: Spec,
    x: jax.Array,
    w: jax.Array | Quantized,
    scalars: Scalars,
    gemms: Gemms,
    *,
    save: bool = True,
) -> tuple[tuple[jax.Array, Stats], SavedMatmul | None]:
    """The results of ``matmul``, and what its backward pass reads if ``save``."""
    frozen = isinstance(w, Quantized)
    if isinstance(w, Quantized) and not save and gemms == DENSE:
        y = _quantize_matmul(spec, x, w, scalars)
        if y is not None:
            # Nothing reads the stats of a frozen layer: its state does not change.
            metric = jnp.zeros((x.shape[0], 0, 0), jnp.float32)
            return (y, threshold.without_fallback(scalars, metric)), None
    blocks = gemms.count_blocks(spec, x)
    lhs, residual, stats = quantize_lhs(
        spec,
        gemms.tile_rows(x),
        scalars,
        blocks,
        save=save and not frozen,
        frozen=frozen,
    )
    seed = scalars.later_seed(stats)
    y, saved = forward(spec, lhs, residual, w, seed, gemms, x=x, save=save)
    return (y, stats), saved


def _quantize_matmul(
    spec: Spec,
    x: jax.Array,
    w: Quantized,
    scalars: Scalars,
) -> jax.Array | None:
    """Y of a frozen layer, if one op is to quantize X and to multiply; or None."""
    gemm, block_shape, dtype, implementation = spec.fwd
    quantizer = gemm.quantizers[0]
    assert quantizer is not None  # a frozen forward GEMM is in INT8
    how: dict[str, Any] = {
        "block_shape": block_shape,
        "criterion": spec.recipe.criterion,
        "implementation": implementation,
    }
    if (
        quantizer.rounding != "nearest"
        or not gemm.splits_contraction
        or not products.quantizes_in_matmul(x, w, **how)
    ):
        return None
    theta = jnp.broadcast_to(scalars.theta, x.shape[:1])
    return ops.quantize_matmul(x, theta, w, dtype=dtype, reduce=gemm.reduce, **how)


def forward(
    spec: Spec,
    lhs: Layouts,
    residual: Quantized | None,
    w: jax.Array | Quantized,
    seed: CallSeed,
    gemms: Gemms = DENSE,
    *,
    x: jax.Array | None = None,
    save: bool,
) -> tuple[jax.Array, SavedMatmul | None]:
    """Y, and what the backward pass reads if ``save``.

    Args:
      spec: the static settings.
      lhs: the codes of X.
      residual: the second term of the rowwise codes of X, or None.
      w: the weight, as in ``matmul``.
      seed: seeds stochastic rounding of W and dY.
      gemms: runs the INT8 GEMMs.
      x: the activation, as in ``matmul``; read by unquantized GEMMs only.
      save: whether there will be a backward pass.
    """
    recipe, rhs = spec.recipe, quantize_rhs(spec, w, seed, save=save)
    if recipe.fwd.in_floats:
        assert x is not None
        assert not isinstance(w, Quantized)  # a frozen forward GEMM is in INT8
        y = float_matmul(x, w, spec.dtype)
    else:
        assert lhs.rowwise is not None
        assert rhs.colwise is not None
        y = gemms.multiply(spec.fwd, lhs.rowwise, residual, rhs.colwise, seed)
    if not save:
        return y, None
    warn_of_copies()
    saved_lhs = None
    if not isinstance(w, Quantized):
        saved_lhs = _to_save(recipe.drhs, x, lhs.rowwise, lhs.colwise, LHS_NAME)
    saved_rhs = _to_save(recipe.dlhs, w, rhs.colwise, rhs.rowwise, RHS_NAME)
    saved_seed = checkpoint_name(seed, SEED_NAME)
    return y, SavedMatmul(saved_lhs, saved_rhs, saved_seed, gemms)


def _to_save(
    gemm: Gemm,
    operand: jax.Array | Quantized | None,
    forward_codes: Quantized | None,
    codes: Quantized | None,
    name: str,
) -> Quantized | jax.Array:
    """The form in which a backward GEMM reads X or W.

    Only codes get a checkpoint name, so ``save_codes`` recomputes an unquantized
    operand.
    """
    if gemm.in_floats and gemm.keeps == "floats":
        assert operand is not None
        return operand
    saved = forward_codes if gemm.in_floats else codes
    assert saved is not None
    return checkpoint_name(saved, name)


def _matmul_bwd(
    spec: Spec, saved: SavedMatmul, cotangents: tuple[jax.Array, Stats]
) -> tuple[jax.Array, jax.Array | None, None, None]:
    dy, _ = cotangents
    grad = quantize_cotangent(spec, saved, dy)
    return (*backward(spec, saved, grad, dy), None, None)


matmul.defvjp(matmul_fwd, _matmul_bwd)


def quantize_cotangent(spec: Spec, saved: SavedMatmul, dy: jax.Array) -> Layouts:
    """The codes of dY, the gradient of the product, for ``backward``."""
    rows, seed = saved.gemms.tile_rows(dy), grad_seed(saved, dy)
    return quantize_grad(spec, rows, seed, frozen=saved.lhs is None)


def grad_seed(saved: SavedMatmul, dy: jax.Array) -> CallSeed:
    """The seed of the gradient's noise; dY is the output's gradient."""
    return frozen_seed(saved.seed, dy) if saved.lhs is None else saved.seed


def backward(
    spec: Spec, saved: SavedMatmul, grad: Layouts, dy: jax.Array | None = None
) -> tuple[jax.Array, jax.Array | None]:
    """The gradients dX and dW; a frozen layer has no dW.

    Args:
      spec: the static settings.
      saved: what the forward pass saved.
      grad: the codes of dY.
      dy: dY itself; read by unquantized GEMMs only.
    """
    lhs, rhs, seed, gemms = saved
    if spec.recipe.dlhs.in_floats:
        assert dy is not None
        dx = float_matmul(dy, _transposed_rhs(spec, rhs), spec.lhs_dtype)
    else:
        assert isinstance(rhs, Quantized)
        assert grad.rowwise is not None
        dx = gemms.multiply_grad(spec.dlhs, grad.rowwise, rhs, seed)
    if lhs is None:
        dw = None
    elif spec.recipe.drhs.in_floats:
        assert dy is not None
        dw = float_matmul(_transposed_lhs(spec, lhs), dy, spec.rhs_dtype)
    else:
        assert isinstance(lhs, Quantized)
        assert grad.colwise is not None
        dw = gemms.contract_rows(spec.drhs, lhs, grad.colwise, seed)
    return dx, dw


def float_matmul(lhs: jax.Array, rhs: jax.Array, dtype: Any) -> jax.Array:
    """``[B, M, K]`` times ``[B, K, N]``, unquantized, rounded once to ``dtype``.

    Devices sum their partial products in ``dtype`` or the operands' dtype, whichever is
    wider.
    """
    # Two different dtypes of 16 and 32 bits have float32 as their common dtype.
    common = lhs.dtype if lhs.dtype == rhs.dtype else jnp.float32
    wider = dtype if dtype == common else jnp.float32
    return lax.dot_general(
        lhs.astype(common),
        rhs.astype(common),
        (((2,), (1,)), ((0,), (0,))),
        preferred_element_type=wider,
    ).astype(dtype)


def _transposed_lhs(spec: Spec, lhs: Quantized | jax.Array) -> jax.Array:
    """X', dequantized if its codes were saved."""
    if isinstance(lhs, Quantized):
        codes = forward_qtensor(spec.recipe, lhs, spec.fwd.block_shape[:2])
        return codes.dequantize(spec.lhs_dtype).mT
    return lhs.mT


def _transposed_rhs(spec: Spec, rhs: Quantized | jax.Array) -> jax.Array:
    """W', dequantized if its codes were saved; colwise codes are W' already."""
    if isinstance(rhs, Quantized):
        codes = forward_qtensor(spec.recipe, rhs, spec.fwd.block_shape[:0:-1])
        return codes.dequantize(spec.rhs_dtype)
    return rhs.mT
