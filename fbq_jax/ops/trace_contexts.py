"""Contexts in which JAX traces layers again, but not the ops that they call.

Part of the key of JAX's trace caches is every ``jax.make_user_context``: what was
traced outside a context is traced again inside.  No op depends on one, and to trace ops
takes most of the time to trace a layer.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import jax

_contexts: list[tuple[Any, Any]] = []  # with their defaults


def make_trace_context(default: Any) -> Any:
    """A ``jax.make_user_context`` that is not active in ops."""
    context = jax.make_user_context(default)
    _contexts.append((context, default))
    return context


@contextlib.contextmanager
def outside_trace_contexts() -> Iterator[None]:
    """Where every context has its default."""
    with contextlib.ExitStack() as stack:
        for context, default in _contexts:
            stack.enter_context(context(default))
        yield
