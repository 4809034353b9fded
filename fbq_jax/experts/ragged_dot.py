"""A quantized ``lax.ragged_dot``: each expert of a mixture multiplies its own rows.

    Y_g = X_g . W_g        dX_g = dY_g . W_g'        dW_g = X_g' . dY_g

``X_g`` are the rows of group g.  Blocks start anew with each group.  A block with rows
of two groups would let the outliers (or the NaN) of one expert reach the tokens of
another, and dW_g must sum over its own rows only.  For a given threshold, each group
has the codes, scales and forward product that ``dot_general`` computes from its rows
alone.  Only the noise differs, because it depends on the position of a row.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from fbq_jax.core import gemms, threshold
from fbq_jax.core.arguments import (
    DimensionNumbers,
    check_arrays,
    output_dtype,
)
from fbq_jax.core.dot_general import (
    DotConfig,
    LayerDot,
    Stats,
    stateless_scalars,
)
from fbq_jax.core.gemms import Spec
from fbq_jax.core.threshold import Scalars
from fbq_jax.core.tracing import mappable
from fbq_jax.core.training_warnings import warn_without_key
from fbq_jax.experts.exchange import float_dot
from fbq_jax.experts.plan import TILE, Exchange
from fbq_jax.experts.rows import (
    ExchangedRows,
    TiledRows,
    exchanged_rows,
    tiled_rows,
)
from fbq_jax.kernels.quantized import Layouts
from fbq_jax.kernels.threshold_reference import SMALLEST, exceeds, rate_of
from fbq_jax.recipes import fallback
from fbq_jax.recipes.presets import describe_recipe
from fbq_jax.recipes.schema import Recipe, check_no_recipe
from fbq_jax.sharding.mesh_axes import as_varying

Groups = jax.Array | Exchange

#: The weight's side of a ragged dot as ``lax.dot_general`` describes it: each group's
#: matrix ``[K, N]`` of ``[G, K, N]`` is contracted along K.
DIMENSIONS: DimensionNumbers = (((1,), (1,)), ((), (0,)))
#: What a layer of experts sows in "intermediates": the fallback rate of each group.
GROUP_RATES = "fallback_rates"


def ragged_dot(
    lhs: jax.Array,
    rhs: jax.Array,
    group_sizes: Groups,
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
      group_sizes: integers ``[G]``, at least 0; a negative size counts as 0.  A sum
        above M counts as M, even if it exceeds the range of integers.  Or the
        ``Exchange`` of rows between devices, which ``MoEMLP`` makes: it says which
        shapes lhs and the result have.
      precision: None or DEFAULT; the recipe sets the precision.
      preferred_element_type: the output's dtype; None takes the operands' common one.
      recipe: how the three GEMMs are quantized, without a ``Gemm.reduce`` and with
        ``where_slower="quantize"``.  A scale never spans more than a tile of a group:
        ``scales="row"`` and ``"tensor"`` are of a tile's rows, and each tile is a shard
        of its own, whatever ``Gemm.shards``.
      theta: the threshold of fallback for all groups, as in ``fbq_jax.dot_general``.
      key: a PRNG key for stochastic rounding, as in ``fbq_jax.dot_general``.
      implementation: as in ``fbq_jax.dot_general``.

    Returns:
      ``[M, N]`` and ``Stats``.  The metric is float32 ``[T, 1, ceil(K/k)]``, one value
      for each block of the T tiles that the groups are padded to
      (``fbq_jax.kernels.tiles``).  It is 0 for tiles without rows, which do not count
      in the rate.

    Raises:
      TypeError: an operand is not an array or has another dtype, ``group_sizes`` does
        not hold integers, or ``recipe`` is not a ``Recipe``.
      ValueError: shapes do not fit, an array is sharded over explicit axes, the recipe
        has a ``Gemm.reduce`` or ``where_slower="float"``, theta is negative, another
        precision is requested, or the implementation has no kernel for this product.

    >>> tokens, experts = jnp.ones((3, 4)), jnp.ones((2, 4, 1))
    >>> y, stats = ragged_dot(tokens, experts, jnp.array([2, 0]))
    >>> y[:, 0]
    Array([4., 4., 0.], dtype=float32)
    """
    config = DotConfig(recipe, implementation)
    scalars = stateless_scalars(theta, key)
    options = precision, preferred_element_type
    rows = make_rows(config, lhs, rhs, group_sizes)
    if key is None:
        rhs = warn_without_key("ragged_dot", recipe, rhs)
    return _seeded_ragged_dot(config, scalars, lhs, rhs, rows, *options)


def layer_ragged_dot(layer: LayerDot, lhs: jax.Array, groups: Groups) -> jax.Array:
    """``ragged_dot`` of a layer, whose state it updates.

    The layer sows the fallback rate of each group, float32 ``[G]``; 0 for a group
    without blocks that count.
    """
    config = layer.config
    with layer.named():
        old = threshold.canonicalize_state(layer.state)
        rows = make_rows(config, lhs, layer.weight, groups)
        out, stats = _seeded_ragged_dot(
            config,
            threshold.scalars_of(old),
            lhs,
            layer.weight,
            rows,
            codes=layer.codes,
            is_frozen=layer.is_frozen,
        )
    sow_rates(layer, stats, rows.tile_groups)
    return layer.commit(out, threshold.next_state(old, stats))


def sow_rates(layer: LayerDot, stats: Stats, tile_groups: jax.Array) -> None:
    """Sows the fallback rate of each group, if the recipe has one."""
    if layer.sow is not None and layer.config.recipe.criterion is not None:
        layer.sow(GROUP_RATES, group_rates(stats, tile_groups, len(layer.weight)))


def ragged_dot_in_float(
    dot_general: Any, lhs: jax.Array, rhs: jax.Array, groups: Groups
) -> jax.Array:
    """The unquantized product of a layer of experts.

    It is ``dot_general.ragged_dot`` if the layer's op has one, as another library's may
    have, or else ``lax.ragged_dot``.  Rows that devices exchange take the latter.
    """
    if isinstance(groups, Exchange):
        return float_dot(groups, lhs, rhs)
    multiply = getattr(dot_general, "ragged_dot", lax.ragged_dot)
    y: jax.Array = mappable(multiply)(lhs, rhs, groups)
    return y


def layer_dot_of(dot_general: Any, x: jax.Array, weight: jax.Array) -> LayerDot | None:
    """The dot of the calling layer of experts; None if it stays in float.

    Args:
      dot_general: the layer's op, such as a ``FallbackDot``; for float None,
        ``lax.dot_general`` or an op with a ``ragged_dot`` of its own.
      x: the layer's input.
      weight: ``[G, K, N]``.

    Raises:
      TypeError: the op has neither a state for a layer nor a ``ragged_dot``.
    """
    if dot_general is None or dot_general is lax.dot_general:
        return None
    check_no_recipe(dot_general)
    if hasattr(dot_general, "ragged_dot"):
        return None
    if not hasattr(dot_general, "layer_dot"):
        raise TypeError(
            "a layer of experts takes a FallbackDot, RulesDot, "
            "fbq_jax.nnx.FallbackDot, an op with a ragged_dot or None as its "
            f"dot_general; got {dot_general!r}"
        )
    dot: LayerDot | None = dot_general.layer_dot(x, weight, DIMENSIONS)
    return dot


def _seeded_ragged_dot(
    config: DotConfig,
    scalars: Scalars,
    lhs: jax.Array,
    rhs: jax.Array,
    rows: TiledRows | ExchangedRows,
    *options: Any,
    codes: Layouts | None = None,
    is_frozen: bool = False,
) -> tuple[jax.Array, Stats]:
    """``ragged_dot``; a traced threshold may be ``threshold.UNSET``."""
    dtype = output_dtype(lhs, rhs, *(options or (None, None)))
    spec = Spec(config.recipe, dtype, lhs.dtype, rhs.dtype, config.implementation)
    weight = None if is_frozen else rhs
    lhs, weight, codes, rows = as_varying((lhs, weight, codes, rows))
    scalars = scalars.on_device(lhs)
    return gemms.matmul(spec, lhs, weight, scalars, codes, rows)


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


def make_rows(
    config: DotConfig, lhs: jax.Array, rhs: jax.Array, groups: Groups
) -> TiledRows | ExchangedRows:
    """How the rows of lhs lie, an operand of ``ragged_dot``.

    Raises:
      TypeError, ValueError: as ``ragged_dot``, except for dtypes and a precision.
    """
    _check_recipe(config.recipe)
    m = config.recipe.block_shape[0]
    if isinstance(groups, Exchange):
        _check_exchange(config.recipe)
        return exchanged_rows(groups, m)
    _check_shapes(lhs, rhs, groups)
    return tiled_rows(groups, lhs.shape[0], m)


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


def _check_recipe(recipe: Recipe) -> None:
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


def _check_exchange(recipe: Recipe) -> None:
    if not recipe.in_blocks:
        raise ValueError(
            "experts on several devices take a recipe with INT8 scales='block' in all "
            "three GEMMs, such as fallback and block, because devices agree on the "
            f"scales of blocks; got {describe_recipe(recipe)}"
        )
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
