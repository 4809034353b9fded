"""How the rows of experts lie: in tiles, on one device or on several."""

import dataclasses
import functools
import math
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax import lax

from fbq_jax import ops
from fbq_jax.core.gemms import Rows, Spec
from fbq_jax.core.threshold import GRAD_STREAM, Scalars, Stats
from fbq_jax.experts.codes import quantize_token_activation, quantize_tokens
from fbq_jax.experts.exchange import return_rows, sum_rows
from fbq_jax.experts.plan import Exchange, GroupTiles
from fbq_jax.kernels.quantized import Layouts, Quantized
from fbq_jax.kernels.rounding import CallSeed
from fbq_jax.kernels.sources import Matrix, Source
from fbq_jax.kernels.tiles import Tiles, assign_tiles, from_tiles, group_ends
from fbq_jax.recipes.schema import Gemm

Tree = TypeVar("Tree")


@dataclasses.dataclass(frozen=True)
class GroupedRows(Rows):
    """Rows in groups, each of which has its own matrix, in tiles.

    Subclasses say where X, dX and Y are outside of the tiles.

    Attributes:
      tiles: the tiles.
      m: the rows of a tile.
      size: the number of groups whose matrices a device has.
    """

    tiles: GroupTiles
    m: int
    size: int

    @property
    def tile_groups(self) -> jax.Array:
        """The group of each tile that X is quantized in, int32; G without rows."""
        return self.tiles.groups

    def place_output(self, y: jax.Array) -> jax.Array:
        """Moves Y from its tiles to where the caller has its rows."""
        raise NotImplementedError

    def place_grad(self, dx: jax.Array) -> jax.Array:
        """Moves dX from its tiles to where the caller has the rows of X."""
        raise NotImplementedError

    def fused(self) -> "tuple[GroupedRows, GroupedRows]":
        """The rows of two projections, between which they stay in their tiles."""
        raise NotImplementedError

    def matrix(self, x: jax.Array) -> tuple[Source, jax.Array]:
        """The rows of x with their tiles."""
        tiles = self.tiles
        return Matrix(x, tiles.first_rows, tiles.row_counts, self.m), tiles.indices

    def stack(self, x: jax.Array) -> tuple[jax.Array, jax.Array | None, jax.Array]:
        """All tiles ``[T, m, C]``, with the number of rows of each."""
        tiles = self.tiles
        values = x.reshape(tiles.row_counts.size, self.m, x.shape[-1])
        return values, tiles.row_counts.reshape(-1), tiles.indices.reshape(-1)

    def unstack(self, tree: Tree) -> Tree:
        """Arrays ``[T, ...]`` of all tiles, by device."""
        shape = self.tiles.row_counts.shape
        return jax.tree.map(lambda x: x.reshape(*shape, *x.shape[1:]), tree)

    def count_blocks(self, blocks: int) -> jax.Array:
        """The number of blocks in tiles that hold rows, int32 ``[]``."""
        return jnp.sum(self.tiles.row_counts > 0, dtype=jnp.int32) * blocks

    def multiply(
        self,
        spec: Spec,
        gemm: Gemm,
        lhs: Quantized,
        rhs: Quantized,
        seed: CallSeed,
        dtype: Any,
    ) -> jax.Array:
        """Multiplies each tile ``[m, K]`` with its group's matrix ``[N, K]``, for Y."""
        del gemm, seed  # no device sums in another dtype
        return self.place_output(self._multiply(spec, lhs, rhs, dtype))

    def dlhs(
        self, spec: Spec, grad: Quantized, rhs: Quantized, seed: CallSeed
    ) -> jax.Array:
        """Multiplies each tile ``[m, N]`` with its group's ``[K, N]``, for dX."""
        del seed
        return self.place_grad(self._multiply(spec, grad, rhs, spec.lhs_dtype))

    def _multiply(
        self, spec: Spec, lhs: Quantized, rhs: Quantized, dtype: Any
    ) -> jax.Array:
        groups = self.tiles.groups
        shape = *groups.shape[:-2], self.size  # of the groups, by device
        return ops.matmul(
            lhs,
            jax.tree.map(lambda x: x.reshape(*shape, *x.shape[1:]), rhs),
            groups,
            dtype=dtype,
            implementation=spec.implementation,
        )

    def drhs(
        self, spec: Spec, lhs: Quantized, grad: Quantized, seed: CallSeed
    ) -> jax.Array:
        """DW ``[G, K, N]``, from colwise codes ``[T, K, m]`` and ``[T, N, m]``."""
        del seed
        dw = ops.contract(
            lhs,
            grad,
            self.tiles.groups,
            size=self.size,
            dtype=spec.rhs_dtype,
            implementation=spec.implementation,
        )
        return dw.reshape(math.prod(dw.shape[:-2]), *dw.shape[-2:])


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["tiles", "positions", "group_sizes"],
    meta_fields=["m", "size", "lhs_in_tiles", "out_in_tiles"],
)
@dataclasses.dataclass(frozen=True)
class TiledRows(GroupedRows):
    """Rows ``[M, K]`` of groups on one device.

    Attributes:
      positions: int32 ``[M]``, where each row is (``Tiles.positions``).
      group_sizes: int32 ``[G]``, the rows of each group.
      lhs_in_tiles: whether X and dX are tiles ``[T, m, K]`` instead of rows.
      out_in_tiles: whether Y is tiles ``[T, m, N]`` instead of rows.
    """

    positions: jax.Array
    group_sizes: jax.Array
    lhs_in_tiles: bool = False
    out_in_tiles: bool = False

    @property
    def assigned(self) -> Tiles:
        """The tiles, as the kernels' functions take them."""
        groups, first, counts, _ = self.tiles
        return Tiles(first, counts, groups, self.positions)

    def place_output(self, y: jax.Array) -> jax.Array:
        """Y as rows ``[M, N]``, or as it is."""
        return y if self.out_in_tiles else from_tiles(y, self.assigned)

    def place_grad(self, dx: jax.Array) -> jax.Array:
        """DX as rows ``[M, K]``, or as it is."""
        return dx if self.lhs_in_tiles else from_tiles(dx, self.assigned)

    def fused(self) -> "tuple[TiledRows, TiledRows]":
        """The rows of two projections, between which they stay in their tiles."""
        replace = functools.partial(dataclasses.replace, self)
        return replace(out_in_tiles=True), replace(lhs_in_tiles=True)

    def multiply_in_float(self, x: jax.Array, w: jax.Array, dtype: Any) -> jax.Array:
        """``lax.ragged_dot``, unquantized; codes of W stand for their values."""
        return float_ragged_dot(x, w, self.group_sizes, dtype)

    def drhs_in_float(self, x: jax.Array, dy: jax.Array, dtype: Any) -> jax.Array:
        """``X' . dY`` of each group, unquantized."""
        if x.ndim == 3:  # X was saved as codes, in tiles
            x = from_tiles(x, self.assigned)
        w = jax.ShapeDtypeStruct((self.size, x.shape[1], dy.shape[1]), jnp.float32)

        def product(w: jax.Array) -> jax.Array:
            return float_ragged_dot(x, w, self.group_sizes, jnp.float32)

        (dw,) = jax.linear_transpose(product, w)(dy.astype(jnp.float32))
        return dw.astype(dtype)


def float_ragged_dot(
    x: jax.Array, w: jax.Array, group_sizes: jax.Array, dtype: Any
) -> jax.Array:
    """``lax.ragged_dot`` in the operands' common dtype, rounded once to ``dtype``."""
    common = x.dtype if x.dtype == w.dtype else jnp.float32
    wider = dtype if dtype == common else jnp.float32
    return lax.ragged_dot(
        x.astype(common), w.astype(common), group_sizes, preferred_element_type=wider
    ).astype(dtype)


def tiled_rows(group_sizes: jax.Array, rows: int, m: int) -> TiledRows:
    """The tiles of m rows of groups of these sizes, of ``rows`` rows in all."""
    first, counts, groups, positions = assign_tiles(group_sizes, rows, m)
    sizes = jnp.diff(group_ends(group_sizes, rows), prepend=0)
    index = jnp.arange(groups.shape[0], dtype=jnp.int32)
    tiles = GroupTiles(groups, first, counts, index)
    return TiledRows(tiles, m, len(sizes), positions, sizes)


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["tiles", "plan"],
    meta_fields=["m", "size"],
)
@dataclasses.dataclass(frozen=True)
class ExchangedRows(GroupedRows):
    """Rows of experts that are on several devices.

    Each device multiplies the rows of its own experts.  Codes are sent before the
    products, and outputs return after them.  On the experts' devices, rows are
    ``[D, C, R, K]``.
    """

    plan: Exchange

    @property
    def tile_groups(self) -> jax.Array:
        """The expert of each tile, int32; E for a tile without rows.

        The tiles are as on one device, ``[T]``, if lhs is sent; else all devices'
        tiles, ``[D C T]``.
        """
        plan, local = self.plan, self.size
        if plan.sends:
            return assign_tiles(plan.group_sizes, plan.rows, self.m).groups
        part = jnp.arange(plan.parts, dtype=jnp.int32)[:, None, None]
        groups = self.tiles.groups
        return jnp.where(groups < local, part * local + groups, len(plan)).reshape(-1)

    def count_blocks(self, blocks: int) -> jax.Array:
        """The number of blocks in tiles that hold rows, int32 ``[]``."""
        tiles = -(-self.plan.group_sizes // self.m)  # the sum is on each device
        return jnp.sum(tiles, dtype=jnp.int32) * blocks

    def quantize_lhs(
        self, spec: Spec, x: jax.Array, scalars: Scalars, *, save: bool, frozen: bool
    ) -> tuple[Layouts, Stats]:
        """Quantizes tokens where they lie and sends their codes."""
        if x.ndim == 4:
            return super().quantize_lhs(spec, x, scalars, save=save, frozen=frozen)
        layouts = spec.lhs(save=save)
        blocks = self.count_blocks(-(-x.shape[-1] // spec.recipe.block_shape[1]))
        return quantize_token_activation(
            self.plan, x, spec, layouts, scalars, blocks=blocks, frozen=frozen
        )

    def quantize_grad(
        self, spec: Spec, dy: jax.Array, seed: CallSeed, *, frozen: bool
    ) -> Layouts:
        """The codes of dY, which are sent if Y returned to the tokens."""
        if dy.ndim == 4:
            return super().quantize_grad(spec, dy, seed, frozen=frozen)
        layouts = spec.grad(frozen=frozen)
        return quantize_tokens(self.plan, dy, seed, GRAD_STREAM, layouts)

    def place_output(self, y: jax.Array) -> jax.Array:
        """Y as ``[D, C, R, N]``, or as ``[T, k, N]`` if it returns to the tokens."""
        y = _join_tiles(y)
        return y if self.plan.sends else return_rows(self.plan, y)

    def place_grad(self, dx: jax.Array) -> jax.Array:
        """DX as tokens ``[T, K]``, or as ``[D, C, R, K]``."""
        dx = _join_tiles(dx)
        return sum_rows(return_rows(self.plan, dx)) if self.plan.sends else dx

    def fused(self) -> "tuple[ExchangedRows, ExchangedRows]":
        """The rows of two projections, between which they stay in their tiles."""
        return self, dataclasses.replace(self, plan=self.plan.back)


def _join_tiles(x: jax.Array) -> jax.Array:
    """Tiles ``[D, C, T, m, K]`` as rows ``[D, C, T m, K]``."""
    return x.reshape(*x.shape[:2], x.shape[2] * x.shape[3], x.shape[4])


def exchanged_rows(plan: Exchange, m: int) -> ExchangedRows:
    """The tiles of m rows of a plan."""
    return ExchangedRows(plan.tiles(m), m, plan.local_experts, plan)
