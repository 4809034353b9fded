"""Everything private that the library uses of Qwix, checked on import.

Qwix's providers do the rest.
"""

import threading
from collections.abc import Callable
from typing import Any

from flax import nnx
from qwix import LoraProvider, QuantizationProvider

from fbq_jax.flax_internals import find_private

_INTERCEPTION, _MODULES = "qwix._src.interception", "qwix._src.utils.flax_util"


def _find(name: str, use: str, module: str = _INTERCEPTION) -> Any:
    return find_private(module, name, use)


#: What a provider calls the function by which JAX calls a primitive.
PRIMITIVE_BIND: str = _find("PRIMITIVE_BIND_KEY", "products find their op")
#: Makes a function that no provider sees the inside of.
disable_interceptions = _find("disable_interceptions", "ops run as they are")
_wrap = _find("wrap_func_intercepted", "functions of JAX are replaced")
# Maps names of functions to what each provider has in their place.
_interceptors = _find("interception_manager._interceptors", "LoRA finds ops")
# By thread and provider, whether the provider's functions are called.
_threads = _find("interception_manager._intercepted_threads", "LoRA finds ops")
# The module whose method is running; only Qwix knows it if it is one of NNX.
_get_module = _find("get_current_module", "products find their module", _MODULES)


def intercepted(
    function: Callable[[], Any], provider: QuantizationProvider, *, disable_jit: bool
) -> Callable[[], Any]:
    """The function, in which a provider replaces others, in the thread that calls it.

    It may run in ``jax.disable_jit``.
    """
    (interceptor,) = provider.get_interceptors()
    found: Callable[[], Any] = _wrap(function, interceptor, disable_jit=disable_jit)
    return found


def current_module() -> nnx.Module | None:
    """The NNX module whose method is running; None outside NNX modules."""
    try:
        module = _get_module()
    except ValueError:  # none is running
        return None
    return module if isinstance(module, nnx.Module) else None


def is_lora_active(function: str = "") -> bool:
    """Whether Qwix's LoRA runs in this thread.

    Args:
      function: if given, whether a call of this function is now a call of LoRA; LoRA
        itself calls the function that it replaces.
    """
    running = {
        provider
        for (thread, provider), is_called in _threads.items()
        if thread == threading.get_ident() and (is_called or not function)
    }
    return any(
        isinstance(getattr(replacement, "__self__", None), LoraProvider)
        for interceptor in _interceptors
        if interceptor.id in running
        for name, replacement in interceptor.items()
        if name.startswith(function)
    )
