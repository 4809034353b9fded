"""Replaces functions of Flax that have no public way to change what they do."""

from collections.abc import Callable
from types import ModuleType
from typing import Any

import flax


def replace(
    module: ModuleType, name: str, wrap: Callable[[Any], Any], *, user: str, remedy: str
) -> None:
    """Replaces a function of Flax by ``wrap`` of it.

    Args:
      module: the module of Flax.
      name: the name of the function.
      wrap: takes the function and returns the one that replaces it.
      user: what needs the function, for the error.
      remedy: what to do without it, for the error.

    Raises:
      RuntimeError: this version of Flax has no such function.
    """
    if not hasattr(module, name):
        raise RuntimeError(
            f"{user} does not know flax {flax.__version__}, which has no "
            f"{module.__name__}.{name}: {remedy}"
        )
    setattr(module, name, wrap(getattr(module, name)))
