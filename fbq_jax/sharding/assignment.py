"""Which axes of an op the axes of a mesh cut.

An op says how its arrays hang together, in words such as ``"b i128 j128"``, one for
each axis of an array.  A word is a letter, the name of an axis of the op, and the
number of elements there that stay together (1 if it is left out): arrays whose words
share a letter are cut alike.  ``"."`` is an axis that is never cut.

An axis that cannot be cut as the mesh asks, between elements that stay together, is cut
into fewer shards, or left whole, on devices that then do the same, or inside of what
stays together where the op can have devices agree.  A warning says so.
"""

import itertools
import math
import warnings
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh


class Axes(NamedTuple):
    """An op's arrays, in words.

    Attributes:
      operands: a tuple, for each operand a tree like it, of one string an array.
      results: a tree like that of the results.
      contracted: the letters, in the order of the operands' axes, of what operands have
        in common and results lack.
      agreed: those whose elements that stay together may be on several devices, where
        these agree on what the elements share.
    """

    operands: tuple[Any, ...]
    results: Any
    contracted: str = ""
    agreed: str = ""


class Shards(NamedTuple):
    """What one device has of an op's axes.

    Attributes:
      over: the axes of the mesh that a letter's axis is cut over, the major one first;
        a letter may be missing.
      scattered: those that a result's axis is cut over beyond ``over``, by a
        contraction whose sum ends up in shards.
      inside: those that cut, beyond ``over``, between elements that stay together.
      sizes: of the axes of the mesh.
    """

    over: Mapping[str, tuple[str, ...]]
    scattered: Mapping[str, tuple[str, ...]]
    inside: Mapping[str, tuple[str, ...]]
    sizes: Mapping[str, int]

    def names(self, letters: str) -> tuple[str, ...]:
        """The axes of the mesh that any of the letters is cut over."""
        cuts = (self.over, self.inside)
        return tuple(
            n for letter in letters for cut in cuts for n in cut.get(letter, ())
        )

    def count(self, names: Iterable[str]) -> int:
        """The number of devices along axes of the mesh."""
        return _devices(names, self.sizes)

    def number(self, letter: str) -> int:
        """The number of shards of an axis."""
        return self.count(self.names(letter))

    def place(self, letter: str) -> jax.Array:
        """Which of them this device has, uint32 ``[]``."""
        names = self.names(letter)
        return jnp.uint32(lax.axis_index(names) if names else 0)


def parse(words: str) -> list[tuple[str, int]]:
    """The letter, and how many elements stay together, of each axis.

    >>> parse("b i128 .")
    [('b', 1), ('i', 128), ('.', 1)]
    """
    return [(word[0], int(word[1:] or 1)) for word in words.split()]


def pairs(words: Any, arrays: Any) -> Iterator[tuple[str, Any]]:
    """The words of each array, and the array."""
    return zip(jax.tree.leaves(words), jax.tree.leaves(arrays), strict=True)


def in_primes(mesh: Mesh, arrays: Iterable[Any]) -> Mesh:
    """The mesh with an axis for each prime factor of each of its own.

    Shardy may cut an array over a part of an axis, which JAX has no name for.  The
    factors are in an order in which they name what all arrays are cut over, if any is.
    """
    arrays = list(arrays)
    orders = [
        sorted({*itertools.permutations(_primes(n))}) for n in mesh.shape.values()
    ]
    meshes = []
    for primes in itertools.product(*orders):
        factors = {
            f"{name}/{i}": prime
            for name, each in zip(mesh.shape, primes, strict=True)
            for i, prime in enumerate(each)
        }
        devices = mesh.devices.reshape(tuple(factors.values()))
        meshes.append(Mesh(devices, tuple(factors)))
    suit = (m for m in meshes if all(_named(m, array) for array in arrays))
    return next(suit, meshes[0])


def _named(mesh: Mesh, array: Any) -> bool:
    return all(cut.named for cut in _cuts(". " * len(array.shape), array, mesh))


def _in_full(names: Iterable[str], mesh: Mesh) -> dict[str, int]:
    """The sizes of the axes that these are factors of, as far as these make them up."""
    sizes: dict[str, int] = {}
    for name in names:
        axis = name.rpartition("/")[0]
        sizes[axis] = sizes.get(axis, 1) * mesh.shape[name]
    return sizes


def _primes(size: int) -> list[int]:
    """The prime factors, in ascending order.

    >>> _primes(24)
    [2, 2, 2, 3]
    """
    for prime in range(2, size + 1):
        if size % prime == 0:
            return [prime, *_primes(size // prime)]
    return []


class _Cut(NamedTuple):
    """How an array's axis is cut, or should be.

    It could be cut into so many parts, of so many elements that stay together.  It is
    ``named`` unless it is cut in a way that no axes of the mesh make up.
    """

    letter: str
    names: tuple[str, ...]
    named: bool
    parts: int
    together: int


def shards_of(
    axes: Axes, operands: tuple[Any, ...], results: Any, mesh: Mesh
) -> Shards:
    """Decides which of the op's axes each axis of the mesh cuts.

    What is contracted is cut where all operands are.  Everything else is cut as a
    contraction's result is, or else as the operands are, of each the largest array.
    """

    def largest(words: Any, arrays: Any) -> tuple[str, Any]:
        return max(pairs(words, arrays), key=lambda pair: math.prod(pair[1].shape))

    given = [
        _cuts(*largest(words, arrays), mesh)
        for words, arrays in zip(axes.operands, operands, strict=True)
        if jax.tree.leaves(words)
    ]
    words, result = largest(axes.results, results)
    made = _cuts(words, result, mesh)
    over: dict[str, tuple[str, ...]] = {}
    inside: dict[str, tuple[str, ...]] = {}

    def claim(cut: _Cut, agreed: str) -> None:
        if cut.letter in (".", *over, *inside):
            return
        taken = {
            name for cuts in (over, inside) for names in cuts.values() for name in names
        }
        names = tuple(name for name in cut.names if name not in taken)
        if between := _divisors(names, cut.parts, mesh):
            over[cut.letter] = between
        if cut.letter in agreed:
            shard = cut.parts * cut.together // _devices(between, mesh.shape)
            if within := _divisors(names[len(between) :], shard, mesh):
                inside[cut.letter] = within

    for letter in axes.contracted:
        each = [cut for cuts in given for cut in cuts if cut.letter == letter]
        names = tuple(n for n in each[0].names if all(n in cut.names for cut in each))
        claim(each[0]._replace(names=names), axes.agreed)
    for cuts in [made, *given] if axes.contracted else [*given, made]:
        for cut in cuts:
            if cut.letter not in axes.contracted:
                # What is whole on a device is quantized there, whatever becomes of it.
                claim(cut, "" if cuts is made else axes.agreed)

    summed = {name for letter in axes.contracted for name in over.get(letter, ())}
    scattered: dict[str, tuple[str, ...]] = {}
    for cut, size in zip(made, result.shape, strict=True):
        letter, have = cut.letter, over.get(cut.letter, ())
        more = cut.names[len(have) :]
        if letter != "." and cut.names == have + more and summed.issuperset(more):
            shard = size // _devices(have, mesh.shape)
            scattered[letter] = _divisors(more, shard, mesh)
            summed.difference_update(scattered[letter])
    return Shards(over, scattered, inside, mesh.shape)


def warn_of_parts(
    name: str, axes: Axes, operands: tuple[Any, ...], shards: Shards, mesh: Mesh
) -> None:
    """Says where shards are not whole blocks, and what that costs."""
    every = (shards.over, shards.scattered, shards.inside)
    busy = {axis for cuts in every for names in cuts.values() for axis in names}
    for words, array in pairs(axes.operands, operands):
        if len(array.shape) < 3:  # What is as small as a gain is fetched anyway.
            continue
        for axis, cut in enumerate(_cuts(words, array, mesh)):
            fits = (
                cut.letter != "." and cut.parts % _devices(cut.names, mesh.shape) == 0
            )
            agreed = cut.letter in shards.inside
            if cut.named and (fits or (not agreed and busy.issuperset(cut.names))):
                continue
            over = ", ".join(f"{n}={k}" for n, k in _in_full(cut.names, mesh).items())
            side = "the block" if cut.letter == "." else cut.together
            do = "agree on its scales, without a kernel," if agreed else "gather it"
            warnings.warn(
                f"{name}: axis {axis} of {array.dtype}{list(array.shape)} is cut over "
                f"{over or 'parts of axes'}, and not into whole blocks of what has a "
                f"common scale. The devices {do} and may do the same work. What a "
                f"device has of it should be a multiple of {side}. Where nothing of "
                "yours cuts it so, XLA does, unless a sharding constraint forbids it.",
                stacklevel=2,
            )


def _cuts(words: str, array: Any, mesh: Mesh) -> list[_Cut]:
    """How an array is cut, axis by axis."""
    # The shards' places in an array that every sharding divides.
    shape = (mesh.size,) * len(array.shape)
    places = array.sharding.devices_indices_map(shape)
    cuts = []
    for axis, (letter, together) in enumerate(parse(words)):
        names = _names(mesh, {device: at[axis] for device, at in places.items()})
        parts = array.shape[axis] // together
        cuts.append(_Cut(letter, names or (), names is not None, parts, together))
    return cuts


def _names(mesh: Mesh, places: Mapping[jax.Device, slice]) -> tuple[str, ...] | None:
    """The axes of a mesh along which places differ, the major one first.

    None if they differ in a way that these do not make up.
    """
    starts = np.vectorize(lambda device: places[device].start or 0)(mesh.devices)
    steps = {
        name: int(starts.take(1, axis).flat[0])
        for axis, name in enumerate(mesh.axis_names)
        if mesh.shape[name] > 1 and np.ptp(starts, axis).any()
    }
    if math.prod(mesh.shape[name] for name in steps) != len(np.unique(starts)):
        return None
    return tuple(sorted(steps, key=lambda name: -steps[name]))


def _divisors(names: tuple[str, ...], size: int, mesh: Mesh) -> tuple[str, ...]:
    """As many of the axes, from the major one on, as together divide a size."""
    while size % _devices(names, mesh.shape):
        names = names[:-1]
    return names


def _devices(names: Iterable[str], sizes: Mapping[str, int]) -> int:
    return math.prod(sizes[name] for name in names)
