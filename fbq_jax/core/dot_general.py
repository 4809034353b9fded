"""A quantized ``lax.dot_general``: any ``dimension_numbers``, as one matrix product.

State goes in as a threshold and comes out as the metric of the blocks: nothing is
written in here.
"""

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from fbq_jax import ops
from fbq_jax.core import matmul_vjp, threshold
from fbq_jax.core.dimension_numbers import (
    DimensionNumbers,
    as_matrices,
    check_operands,
    output_of,
)
from fbq_jax.core.qtensor import QTensor
from fbq_jax.kernels.reference import Quantized
from fbq_jax.recipes import fallback
from fbq_jax.recipes.schema import Recipe
from fbq_jax.sharding.explicit_axes import automatic


class Stats(NamedTuple):
    """What a forward measures.

    Attributes:
      rate: float32 ``[]``, the share of blocks that fell back.
      theta: float32 ``[]``, the threshold that decided it; ``threshold.UNSET``, which
        counts as 0, where lhs set none (zeros, a NaN or an Inf).
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
    implementation: str | None = None,
) -> tuple[jax.Array, Stats]:
    """``lax.dot_general`` with quantized GEMMs, forward and backward.

    Pure: the threshold goes in as ``theta``, and what a new one is made of comes out in
    ``Stats``.  With ``X``, ``W`` and ``dY`` the operands and the output's gradient as
    matrices, and ``Q``, ``R``, ``S`` nearest codes, nearest codes plus residual, and
    stochastic codes, the recipe ``fallback`` (arXiv 2503.08040) computes

        Y = R(X) . Q(W)        dX = S(dY) . Q(W)'        dW = S(X)' . S(dY)

    Args:
      lhs: the activation, which may fall back; bfloat16, float16 or float32. (Roles go
        by position: an einsum may hand its operands over the other way round.)
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
      implementation: ``"mosaic"``, ``"triton"`` or ``"reference"``; by default
        ``fbq_jax.ops.dispatch`` chooses.

    Returns:
      The output, of the shape and dtype that ``lax.dot_general`` gives, and ``Stats``.

    Raises:
      TypeError: an operand is not of a float dtype above.
      ValueError: the dimensions do not fit, theta is negative, another precision is
        asked for, or the implementation cannot run here.

    >>> x, w = jnp.ones((4, 256)), jnp.ones((256, 8))
    >>> y, stats = dot_general(x, w, (((1,), (0,)), ((), ())), theta=0.5)
    >>> float(y[0, 0]), float(stats.rate)
    (256.0, 1.0)
    """
    seed = jnp.zeros((), jnp.uint32)
    if key is not None:
        seed = jax.random.bits(key, (), jnp.uint32)
    out, stats = _seeded_dot_general(
        lhs,
        rhs,
        dimension_numbers,
        precision,
        preferred_element_type,
        recipe=recipe,
        theta=checked_theta(theta),
        seed=seed,
        out_sharding=out_sharding,
        implementation=implementation,
    )
    batch, *rows, across = stats.metric.shape
    metric = stats.metric.reshape(batch, math.prod(rows), across)
    return out, stats._replace(metric=metric)


def checked_theta(theta: jax.Array | float | None) -> jax.Array:
    """A caller's threshold as float32 ``[]``; None is ``threshold.UNSET``."""
    if theta is None:
        theta = threshold.UNSET
    elif jnp.ndim(theta):
        raise ValueError(f"theta is a scalar; got an array {jnp.shape(theta)}")
    elif not isinstance(theta, jax.core.Tracer) and not np.asarray(theta) >= 0.0:
        raise ValueError(f"theta is a threshold and at least 0; got {theta}")
    return jnp.asarray(theta, jnp.float32)


def stateful_dot_general(
    state: Mapping[str, jax.Array],
    lhs: jax.Array,
    rhs: jax.Array,
    dimension_numbers: DimensionNumbers,
    precision: Any,
    preferred_element_type: jax.typing.DTypeLike | None,
    *,
    recipe: Recipe,
    out_sharding: Any,
    implementation: str | None,
    codes: QTensor | None = None,
) -> tuple[jax.Array, threshold.State]:
    """``dot_general`` with a layer's state: the output and the state after training.

    A caller that evaluates drops the new state.  ``codes`` are those of rhs by columns,
    in a frozen layer (``fbq_jax.core.frozen_weight``), whose rhs has a shape and a
    dtype only.
    """
    before = threshold.canonicalize_state(state)
    out, stats = _seeded_dot_general(
        lhs,
        rhs,
        dimension_numbers,
        precision,
        preferred_element_type,
        recipe=recipe,
        theta=before["theta"],
        seed=threshold.call_seed(before),
        out_sharding=out_sharding,
        implementation=implementation,
        codes=codes,
    )
    return out, threshold.update(before, stats.metric, stats.theta, recipe)


def _seeded_dot_general(
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
    implementation: str | None,
    codes: QTensor | None = None,
) -> tuple[jax.Array, Stats]:
    """``dot_general`` where a traced ``theta`` may be ``threshold.UNSET``."""
    check_operands(lhs, rhs, precision, preferred_element_type)
    dtype = jnp.dtype(preferred_element_type or jnp.promote_types(lhs.dtype, rhs.dtype))
    out = output_of(lhs, rhs, dimension_numbers, dtype, out_sharding)

    def multiply(
        lhs: jax.Array,
        rhs: jax.Array,
        theta: jax.Array,
        seed: jax.Array,
        codes: Quantized | None,
    ) -> tuple[jax.Array, Stats]:
        rows_of = functools.partial(row_axes, recipe=recipe)
        x, w = as_matrices(lhs, rhs, dimension_numbers, rows_of)
        theta = resolve(theta, x, recipe, implementation)
        spec = matmul_vjp.Spec(recipe, dtype, x.dtype, w.dtype, implementation)
        weight = w if codes is None else codes
        y, metric = matmul_vjp.matmul(spec, x, weight, jnp.maximum(theta, 0.0), seed)
        stats = Stats(threshold.fallback_rate(metric, theta), theta, metric)
        return y.reshape(out.shape), stats

    main = None if codes is None else codes.main
    return automatic(multiply, out)(lhs, rhs, theta, seed, main)


def row_axes(sizes: Sequence[int], recipe: Recipe) -> tuple[int, ...]:
    """The axes, ``(M,)`` or ``(G, R)``, that an activation's axes before K become.

    The last one, often the tokens of a sequence, is kept if it is of whole blocks and
    all GEMMs have block scales, so that the ones before it and it can both be sharded.

    >>> row_axes((2, 4, 256), Recipe(block=128)), row_axes((2, 100), Recipe(block=128))
    ((8, 256), (200,))
    """
    *lead, last = sizes or (1,)
    if not lead or 0 in sizes or last % recipe.block_shape[0] or not recipe.in_blocks:
        return (math.prod(sizes),)
    return math.prod(lead), last


def resolve(
    theta: jax.Array,
    x: jax.Array,
    recipe: Recipe,
    implementation: str | None,
    *,
    layer: Callable[[jax.Array], jax.Array] = lambda x: x,
    blocks: jax.Array | None = None,
) -> jax.Array:
    """Sets an unset threshold from the operand's own blocks.

    Args:
      theta: float32 ``[]``; ``threshold.UNSET`` or any below 0 is unset.
      x: ``[B, ...]``.
      recipe: gives the criterion and the range that the threshold should meet.
      implementation: of the ops.
      layer: makes the operand of ``x``, where there is need of it.
      blocks: as for ``threshold.quantile``.
    """
    criterion = recipe.criterion
    if criterion is None:
        return theta

    def own_quantile() -> jax.Array:
        metric = ops.block_metric(
            layer(lax.stop_gradient(x)),
            block=recipe.lhs_block,
            criterion=criterion,
            implementation=implementation,
        )
        return threshold.quantile(metric, recipe, blocks)

    # An empty sum: 0, which varies over the axes of a mesh as the quantile does.
    theta += jnp.sum(x[:0], dtype=jnp.float32)
    return lax.cond(theta < 0.0, own_quantile, lambda: theta)
