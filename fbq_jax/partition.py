"""How an op is cut over the devices of a mesh.

XLA cannot look into a kernel: it would gather the operands whole on every device.  So
an op says how its arrays hang together, in words such as ``"b i128 j128"``, one for
each axis of an array.  A word is a letter, the name of an axis of the op, and the number
of elements there that stay together (1 if it is left out): arrays whose words share a
letter are cut alike.  ``"."`` is an axis that is never cut.

Shardy learns how shardings propagate from the operands to the results and back; what
each device does then, on its own shard and with the others, is decided here.  An axis
that cannot be cut as the mesh asks, between elements that stay together, is left whole.
"""

import functools
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding


class Axes(NamedTuple):
    """An op's arrays, in words.

    Attributes:
      operands: a tree like that of the operands, of one string an array.
      results: likewise.
      contracted: the letters of axes that operands have in common and results lack.
    """

    operands: Any
    results: Any
    contracted: str = ""


class Shards(NamedTuple):
    """What one device has of an op's axes.

    Attributes:
      over: the axes of the mesh that a letter's axis is cut over, the major one first;
        a letter may be missing.
      scattered: those that a result's axis is cut over beyond ``over``, by a
        contraction whose sum ends up in shards.
      sizes: of the axes of the mesh.
    """

    over: Mapping[str, tuple[str, ...]]
    scattered: Mapping[str, tuple[str, ...]]
    sizes: Mapping[str, int]

    def names(self, letters: str) -> tuple[str, ...]:
        """The axes of the mesh that any of the letters is cut over."""
        return tuple(name for letter in letters for name in self.over.get(letter, ()))

    def count(self, letter: str) -> int:
        """The number of shards of an axis."""
        return math.prod(self.sizes[name] for name in self.names(letter))

    def index(self, letter: str) -> jax.Array:
        """Which of them this device has, uint32 ``[]``."""
        names = self.names(letter)
        index = lax.axis_index(names) if names else jnp.int32(0)
        return index.astype(jnp.uint32)


WHOLE = Shards({}, {}, {})

Local = Callable[[Axes, Shards], Callable[..., Any]]


def partitioned(axes_of: Callable[..., Axes], local: Local) -> Callable[..., Any]:
    """An op that is cut as ``axes_of(*operands)`` says.

    Args:
      axes_of: the op's axes, from its operands' shapes.
      local: makes what computes a device's results from its operands; it may use
        collectives over the axes of ``Shards``.
    """

    def op(*operands: Any) -> Any:
        axes = axes_of(*operands)
        call = custom_partitioning(local(axes, WHOLE))
        rule, contracted, sizes = _rule(axes, operands)
        call.def_partition(
            functools.partial(_partition, axes, local),
            decode_shardings=False,  # not all of Shardy's can be: see cuts_of
            sharding_rule=rule,
            reduction_factors=contracted,
            **sizes,
        )
        return call(*operands)

    return op


def parse(words: str) -> list[tuple[str, int]]:
    """The letter and the elements that stay together of each axis.

    >>> parse("b i128 .")
    [('b', 1), ('i', 128), ('.', 1)]
    """
    return [(word[0], int(word[1:] or 1)) for word in words.split()]


def _rule(
    axes: Axes, operands: Any
) -> tuple[str, tuple[str, ...], dict[str, int]]:
    """The rule for Shardy, its contracted factors and its factors' sizes."""
    anonymous = (f"x{i}" for i in range(10**6))
    sizes: dict[str, int] = {}
    alone = set()

    def factors(words: str) -> str:
        dims = []
        for letter, together in parse(words):
            if letter == ".":
                dims.append(next(anonymous))
            elif together == 1:
                alone.add(letter)
                dims.append(letter)
            else:
                sizes[f"{letter}{together}"] = together
                dims.append(f"({letter} {letter}{together})")
        return " ".join(dims)

    sides = [
        ", ".join(factors(words) for words in jax.tree.leaves(side))
        for side in (axes.operands, axes.results)
    ]
    for words, array in _arrays(axes.operands, operands):
        for (letter, together), size in zip(parse(words), array.shape, strict=True):
            if letter != ".":
                sizes[letter] = size // together
    sizes = {factor: size for factor, size in sizes.items() if factor not in alone}
    return " -> ".join(sides), tuple(axes.contracted), sizes


def _arrays(words: Any, arrays: Any) -> Iterator[tuple[str, Any]]:
    return zip(jax.tree.leaves(words), jax.tree.leaves(arrays), strict=True)


def _partition(
    axes: Axes, local: Local, mesh: Mesh, operands: Any, results: Any
) -> tuple[Mesh, Callable[..., Any], Any, Any]:
    """The callback of ``custom_partitioning``; arrays are shapes with a sharding."""
    if mesh.empty:
        devices = jax.tree.leaves(operands)[0].sharding.devices_indices_map((1,))
        mesh = Mesh(list(devices), ("devices",))
    shards = _cut(axes, operands, results, mesh)

    def sharding(words: str, scattered: Mapping[str, tuple[str, ...]]) -> NamedSharding:
        spec = [
            (*shards.over.get(letter, ()), *scattered.get(letter, ())) or None
            for letter, _ in parse(words)
        ]
        return NamedSharding(mesh, PartitionSpec(*spec))

    return (
        mesh,
        local(axes, shards),
        jax.tree.map(lambda words: sharding(words, shards.scattered), axes.results),
        jax.tree.map(lambda words: sharding(words, {}), axes.operands),
    )


def _cut(axes: Axes, operands: Any, results: Any, mesh: Mesh) -> Shards:
    """Which axis of the op each axis of the mesh is for.

    What is contracted is cut where all operands are.  Other axes are cut as a result
    of a contraction is, and elsewhere as the operands are, the largest arrays first;
    then as the others are.
    """
    given = [
        max(_arrays(words, arrays), key=lambda pair: math.prod(pair[1].shape))
        for words, arrays in zip(axes.operands, operands, strict=True)
        if jax.tree.leaves(words)
    ]
    made = max(
        _arrays(axes.results, results), key=lambda pair: math.prod(pair[1].shape)
    )
    over: dict[str, tuple[str, ...]] = {}

    def claim(letter: str, names: tuple[str, ...], cells: int) -> None:
        taken = {name for names in over.values() for name in names}
        names = tuple(name for name in names if name not in taken)
        names = _divisors(names, cells, mesh)
        if names and letter not in over:
            over[letter] = names

    wanted = [{letter: (n, cells) for letter, n, cells in _cuts(*p, mesh)} for p in given]
    for letter in axes.contracted:
        each = [cuts[letter] for cuts in wanted if letter in cuts]
        if each:
            first, cells = each[0]
            names = tuple(n for n in first if all(n in other for other, _ in each))
            claim(letter, names, cells)
    order = [made, *given] if axes.contracted else [*given, made]
    for pair in order:
        for letter, names, cells in _cuts(*pair, mesh):
            if letter not in axes.contracted:
                claim(letter, names, cells)

    sums = {name for letter in axes.contracted for name in over.get(letter, ())}
    scattered: dict[str, tuple[str, ...]] = {}
    for (letter, names, _), size in zip(_cuts(*made, mesh), made[1].shape, strict=True):
        have = over.get(letter, ())
        if letter != "." and names[: len(have)] == have:
            more = tuple(name for name in names[len(have) :] if name in sums)
            if names == have + more:
                shard = size // math.prod(mesh.shape[name] for name in have)
                scattered[letter] = _divisors(more, shard, mesh)
                sums -= set(scattered[letter])
    return Shards(over, scattered, mesh.shape)


def _cuts(
    words: str, array: Any, mesh: Mesh
) -> Iterator[tuple[str, tuple[str, ...], int]]:
    """For each axis its letter, what cuts it, and the number of its indivisible parts."""
    cuts = cuts_of(array.sharding, len(array.shape), mesh)
    for (letter, together), names, size in zip(
        parse(words), cuts, array.shape, strict=True
    ):
        yield letter, () if letter == "." else names, size // together


def cuts_of(sharding: Sharding, rank: int, mesh: Mesh) -> list[tuple[str, ...]]:
    """The axes of the mesh that each axis of an array is cut over, the major one first.

    None where it is cut in a way of the compiler's own, over a part of an axis.
    """
    # Of a shape that any sharding divides, so that an index is one's place in the mesh.
    places = sharding.devices_indices_map((mesh.size,) * rank)
    cuts = []
    for axis in range(rank):
        starts = np.array([places[d][axis].start or 0 for d in mesh.devices.flat])
        starts = starts.reshape(mesh.devices.shape)
        steps = {
            name: starts.take(1, i).flat[0]
            for i, name in enumerate(mesh.axis_names)
            if mesh.shape[name] > 1 and np.ptp(starts, i).any()
        }
        whole = math.prod(mesh.shape[name] for name in steps) == len(np.unique(starts))
        cuts.append(tuple(sorted(steps, key=steps.get, reverse=True)) if whole else ())  # type: ignore[arg-type]
    return cuts


def _divisors(names: tuple[str, ...], size: int, mesh: Mesh) -> tuple[str, ...]:
    """As many of the axes, from the major one on, as together divide a size."""
    while size % math.prod(mesh.shape[name] for name in names):
        names = names[:-1]
    return names
