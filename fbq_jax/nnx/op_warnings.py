"""Warnings of ops that train for two layers, or that Qwix does not see."""

import weakref
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from flax.core import tracers

from fbq_jax.ops.trace_contexts import make_trace_context
from fbq_jax.sharding.layer_names import warn_first

#: Whether a model runs whose ops Qwix sees (``fbq_jax.contrib.qwix``).  Part of the key
#: of JAX's trace caches: what was traced outside is traced again inside.
seen_by_qwix = make_trace_context(False)

_shapes: weakref.WeakKeyDictionary[nnx.Module, list[list[int]]]
_shapes = weakref.WeakKeyDictionary()  # of the weights that each op trained with last


#: The trace that each op was made in.  Flax's transformations copy an op otherwise.
_traces: weakref.WeakKeyDictionary[nnx.Module, Any] = weakref.WeakKeyDictionary()


def record_trace(op: nnx.Module) -> None:
    """Records that an op is being made."""
    _traces[op] = tracers.current_trace()


def is_made_in_call(op: nnx.Module) -> bool:
    """Whether an op was made by the function that is being traced, for one call."""
    return op in _traces and _traces[op] == tracers.current_trace()


def warn_if_shared(op: nnx.Module, weight: Any) -> None:
    """Warns, once, if an op trains with a weight of another shape than before.

    Layers with equal shapes may be one layer that is called twice.  Only the owner of
    the model can tell them apart (``fbq_jax.nnx.check_unshared``).
    """
    shapes = [list(jnp.shape(x)) for x in jax.tree.leaves(weight)]
    before, _shapes[op] = _shapes.get(op, shapes), shapes
    if before != shapes:
        kind = type(op).__name__
        warn_first(
            "shared op",
            f"weights of shapes {str(before)[1:-1]} and {str(shapes)[1:-1]} train with "
            f"one {kind}, so both change one state: give each layer its own {kind}, as "
            "fbq_jax.nnx.quantize(model, rules, quantize_rngs=rngs) does with "
            "FallbackDot. fbq_jax.nnx.check_unshared(model) names the layers",
        )


def warn_if_hidden(op: nnx.Module) -> None:
    """Warns, once, if Qwix changed the model after a layer got this op."""
    if hasattr(op, "qwix_path") and not seen_by_qwix.value:
        warn_first(
            "hidden from Qwix",
            "Qwix changed a model that fbq_jax.nnx.quantize had quantized, and does "
            "not see the products of its quantized layers, such as those for LoRA: use "
            "fbq_jax.contrib.qwix.quantize_nnx",
        )
