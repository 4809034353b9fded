"""How the rows of experts lie: in tiles, on one device or on several."""

import dataclasses
import functools
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax import lax

from fbq_jax import ops
from fbq_jax.core.gemms import Rows
from fbq_jax.core.noise import GRAD_STREAM, seeds_of
from fbq_jax.core.spec import Spec
from fbq_jax.core.threshold import Scalars, Stats
from fbq_jax.experts.codes import TokenRows, quantize_tokens, quantize_tokens_lhs
from fbq_jax.experts.exchange import ExchangedGroups, return_rows, sum_rows
from fbq_jax.kernels.quantized import Layouts, Quantized
from fbq_jax.kernels.rounding import CallSeed
from fbq_jax.kernels.sources import Matrix, Source
from fbq_jax.kernels.tiles import Tiles, assign_tiles, from_tiles
from fbq_jax.recipes.schema import Gemm

Tree = TypeVar("Tree")


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["tiles", "group_sizes"],
    meta_fields=["m", "lhs_in_tiles", "out_in_tiles"],
)
@dataclasses.dataclass(frozen=True)
class TiledRows(Rows):
    """Rows ``[M, K]`` of groups, each of which has its own matrix, in tiles.

    Attributes:
      tiles: where each row lies among the T tiles.
      group_sizes: int32 ``[G]``, the rows of each group.
      m: the rows of a tile.
      lhs_in_tiles: whether X and dX are tiles ``[T, m, K]`` instead of rows.
      out_in_tiles: whether Y is tiles ``[T, m, N]`` instead of rows.
    """

    tiles: Tiles
    group_sizes: jax.Array
    m: int
    lhs_in_tiles: bool = False
    out_in_tiles: bool = False

    @property
    def tile_groups(self) -> jax.Array:
        """The group of each tile, int32 ``[T]``; G without rows."""
        return self.tiles.groups

    def matrix(self, x: jax.Array) -> tuple[Source, jax.Array]:
        """The rows of ``[M, C]`` with their tiles."""
        first, counts = self.tiles.first_rows, self.tiles.row_counts
        return Matrix(x, first, counts, self.m), _index(first)

    def stack(self, x: jax.Array) -> tuple[jax.Array, jax.Array | None, jax.Array]:
        """Tiles ``[T, m, C]`` with the number of rows of each."""
        return x, self.tiles.row_counts, _index(self.tiles.row_counts)

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
        y = self._multiply(spec, lhs, rhs, dtype)
        return y if self.out_in_tiles else from_tiles(y, self.tiles)

    def multiply_grad(
        self, spec: Spec, grad: Quantized, rhs: Quantized, seed: CallSeed
    ) -> jax.Array:
        """dX, ``[M, K]`` or ``[T, m, K]``."""
        del seed
        dx = self._multiply(spec, grad, rhs, spec.lhs_dtype)
        return dx if self.lhs_in_tiles else from_tiles(dx, self.tiles)

    def _multiply(
        self, spec: Spec, lhs: Quantized, rhs: Quantized, dtype: Any
    ) -> jax.Array:
        how = spec.implementation
        return ops.matmul(lhs, rhs, self.tiles.groups, dtype=dtype, implementation=how)

    def contract(
        self, spec: Spec, lhs: Quantized, grad: Quantized, seed: CallSeed
    ) -> jax.Array:
        """DW ``[G, K, N]``, from colwise codes ``[T, K, m]`` and ``[T, N, m]``."""
        del seed
        return ops.contract(
            lhs,
            grad,
            self.tiles.groups,
            size=self.group_sizes.shape[0],
            dtype=spec.rhs_dtype,
            implementation=spec.implementation,
        )

    def multiply_in_float(self, x: jax.Array, w: jax.Array, dtype: Any) -> jax.Array:
        """``lax.ragged_dot``, unquantized; codes of W stand for their values."""
        return float_ragged_dot(x, w, self.group_sizes, dtype)

    def contract_in_float(self, x: jax.Array, dy: jax.Array, dtype: Any) -> jax.Array:
        """``X' . dY`` of each group, unquantized."""
        if x.ndim == 3:  # X was saved as codes, in tiles
            x = from_tiles(x, self.tiles)
        groups = self.group_sizes.shape[0]
        w = jax.ShapeDtypeStruct((groups, x.shape[1], dy.shape[1]), jnp.float32)

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
    sizes = group_sizes.astype(jnp.int32)
    return TiledRows(assign_tiles(sizes, rows, m), sizes, m)


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["groups"], meta_fields=["m"]
)
@dataclasses.dataclass(frozen=True)
class ExchangedRows(Rows):
    """Rows of experts that are on several devices.

    Each device multiplies the rows of its own experts.  Codes are sent before the
    products, and outputs return after them.

    Attributes:
      groups: the groups of rows.
      m: the rows of a block.
    """

    groups: ExchangedGroups
    m: int

    @property
    def tile_groups(self) -> jax.Array:
        """The expert of each tile, int32; E for a tile without rows.

        The tiles are as on one device, ``[T]``, if lhs is sent; else all devices'
        tiles, ``[D C T]``.
        """
        plan = self.groups.plan
        if self.groups.sends:
            return assign_tiles(plan.group_sizes, plan.rows, self.m).groups
        local = plan.local_experts
        part = jnp.arange(plan.parts, dtype=jnp.int32)[:, None, None]
        groups = plan.tiles(self.m).groups
        experts = jnp.where(groups < local, part * local + groups, plan.num_experts)
        return experts.reshape(-1)

    def matrix(self, x: jax.Array) -> tuple[Source, jax.Array]:
        """The rows ``[D, C, R, K]`` on each device, with their tiles."""
        tiles = self.groups.plan.tiles(self.m)
        place = jnp.arange(0, x.shape[2], self.m, dtype=jnp.int32)
        first = jnp.broadcast_to(place, tiles.row_counts.shape)
        return Matrix(x, first, tiles.row_counts, self.m), tiles.indices

    def stack(self, x: jax.Array) -> tuple[jax.Array, jax.Array | None, jax.Array]:
        """The tiles ``[D C T, m, K]`` of rows ``[D, C, R, K]`` on each device."""
        tiles = self.groups.plan.tiles(self.m)
        values = x.reshape(tiles.row_counts.size, self.m, x.shape[-1])
        return values, tiles.row_counts.reshape(-1), tiles.indices.reshape(-1)

    def unstack(self, tree: Tree) -> Tree:
        """Arrays ``[D C T, ...]`` of tiles as ``[D, C, T, ...]``."""
        shape = self.groups.plan.tiles(self.m).row_counts.shape
        return jax.tree.map(lambda x: x.reshape(*shape, *x.shape[1:]), tree)

    def count_blocks(self, blocks: int) -> jax.Array:
        """The number of blocks in tiles that hold rows, int32 ``[]``."""
        return self.groups.plan.used_tiles(self.m) * blocks

    def quantize_lhs(
        self, spec: Spec, x: jax.Array, scalars: Scalars, *, save: bool, frozen: bool
    ) -> tuple[Layouts, Stats]:
        """Quantizes tokens where they lie and sends their codes."""
        if x.ndim == 4:
            return super().quantize_lhs(spec, x, scalars, save=save, frozen=frozen)
        rows, plan = TokenRows(x, self.groups.plan, self.m), spec.lhs(save=save)
        blocks = self.count_blocks(-(-x.shape[-1] // spec.recipe.block_shape[1]))
        return quantize_tokens_lhs(
            rows, spec, plan, scalars, blocks=blocks, frozen=frozen
        )

    def quantize_grad(
        self, spec: Spec, dy: jax.Array, seed: CallSeed, *, frozen: bool
    ) -> Layouts:
        """The codes of dY, which are sent if Y returned to the tokens."""
        if dy.ndim == 4:
            return super().quantize_grad(spec, dy, seed, frozen=frozen)
        rows = TokenRows(dy, self.groups.plan, self.m)
        seeds = seeds_of(seed, GRAD_STREAM, rows.indices)
        return quantize_tokens(rows, seeds, spec.grad(frozen=frozen))

    def multiply(
        self,
        spec: Spec,
        gemm: Gemm,
        lhs: Quantized,
        rhs: Quantized,
        seed: CallSeed,
        dtype: Any,
    ) -> jax.Array:
        """Multiplies tiles ``[D, C, T, m, K]`` with matrices ``[E, N, K]``, for Y.

        Returns ``[D, C, R, N]``, or ``[T, k, N]`` if the output returns to the tokens.
        """
        del gemm, seed  # no device sums in another dtype
        y = self._multiply(spec, lhs, rhs, dtype)
        return y if self.groups.sends else return_rows(self.groups.plan, y)

    def multiply_grad(
        self, spec: Spec, grad: Quantized, rhs: Quantized, seed: CallSeed
    ) -> jax.Array:
        """dX, ``[T, K]`` or ``[D, C, R, K]``."""
        del seed
        dx = self._multiply(spec, grad, rhs, spec.lhs_dtype)
        return sum_rows(return_rows(self.groups.plan, dx)) if self.groups.sends else dx

    def _multiply(
        self, spec: Spec, lhs: Quantized, rhs: Quantized, dtype: Any
    ) -> jax.Array:
        plan = self.groups.plan
        y = ops.matmul(
            lhs,
            jax.tree.map(lambda x: x.reshape(plan.parts, -1, *x.shape[1:]), rhs),
            plan.tiles(self.m).groups,
            dtype=dtype,
            implementation=spec.implementation,
        )
        return y.reshape(*y.shape[:2], -1, y.shape[-1])

    def contract(
        self, spec: Spec, lhs: Quantized, grad: Quantized, seed: CallSeed
    ) -> jax.Array:
        """DW ``[E, K, N]``, from colwise codes ``[D, C, T, K, m]``."""
        del seed
        plan = self.groups.plan
        dw = ops.contract(
            lhs,
            grad,
            plan.tiles(self.m).groups,
            size=plan.local_experts,
            dtype=spec.rhs_dtype,
            implementation=spec.implementation,
        )
        return dw.reshape(-1, *dw.shape[2:])


def _index(tiles: jax.Array) -> jax.Array:
    return jnp.arange(tiles.shape[0], dtype=jnp.int32)
