"""One device's shard of an op over a mesh, and what devices exchange.

Shards end at block boundaries, and the codes and scales of a block depend on nothing
else.  Each device draws the noise at its offset in the global matrix.  So N devices
compute the same codes and scales as one device, bit for bit and without communication,
with two exceptions:

- The scale of a row or column that is sharded, or of a block that is split between
  devices, needs the maximum over these devices.
- A product whose contraction is sharded is summed over devices.

If a product needs more of an operand than a device's shard, INT8 codes are gathered.

In floating point and in INT32, XLA's own collectives compute a sum.  A sum in INT32 is
exact, of the products of codes that share their scales.  In INT8, which is meant for
gradients, each device quantizes its partial sum in blocks with stochastic rounding and
divides it into one share per device.  It sends the codes and scales of each share to
the share's device, which adds the received shares in float32.  This costs one byte per
value and four bytes per block.  Noise differs between devices, and between mesh axes
that are summed one after the other, so the sum is unbiased.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from fbq_jax.kernels.quantized import Quantized
from fbq_jax.kernels.reference import AmaxReduce
from fbq_jax.kernels.rounding import ROW_GROUP, GlobalOffset, fold
from fbq_jax.sharding.assignment import MeshAxes, ShardAssignment
from fbq_jax.sharding.local_ops import Shard
from fbq_jax.sharding.rule_language import factor_names
from fbq_jax.sharding.split_block_scales import quantize_split_blocks

BLOCK = (128, 128)
# The dtype of a device's partial sum for each value of ``Gemm.reduce``.
PARTIAL_DTYPES = {"float32": jnp.float32, "bfloat16": jnp.bfloat16, "int8": jnp.float32}


@dataclasses.dataclass(frozen=True)
class MeshShard(Shard):
    """One device's share of an op: its sharding rule and the assigned mesh axes."""

    assignment: ShardAssignment

    def is_sharded(self, factors: str) -> bool:
        """See ``Shard``."""
        return bool(self.assignment.axes_of(factors))

    def shard_count(self, factor: str) -> int:
        """See ``Shard``."""
        return self.assignment.shard_count(factor)

    def shard_index(self, factor: str) -> jax.Array:
        """See ``Shard``."""
        return self.assignment.shard_index(factor)

    def global_offset(
        self, groups: int, rows: int, columns: int
    ) -> GlobalOffset | None:
        """See ``Shard``."""
        if not self.is_sharded("gij"):
            return None
        merged = jnp.arange(0, groups * rows, ROW_GROUP, jnp.uint32)
        group = self.shard_index("g") * groups + merged // rows
        row = self.shard_index("i") * rows + merged % rows
        column = self.shard_index("j") * columns
        first = group * (rows * self.shard_count("i")) + row
        return GlobalOffset(first, column[None])

    def amax_reduce(self, *factors: str) -> AmaxReduce | None:
        """See ``Shard``."""
        if not self.is_sharded("gij"):
            return None
        return AmaxReduce(*map(self._all_reduce_amax, factors))

    def _all_reduce_amax(self, factors: str) -> Callable[[jax.Array], jax.Array]:
        """A function that maps ``max |x|`` of this shard to the maximum of all shards.

        The maximum is over the bits of non-negative floats, so that NaN is the largest.
        """
        axes = self.assignment.axes_of(factors)

        def reduce(amax: jax.Array) -> jax.Array:
            if not axes:
                return amax
            bits = lax.pmax(lax.bitcast_convert_type(amax, jnp.int32), axes)
            return lax.bitcast_convert_type(bits, jnp.float32)

        return reduce

    def quantizer(self, run: Callable[..., Any]) -> Callable[..., Any]:
        """See ``Shard``; a shard may end inside a block."""
        if not self.assignment.intra_block_axes:
            return run
        return functools.partial(quantize_split_blocks, self.assignment)

    def gather(self, x: jax.Array, factors: str, axis: int) -> jax.Array:
        """See ``Shard``."""
        axes = self.assignment.axes_of(factors)
        return lax.all_gather(x, axes, axis=axis, tiled=True) if axes else x

    def partial_dtype(self, reduce: str | None, dtype: Any) -> Any:
        """See ``Shard``."""
        if reduce and self.is_sharded(self.rule.contracted):
            return jnp.dtype(PARTIAL_DTYPES[reduce])
        return dtype

    def sum(self, part: jax.Array) -> jax.Array:
        """See ``Shard``."""
        scatter = functools.partial(lax.psum_scatter, tiled=True)
        part, left = _reduce_scatter(part, self, scatter)
        return lax.psum(part, left) if left else part

    def scatter(self, x: jax.Array, words: str) -> jax.Array:
        """See ``Shard``."""
        for axis, factor in enumerate(factor_names(words)):
            if names := self.assignment.reduce_scatter_axes.get(factor):
                size = x.shape[axis] // self.assignment.device_count(names)
                start = lax.axis_index(names) * size
                x = lax.dynamic_slice_in_dim(x, start, size, axis)
        return x

    def sum_in_int8(
        self,
        part: jax.Array,
        seeds: jax.Array,
        quantize: Callable[[jax.Array, jax.Array, tuple[int, int]], Quantized],
        dtype: Any,
    ) -> jax.Array:
        """See ``Shard``."""
        assignment = self.assignment
        if not (summed := assignment.axes_of(self.rule.contracted)):
            return part
        seed = fold(seeds[0], lax.axis_index(summed))
        scatter = functools.partial(_scatter_codes, seed, quantize, assignment)
        part, left = _reduce_scatter(part, self, scatter)
        if not left:
            return part
        rows = part.shape[1]
        padding = -rows % assignment.device_count(left)
        part = jnp.pad(part, ((0, 0), (0, padding), (0, 0)))
        share = scatter(part, left, scatter_dimension=1).astype(dtype)
        return lax.all_gather(share, left, axis=1, tiled=True)[:, :rows]


def _reduce_scatter(
    part: jax.Array, shard: MeshShard, scatter: Callable[..., jax.Array]
) -> tuple[jax.Array, MeshAxes]:
    """Sums over the axes that shard the result; also returns the remaining axes."""
    left = set(shard.assignment.axes_of(shard.rule.contracted))
    for axis, factor in enumerate(factor_names(shard.rule.results)):
        if names := shard.assignment.reduce_scatter_axes.get(factor):
            part = scatter(part, names, scatter_dimension=axis)
            left.difference_update(names)
    return part, tuple(sorted(left))


def _scatter_codes(
    seed: jax.Array,
    quantize: Callable[[jax.Array, jax.Array, tuple[int, int]], Quantized],
    assignment: ShardAssignment,
    part: jax.Array,
    names: MeshAxes,
    *,
    scatter_dimension: int,
) -> jax.Array:
    """``lax.psum_scatter`` in INT8; ``seed`` differs between devices."""
    axis, shape, number = scatter_dimension, part.shape, assignment.device_count(names)
    split = (*shape[:axis], number, shape[axis] // number, *shape[axis + 1 :])
    shares = jnp.moveaxis(part.reshape(split), axis, 0)  # [number, b, ., .]
    matrices = shares.reshape(-1, *shares.shape[2:])
    # Each mesh axis is summed over once, so its index identifies this sum.
    stage = tuple(assignment.mesh_shape).index(names[0])
    seeds = fold(fold(seed, stage), jnp.arange(len(matrices)))
    codes = quantize(matrices, seeds, BLOCK)

    def exchange(x: jax.Array) -> jax.Array:
        x = x.reshape(number, -1, *x.shape[1:])
        return lax.all_to_all(x, names, split_axis=0, concat_axis=0, tiled=True)

    received = jax.tree.map(exchange, codes)  # [number, b, ., .]
    return jnp.sum(received.dequantize(), axis=0)
