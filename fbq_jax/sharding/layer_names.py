"""Records which layers of a model call an op, for warnings.

XLA partitions a program after tracing, when nothing says which layer an op belongs to.
Besides, JAX traces an op once for all layers that call it with equal shapes.  So each
call of an op records its layer here while the caller is traced.
"""

import contextlib
import re
import warnings
from collections.abc import Hashable, Iterator
from contextvars import ContextVar
from typing import Any

import jax
from jax.extend import source_info_util

_layer: ContextVar[tuple[str, str] | None] = ContextVar("layer", default=None)
_names: dict[str, str] = {}  # names of layers by path
_callers: dict[Hashable, dict[str, None]] = {}  # keys in the order of the first calls
_warned: dict[Hashable, set[str]] = {}  # layers by cause


@contextlib.contextmanager
def layer_name(path: str, name: str | None = None) -> Iterator[None]:
    """Names the layer whose ops are traced in this context.

    Args:
      path: the layer's path.  A backward pass finds it in the names of the enclosing
        ``jax.named_scope``s.
      name: what warnings call the layer; None takes the path.

    >>> with layer_name("encoder/up"):
    ...     current_layer()
    'encoder/up'
    """
    name = _names[path] = name or path
    token = _layer.set((path, name))
    try:
        yield
    finally:
        _layer.reset(token)


def current_path() -> str | None:
    """The path in ``layer_name`` of the layer that is being traced, or None outside."""
    return layer[0] if (layer := _layer.get()) is not None else None


def current_layer() -> str | None:
    """The name of the layer that is being traced, or None outside any layer.

    Outside ``layer_name``, as in a backward pass, the names of the enclosing
    ``jax.named_scope``s are the path of the layer.  Linen opens a scope for each
    module, and ``fbq_jax.nnx`` for each quantized layer.
    """
    if (layer := _layer.get()) is not None:
        return layer[1] or None
    stack = str(source_info_util.current_name_stack())  # "transpose(jvp(MLP))/up"
    scopes = re.sub(r"\w+\(|\)", "", stack).split("/")
    paths = ["/".join(scopes[i:]) for i in range(len(scopes))]
    # Linen's outermost scope is the root module's class, which no path contains.
    known = (_names[path] for path in paths if path and path in _names)
    return next(known, paths[0]) or None


def record_layer(op: str, operands: Any) -> None:
    """Records that the current layer calls an op with operands of these shapes.

    Only programs for several devices warn about them.
    """
    if jax.device_count() > 1 and (layer := current_layer()):
        _callers.setdefault(_call_of(op, operands), {})[layer] = None


def warn_once(op: str, operands: Any, cause: Hashable, text: str) -> None:
    """Warns about a cause, once for each layer.

    An op without a known layer gives no warning if a layer has the same cause.

    Args:
      op: the name of the op, used in the warning if no layer is known.
      operands: the operands of the op, or their shapes.
      cause: identifies the cause; equal for warnings about the same thing.
      text: the text of the warning, without the layer.
    """
    callers = _callers.get(_call_of(op, operands), {})
    warned = _warned.setdefault(cause, set())
    new = [layer for layer in callers or [op] if layer not in warned]
    if new and (callers or not warned):
        warned.update(new)
        names = ", ".join(new[:3])
        more = f" and {len(new) - 3} more layers" * (len(new) > 3)
        warnings.warn(f"{names}{more}: {text}", stacklevel=2)


def warn_first(cause: Hashable, text: str) -> None:
    """Warns about a cause when it first occurs.

    Args:
      cause: identifies the cause; equal for warnings about the same thing.
      text: the text of the warning, which may name the first layer.
    """
    if is_first(cause):
        warnings.warn(text, stacklevel=2)


def is_first(cause: Hashable) -> bool:
    """Whether a cause occurs for the first time."""
    if cause in _warned:
        return False
    _warned[cause] = set()
    return True


def clear() -> None:
    """Forgets all layers, calls and warnings, so that each cause warns again."""
    _names.clear()
    _callers.clear()
    _warned.clear()


def _call_of(op: str, operands: Any) -> Hashable:
    leaves = jax.tree.leaves(operands)
    return op, tuple((tuple(x.shape), str(x.dtype)) for x in leaves)
