"""LoRA of Qwix, which adds to the products of layers that have an op."""

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
from flax import nnx
from qwix import LoraProvider, QuantizationProvider

from fbq_jax.core.frozen_weight import FrozenKernel
from fbq_jax.core.layer_stats import layer_path
from fbq_jax.integrations.qwix.interception import interception
from fbq_jax.integrations.qwix.products import Products, Weight
from fbq_jax.linen.frozen import KERNEL
from fbq_jax.linen.state import calling_module
from fbq_jax.nnx.callers import calling_layer

_manager = interception.interception_manager

# What layers call, and the function that LoRA replaces, which they call in float.  All
# classes of dots have one ``__call__``.
_OP_CALLS = {
    "fbq_jax.FallbackDot.__call__": "jax.lax.dot_general",
    "fbq_jax.FallbackEinsum.__call__": "jax.numpy.einsum",
    "fbq_jax.nnx.FallbackEinsum.__call__": "jax.numpy.einsum",
    "fbq_jax.FallbackConv.__call__": "jax.lax.conv_general_dilated",
    "fbq_jax.nnx.FallbackConv.__call__": "jax.lax.conv_general_dilated",
}


class OpCalls(QuantizationProvider):
    """Shows the products of ops to Qwix's LoRA.

    LoRA replaces functions of JAX, and adds to the products that it finds.  A layer
    with an op calls none of these functions.  Here it calls the one that it would call
    in float, and ``Products`` calls the op for the product inside.
    """

    def __init__(self, products: Products):
        super().__init__([])
        self.products = products

    def get_intercept_map(self) -> dict[str, Callable[..., Any]]:
        """What Qwix replaces."""
        calls: dict[str, Callable[..., Any]] = {
            name: functools.partial(self.call, function)
            for name, function in _OP_CALLS.items()
        }
        if self.products.modules.sees_activations:
            calls["jax.numpy.einsum"] = self.einsum
        return calls

    def einsum(self, *args: Any, **kwargs: Any) -> Any:
        """Calls ``jnp.einsum``, and tells its first operand from the second."""
        self.products.second = args[2] if len(args) == 3 else None
        try:
            return interception.get_attribute("jax.numpy.einsum")(*args, **kwargs)
        finally:
            self.products.second = None

    def call(self, function: str, op: Any, *args: Any, **kwargs: Any) -> Any:
        """Calls an op, or the function that it stands for."""
        if not _in_lora(function):
            return interception.disable_interceptions(op)(*args, **kwargs)
        position = 2 if function == "jax.numpy.einsum" else 1
        rhs = jnp.asarray(args[position])  # may be a FrozenKernel
        args = (*args[:position], rhs, *args[position + 1 :])
        self.products.called = Weight(rhs, getattr(op, "dot_general", op))
        try:
            with _shown_to_lora(op, rhs):
                y = interception.get_attribute(function)(*args, **kwargs)
            if self.products.called is None:
                return y
        finally:
            self.products.called = None
        raise ValueError(
            "a LoraRule has a weight_qtype or an act_qtype for a layer that fbq_jax "
            "quantizes: omit them"
        )


def _in_lora(function: str) -> bool:
    """Whether Qwix's LoRA replaces a function of JAX, in this thread."""
    thread = threading.get_ident()
    return any(
        isinstance(getattr(replacement, "__self__", None), LoraProvider)
        for interceptor in _manager._interceptors
        if _manager._intercepted_threads.get((thread, interceptor.id))
        for name, replacement in interceptor.items()
        if name.startswith(function)
    )


def is_lora_active() -> bool:
    """Whether Qwix's LoRA runs in this thread, even if inside its own replacement."""
    thread = threading.get_ident()
    return any(
        isinstance(getattr(replacement, "__self__", None), LoraProvider)
        for interceptor in _manager._interceptors
        if (thread, interceptor.id) in _manager._intercepted_threads
        for replacement in interceptor.values()
    )


@contextlib.contextmanager
def _shown_to_lora(op: Any, weight: jax.Array) -> Iterator[None]:
    """Lets LoRA find the weight of a frozen layer, which has codes in its place.

    LoRA names its own parameters after the one that a layer multiplies by.
    """
    if calling_module() is not None:
        _refuse_frozen_linen()
        yield
        return
    layer = calling_layer(op)
    frozen = {
        name: value
        for name, value in (vars(layer) if layer is not None else {}).items()
        if isinstance(value, FrozenKernel)
    }
    if layer is None or not frozen:
        yield
        return
    vars(layer).update({name: nnx.Param(weight) for name in frozen})
    try:
        yield
    finally:
        vars(layer).update(frozen)


def _refuse_frozen_linen() -> None:
    """Raises ValueError if the Linen layer that is running is frozen."""
    module = calling_module()
    assert module is not None
    if isinstance(module.get_variable("params", KERNEL), FrozenKernel):
        refuse_lora(layer_path(module.path))


def refuse_lora(layer: str) -> NoReturn:
    """Raises ValueError, because LoRA reaches a frozen layer of Linen."""
    raise ValueError(
        f"layer {layer!r} is frozen, and LoRA finds no parameter in it: use NNX for "
        "LoRA on a frozen base, or LoRA without freeze"
    )
