"""Lets Flax serialize frozen variables, and ``jax.export`` functions of them.

Flax stores arrays by their names, and takes the rest from the tree to restore.  An
exported function has the structure of its arguments.  In frozen variables, it includes
the recipes and the shapes of their layers, which are stored as JSON.
"""

import dataclasses
import json
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from flax import serialization
from jax import export

from fbq_jax.recipes.schema import Gemm, Recipe

T = TypeVar("T")

_CLASSES = {cls.__name__: cls for cls in (Gemm, Recipe)}

# What an earlier version stored besides.
_REMOVED_FIELDS = {"Gemm": {"hadamard", "fallback"}, "Recipe": {"equalize"}}


def serializable_dataclass(*data_fields: str) -> Callable[[type[T]], type[T]]:
    """Makes a dataclass a pytree that is registered by its name.

    Args:
      *data_fields: the fields with arrays; the others are static.
    """

    def register(nodetype: type[T]) -> type[T]:
        meta_fields = [x for x in _field_names(nodetype) if x not in data_fields]
        jax.tree_util.register_dataclass(
            nodetype, data_fields=data_fields, meta_fields=meta_fields
        )
        return register_export(nodetype, data_fields, nodetype.__name__)

    return register


def register_export(
    nodetype: type[T], data_fields: tuple[str, ...], name: str
) -> type[T]:
    """Registers a dataclass that is a pytree, by a name.

    Args:
      nodetype: the class.
      data_fields: the fields with arrays; the others are static.
      name: what exported functions call it.
    """
    meta_fields = [x for x in _field_names(nodetype) if x not in data_fields]

    def from_children(aux_data: Any, children: Any) -> Any:
        # An operand of an earlier version has a third child, which is None.
        data = dict(zip(data_fields, children, strict=False))
        return nodetype(**data, **dict(zip(meta_fields, aux_data, strict=True)))

    _register_flax(nodetype, data_fields)
    return export.register_pytree_node_serialization(
        nodetype,
        serialized_name=f"fbq_jax.{name}",
        serialize_auxdata=_dumps,
        deserialize_auxdata=_loads,
        from_children=from_children,
    )


def serializable_static(nodetype: type[T]) -> type[T]:
    """Makes a dataclass a pytree without arrays that is registered by its name."""
    names = _field_names(nodetype)
    jax.tree_util.register_static(nodetype)
    _register_flax(nodetype, ())
    return export.register_pytree_node_serialization(
        nodetype,
        serialized_name=f"fbq_jax.{nodetype.__name__}",
        serialize_auxdata=lambda x: _dumps(tuple(getattr(x, name) for name in names)),
        deserialize_auxdata=lambda data: nodetype(*_loads(data)),
    )


def _field_names(nodetype: Any) -> list[str]:
    return [field.name for field in dataclasses.fields(nodetype)]


def _register_flax(nodetype: Any, data_fields: tuple[str, ...]) -> None:
    """Registers a dataclass for ``flax.serialization``."""

    def to_state_dict(x: Any) -> dict[str, Any]:
        return {
            name: serialization.to_state_dict(getattr(x, name)) for name in data_fields
        }

    def from_state_dict(x: Any, state: dict[str, Any]) -> Any:
        if isinstance(state, dict) and state.get("exponents") is not None:
            raise _removed_field("Recipe", "equalize")
        restored = {
            name: serialization.from_state_dict(getattr(x, name), state[name], name)
            for name in data_fields
        }
        return dataclasses.replace(x, **restored)

    serialization.register_serialization_state(nodetype, to_state_dict, from_state_dict)


def serializable_namedtuple(nodetype: type[T], name: str) -> type[T]:
    """Registers a ``NamedTuple``, by a name."""
    return export.register_namedtuple_serialization(
        nodetype, serialized_name=f"fbq_jax.{name}"
    )


def _dumps(value: Any) -> bytes:
    return json.dumps(_encode(value)).encode()


def _loads(data: bytes) -> Any:
    return _decode(json.loads(bytes(data)))


def _encode(value: Any) -> Any:
    """A value in JSON, where other types than JSON's are ``[type, value]``."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, tuple):
        return ["tuple", [_encode(x) for x in value]]
    if isinstance(value, Gemm | Recipe):
        fields = {name: _encode(getattr(value, name)) for name in _field_names(value)}
        return [type(value).__name__, fields]
    return ["dtype", jnp.dtype(value).name]


def _decode(value: Any) -> Any:
    if not isinstance(value, list):
        return value
    kind, content = value
    if kind == "tuple":
        return tuple(_decode(x) for x in content)
    if kind == "dtype":
        return jnp.dtype(content)
    removed = _REMOVED_FIELDS[kind] & content.keys()
    for name in removed:
        if content[name]:
            raise _removed_field(kind, name)
    fields = {name: _decode(x) for name, x in content.items() if name not in removed}
    return _CLASSES[kind](**fields)


def _removed_field(kind: str, name: str) -> ValueError:
    return ValueError(
        f"{kind}({name}=True), which made this model's codes, was removed: train with "
        "recipes.row_block_lhs and freeze the model again"
    )


class _Exponents:
    """Stands for the powers of two of an equalized weight, which were removed."""


def _refuse_exponents(_: Any) -> Any:
    raise _removed_field("Recipe", "equalize")


export.register_pytree_node_serialization(
    _Exponents,
    serialized_name="fbq_jax.Exponents",
    serialize_auxdata=_refuse_exponents,
    deserialize_auxdata=_refuse_exponents,
    from_children=lambda *_: _Exponents(),
)
