"""How an op is cut over the devices of a mesh.

XLA cannot look into a kernel: it would gather the operands whole on every device.  So
an op says how its arrays hang together, in the words of
``fbq_jax.sharding.assignment``.  Shardy learns from them how shardings propagate from
operands to results and back; what each device then does, on its own shard and with the
others, is the op's.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
from jax import lax
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from fbq_jax.sharding.assignment import (
    Axes,
    Shards,
    in_primes,
    pairs,
    parse,
    shards_of,
    warn_of_parts,
)

Local = Callable[[Axes, Shards], Callable[..., Any]]


def partitioned(
    name: str, axes_of: Callable[..., Axes], local: Local
) -> Callable[..., Any]:
    """An op that is cut as ``axes_of(*operands)`` says.

    Args:
      name: the op's.
      axes_of: the op's axes, from its operands' shapes.
      local: makes what computes a device's results from its operands; it may use
        collectives over the axes of ``Shards``.
    """

    def op(*operands: Any) -> Any:
        axes = axes_of(*operands)
        whole = jax.jit(local(axes, Shards({}, {}, {}, {})))  # To be traced once.
        if jax.sharding.get_abstract_mesh().manual_axes:
            return whole(*operands)  # Inside shard_map an array is a shard already.
        # Results leave the op without axes of size one.  Where these are broadcast,
        # XLA's simplifier for GPUs reshapes them away, and hands the op's attributes on
        # to the reshape, to which Shardy would apply the op's rule, and crash.
        shapes = jax.eval_shape(whole, *operands)
        narrow = axes._replace(results=jax.tree.map(_narrow, axes.results, shapes))

        def squeezed(function: Callable[..., Any], *operands: Any) -> Any:
            return jax.tree.map(_squeeze, function(*operands), shapes)

        def on_shards(shards: Shards) -> Callable[..., Any]:
            return functools.partial(squeezed, local(axes, shards))

        call = custom_partitioning(functools.partial(squeezed, whole))
        rule, sizes = _rule(narrow, operands)
        call.def_partition(
            functools.partial(_partition, name, narrow, on_shards),
            decode_shardings=False,  # Not all of Shardy's can be: see in_primes.
            sharding_rule=rule,
            reduction_factors=tuple(axes.contracted),
            **sizes,
        )
        return jax.tree.map(_expand, call(*operands), shapes)

    return op


def _units(of: Any) -> list[int]:
    """The axes of size one."""
    return [axis for axis, size in enumerate(of.shape) if size == 1]


def _narrow(words: str, of: Any) -> str:
    """The words of the others."""
    sized = zip(words.split(), of.shape, strict=True)
    return " ".join(word for word, size in sized if size != 1)


def _squeeze(x: jax.Array, of: Any) -> jax.Array:
    return lax.squeeze(x, _units(of))


def _expand(x: jax.Array, of: Any) -> jax.Array:
    return lax.expand_dims(x, _units(of))


def _rule(axes: Axes, operands: tuple[Any, ...]) -> tuple[str, dict[str, int]]:
    """The rule for Shardy, and the sizes of factors that are no array's whole axis.

    An axis whose elements stay together is a compound factor, of which only the major
    one is in other arrays.
    """
    sizes, dims = {}, set()
    for words, array in pairs(axes.operands, operands):
        for (letter, together), size in zip(parse(words), array.shape, strict=True):
            sizes[letter] = size // together
    unnamed = 0

    def factors(words: str) -> str:
        nonlocal unnamed
        text = []
        for letter, together in parse(words):
            factor = letter
            if letter == ".":
                unnamed += 1
                factor = f"x{unnamed}"
            elif together > 1:
                sizes[f"{letter}{together}"] = together
                factor = f"({letter} {letter}{together})"
            dims.add(factor)
            text.append(factor)
        return " ".join(text)

    sides = [
        ", ".join(factors(words) for words in jax.tree.leaves(side))
        for side in (axes.operands, axes.results)
    ]
    parts = {f: size for f, size in sizes.items() if f not in dims and f != "."}
    return " -> ".join(sides), parts


def _partition(
    name: str,
    axes: Axes,
    local: Callable[[Shards], Callable[..., Any]],
    mesh: Mesh,
    operands: tuple[Any, ...],
    results: Any,
) -> tuple[Mesh, Callable[..., Any], Any, Any]:
    """The callback of ``custom_partitioning``; arrays are shapes with shardings."""
    if mesh.empty:
        devices = jax.tree.leaves(operands)[0].sharding.devices_indices_map((1,))
        mesh = Mesh(list(devices), ("devices",))
    mesh = in_primes(mesh, jax.tree.leaves((operands, results)))
    shards = shards_of(axes, operands, results, mesh)
    warn_of_parts(name, axes, operands, shards, mesh)

    def run(*operands: Any) -> Any:
        # What is compiled in the context of a caller is not of the caller's mesh.
        with jax.sharding.use_abstract_mesh(AbstractMesh((), ())):
            return local(shards)(*operands)

    def sharding(scattered: Mapping[str, tuple[str, ...]], words: str) -> NamedSharding:
        spec = []
        for letter, together in parse(words):
            names = (
                shards.names(letter) if together > 1 else shards.over.get(letter, ())
            )
            spec.append((*names, *scattered.get(letter, ())) or None)
        return NamedSharding(mesh, PartitionSpec(*spec))

    of_result = functools.partial(sharding, shards.scattered)
    of_operand = functools.partial(sharding, {})
    return (
        mesh,
        run,
        jax.tree.map(of_result, axes.results),
        jax.tree.map(of_operand, axes.operands),
    )
