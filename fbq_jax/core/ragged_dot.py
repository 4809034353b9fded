"""A quantized ``lax.ragged_dot``: the experts of a mixture, each with its own rows.

    Y_g = X_g . W_g        dX_g = dY_g . W_g'        dW_g = X_g' . dY_g

with ``X_g`` the rows of group g.  Blocks begin anew with each group: one that held rows
of two would let an expert's outliers, or its NaN, reach another's tokens, and dW_g sums
over its own rows only.  So at one threshold each group has the codes, scales and
forward product that the reference of ``dot_general`` gives its rows alone; noise
differs, for it belongs to a row's place.
"""

import functools
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from fbq_jax import ops
from fbq_jax.core import threshold
from fbq_jax.core.dimension_numbers import check_operands
from fbq_jax.core.dot_general import Stats, checked_theta, resolve
from fbq_jax.core.matmul_vjp import LHS_NAME, RHS_NAME
from fbq_jax.core.quantize_operands import (
    Spec,
    quantize_grad,
    quantize_lhs,
    quantize_rhs,
)
from fbq_jax.kernels.grouped_reference import Tiles, assign_tiles, from_tiles, to_tiles
from fbq_jax.kernels.reference import Quantized
from fbq_jax.ops import dispatch
from fbq_jax.recipes import fallback
from fbq_jax.recipes.schema import Recipe


def ragged_dot(
    lhs: jax.Array,
    rhs: jax.Array,
    group_sizes: jax.Array,
    precision: Any = None,
    preferred_element_type: jax.typing.DTypeLike | None = None,
    *,
    recipe: Recipe = fallback,
    theta: jax.Array | float | None = None,
    key: jax.Array | None = None,
    implementation: str | None = None,
) -> tuple[jax.Array, Stats]:
    """``lax.ragged_dot`` with quantized GEMMs, forward and backward.

    The first ``group_sizes[0]`` rows of lhs are multiplied with ``rhs[0]``, the next
    ``group_sizes[1]`` with ``rhs[1]`` and so on; rows after the last group give zeros.
    A group may be empty.  Pure, as ``fbq_jax.dot_general`` is.

    There is no GPU kernel for these products: on a GPU they run through XLA, slowly,
    and a warning says so.  On any device each group costs up to ``m`` rows more than it
    has, with ``m`` the side of the recipe's blocks along M.

    Args:
      lhs: ``[M, K]``, the activation, which may fall back; bfloat16, float16 or
        float32.
      rhs: ``[G, K, N]``, the weights; likewise.
      group_sizes: integers ``[G]``, at least 0.  Together at most M: rows that are not
        there do not count.
      precision: None or DEFAULT; the recipe sets the precision.
      preferred_element_type: the output's dtype; by default the operands' common one.
      recipe: what is quantized how; with block scales in all three GEMMs, and no
        ``Gemm.reduce``.
      theta: the threshold of fallback, of all groups, as for ``fbq_jax.dot_general``.
      key: likewise, a PRNG key for stochastic rounding.
      implementation: ``"reference"`` or None, ``fbq_jax.ops.dispatch``'s choice.

    Returns:
      ``[M, N]`` and ``Stats``, whose metric is float32 ``[T, 1, ceil(K/k)]``: one a
      block of the T tiles that the groups are cut into
      (``fbq_jax.kernels.grouped_reference``), 0 for tiles without rows, which do not
      count in the rate.

    Raises:
      TypeError: an operand is not of a float dtype above, or ``group_sizes`` is not of
        integers.
      ValueError: shapes do not fit, an array is cut over explicit axes, the recipe has
        other scales or a ``Gemm.reduce``, theta is negative, another precision is asked
        for, or an implementation with kernels.

    >>> tokens, experts = jnp.ones((5, 64)), jnp.ones((3, 64, 8))
    >>> y, stats = ragged_dot(tokens, experts, jnp.array([2, 0, 1]))
    >>> y[:, 0]
    Array([64., 64., 64.,  0.,  0.], dtype=float32)
    """
    seed = jnp.zeros((), jnp.uint32)
    if key is not None:
        seed = jax.random.bits(key, (), jnp.uint32)
    out, stats, _ = _seeded_ragged_dot(
        lhs,
        rhs,
        group_sizes,
        precision,
        preferred_element_type,
        recipe=recipe,
        theta=checked_theta(theta),
        seed=seed,
        implementation=implementation,
    )
    return out, stats


def stateful_ragged_dot(
    state: Mapping[str, jax.Array],
    lhs: jax.Array,
    rhs: jax.Array,
    group_sizes: jax.Array,
    precision: Any,
    preferred_element_type: jax.typing.DTypeLike | None,
    *,
    recipe: Recipe,
    implementation: str | None,
) -> tuple[jax.Array, threshold.State]:
    """``ragged_dot`` with a layer's state: the output and the state after training."""
    before = threshold.canonicalize_state(state)
    out, stats, blocks = _seeded_ragged_dot(
        lhs,
        rhs,
        group_sizes,
        precision,
        preferred_element_type,
        recipe=recipe,
        theta=before["theta"],
        seed=threshold.call_seed(before),
        implementation=implementation,
    )
    after = threshold.update(before, stats.metric, stats.theta, recipe, blocks)
    return out, after


def _seeded_ragged_dot(
    lhs: jax.Array,
    rhs: jax.Array,
    group_sizes: jax.Array,
    precision: Any,
    preferred_element_type: jax.typing.DTypeLike | None,
    *,
    recipe: Recipe,
    theta: jax.Array,
    seed: jax.Array,
    implementation: str | None,
) -> tuple[jax.Array, Stats, jax.Array]:
    """The output, its stats and the number of blocks that hold rows, int32 ``[]``."""
    check_operands(lhs, rhs, precision, preferred_element_type)
    _check_groups(lhs, rhs, group_sizes, recipe)
    dispatch.choose("ragged_matmul", recipe.block_shape, implementation=implementation)
    dtype = jnp.dtype(preferred_element_type or jnp.promote_types(lhs.dtype, rhs.dtype))
    tiles = assign_tiles(group_sizes, lhs.shape[0], recipe.block_shape[0])
    blocks = tiles.used * -(-lhs.shape[1] // recipe.block_shape[1])
    layer = functools.partial(to_tiles, tiles=tiles)
    theta = resolve(theta, lhs, recipe, implementation, layer=layer, blocks=blocks)
    spec = Spec(recipe, dtype, lhs.dtype, rhs.dtype, implementation)
    y, metric = _matmul(spec, lhs, rhs, jnp.maximum(theta, 0.0), seed, tiles)
    return (
        y,
        Stats(threshold.fallback_rate(metric, theta, blocks), theta, metric),
        blocks,
    )


def _check_groups(
    lhs: jax.Array, rhs: jax.Array, group_sizes: jax.Array, recipe: Recipe
) -> None:
    if not jnp.issubdtype(group_sizes.dtype, jnp.integer):
        raise TypeError(f"group_sizes is {group_sizes.dtype}; it takes integers")
    shapes = lhs.shape, rhs.shape, group_sizes.shape
    if (
        tuple(map(len, shapes)) != (2, 3, 1)
        or lhs.shape[1] != rhs.shape[1]
        or len(rhs) != len(group_sizes)
        or not len(rhs)
    ):
        raise ValueError(
            "a ragged dot takes lhs [M, K], rhs [G, K, N] and group_sizes [G], with at "
            f"least one group; got {', '.join(map(str, shapes))}"
        )
    types = [jax.typeof(x) for x in (lhs, rhs, group_sizes)]
    if any(names for x in types for names in x.sharding.spec):
        raise ValueError(
            "a ragged dot takes arrays that are whole or cut over automatic axes of a "
            f"mesh (see jax.sharding.auto_axes); got {', '.join(map(str, types))}"
        )
    if not recipe.in_blocks:
        raise ValueError(
            "a ragged dot takes a recipe with block scales in all three GEMMs; got "
            f"{recipe}"
        )
    if any(g.reduce is not None for g in (recipe.fwd, recipe.dlhs, recipe.drhs)):
        raise ValueError(
            "a ragged dot sums over devices in the product's own dtype; got a recipe "
            f"with a Gemm.reduce: {recipe}"
        )


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _matmul(
    spec: Spec,
    x: jax.Array,
    w: jax.Array,
    theta: jax.Array,
    seed: jax.Array,
    tiles: Tiles,
) -> tuple[jax.Array, jax.Array]:
    """``[M, N]`` and the metric of each block (of none without a criterion)."""
    lhs, residual, metric = quantize_lhs(
        spec, to_tiles(x, tiles), theta, seed, save=False
    )
    rhs = quantize_rhs(spec, w, seed, save=False)
    return _forward(spec, lhs.rowwise, residual, rhs.colwise, tiles), metric


class _Saved(NamedTuple):
    """X by columns and W by rows, as the backward GEMMs read them."""

    lhs: Quantized
    rhs: Quantized
    seed: jax.Array
    tiles: Tiles


def _matmul_fwd(
    spec: Spec,
    x: jax.Array,
    w: jax.Array,
    theta: jax.Array,
    seed: jax.Array,
    tiles: Tiles,
) -> tuple[tuple[jax.Array, jax.Array], _Saved]:
    lhs, residual, metric = quantize_lhs(
        spec, to_tiles(x, tiles), theta, seed, save=True
    )
    rhs = quantize_rhs(spec, w, seed, save=True)
    y = _forward(spec, lhs.rowwise, residual, rhs.colwise, tiles)
    saved_lhs = checkpoint_name(lhs.colwise, LHS_NAME)
    saved_rhs = checkpoint_name(rhs.rowwise, RHS_NAME)
    return (y, metric), _Saved(saved_lhs, saved_rhs, seed, tiles)


def _matmul_bwd(
    spec: Spec, saved: _Saved, cotangents: tuple[jax.Array, jax.Array]
) -> tuple[jax.Array, jax.Array, None, None, None]:
    lhs, rhs, seed, tiles = saved
    m, k, n = spec.recipe.block_shape
    grad = quantize_grad(spec, to_tiles(cotangents[0], tiles), seed)
    assert grad.rowwise is not None
    assert grad.colwise is not None
    dx = ops.ragged_matmul(
        grad.rowwise,
        None,
        rhs,
        tiles.groups,
        block_shape=(m, n, k),
        dtype=spec.lhs_dtype,
        implementation=spec.implementation,
    )
    dw = ops.ragged_contraction(
        lhs,
        grad.colwise,
        tiles.groups,
        size=len(rhs.codes),
        block_shape=(k, m, n),
        dtype=spec.rhs_dtype,
        implementation=spec.implementation,
    )
    return from_tiles(dx, tiles), dw, None, None, None


_matmul.defvjp(_matmul_fwd, _matmul_bwd)


def _forward(
    spec: Spec,
    lhs: Quantized | None,
    residual: Quantized | None,
    rhs: Quantized | None,
    tiles: Tiles,
) -> jax.Array:
    assert lhs is not None
    assert rhs is not None
    y = ops.ragged_matmul(
        lhs,
        residual,
        rhs,
        tiles.groups,
        block_shape=spec.recipe.block_shape,
        dtype=spec.dtype,
        implementation=spec.implementation,
    )
    return from_tiles(y, tiles)
