"""A quantized ``lax.dot_general``: the three GEMMs of a linear layer in INT8.

Any ``dimension_numbers`` become ``[B, M, K] x [B, K, N]``.  That product is a
``jax.custom_vjp``, whose forward and backward passes quantize as a ``Recipe`` says.
State goes in as a threshold and comes out as the metric of the blocks: nothing is
written in here.
"""

import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from fbq_jax import dispatch, qtensor, threshold
from fbq_jax.kernels import rounding
from fbq_jax.qtensor import QTensor
from fbq_jax.recipe import Recipe
from fbq_jax.recipes import fallback

DimensionNumbers = tuple[
    tuple[Sequence[int], Sequence[int]], tuple[Sequence[int], Sequence[int]]
]
DTYPES = (jnp.bfloat16, jnp.float16, jnp.float32)

# checkpoint_names of what the forward pass saves for the backward pass.
LHS_NAME = "fbq_lhs"
RHS_NAME = "fbq_rhs"

# Streams of the noise of one call.
_LHS_STREAM, _RHS_STREAM, _GRAD_STREAM = range(3)


class Stats(NamedTuple):
    """What a forward measures.

    Attributes:
      rate: float32 ``[]``, the share of blocks that fell back.
      theta: float32 ``[]``, the threshold that decided it.
      metric: float32 ``[B, ceil(M/m), ceil(K/k)]``, the criterion's value of each
        block.
    """

    rate: jax.Array
    theta: jax.Array
    metric: jax.Array


def dot_general(
    lhs: jax.Array,
    rhs: jax.Array,
    dimension_numbers: DimensionNumbers,
    precision: Any = None,
    preferred_element_type: jax.typing.DTypeLike | None = None,
    *,
    recipe: Recipe = fallback,
    theta: jax.Array | float | None = None,
    key: jax.Array | None = None,
    out_sharding: Any = None,
) -> tuple[jax.Array, Stats]:
    """``lax.dot_general`` with quantized GEMMs, forward and backward.

    Pure: the threshold goes in as ``theta``, and what a new one is made of comes out in
    ``Stats``.  With ``X``, ``W`` and ``dY`` the operands and the output's gradient as
    matrices, and ``Q``, ``R``, ``S`` nearest codes, nearest codes plus residual, and
    stochastic codes (arXiv 2503.08040, sections 4 and 5),

        Y = R(X) . Q(W)        dX = S(dY) . Q(W)'        dW = S(X)' . S(dY)

    Args:
      lhs: the activation, which may fall back; bfloat16, float16 or float32.
      rhs: the weight; likewise.
      dimension_numbers: as for ``lax.dot_general``: the contracting dimensions of lhs
        and rhs, and their batch dimensions.
      precision: None or DEFAULT; the recipe sets the precision.
      preferred_element_type: the output's dtype; by default the operands' common one.
      recipe: what is quantized how.
      theta: the threshold of fallback, at least 0; by default the quantile of lhs' own
        blocks that puts the rate in the middle of the recipe's range.
      key: a PRNG key for stochastic rounding.  Without one every call draws the same
        noise; training should pass a new one each call.
      out_sharding: the output's sharding, over explicit mesh axes.

    Returns:
      The output, of the shape and dtype that ``lax.dot_general`` gives, and ``Stats``.

    Raises:
      TypeError: an operand is not of a float dtype above.
      ValueError: the dimensions do not fit, theta is negative, or another precision is
        asked for.

    >>> x, w = jnp.ones((4, 256)), jnp.ones((256, 8))
    >>> y, stats = dot_general(x, w, (((1,), (0,)), ((), ())), theta=0.5)
    >>> float(y[0, 0]), float(stats.rate)
    (256.0, 1.0)
    """
    if theta is None:
        theta = threshold.UNSET
    elif not isinstance(theta, jax.core.Tracer) and not theta >= 0.0:
        raise ValueError(f"theta is a threshold and at least 0; got {theta}")
    seed = jnp.zeros((), jnp.uint32)
    if key is not None:
        seed = jax.random.bits(key, (), jnp.uint32)
    return seeded_dot_general(
        lhs,
        rhs,
        dimension_numbers,
        precision,
        preferred_element_type,
        recipe=recipe,
        theta=jnp.asarray(theta, jnp.float32),
        seed=seed,
        out_sharding=out_sharding,
    )


def seeded_dot_general(
    lhs: jax.Array,
    rhs: jax.Array,
    dimension_numbers: DimensionNumbers,
    precision: Any,
    preferred_element_type: jax.typing.DTypeLike | None,
    *,
    recipe: Recipe,
    theta: jax.Array,
    seed: jax.Array,
    out_sharding: Any,
) -> tuple[jax.Array, Stats]:
    """``dot_general`` on the arrays that a layer's state holds.

    ``theta``, float32 ``[]``, may be ``threshold.UNSET``, even as a traced value; lhs'
    own quantile then takes its place.  ``seed`` is uint32 ``[]``.
    """
    _check_operands(lhs, rhs, precision, preferred_element_type)
    dtype = jnp.dtype(preferred_element_type or jnp.promote_types(lhs.dtype, rhs.dtype))
    out = _output_shape(lhs, rhs, dimension_numbers, dtype)
    x, w = _as_matrices(lhs, rhs, dimension_numbers)
    theta = _resolve(theta, x, recipe)
    spec = _Spec(recipe, dtype, x.dtype, w.dtype)
    y, metric = _matmul(spec, x, w, jnp.maximum(theta, 0.0), seed)
    y = y.reshape(out.shape)
    if out_sharding is not None:
        y = jax.sharding.reshard(y, out_sharding)
    return y, Stats(threshold.observe(metric, theta), theta, metric)


def _check_operands(
    lhs: jax.Array, rhs: jax.Array, precision: Any, preferred: Any
) -> None:
    accepted = ", ".join(jnp.dtype(dtype).name for dtype in DTYPES)
    dtypes = {"lhs": lhs.dtype, "rhs": rhs.dtype}
    if preferred is not None:
        dtypes["preferred_element_type"] = jnp.dtype(preferred)
    for name, dtype in dtypes.items():
        if dtype not in DTYPES:
            raise TypeError(f"{name} is {dtype}; a quantized dot takes {accepted}")
    pair = precision if isinstance(precision, tuple) else (precision, precision)
    if any(p not in (None, "default", lax.Precision.DEFAULT) for p in pair):
        raise ValueError(
            f"precision={precision} cannot be met: the recipe sets the precision of a "
            "quantized dot; pass None or DEFAULT"
        )


def _output_shape(
    lhs: jax.Array, rhs: jax.Array, dimension_numbers: DimensionNumbers, dtype: Any
) -> jax.ShapeDtypeStruct:
    """The output's shape, or ``lax.dot_general``'s own error where nothing fits."""
    return jax.eval_shape(
        lambda lhs, rhs: lax.dot_general(lhs, rhs, dimension_numbers),
        jax.ShapeDtypeStruct(lhs.shape, dtype),
        jax.ShapeDtypeStruct(rhs.shape, dtype),
    )


def _as_matrices(
    lhs: jax.Array, rhs: jax.Array, dimension_numbers: DimensionNumbers
) -> tuple[jax.Array, jax.Array]:
    """Transposes and reshapes to ``[B, M, K]`` and ``[B, K, N]``."""
    (lhs_contract, rhs_contract), (lhs_batch, rhs_batch) = dimension_numbers

    def group(x: jax.Array, *dims: Sequence[int]) -> jax.Array:
        order = [d for group in dims for d in group]
        sizes = [math.prod(x.shape[d] for d in group) for group in dims]
        return x.transpose(order).reshape(sizes)

    def free(x: jax.Array, *taken: Sequence[int]) -> list[int]:
        return [d for d in range(x.ndim) if not any(d in dims for dims in taken)]

    lhs_free = free(lhs, lhs_contract, lhs_batch)
    rhs_free = free(rhs, rhs_contract, rhs_batch)
    return (
        group(lhs, lhs_batch, lhs_free, lhs_contract),
        group(rhs, rhs_batch, rhs_contract, rhs_free),
    )


def _resolve(theta: jax.Array, x: jax.Array, recipe: Recipe) -> jax.Array:
    """Sets an unset threshold from the operand's own blocks."""
    criterion = recipe.criterion
    if criterion is None:
        return theta

    def own_quantile() -> jax.Array:
        metric = dispatch.block_metric(
            lax.stop_gradient(x), block=recipe.lhs_block, criterion=criterion
        )
        return threshold.quantile(metric, recipe)

    return lax.cond(theta < 0.0, own_quantile, lambda: theta)


class _Spec(NamedTuple):
    recipe: Recipe
    dtype: Any
    lhs_dtype: Any
    rhs_dtype: Any


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _matmul(
    spec: _Spec, x: jax.Array, w: jax.Array, theta: jax.Array, seed: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """``x [B, M, K] . w [B, K, N]`` and the metric of x' blocks."""
    lhs, metric = _quantize_lhs(spec.recipe, x, theta, seed)
    rhs = _quantize_rhs(spec.recipe, w, seed)
    return qtensor.matmul(lhs, rhs, spec.dtype), metric


def _matmul_fwd(
    spec: _Spec, x: jax.Array, w: jax.Array, theta: jax.Array, seed: jax.Array
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
    spec: _Spec,
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


_matmul.defvjp(_matmul_fwd, _matmul_bwd)


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
