"""A quantized ``lax.ragged_dot``: each expert of a mixture multiplies its own rows.

    Y_g = X_g . W_g        dX_g = dY_g . W_g'        dW_g = X_g' . dY_g

``X_g`` are the rows of group g.  Blocks start anew with each group.  A block with rows
of two groups would let the outliers (or the NaN) of one expert reach the tokens of
another, and dW_g must sum over its own rows only.  For a given threshold, each group
has the codes, scales and forward product that ``dot_general`` computes from its rows
alone.  Only the noise differs, because it depends on the position of a row.
"""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from fbq_jax.core import matmul_vjp, threshold
from fbq_jax.core.dimension_numbers import check_arrays, output_dtype
from fbq_jax.core.dot_call import RaggedCall
from fbq_jax.core.dot_general import (
    DotConfig,
    Stats,
    checked_theta,
    seed_from_key,
)
from fbq_jax.core.expert_exchange import ExchangedGroups
from fbq_jax.core.expert_plan import TILE
from fbq_jax.core.grouped_gemms import ExchangedGemms, GroupedGemms
from fbq_jax.core.qtensor import QTensor
from fbq_jax.core.spec import Spec
from fbq_jax.core.threshold import Scalars
from fbq_jax.kernels.grouped_reference import (
    assign_tiles,
)
from fbq_jax.kernels.threshold_reference import SMALLEST, exceeds, rate_of
from fbq_jax.ops import dispatch
from fbq_jax.recipes import fallback
from fbq_jax.recipes.rules_report import describe_recipe, recipe_name
from fbq_jax.recipes.schema import Recipe
from fbq_jax.sharding.manual_axes import as_varying


def ragged_dot(
    lhs: jax.Array,
    rhs: jax.Array,
    group_sizes: jax.Array | ExchangedGroups,
    precision: Any = None,
    preferred_element_type: jax.typing.DTypeLike | None = None,
    *,
    recipe: Recipe = fallback,
    theta: jax.Array | float | None = None,
    key: jax.Array | None = None,
    implementation: str | None = None,
) -> tuple[jax.Array, Stats]:
    """``lax.ragged_dot`` with quantized GEMMs in the forward and backward passes.

    The first ``group_sizes[0]`` rows of lhs are multiplied with ``rhs[0]``, the next
    ``group_sizes[1]`` rows with ``rhs[1]``, and so on.  Rows after the last group give
    zeros, and a group may be empty.  The function is pure, as ``fbq_jax.dot_general``
    is.

    Each group is padded to a multiple of ``m`` rows, where ``m`` is the number of rows
    of a block.  The sizes of the groups change neither the compiled program nor the
    memory that it takes, and tiles without rows take no time in the products.

    Args:
      lhs: ``[M, K]``, the activation, whose blocks may fall back; bfloat16, float16 or
        float32.
      rhs: ``[G, K, N]``, the weights; bfloat16, float16 or float32.
      group_sizes: integers ``[G]``, at least 0.  A sum above M counts as M.  Or the
        groups of rows that devices exchange, which ``MoEMLP`` makes: they say which
        shapes lhs and the result have.
      precision: None or DEFAULT; the recipe sets the precision.
      preferred_element_type: the output's dtype; None takes the operands' common one.
      recipe: how the three GEMMs are quantized; needs block scales in all of them, no
        ``Gemm.reduce`` and ``where_slower="quantize"``.
      theta: the threshold of fallback for all groups, as in ``fbq_jax.dot_general``.
      key: a PRNG key for stochastic rounding, as in ``fbq_jax.dot_general``.
      implementation: as in ``fbq_jax.dot_general``.

    Returns:
      ``[M, N]`` and ``Stats``.  The metric is float32 ``[T, 1, ceil(K/k)]``, one value
      for each block of the T tiles that the groups are padded to
      (``fbq_jax.kernels.grouped_reference``).  It is 0 for tiles without rows, which
      do not count in the rate.

    Raises:
      TypeError: an operand is not an array or has another dtype, ``group_sizes`` does
        not hold integers, or ``recipe`` is not a ``Recipe``.
      ValueError: shapes do not fit, an array is sharded over explicit axes, the recipe
        has other scales, a ``Gemm.reduce`` or ``where_slower="float"``, theta is
        negative, another precision is requested, or the implementation has no kernel
        for this product.

    >>> tokens, experts = jnp.ones((3, 4)), jnp.ones((2, 4, 1))
    >>> y, stats = ragged_dot(tokens, experts, jnp.array([2, 0]))
    >>> y[:, 0]
    Array([4., 4., 0.], dtype=float32)
    """
    config = DotConfig(recipe, implementation)
    call = RaggedCall(group_sizes, precision, preferred_element_type)
    scalars = Scalars(checked_theta(theta), seed_from_key(key))
    return _seeded_ragged_dot(config, scalars, lhs, rhs, call)[:2]


def stateful_ragged_dot(
    config: DotConfig,
    state: Mapping[str, jax.Array],
    lhs: jax.Array,
    rhs: jax.Array,
    call: RaggedCall,
    codes: QTensor | None = None,
) -> tuple[jax.Array, threshold.State, jax.Array]:
    """``ragged_dot`` with the state of a layer.

    ``fbq_jax.core.dot_general.stateful_dot_general`` documents the arguments and the
    first two results.  The third is the fallback rate of each group, float32 ``[G]``;
    0 for a group without blocks that count.
    """
    old = threshold.canonicalize_state(state)
    scalars = threshold.scalars_of(old)
    rhs, call = config.marked(rhs, call)
    out, stats, groups = _seeded_ragged_dot(config, scalars, lhs, rhs, call, codes)
    return out, threshold.next_state(old, stats), group_rates(stats, groups, len(rhs))


def _seeded_ragged_dot(
    config: DotConfig,
    scalars: Scalars,
    lhs: jax.Array,
    rhs: jax.Array,
    call: RaggedCall,
    codes: QTensor | None = None,
) -> tuple[jax.Array, Stats, jax.Array]:
    """``ragged_dot``; a traced threshold may be ``threshold.UNSET``.

    The third result is the group of each tile of the metric, int32 ``[T]``.
    """
    group_sizes, *options = call
    dtype = output_dtype(lhs, rhs, *options)
    gemms = make_gemms(config, lhs, rhs, group_sizes)
    spec = Spec(config.recipe, dtype, lhs.dtype, rhs.dtype, config.implementation)
    weight = rhs if codes is None else codes.main
    lhs, weight, gemms = as_varying((lhs, weight, gemms))
    scalars = scalars.on_device(lhs)
    out, stats = matmul_vjp.matmul(spec, lhs, weight, scalars, gemms)
    return out, stats, gemms.tile_groups()


def group_rates(stats: Stats, groups: jax.Array, size: int) -> jax.Array:
    """The fallback rate of each group, float32 ``[G]``.

    Args:
      stats: of all groups.
      groups: int32 ``[T]``, the group of each tile.
      size: G.
    """
    fell_back = exceeds(stats.metric[None], stats.theta[None])[0]
    counts = ~(stats.metric < SMALLEST)  # NaN counts
    of_group = groups[None, :] == jnp.arange(size, dtype=groups.dtype)[:, None]

    def blocks(chosen: jax.Array) -> jax.Array:
        of_tile = jnp.sum(chosen, axis=(1, 2), dtype=jnp.int32)
        return jnp.sum(jnp.where(of_group, of_tile[None, :], 0), axis=1)

    return rate_of(blocks(fell_back), blocks(counts))


def make_gemms(
    config: DotConfig,
    lhs: jax.Array,
    rhs: jax.Array,
    group_sizes: jax.Array | ExchangedGroups,
) -> GroupedGemms | ExchangedGemms:
    """What runs the GEMMs of lhs and rhs, operands of ``ragged_dot``.

    Raises:
      TypeError, ValueError: as ``ragged_dot``, except for dtypes and a precision.
    """
    _check_config(config)
    m = config.recipe.block_shape[0]
    if isinstance(group_sizes, ExchangedGroups):
        _check_exchange(config.recipe)
        return ExchangedGemms(group_sizes, m)
    _check_shapes(lhs, rhs, group_sizes)
    return GroupedGemms(assign_tiles(group_sizes, lhs.shape[0], m), len(rhs))


def _check_shapes(lhs: jax.Array, rhs: jax.Array, group_sizes: jax.Array) -> None:
    check_arrays(group_sizes=group_sizes)
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
    check_automatic(lhs, rhs, group_sizes)


def check_automatic(*arrays: jax.Array) -> None:
    """Raises ValueError if an array is sharded over explicit mesh axes."""
    types = [jax.typeof(x) for x in arrays]
    if any(names for x in types for names in x.sharding.spec):
        raise ValueError(
            "a ragged dot takes arrays that are not sharded over explicit mesh axes; "
            "make the axes automatic with jax.sharding.auto_axes; got "
            f"{', '.join(map(str, types))}"
        )


def _check_config(config: DotConfig) -> None:
    recipe = config.recipe
    if not recipe.in_blocks:
        raise ValueError(
            "a ragged dot takes a recipe with INT8 scales='block' in all three GEMMs, "
            "such as fallback, block, jetfire and variants of them; got "
            f"{recipe_name(recipe)}. Rules give layers of experts their own recipe, as "
            "in {'.*moe.*': recipes.fallback, ...}"
        )
    if recipe.where_slower != "quantize":
        raise ValueError(
            "a ragged dot takes a recipe with where_slower='quantize', because the map "
            f"of speeds has no ragged products; got {describe_recipe(recipe)}"
        )
    if any(g.reduce is not None for g in (recipe.fwd, recipe.dlhs, recipe.drhs)):
        raise ValueError(
            "a ragged dot sums over devices in the product's own dtype; got a recipe "
            f"with a Gemm.reduce: {describe_recipe(recipe)}"
        )
    dispatch.choose(
        "ragged_matmul", recipe.block_shape, implementation=config.implementation
    )


def _check_exchange(recipe: Recipe) -> None:
    if recipe.criterion not in ("absmax", None):
        raise ValueError(
            "experts on several devices take a recipe with criterion='absmax' or None, "
            "because devices agree on the largest value of a block only; got "
            f"{describe_recipe(recipe)}"
        )
    if TILE % recipe.block_shape[0]:
        raise ValueError(
            "experts on several devices take a recipe whose blocks have rows that "
            f"divide {TILE}; got {describe_recipe(recipe)}"
        )
