"""X, W and dY as operands of the GEMMs that are in INT8.

Both operands of a GEMM are contiguous along its contraction, as tensor cores take them:
X is needed by rows for Y and by columns for dW, W by columns for Y and by rows for dX,
dY by rows for dX and by columns for dW.  One op gives both where both have scales of
one kind.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fbq_jax import ops
from fbq_jax.kernels.reference import Block, Layouts, Quantized
from fbq_jax.kernels.rounding import fold
from fbq_jax.recipes.schema import Quantizer, Recipe

# Streams of the noise of one call.
LHS_STREAM, RHS_STREAM, GRAD_STREAM, SUM_STREAM = range(4)


class Spec(NamedTuple):
    """What is static: the recipe, the dtypes of Y, dX and dW, who computes."""

    recipe: Recipe
    dtype: Any
    lhs_dtype: Any
    rhs_dtype: Any
    implementation: str | None


def quantize_lhs(
    spec: Spec, x: jax.Array, theta: jax.Array, seed: jax.Array, *, save: bool
) -> tuple[Layouts, Quantized | None, jax.Array]:
    """X by rows and, to save it, by columns; its residual; its blocks' metric.

    Codes are there for the GEMMs that are in INT8.
    """
    recipe, seeds = spec.recipe, seeds_of(seed, LHS_STREAM, x)
    columns = recipe.drhs.quantizers[0] if save else None
    layouts = functools.partial(_quantize, spec, x, seeds, recipe.lhs_block)
    if recipe.criterion is None:
        lhs = layouts(rowwise=recipe.fwd.quantizers[0], colwise=columns)
        return lhs, None, jnp.zeros((x.shape[0], 0, 0), jnp.float32)
    in_blocks = columns is not None and columns.scales == "block"
    main, residual, metric, by_columns = ops.quantize_fallback(
        x,
        jnp.broadcast_to(theta, x.shape[:1]),
        seeds,
        block=recipe.lhs_block,
        criterion=recipe.criterion,
        colwise=columns.rounding if columns is not None and in_blocks else None,
        implementation=spec.implementation,
    )
    if not in_blocks:
        by_columns = layouts(rowwise=None, colwise=columns).colwise
    return Layouts(main, by_columns), residual, metric


def quantize_rhs(
    spec: Spec, w: jax.Array | Quantized, seed: jax.Array, *, save: bool
) -> Layouts:
    """W by columns and, to save it, by rows, for the GEMMs that are in INT8.

    The weight of a frozen layer (``fbq_jax.core.frozen_weight``) comes as codes by
    columns.
    """
    if isinstance(w, Quantized):
        if save:
            raise ValueError(
                "a frozen model does not train: it has no gradients; take those of "
                "the model and variables from before freeze"
            )
        return Layouts(None, w)
    recipe, seeds = spec.recipe, seeds_of(seed, RHS_STREAM, w)
    rows = recipe.dlhs.quantizers[1] if save else None
    columns = recipe.fwd.quantizers[1]
    return _quantize(spec, w, seeds, recipe.rhs_block, rowwise=rows, colwise=columns)


def quantize_grad(spec: Spec, dy: jax.Array, seed: jax.Array) -> Layouts:
    """The codes of dY by rows and by columns, for the GEMMs that are in INT8."""
    recipe, seeds = spec.recipe, seeds_of(seed, GRAD_STREAM, dy)
    rows, columns = recipe.dlhs.quantizers[0], recipe.drhs.quantizers[1]
    return _quantize(spec, dy, seeds, recipe.grad_block, rowwise=rows, colwise=columns)


def seeds_of(seed: jax.Array, stream: int, x: jax.Array) -> jax.Array:
    """One seed, uint32 ``[B]``, for each matrix of the stack ``x [B, ...]``."""
    index = jnp.arange(x.shape[0], dtype=jnp.uint32)
    return fold(fold(seed, stream), index)


def _quantize(
    spec: Spec,
    x: jax.Array,
    seeds: jax.Array,
    block: Block,
    *,
    rowwise: Quantizer | None,
    colwise: Quantizer | None,
) -> Layouts:
    """The codes of a matrix as operands of two GEMMs, by rows and by columns."""
    if rowwise is not None and colwise is not None and rowwise[1:] != colwise[1:]:
        one = functools.partial(_quantize, spec, x, seeds, block)
        by_rows = one(rowwise=rowwise, colwise=None).rowwise
        return Layouts(by_rows, one(rowwise=None, colwise=colwise).colwise)
    how = rowwise or colwise
    if how is None:
        return Layouts(None, None)
    row_rounding = None if rowwise is None else rowwise.rounding
    column_rounding = None if colwise is None else colwise.rounding
    if how.scales == "block":
        return ops.quantize(
            x,
            seeds,
            block=block,
            rowwise=row_rounding,
            colwise=column_rounding,
            implementation=spec.implementation,
        )
    return ops.quantize_vectors(
        *_in_parts(x, seeds, how.shards),
        rowwise=row_rounding,
        colwise=column_rounding,
        bound=spec.recipe.bound,
        per_tensor=how.scales == "tensor",
        implementation=spec.implementation,
    )


def _in_parts(
    x: jax.Array, seeds: jax.Array, number: int
) -> tuple[jax.Array, jax.Array]:
    """The rows of matrices in parts, if several: ``[B, P, R, C]``, seeds ``[B, P]``.

    The last ones are filled up with zeros, which change neither scales nor sums.
    """
    if number == 1:
        return x, seeds
    batch, rows, columns = x.shape
    size = -(-rows // number)
    x = jnp.pad(x, ((0, 0), (0, size * number - rows), (0, 0)))
    index = jnp.arange(number, dtype=jnp.uint32)
    seeds = fold(seeds[:, None], index[None, :])
    return x.reshape(batch, number, size, columns), seeds
