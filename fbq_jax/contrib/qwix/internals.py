"""Everything private that the library uses of Qwix, checked on import.

Qwix's providers do the rest.
"""

import inspect
import threading
from collections.abc import Callable, Iterator
from typing import Any

from flax import nnx
from qwix import LoraProvider, QuantizationProvider

from fbq_jax.flax_internals import find_private
from fbq_jax.linen.state import calling_module

_INTERCEPTION = "qwix._src.interception"


def _find(name: str, use: str) -> Any:
    return find_private(_INTERCEPTION, name, use)


#: What a provider calls the function by which JAX calls a primitive.
PRIMITIVE_BIND: str = _find("PRIMITIVE_BIND_KEY", "products find their op")
#: Makes a function that no provider sees the inside of.
disable_interceptions = _find("disable_interceptions", "ops run as they are")
_wrap = _find("wrap_func_intercepted", "functions of JAX are replaced")
# Maps names of functions to what each provider has in their place.
_interceptors = _find("interception_manager._interceptors", "LoRA finds ops")
# By thread and provider, whether the provider's functions are called.
_threads = _find("interception_manager._intercepted_threads", "LoRA finds ops")


def intercepted(
    function: Callable[[], Any], provider: QuantizationProvider, *, disable_jit: bool
) -> Callable[[], Any]:
    """A function in which a provider replaces functions, in the thread that calls it.

    Args:
      function: the function that is called.
      provider: says which functions it replaces.
      disable_jit: whether the function runs in ``jax.disable_jit``.
    """
    (interceptor,) = provider.get_interceptors()
    found: Callable[[], Any] = _wrap(function, interceptor, disable_jit=disable_jit)
    return found


def running_modules() -> Iterator[nnx.Module]:
    """The NNX modules whose methods are running, innermost first.

    As Qwix does, it takes what a running function calls ``self``.
    """
    frame = inspect.currentframe()
    while frame is not None:
        module = frame.f_locals.get("self")
        if isinstance(module, nnx.Module):
            yield module
        frame = frame.f_back


def current_module() -> nnx.Module | None:
    """The NNX module whose method is running; None outside NNX modules."""
    return None if calling_module() is not None else next(running_modules(), None)


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
