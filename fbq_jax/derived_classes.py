"""Classes that the library derives from users' classes."""

import weakref
from collections.abc import Callable, Hashable
from typing import Any


class DerivedClasses:
    """Decorates a function that derives a class, which equal arguments give once.

    It keeps neither the classes alive that it derives nor those that it derives from.
    """

    def __init__(self, derive: Callable[..., type]):
        self._derive = derive
        self._derived: weakref.WeakKeyDictionary[
            type, weakref.WeakValueDictionary[Hashable, type]
        ] = weakref.WeakKeyDictionary()

    def __call__(self, cls: type, *options: Hashable) -> Any:
        """The class that is derived from a class with these options."""
        derived = self._derived.setdefault(cls, weakref.WeakValueDictionary())
        found = derived.get(options)
        return found or derived.setdefault(options, self._derive(cls, *options))
