"""Qwix's replacement of JAX's functions, which is not public, checked once."""

import importlib.metadata
from typing import Any

from qwix._src import interception as _interception

_NAMES = (
    "PRIMITIVE_BIND_KEY",
    "_preprocess_interceptor",
    "disable_interceptions",
    "get_attribute",
    "interception_manager._interceptors",
    "interception_manager._intercepted_threads",
    "interception_manager.activate_interceptor",
    "interception_manager.deactivate_interceptor",
)


def checked(module: Any) -> Any:
    """The module, which has all that is needed of it.

    Raises:
      RuntimeError: this version of Qwix lacks a name.
    """
    for name in _NAMES:
        found = module
        for part in name.split("."):
            found = getattr(found, part, None)
        if found is None:
            raise RuntimeError(
                "fbq_jax.integrations.qwix does not know qwix "
                f"{importlib.metadata.version('qwix')}, whose interception has no "
                f"{name}; it knows 0.1.8"
            )
    return module


interception = checked(_interception)
