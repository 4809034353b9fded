"""What Linen and NNX share about the classes of users' models."""

import weakref
from collections.abc import Callable, Hashable
from typing import Any

from flax import linen as nn
from flax import nnx

#: The attribute by which Qwix finds the class that a model had before Qwix changed it.
QWIX_BASE = "_unquantized_type"


def check_linen(function: str, model: Any) -> None:
    """Raises a TypeError unless this is a Linen model.

    Args:
      function: the name that a function has for Linen and, in ``fbq_jax.nnx``, for NNX.
      model: what was passed as its model.
    """
    if not isinstance(model, nn.Module):
        nnx_has_it = f": use fbq_jax.nnx.{function}" * isinstance(model, nnx.Module)
        raise TypeError(
            f"fbq_jax.{function} takes a Linen model, an instance of "
            f"flax.linen.Module; got {_name(model)}{nnx_has_it}"
        )


def check_nnx(function: str, model: Any, *, in_linen: bool = True) -> None:
    """Raises a TypeError unless this is an NNX model; see ``check_linen``.

    Args:
      function: the name of a function in ``fbq_jax.nnx``.
      model: what was passed as its model.
      in_linen: whether a function for Linen has the same name.
    """
    if not isinstance(model, nnx.Module):
        is_linen = in_linen and isinstance(model, nn.Module)
        linen_has_it = f": use fbq_jax.{function}" * is_linen
        raise TypeError(
            f"fbq_jax.nnx.{function} takes an NNX model, an instance of "
            f"flax.nnx.Module; got {_name(model)}{linen_has_it}"
        )


def check_unchanged_by_qwix(model: Any, remedy: str) -> None:
    """Raises a ValueError, which names the function to use, if Qwix changed a model."""
    if hasattr(model, QWIX_BASE):
        raise ValueError(
            f"Qwix changed this {type(model).__name__}, and does not see the products "
            f"of layers with an op: use {remedy}"
        )


def _name(model: Any) -> str:
    if isinstance(model, type):
        return f"the class {model.__name__}"
    for api, module in (("Linen", nn.Module), ("NNX", nnx.Module)):
        if isinstance(model, module):
            return f"the {api} model {type(model).__name__}"
    return type(model).__name__


class DerivedClasses:
    """Derives classes of users' models, with their names; equal arguments give one.

    It keeps neither the classes alive that it derives nor those that it derives from,
    which are their attribute ``unquantized``.

    Args:
      define: takes the arguments of a call and returns what else the class defines.
      *bases: other base classes, before the user's.
    """

    def __init__(self, define: Callable[..., dict[str, Any]], *bases: type):
        self._define, self._bases = define, bases
        self._derived: weakref.WeakKeyDictionary[
            type, weakref.WeakValueDictionary[Hashable, type]
        ] = weakref.WeakKeyDictionary()

    def __call__(self, cls: type, *options: Hashable) -> Any:
        """The class that is derived from a class, or its original, with options."""
        original = vars(cls).get("unquantized", cls)
        derived = self._derived.setdefault(original, weakref.WeakValueDictionary())
        found = derived.get(options)
        return found or derived.setdefault(options, self._derive(original, *options))

    def _derive(self, cls: Any, *options: Hashable) -> type:
        fields = {
            "__module__": cls.__module__,
            "__qualname__": cls.__qualname__,
            "__doc__": cls.__doc__,
            "unquantized": cls,
            **self._define(cls, *options),
        }
        if (before := getattr(cls, QWIX_BASE, None)) is not None:
            # Qwix changes this class, without its own change, if LoRA is applied again.
            fields[QWIX_BASE] = self(before, *options)
        # Flax names modules by the name of their class.
        return type(cls.__name__, (*self._bases, cls), fields)
