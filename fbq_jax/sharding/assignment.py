"""Assigns the axes of a mesh to the factors of an op.

Shards consist of complete units of a factor's granularity.  If a mesh asks for other
shards, the axis is split over fewer devices or none, and devices repeat each other's
work.  If the rule allows it, blocks are split between devices instead
(``fbq_jax.sharding.split_block_scales``).  A warning reports both.
"""

import dataclasses
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh

from fbq_jax.sharding.layer_names import warn_once
from fbq_jax.sharding.rule_language import (
    UNSHARDED,
    ShardingRule,
    pair_leaves,
    parse_factors,
)

MeshAxes = tuple[str, ...]


class ShardAssignment(NamedTuple):
    """The axes of a mesh that shard each factor; a missing factor is not sharded.

    Attributes:
      mesh_axes: the axes that shard a factor between units, the major axis first.
      reduce_scatter_axes: additional axes that shard a factor of the result, because
        the sum over a contraction is scattered over them.
      intra_block_axes: additional axes that split the units of a factor.
      mesh_shape: the size of each axis of the mesh.
    """

    mesh_axes: dict[str, MeshAxes]
    reduce_scatter_axes: dict[str, MeshAxes]
    intra_block_axes: dict[str, MeshAxes]
    mesh_shape: Mapping[str, int]

    @property
    def assigned_axes(self) -> set[str]:
        """The mesh axes that are assigned to any factor."""
        return {name for field in self[:3] for axes in field.values() for name in axes}

    def axes_of(self, factors: str) -> MeshAxes:
        """The mesh axes that shard an operand along any of the factors."""
        return tuple(
            axis
            for factor in factors
            for assigned in (self.mesh_axes, self.intra_block_axes)
            for axis in assigned.get(factor, ())
        )

    def device_count(self, axes: Iterable[str]) -> int:
        """The number of devices along these mesh axes."""
        return math.prod(self.mesh_shape[name] for name in axes)

    def longest_prefix(self, axes: MeshAxes, size: int) -> MeshAxes:
        """The longest prefix of the axes whose number of devices divides a size."""
        while size % self.device_count(axes):
            axes = axes[:-1]
        return axes

    def shard_count(self, factor: str) -> int:
        """The number of shards along a factor."""
        return self.device_count(self.axes_of(factor))

    def shard_index(self, factor: str) -> jax.Array:
        """The index of this device's shard along a factor, uint32 ``[]``."""
        axes = self.axes_of(factor)
        return jnp.uint32(lax.axis_index(axes) if axes else 0)


@dataclasses.dataclass(frozen=True)
class ShardedArray:
    """An array and the mesh axes that shard each of its axes.

    ``mesh_axes`` has None for an axis whose sharding mesh axes cannot express.
    """

    shape: tuple[int, ...]
    dtype: Any
    mesh_axes: tuple[MeshAxes | None, ...]


def factor_mesh_axes(mesh: Mesh, arrays: Any) -> tuple[Mesh, Any]:
    """Splits the axes of a mesh into axes of prime size.

    Shardy may shard an array over part of a mesh axis, for which JAX has no name.  The
    prime factors of an axis can be ordered in several ways.  The order is chosen so
    that the new axes express the sharding of every array, if that is possible.

    Args:
      mesh: the mesh.
      arrays: a tree of shapes with shardings.

    Returns:
      A mesh with axes such as ``"data/0"``, and a tree of ``ShardedArray``.
    """
    orders = map(_prime_orders, mesh.shape.values())
    candidates = (_read(mesh, arrays, primes) for primes in itertools.product(*orders))
    first = next(candidates)
    return next(filter(_is_expressed, itertools.chain([first], candidates)), first)


def _read(
    mesh: Mesh, arrays: Any, primes: tuple[tuple[int, ...], ...]
) -> tuple[Mesh, Any]:
    """The mesh with its axes split into these primes, and the arrays on it."""
    sizes = {
        f"{axis}/{i}": prime
        for axis, factors in zip(mesh.shape, primes, strict=True)
        for i, prime in enumerate(factors)
    }
    factored = Mesh(mesh.devices.reshape(tuple(sizes.values())), tuple(sizes))
    return factored, jax.tree.map(lambda array: _read_array(factored, array), arrays)


def _is_expressed(candidate: tuple[Mesh, Any]) -> bool:
    """Whether the mesh expresses the sharding of every array."""
    return all(None not in array.mesh_axes for array in jax.tree.leaves(candidate[1]))


def _prime_orders(size: int) -> Iterator[tuple[int, ...]]:
    """The prime factors of a size, in each distinct order.

    >>> list(_prime_orders(12))
    [(2, 2, 3), (2, 3, 2), (3, 2, 2)]
    """
    if size == 1:
        yield ()
    divisors = [n for n in range(2, size + 1) if size % n == 0]
    for i, first in enumerate(divisors):
        if all(first % smaller for smaller in divisors[:i]):  # it is prime
            yield from ((first, *rest) for rest in _prime_orders(size // first))


def _read_array(mesh: Mesh, array: Any) -> ShardedArray:
    # The slices of an array whose axes are divisible by every number of shards.
    shape = (mesh.size,) * len(array.shape)
    slices = array.sharding.devices_indices_map(shape)
    starts = [
        {device: place[axis].start or 0 for device, place in slices.items()}
        for axis in range(len(shape))
    ]
    axes = tuple(_axes_along(mesh, axis_starts) for axis_starts in starts)
    return ShardedArray(array.shape, array.dtype, axes)


def _axes_along(mesh: Mesh, starts: Mapping[jax.Device, int]) -> MeshAxes | None:
    """The mesh axes along which the starts of shards change, the major axis first.

    Returns None if mesh axes do not determine the starts.
    """
    grid = np.vectorize(starts.__getitem__, otypes=[int])(mesh.devices)
    steps = {
        name: int(grid.take(1, axis).flat[0])
        for axis, name in enumerate(mesh.axis_names)
        if mesh.shape[name] > 1 and np.ptp(grid, axis).any()
    }
    if math.prod(mesh.shape[name] for name in steps) != len(np.unique(grid)):
        return None
    return tuple(sorted(steps, key=lambda name: -steps[name]))


class _ShardedAxis(NamedTuple):
    """An axis of an array, its factor, and the mesh axes that shard it."""

    factor: str
    granularity: int
    size: int
    mesh_axes: MeshAxes
    is_expressed: bool

    @property
    def units(self) -> int:
        return self.size // self.granularity


def _sharded_axes(words: str, array: ShardedArray) -> list[_ShardedAxis]:
    axes = zip(parse_factors(words), array.shape, array.mesh_axes, strict=True)
    return [
        _ShardedAxis(*factor, size, names or (), names is not None)
        for factor, size, names in axes
    ]


def _largest(words: Any, arrays: Any) -> list[_ShardedAxis]:
    """The axes of the largest array."""
    pairs = pair_leaves(words, arrays)
    return _sharded_axes(*max(pairs, key=lambda pair: math.prod(pair[1].shape)))


def assign_mesh_axes(
    rule: ShardingRule, operands: tuple[Any, ...], results: Any, mesh: Mesh
) -> ShardAssignment:
    """Decides which factor of an op each mesh axis shards.

    A contracted factor is sharded over the axes that shard it in all operands.  If
    there is a contraction, other factors are sharded as in the result, or else as in
    the operands.  Without a contraction, operands come before the result.  The largest
    array of each operand decides.

    Args:
      rule: the sharding rule of the op.
      operands: trees of ``ShardedArray``.
      results: a tree of ``ShardedArray``.
      mesh: the mesh of ``factor_mesh_axes``.
    """
    assignment = ShardAssignment({}, {}, {}, mesh.shape)
    given = [
        _largest(words, arrays)
        for words, arrays in zip(rule.operands, operands, strict=True)
        if jax.tree.leaves(words)
    ]
    result = _largest(rule.results, results)
    for factor in rule.contracted:
        _assign(assignment, _common_axis(factor, given), rule.splittable)
    for axes in [result, *given] if rule.contracted else [*given, result]:
        # The sharding of the result is no reason to split blocks of an operand.
        splittable = "" if axes is result else rule.splittable
        for axis in axes:
            if axis.factor not in rule.contracted:
                _assign(assignment, axis, splittable)
    _assign_scattered_sums(assignment, rule.contracted, result)
    return assignment


def _common_axis(factor: str, operands: list[list[_ShardedAxis]]) -> _ShardedAxis:
    """A factor's axis, with the mesh axes that shard it in every operand with it."""
    first, *others = (a for axes in operands for a in axes if a.factor == factor)
    names = (n for n in first.mesh_axes if all(n in a.mesh_axes for a in others))
    return first._replace(mesh_axes=tuple(names))


def _assign(assignment: ShardAssignment, axis: _ShardedAxis, splittable: str) -> None:
    """Adds a factor, sharded like an array's axis, as far as possible."""
    between, inside = assignment.mesh_axes, assignment.intra_block_axes
    if axis.factor in (UNSHARDED, *between, *inside):
        return
    taken = assignment.assigned_axes
    free = tuple(name for name in axis.mesh_axes if name not in taken)
    if names := assignment.longest_prefix(free, axis.units):
        between[axis.factor] = names
    if axis.factor in splittable:
        units = axis.units // assignment.device_count(names)
        elements = units * axis.granularity
        if rest := assignment.longest_prefix(free[len(names) :], elements):
            inside[axis.factor] = rest


def _assign_scattered_sums(
    assignment: ShardAssignment, contracted: str, result: list[_ShardedAxis]
) -> None:
    """Adds the axes that scatter the sum over a contraction, by its factors."""
    summed = {n for f in contracted for n in assignment.mesh_axes.get(f, ())}
    for axis in result:
        have = assignment.mesh_axes.get(axis.factor, ())
        more = axis.mesh_axes[len(have) :]
        is_prefix = axis.mesh_axes == have + more
        if axis.factor != UNSHARDED and is_prefix and summed.issuperset(more):
            shard = axis.size // assignment.device_count(have)
            scattered = assignment.longest_prefix(more, shard)
            assignment.reduce_scatter_axes[axis.factor] = scattered
            summed.difference_update(scattered)


def warn_misaligned_shards(
    name: str,
    rule: ShardingRule,
    operands: tuple[Any, ...],
    assignment: ShardAssignment,
) -> None:
    """Warns if shards are not complete units, and says what that costs.

    Mesh axes that shard an axis of some size cause one warning per layer, however many
    ops of the layer have such an axis.

    Args:
      name: the name of the op.
      rule: the sharding rule of the op.
      operands: trees of ``ShardedArray``.
      assignment: the result of ``assign_mesh_axes``.
    """
    assigned = assignment.assigned_axes
    for words, array in pair_leaves(rule.operands, operands):
        if len(array.shape) < 3:  # Small arrays, such as a norm's scale.
            continue
        for i, axis in enumerate(_sharded_axes(words, array)):
            is_split = axis.factor in assignment.intra_block_axes
            if _is_aligned(axis, assignment) or (
                axis.is_expressed
                and not is_split
                and assigned.issuperset(axis.mesh_axes)
            ):
                continue
            over = _mesh_axis_names(axis, assignment.mesh_shape)
            where = f"axis {i} of {array.dtype}{list(array.shape)}"
            text = _misalignment(axis, where, over, is_split)
            warn_once(name, operands, (over, axis.size), text)


def _is_aligned(axis: _ShardedAxis, assignment: ShardAssignment) -> bool:
    """Whether every shard of an axis consists of complete units."""
    shards = assignment.device_count(axis.mesh_axes)
    return axis.is_expressed and (
        shards == 1 or (axis.factor != UNSHARDED and axis.units % shards == 0)
    )


def _misalignment(axis: _ShardedAxis, where: str, over: str, is_split: bool) -> str:
    problem = "the op cannot shard this axis"
    if axis.granularity > 1:
        problem = f"shards are not multiples of {axis.granularity}"
    elif axis.factor != UNSHARDED:
        problem = "shards are not equal"
    cost = (
        "scales are all-reduced, without a GPU kernel"
        if is_split
        else "devices gather the axis and may repeat each other's work"
    )
    return (
        f"{where} is sharded over {over}, but {problem}: {cost}. Pad the axis or shard "
        "another one. If you did not request this sharding, XLA chose it; a sharding "
        "constraint prevents it."
    )


def _mesh_axis_names(axis: _ShardedAxis, mesh_shape: Mapping[str, int]) -> str:
    """The axes of the user's mesh that shard this axis, with the number of shards."""
    sizes: dict[str, int] = {}
    for name in axis.mesh_axes:
        full = name.rpartition("/")[0] or name  # a part of an axis, or all of it
        sizes[full] = sizes.get(full, 1) * mesh_shape[name]
    return ", ".join(f"{n}={k}" for n, k in sizes.items()) or "parts of mesh axes"
