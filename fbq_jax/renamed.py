"""Names of an earlier version, which work and warn."""

import sys
import warnings
from collections.abc import Callable, Mapping
from typing import Any


def names(module: str, renamed: Mapping[str, str]) -> Callable[[str], Any]:
    """The ``__getattr__`` of a module whose names were renamed.

    Args:
      module: the module's name.
      renamed: the new names by the earlier ones.
    """

    def getattr_(name: str) -> Any:
        if name not in renamed:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        warn(f"{module}.{name}", f"{module}.{renamed[name]}", stacklevel=3)
        return getattr(sys.modules[module], renamed[name])

    return getattr_


def warn(earlier: str, new: str, *, stacklevel: int) -> None:
    """Warns that a name is an earlier one."""
    warnings.warn(
        f"{earlier} was renamed to {new}; a later version will not have it",
        DeprecationWarning,
        stacklevel=stacklevel + 1,
    )
