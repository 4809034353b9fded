"""Puts the providers in place of JAX's functions, in one thread."""

import contextlib
from collections.abc import Iterator

import jax
from jax.extend.core import unsafe_am_i_under_a_jit_DO_NOT_USE
from qwix import QuantizationProvider

from fbq_jax.integrations.qwix.interception import interception
from fbq_jax.integrations.qwix.lora import OpCalls
from fbq_jax.integrations.qwix.products import Modules, Products


@contextlib.contextmanager
def intercept(modules: Modules) -> Iterator[None]:
    """Computes products with parameters by their ops, in this thread."""
    # Outside jit, JAX runs functions that it has compiled without a call in Python.
    eager = not unsafe_am_i_under_a_jit_DO_NOT_USE()
    products = Products(modules)
    with contextlib.ExitStack() as stack:
        if eager:
            stack.enter_context(jax.disable_jit())
        for provider in (products, OpCalls(products)):
            stack.enter_context(_activate(provider, eager))
        yield


@contextlib.contextmanager
def _activate(provider: QuantizationProvider, eager: bool) -> Iterator[None]:
    """Replaces the functions of a provider, in this thread."""
    (interceptor,) = (make() for make in provider.get_interceptors())
    interceptor = interception._preprocess_interceptor(interceptor, eager)
    interception.interception_manager.activate_interceptor(interceptor)
    try:
        yield
    finally:
        interception.interception_manager.deactivate_interceptor(interceptor)
