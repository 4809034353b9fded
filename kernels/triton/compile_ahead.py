"""Threads in which jax-triton compiles kernels.

jax-triton compiles a kernel where its call is lowered, and JAX lowers one call after
the other.  Here it compiles them as soon as they are traced, several at a time.
"""

import functools
import os
import sys
from collections.abc import Callable, Hashable, Mapping, Sequence
from concurrent import futures
from typing import Any

import jax

_threads = futures.ThreadPoolExecutor(max(1, (os.cpu_count() or 1) - 1), "triton")
_compilations: dict[Hashable, futures.Future[Any]] = {}


def start(function: Callable[..., Any], arrays: Sequence[Any], call: Any) -> None:
    """Starts to compile the kernel of ``function(*arrays, **call)``, once."""
    key = _compiled_for(arrays, call)
    # Python 3.11 cannot parse two kernels at the same time: ``ast.parse`` counts the
    # depth of its recursion for all threads together.
    if sys.version_info >= (3, 12) and key not in _compilations:
        program = jax.jit(functools.partial(function, **call))
        shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in arrays]
        _compilations[key] = _threads.submit(
            lambda: program.trace(*shapes).lower(lowering_platforms=("cuda",))
        )


def wait(arrays: Sequence[Any], call: Mapping[str, Any]) -> None:
    """Waits for a kernel that is being compiled; its call raises any error again."""
    compilation = _compilations.get(_compiled_for(arrays, call))
    # One that has not started need not wait for those before it.
    if compilation is not None and not compilation.cancel():
        futures.wait([compilation])


def _compiled_for(arrays: Sequence[Any], call: Mapping[str, Any]) -> Hashable:
    dtypes = tuple(str(x.dtype) for x in (*arrays, *call["outputs"]))
    is_one = tuple(size and size == 1 for size in call["sizes"])
    return call["kernel"], is_one, dtypes, call["options"], call["constants"]
