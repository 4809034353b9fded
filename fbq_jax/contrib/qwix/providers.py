"""Calls models whose products Qwix's provider and LoRA see."""

import contextlib
import functools
import operator
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
from flax import nnx
from qwix import QuantizationProvider

from fbq_jax.contrib.qwix.internals import (
    current_module,
    disable_interceptions,
    intercepted,
    is_lora_active,
)
from fbq_jax.contrib.qwix.products import Modules, Products, Weight
from fbq_jax.core.arguments import DotGeneral
from fbq_jax.core.frozen_weight import FrozenKernel
from fbq_jax.core.threshold import layer_path
from fbq_jax.linen.conv import FallbackConv
from fbq_jax.linen.einsum import FallbackEinsum
from fbq_jax.linen.state import KERNEL, calling_module
from fbq_jax.nnx import dot as nnx_dot

# What layers call: its name, the function itself (``nnx.tabulate`` puts another one in
# place of the name), and the function that LoRA replaces, which layers call in float.
# All classes of dots have one ``__call__``.
_DOT, _EINSUM = "jax.lax.dot_general", "jax.numpy.einsum"
_CONV = "jax.lax.conv_general_dilated"
_OP_CALLS: dict[str, tuple[Callable[..., Any], str]] = {
    "fbq_jax.FallbackDot.__call__": (DotGeneral.__call__, _DOT),
    "fbq_jax.FallbackEinsum.__call__": (FallbackEinsum.__call__, _EINSUM),
    "fbq_jax.nnx.FallbackEinsum.__call__": (nnx_dot.FallbackEinsum.__call__, _EINSUM),
    "fbq_jax.FallbackConv.__call__": (FallbackConv.__call__, _CONV),
    "fbq_jax.nnx.FallbackConv.__call__": (nnx_dot.FallbackConv.__call__, _CONV),
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
            name: functools.partial(self.call, *functions)
            for name, functions in _OP_CALLS.items()
        }
        if self.products.modules.sees_activations:
            calls[_EINSUM] = self.einsum
        return calls

    def einsum(self, *args: Any, **kwargs: Any) -> Any:
        """Calls ``jnp.einsum``, and tells its first operand from the second."""
        has_string = any(isinstance(x, str) for x in args[:1])
        is_pair = len(args) == 3 if has_string else len(args) in (4, 5)
        second: Any = args[2] if is_pair else None
        is_variable = isinstance(second, nnx.Variable)
        self.products.second = second.get_value() if is_variable else second
        try:
            return jnp.einsum(*args, **kwargs)
        finally:
            self.products.second = None

    def call(
        self,
        call: Callable[..., Any],
        function: str,
        op: Any,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """Calls an op by ``call``, or the function whose name it stands for."""
        if not is_lora_active(function):
            return disable_interceptions(call)(op, *args, **kwargs)
        args += tuple(kwargs.pop(name) for name in ("lhs", "rhs") if name in kwargs)
        position = 2 if function == _EINSUM else 1
        rhs = jnp.asarray(args[position])  # may be a FrozenKernel
        args = (*args[:position], rhs, *args[position + 1 :])
        self.products.called = Weight(rhs, getattr(op, "dot_general", op))
        try:
            with _shown_to_lora(rhs):
                y = _function(function)(*args, **kwargs)
            if self.products.called is None:
                return y
        finally:
            self.products.called = None
        raise ValueError(
            "a LoraRule has a weight_qtype or an act_qtype for a layer that fbq_jax "
            "quantizes: omit them"
        )


def _function(name: str) -> Callable[..., Any]:
    """A function of JAX, or what Qwix has in its place now."""
    found: Callable[..., Any] = operator.attrgetter(name.removeprefix("jax."))(jax)
    return found


@contextlib.contextmanager
def _shown_to_lora(weight: jax.Array) -> Iterator[None]:
    """Lets LoRA find the weight of a frozen layer, which has codes in its place.

    LoRA names its own parameters after the one that a layer multiplies by.
    """
    if (linen := calling_module()) is not None:
        if isinstance(linen.get_variable("params", KERNEL), FrozenKernel):
            refuse_lora(layer_path(linen.path))
        yield
        return
    fields = vars(current_module() or nnx.Module())
    frozen = {
        n: value for n, value in fields.items() if isinstance(value, FrozenKernel)
    }
    fields.update({name: nnx.Param(weight) for name in frozen})
    try:
        yield
    finally:
        fields.update(frozen)


def refuse_lora(layer: str) -> NoReturn:
    """Raises ValueError, because LoRA reaches a frozen layer of Linen."""
    raise ValueError(
        f"layer {layer!r} is frozen, and LoRA finds no parameter in it: use NNX for "
        "LoRA on a frozen base, or LoRA without freeze"
    )


def call_quantized(modules: Modules, function: Callable[[], Any]) -> Any:
    """Calls a function whose products with parameters are computed by their ops."""
    # Outside jit, JAX runs functions that it has compiled without a call in Python.
    is_eager = not isinstance(jnp.zeros(()), jax.core.Tracer)
    products = Products(modules)
    for provider in (OpCalls(products), products):
        function = intercepted(function, provider, disable_jit=is_eager)
    return function()
