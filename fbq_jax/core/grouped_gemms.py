"""The INT8 GEMMs of rows in groups: of a ragged product, on one device or several."""

import dataclasses
import functools
from typing import TypeVar

import jax
import jax.numpy as jnp

from fbq_jax import ops
from fbq_jax.core.expert_codes import TokenRows
from fbq_jax.core.expert_exchange import ExchangedGroups, return_rows, sum_rows
from fbq_jax.core.gemms import Gemms
from fbq_jax.core.rows import MatrixStack, Rows, TiledRows
from fbq_jax.core.spec import GemmSpec, Spec
from fbq_jax.kernels.grouped_reference import (
    GroupedRows,
    Tiles,
    assign_tiles,
    from_tiles,
)
from fbq_jax.kernels.reference import Quantized
from fbq_jax.kernels.rounding import CallSeed

Tree = TypeVar("Tree")


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["tiles"],
    meta_fields=["num_groups", "lhs_in_tiles", "out_in_tiles"],
)
@dataclasses.dataclass(frozen=True)
class GroupedGemms(Gemms):
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
        index = jnp.arange(x.shape[0], dtype=jnp.int32)
        return MatrixStack(x, index, self.tiles.row_counts)

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
        rhs: Quantized,
        seed: CallSeed,
    ) -> jax.Array:
        """Multiplies X' with dY, colwise codes ``[T, K, m]`` and ``[T, N, m]``.

        Returns ``[G, K, N]`` in ``spec.dtype``.
        """
        del seed
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
class ExchangedGemms(Gemms):
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
        rhs: Quantized,
        seed: CallSeed,
    ) -> jax.Array:
        """Multiplies X' with dY, colwise codes ``[D, C, T, K, m]``.

        Returns ``[E, K, N]`` in ``spec.dtype``.
        """
        del seed
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
