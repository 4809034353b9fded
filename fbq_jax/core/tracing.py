"""Traces models, and finds what depends on what in them, without computing anything."""

import dataclasses
from collections.abc import Callable, Collection
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_batching import custom_vmap, sequential_vmap

from fbq_jax.core.visitors import Visitor, visiting, visitor

#: What ``find_dependents`` calls the outputs of a model.
OUTPUTS = "outputs"


def trace(call: Callable[..., Any], *trees: Any) -> Any:
    """The shapes of ``call(*trees)``.

    Args:
      call: a function, which is traced and not computed.
      *trees: its arguments.  Arrays may be ``jax.ShapeDtypeStruct``, and everything
        else, such as ``train=True``, stays as it is.
    """
    arrays, rebuild = split_arrays(trees)
    return jax.eval_shape(lambda arrays: call(*rebuild(arrays)), arrays)


class UnknownDependentsError(ValueError):
    """``jax.vmap`` does not take a model."""


@dataclasses.dataclass(eq=False)
class _Watch(Visitor):
    """Watches the weights of a model's layers while it is traced.

    Attributes:
      layers: the layers whose weights are watched.
      size: of the mapped axis on which everything lies that moves.
      other_sizes: of the axes that the model itself maps.
      dependents: the watched values that depend on what moves.
    """

    layers: Collection[str]
    size: int | None = None
    other_sizes: set[int] = dataclasses.field(default_factory=set)
    dependents: set[str] = dataclasses.field(default_factory=set)

    def see(self, product: Any) -> Any:
        """The product of a layer, whose right operand is watched."""
        rhs = observe_weight(product.layer, product.rhs)
        return dataclasses.replace(product, rhs=rhs)


def find_dependents(
    call: Callable[[Any, Any], Any], moving: Any, fixed: Any, layers: Collection[str]
) -> set[str]:
    """What depends on a part of a model's arguments, according to ``jax.vmap``.

    The model is traced under a ``vmap`` over that part, so JAX knows of each value
    whether it depends on it.  What depends on a weight of ``layers`` by their product
    only does not count as dependent.

    Args:
      call: takes ``moving`` and ``fixed`` and returns the model's outputs.
      moving: a tree of arguments.
      fixed: a tree of arguments.
      layers: the names of layers that call ``observe_weight``.

    Returns:
      The layers whose weights depend on ``moving``, and ``OUTPUTS`` if outputs do.

    Raises:
      UnknownDependentsError: ``jax.vmap`` does not take the model.
    """
    arrays, rebuild = split_arrays(moving)
    if not arrays:
        return set()
    fixed_arrays, rebuild_fixed = split_arrays(fixed)
    watch = _Watch(layers)

    def run(arrays: list[Any], fixed: list[Any]) -> list[Any]:
        outputs = call(rebuild(arrays), rebuild_fixed(fixed))
        return [_observe(x, OUTPUTS, watch) for x in split_arrays(outputs)[0]]

    def run_mapped(arrays: list[Any], fixed: list[Any]) -> Any:
        stacked = [jnp.broadcast_to(x, (watch.size, *x.shape)) for x in arrays]
        return jax.vmap(lambda x: run(x, fixed))(stacked)

    with visiting(watch):
        trace(run, arrays, fixed_arrays)
        watch.size = min(set(range(1, 2 + len(watch.other_sizes))) - watch.other_sizes)
    with visiting(dataclasses.replace(watch)):  # nothing is taken from the first trace
        try:
            trace(run_mapped, arrays, fixed_arrays)
        except (NotImplementedError, ValueError) as error:
            if isinstance(error, ValueError) and "vmap" not in str(error):
                raise
            raise UnknownDependentsError(
                "nobody can tell what reads the weights of this model, because "
                f"jax.vmap does not take a function that it calls ({error}): wrap that "
                "in jax.custom_batching.sequential_vmap"
            ) from error
    return watch.dependents


def mappable(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function that JAX may not map, and that ``find_dependents`` may meet."""
    is_watched = isinstance(visitor.value, _Watch)
    return sequential_vmap(function) if is_watched else function


def find_readers(
    call: Callable[[dict[str, Any], Any], Any],
    values: dict[str, Any],
    fixed: Any,
    layers: Collection[str],
) -> list[str]:
    """The values that a model's outputs depend on other than by products of layers.

    Args:
      call: takes ``values`` and ``fixed`` and returns the model's outputs.
      values: arguments by their names.
      fixed: a tree of other arguments.
      layers: the names of layers that call ``observe_weight``.
    """

    def find(names: list[str]) -> list[str]:
        moving = {name: values[name] for name in names}
        others = {name: x for name, x in values.items() if name not in moving}

        def run(moving: dict[str, Any], rest: Any) -> Any:
            return call({**rest[0], **moving}, rest[1])

        if OUTPUTS not in find_dependents(run, moving, (others, fixed), layers):
            return []
        if len(names) == 1:
            return names
        half = len(names) // 2
        return find(names[:half]) + find(names[half:])

    return find(list(values))


def observe_weight(layer: str, weight: jax.Array) -> jax.Array:
    """The weight of a layer, seen by ``find_dependents``."""
    watch: Visitor = visitor.value
    if not isinstance(watch, _Watch) or layer not in watch.layers:
        return weight
    return _observe(weight, layer, watch)


def _observe(x: Any, name: str, watch: _Watch) -> Any:
    """Notes whether a value depends on what moves; the result does not."""

    @custom_vmap
    def observe(x: jax.Array) -> jax.Array:
        return x

    @observe.def_vmap
    def _(size: int, batched: list[bool], x: jax.Array) -> tuple[jax.Array, bool]:
        if size != watch.size:
            watch.other_sizes.add(size)
            return _observe(x, name, watch), batched[0]
        if batched[0]:
            watch.dependents.add(name)
        return (x[0] if batched[0] else x), False

    return observe(x)


def split_arrays(tree: Any) -> tuple[list[Any], Callable[[list[Any]], Any]]:
    """Splits arrays, and shapes of arrays, from static options such as ``train``."""
    leaves, structure = jax.tree.flatten(tree)
    is_array = [hasattr(x, "shape") and hasattr(x, "dtype") for x in leaves]
    arrays = [x for x, array in zip(leaves, is_array, strict=True) if array]

    def rebuild(arrays: list[Any]) -> Any:
        values = iter(arrays)
        merged = [
            next(values) if array else x
            for x, array in zip(leaves, is_array, strict=True)
        ]
        return jax.tree.unflatten(structure, merged)

    return arrays, rebuild
