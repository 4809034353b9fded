"""The modules whose methods are running, by Python's stack.

NNX does not tell an op which layer calls it, nor a parameter's reader which module has
it.  A module is found if it is the ``self`` of a function on the stack.
"""

import inspect
import itertools
import weakref
from collections.abc import Iterator

import jax
from flax import nnx

from fbq_jax.sharding.layer_names import warn_first

#: Whether a model runs whose ops Qwix sees (``fbq_jax.integrations.qwix``).  Part of
#: the key of JAX's trace caches: what was traced outside is traced again inside.
seen_by_qwix = jax.make_user_context(False)

_MOST_FRAMES = 20  # between a layer's method and its op, if Qwix replaces functions

_layers: weakref.WeakKeyDictionary[nnx.Module, weakref.ref[nnx.Module]]
_layers = weakref.WeakKeyDictionary()  # the last layer that called each op


def running_modules(most_frames: int | None = None) -> Iterator[nnx.Module]:
    """The modules whose methods are running, innermost first.

    Args:
      most_frames: how many functions to look at; None looks at all.
    """
    frame = inspect.currentframe()
    for _ in itertools.count() if most_frames is None else range(most_frames):
        if (frame := frame.f_back if frame else None) is None:
            return
        if frame.f_code.co_varnames[:1] == ("self",):
            module = frame.f_locals.get("self")
            if isinstance(module, nnx.Module):
                yield module


def calling_layer(op: nnx.Module) -> nnx.Module | None:
    """The layer that has ``op`` as an attribute and calls it, if a method does."""
    modules = running_modules(_MOST_FRAMES)
    return next((module for module in modules if _holds(module, op)), None)


def warn_if_shared(op: nnx.Module) -> None:
    """Warns, once, if two layers train with one op; one layer may call it twice.

    Both layers exist and hold the op, so there is no false alarm.  There is none at all
    if the caller is a function, or keeps its ops in a list or a dictionary.

    Args:
      op: the op that is being called.
    """
    layer = calling_layer(op)
    if layer is None:
        return
    reference = _layers.get(op)
    before = None if reference is None else reference()
    _layers[op] = weakref.ref(layer)
    if before is None or before is layer or not _holds(before, op):
        return
    names = f"a {type(before).__name__} and a {type(layer).__name__}"
    kind = type(op).__name__
    warn_first(
        "shared op",
        f"{names} train with one {kind}, so both change one state: give each layer its "
        f"own {kind}, as fbq_jax.nnx.quantize(model, rules, rngs=rngs) does with "
        "FallbackDot. fbq_jax.nnx.check_unshared(model) names the layers",
    )


def warn_if_hidden(op: nnx.Module) -> None:
    """Warns, once, if Qwix changed the model after a layer got an op.

    Args:
      op: the op that is being called.
    """
    if hasattr(op, "qwix_path") and not seen_by_qwix.value:
        warn_first(
            "hidden from Qwix",
            "Qwix changed a model that fbq_jax.nnx.quantize had quantized, and does "
            "not see the products of its quantized layers, such as those for LoRA: use "
            "fbq_jax.integrations.qwix.quantize_nnx",
        )


def _holds(layer: nnx.Module, op: nnx.Module) -> bool:
    return any(value is op for value in vars(layer).values())
