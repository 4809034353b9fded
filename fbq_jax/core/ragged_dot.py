"""A quantized ``lax.ragged_dot``: each expert of a mixture multiplies its own rows.

    Y_g = X_g . W_g        dX_g = dY_g . W_g'        dW_g = X_g' . dY_g

``X_g`` are the rows of group g.  Blocks start anew with each group.  A block with rows
of two groups would let the outliers (or the NaN) of one expert reach the tokens of
another, and dW_g must sum over its own rows only.  For a given threshold, each group
has the codes, scales and forward product that ``dot_general`` computes from its rows
alone.  Only the noise differs, because it depends on the position of a row.
"""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any, TypeVar

import jax
import jax.numpy as jnp

from fbq_jax import ops
from fbq_jax.core import matmul_vjp, threshold
from fbq_jax.core.dimension_numbers import check_arrays, output_dtype
from fbq_jax.core.dot_call import RaggedCall
from fbq_jax.core.dot_general import (
    DotConfig,
    Stats,
    checked_theta,
    seed_from_key,
)
from fbq_jax.core.expert_codes import TokenRows
from fbq_jax.core.expert_exchange import ExchangedGroups, return_rows, sum_rows
from fbq_jax.core.expert_plan import TILE
from fbq_jax.core.matmul_vjp import DenseGemms
from fbq_jax.core.qtensor import QTensor
from fbq_jax.core.rows import MatrixStack, Rows, TiledRows
from fbq_jax.core.spec import GemmSpec, Spec
from fbq_jax.core.threshold import Scalars
from fbq_jax.kernels.grouped_reference import (
    GroupedRows,
    Tiles,
    assign_tiles,
    from_tiles,
)
from fbq_jax.kernels.reference import Quantized
from fbq_jax.kernels.rounding import CallSeed
from fbq_jax.kernels.threshold_reference import SMALLEST, exceeds, rate_of
from fbq_jax.ops import dispatch
from fbq_jax.recipes import fallback
from fbq_jax.recipes.rules_report import describe_recipe, recipe_name
from fbq_jax.recipes.schema import Recipe
from fbq_jax.sharding.manual_axes import as_varying

Tree = TypeVar("Tree")


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
        ``Gemm.reduce``, no ``drhs.fallback`` and ``where_slower="quantize"``.
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
        has other scales, a ``Gemm.reduce``, ``drhs.fallback`` or
        ``where_slower="float"``, theta is negative, another precision is requested, or
        the implementation has no kernel for this product.

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
) -> "GroupedGemms | ExchangedGemms":
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
    if recipe.equalize:
        raise ValueError(
            "a ragged dot takes a recipe without equalize; got "
            f"{describe_recipe(recipe)}"
        )
    if recipe.drhs.fallback:
        raise ValueError(
            "a ragged dot takes a recipe without drhs.fallback; got "
            f"{describe_recipe(recipe)}"
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


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["tiles"],
    meta_fields=["num_groups", "lhs_in_tiles", "out_in_tiles"],
)
@dataclasses.dataclass(frozen=True)
class GroupedGemms(DenseGemms):
    """Runs the INT8 GEMMs of rows in groups, tile by tile.

    Attributes:
      tiles: where each row lies among the tiles.
      num_groups: G.
      lhs_in_tiles: whether X and dX are tiles ``[T, m, K]`` instead of rows ``[M, K]``.
      out_in_tiles: whether Y is tiles ``[T, m, N]`` instead of rows ``[M, N]``.
    """

    tiles: Tiles
    num_groups: int
    lhs_in_tiles: bool = False
    out_in_tiles: bool = False

    def tile_groups(self) -> jax.Array:
        """The group of each tile, int32 ``[T]``; G without rows."""
        return self.tiles.groups

    def tile_rows(self, x: jax.Array) -> Rows:
        """The rows of ``[M, C]`` with their tiles."""
        first, counts = self.tiles.first_rows, self.tiles.row_counts
        index = jnp.arange(first.shape[0], dtype=jnp.int32)
        return TiledRows(GroupedRows(x, first, counts), index)

    def stack(self, x: jax.Array) -> MatrixStack:
        """Tiles ``[T, m, C]`` with the number of rows of each."""
        return super().stack(x)._replace(row_counts=self.tiles.row_counts)

    def count_blocks(self, spec: Spec, x: jax.Array) -> jax.Array:
        """The number of blocks in tiles that hold rows, int32 ``[]``."""
        used = jnp.sum(self.tiles.row_counts > 0, dtype=jnp.int32)
        return used * -(-x.shape[-1] // spec.recipe.block_shape[1])

    def multiply(
        self,
        spec: GemmSpec,
        lhs: Quantized,
        residual: Quantized | None,
        rhs: Quantized,
        seed: CallSeed,
    ) -> jax.Array:
        """Multiplies each tile ``[m, K]`` with its group's matrix ``[N, K]``, for Y.

        Returns ``[M, N]`` or ``[T, m, N]`` in ``spec.dtype``.
        """
        del seed  # no sum is in INT8
        y = self._multiply(spec, lhs, residual, rhs)
        return y if self.out_in_tiles else from_tiles(y, self.tiles)

    def multiply_grad(
        self, spec: GemmSpec, grad: Quantized, rhs: Quantized, seed: CallSeed
    ) -> jax.Array:
        """``multiply`` for dX, ``[M, K]`` or ``[T, m, K]``."""
        del seed
        dx = self._multiply(spec, grad, None, rhs)
        return dx if self.lhs_in_tiles else from_tiles(dx, self.tiles)

    def _multiply(
        self,
        spec: GemmSpec,
        lhs: Quantized,
        residual: Quantized | None,
        rhs: Quantized,
    ) -> jax.Array:
        return ops.ragged_matmul(
            lhs,
            residual,
            rhs,
            self.tiles.groups,
            block_shape=spec.block_shape,
            dtype=spec.dtype,
            implementation=spec.implementation,
        )

    def contract_rows(
        self,
        spec: GemmSpec,
        lhs: Quantized,
        residual: Quantized | None,
        rhs: Quantized,
        seed: CallSeed,
    ) -> jax.Array:
        """Multiplies X' with dY, colwise codes ``[T, K, m]`` and ``[T, N, m]``.

        Returns ``[G, K, N]`` in ``spec.dtype``.
        """
        del seed
        assert residual is None  # _check_config
        return ops.ragged_contraction(
            lhs,
            rhs,
            self.tiles.groups,
            size=self.num_groups,
            block_shape=spec.block_shape,
            dtype=spec.dtype,
            implementation=spec.implementation,
        )


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["groups"], meta_fields=["m"]
)
@dataclasses.dataclass(frozen=True)
class ExchangedGemms(DenseGemms):
    """Runs the INT8 GEMMs of experts that are on several devices.

    Each device multiplies the rows of its own experts.  Codes are sent before the
    products, and outputs return after them.

    Attributes:
      groups: the groups of rows.
      m: the rows of a block.
    """

    groups: ExchangedGroups
    m: int

    def tile_groups(self) -> jax.Array:
        """The expert of each tile, int32; E for a tile without rows.

        If lhs is sent, the tiles are those on one device, ``[T]``; else those of all
        devices, ``[D C T]``.
        """
        plan = self.groups.plan
        if self.groups.sends:
            return assign_tiles(plan.group_sizes, plan.rows, self.m).groups
        local = plan.local_experts
        part = jnp.arange(plan.parts, dtype=jnp.int32)[:, None, None]
        groups = plan.tiles(self.m).groups
        experts = jnp.where(groups < local, part * local + groups, plan.num_experts)
        return experts.reshape(-1)

    def tile_rows(self, x: jax.Array) -> Rows:
        """Rows to be sent, or the rows ``[D, C, R, K]`` on each device."""
        if x.ndim < 4:
            return TokenRows(x, self.groups.plan, self.m)
        tiles = self.groups.plan.tiles(self.m)
        place = jnp.arange(0, x.shape[2], self.m, dtype=jnp.int32)
        first = jnp.broadcast_to(place, tiles.row_counts.shape)
        return TiledRows(GroupedRows(x, first, tiles.row_counts), tiles.indices)

    def stack(self, x: jax.Array) -> MatrixStack:
        """The tiles ``[D C T, m, K]`` of rows ``[D, C, R, K]`` on each device."""
        tiles = self.groups.plan.tiles(self.m)
        values = x.reshape(tiles.row_counts.size, self.m, x.shape[-1])
        return MatrixStack(
            values, tiles.indices.reshape(-1), tiles.row_counts.reshape(-1)
        )

    def unstack(self, tree: Tree) -> Tree:
        """Arrays ``[D C T, ...]`` of tiles as ``[D, C, T, ...]``."""
        shape = self.groups.plan.tiles(self.m).row_counts.shape
        return jax.tree.map(lambda x: x.reshape(*shape, *x.shape[1:]), tree)

    def count_blocks(self, spec: Spec, x: jax.Array) -> jax.Array:
        """The number of blocks in tiles that hold rows, int32 ``[]``."""
        tiles = self.groups.plan.used_tiles(self.m)
        return tiles * -(-x.shape[-1] // spec.recipe.block_shape[1])

    def multiply(
        self,
        spec: GemmSpec,
        lhs: Quantized,
        residual: Quantized | None,
        rhs: Quantized,
        seed: CallSeed,
    ) -> jax.Array:
        """Multiplies tiles ``[D, C, T, m, K]`` with matrices ``[E, N, K]``, for Y.

        Returns ``[D, C, R, N]``, or ``[T, k, N]`` if the output returns to the tokens.
        """
        del seed  # no sum is in INT8
        y = self._multiply(spec, lhs, residual, rhs)
        return y if self.groups.sends else return_rows(self.groups.plan, y)

    def multiply_grad(
        self, spec: GemmSpec, grad: Quantized, rhs: Quantized, seed: CallSeed
    ) -> jax.Array:
        """``multiply`` for dX, ``[T, K]`` or ``[D, C, R, K]``."""
        del seed
        dx = self._multiply(spec, grad, None, rhs)
        return sum_rows(return_rows(self.groups.plan, dx)) if self.groups.sends else dx

    def _multiply(
        self,
        spec: GemmSpec,
        lhs: Quantized,
        residual: Quantized | None,
        rhs: Quantized,
    ) -> jax.Array:
        plan = self.groups.plan
        y = ops.ragged_matmul(
            lhs,
            residual,
            jax.tree.map(lambda x: x.reshape(plan.parts, -1, *x.shape[1:]), rhs),
            plan.tiles(self.m).groups,
            block_shape=spec.block_shape,
            dtype=spec.dtype,
            implementation=spec.implementation,
        )
        return y.reshape(*y.shape[:2], -1, y.shape[-1])

    def contract_rows(
        self,
        spec: GemmSpec,
        lhs: Quantized,
        residual: Quantized | None,
        rhs: Quantized,
        seed: CallSeed,
    ) -> jax.Array:
        """Multiplies X' with dY, colwise codes ``[D, C, T, K, m]``.

        Returns ``[E, K, N]`` in ``spec.dtype``.
        """
        del seed
        assert residual is None  # _check_config
        plan = self.groups.plan
        dw = ops.ragged_contraction(
            lhs,
            rhs,
            plan.tiles(self.m).groups,
            size=plan.local_experts,
            block_shape=spec.block_shape,
            dtype=spec.dtype,
            implementation=spec.implementation,
        )
        return dw.reshape(-1, *dw.shape[2:])
