"""Tells whether two layers of an NNX model call one op, and so share its state.

NNX does not tell an op which layer calls it.  The layer is the nearest object on
Python's stack that has the op as an attribute and runs a method.
"""

import inspect
import weakref
from types import FrameType

from flax import nnx

from fbq_jax.sharding.layer_names import warn_first

_MOST_FRAMES = 10  # between a layer's method and its op there are four at most

_layers: weakref.WeakKeyDictionary[nnx.Module, weakref.ref[nnx.Module]]
_layers = weakref.WeakKeyDictionary()  # the last layer that called each op


def warn_if_shared(op: nnx.Module) -> None:
    """Warns, once, if two layers train with one op; one layer may call it twice.

    Both layers exist and hold the op, so there is no false alarm.  There is none at all
    if the caller is a function, or keeps its ops in a list or a dictionary.

    Args:
      op: the op that is being called.
    """
    frame = inspect.currentframe()
    layer = _calling_layer(op, frame.f_back if frame else None)
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
        f"{names} train with one {kind}, so both move one threshold: give each layer "
        f"its own {kind}(rngs=rngs), as fbq_jax.nnx.quantize(model, rules, "
        "rngs=rngs) does. fbq_jax.nnx.check_unshared(model) names the layers",
    )


def _calling_layer(op: nnx.Module, frame: FrameType | None) -> nnx.Module | None:
    """The layer that holds ``op`` and runs in one of the nearest frames."""
    for _ in range(_MOST_FRAMES):
        if frame is None:
            return None
        if frame.f_code.co_varnames[:1] == ("self",):
            caller = frame.f_locals["self"]
            if isinstance(caller, nnx.Module) and _holds(caller, op):
                return caller
        frame = frame.f_back
    return None


def _holds(layer: nnx.Module, op: nnx.Module) -> bool:
    return any(value is op for value in vars(layer).values())
