"""Everything private that the library uses of Flax; nothing else touches it.

Importing this module checks that the installed version of Flax has all of it.
"""

import contextlib
import importlib
import importlib.metadata
import operator
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from flax import linen as nn

# The versions whose private parts the library knows.
_KNOWN = {"flax": "0.12.3 to 0.12.12", "qwix": "0.1.8"}


def find_private(module: str, name: str, use: str) -> Any:
    """A private part of another library.

    Args:
      module: the module of the library.
      name: the name in it; dots separate attributes of attributes.
      use: what needs it, for the error.

    Raises:
      ImportError: the installed version of the library has no such part.
    """
    library = module.partition(".")[0]
    try:
        found: Any = importlib.import_module(module)
        return operator.attrgetter(name)(found)
    except (ImportError, AttributeError) as error:
        version = importlib.metadata.version(library)
        raise ImportError(
            f"fbq_jax does not know {library} {version}, which has no {module}.{name} "
            f"({use}): it knows {library} {_KNOWN[library]}"
        ) from error


_linen = find_private("flax.linen.module", "_context", "ops find their layer")


def running_modules() -> Sequence[nn.Module | None]:
    """The Linen modules whose methods are running, innermost last.

    None stands for the outside of all modules.
    """
    modules: Sequence[nn.Module | None] = _linen.module_stack
    return modules


class MethodWrapper:
    """A base of a Linen module, before its class, that wraps calls of its methods."""

    def around_method(self, call: Callable[[], Any]) -> Any:
        """Calls a method of the module; subclasses add to it."""
        return call()

    def _call_wrapped_method(self, *args: Any) -> Any:
        call = super()._call_wrapped_method  # type: ignore[misc]
        return self.around_method(lambda: call(*args))


find_private(
    "flax.linen.module",
    f"Module.{MethodWrapper._call_wrapped_method.__name__}",
    "quantized models inject ops",
)


class PrivateFunction:
    """A function of Flax that can be another one for a while."""

    def __init__(self, module: str, name: str, use: str):
        self._function = find_private(module, name, use)
        self._module, self._name = importlib.import_module(module), name
        self._lock, self._users = threading.Lock(), 0

    @contextlib.contextmanager
    def replaced(self, wrap: Callable[[Callable[..., Any]], Any]) -> Iterator[None]:
        """Flax calls ``wrap`` of the function while any thread is in this context."""
        with self._lock:
            self._users += 1
            if self._users == 1:
                self._function = getattr(self._module, self._name)
                setattr(self._module, self._name, wrap(self._function))
        try:
            yield
        finally:
            with self._lock:
                self._users -= 1
                if self._users == 0:
                    setattr(self._module, self._name, self._function)


#: Takes the axes of variable collections that ``nn.scan`` and ``nn.vmap`` carry.
split_axes = PrivateFunction(
    "flax.core.lift", "_split_in_out_axes", "layers of nn.scan and nn.vmap keep state"
)
#: Makes the key by which ``nn.jit`` takes modules for the same one.
module_fingerprint = PrivateFunction(
    "flax.linen.transforms", "_module_fingerprint", "layers of nn.jit keep their rules"
)
