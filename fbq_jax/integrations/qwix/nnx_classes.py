"""Classes of NNX models in whose methods products are intercepted."""

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import jax.numpy as jnp
from flax import nnx

from fbq_jax.core.frozen_weight import FrozenKernel
from fbq_jax.integrations.qwix.nnx_modules import NnxModules
from fbq_jax.integrations.qwix.providers import intercept
from fbq_jax.model_kind import QWIX_BASE
from fbq_jax.nnx.callers import seen_by_qwix


@functools.cache
def intercepting_class(cls: Any) -> Any:
    """A class derived from a model's, in whose methods products are reached."""
    fields: dict[str, Any] = {
        "__module__": cls.__module__,
        "__qualname__": cls.__qualname__,
        "__doc__": cls.__doc__,
        "unquantized": cls,
        "__reduce_ex__": _reduce,
    }
    if (before := getattr(cls, QWIX_BASE, None)) is not None:
        # Qwix changes this class, without its own change, if LoRA is applied again.
        is_quantized = "unquantized" in vars(before)
        fields[QWIX_BASE] = before if is_quantized else intercepting_class(before)
    for name in dir(cls):
        method = inspect.getattr_static(cls, name)
        public = name == "__call__" or not name.startswith("_")
        inherited = any(name in vars(base) for base in nnx.Module.__mro__)
        if public and inspect.isfunction(method) and not inherited:
            fields[name] = _reaching_products(method)
    return type(cls.__name__, (cls,), fields)


def _reduce(model: Any, protocol: Any) -> Any:
    """Pickles a model by its own class, which the derived one has the name of."""
    cls = model.unquantized
    reduced = cls.__reduce_ex__(model, protocol)
    if reduced[1][:1] != (type(model),):  # of the model's own ``__reduce__``
        return reduced
    new, (_, *args), *state = reduced
    return _unpickle, (new, cls, *args), *state


def _unpickle(new: Callable[..., Any], cls: Any, *args: Any) -> Any:
    return new(intercepting_class(cls), *args)


def _reaching_products(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if seen_by_qwix.value or not args or not isinstance(args[0], nnx.Module):
            return method(*args, **kwargs)
        with contextlib.ExitStack() as stack:
            stack.enter_context(seen_by_qwix(True))
            stack.enter_context(_shown_parameters(args[0]))
            stack.enter_context(intercept(NnxModules(args[0])))
            return method(*args, **kwargs)

    return wrapper


@contextlib.contextmanager
def _shown_parameters(model: nnx.Module) -> Iterator[None]:
    """Gives frozen parameters arrays of NaNs, which code other than layers' can read.

    The product that reads one is the op's, which reads its codes.
    """
    frozen = [
        (variable, kernel)
        for _, module in nnx.iter_modules(model)
        for variable in vars(module).values()
        if isinstance(variable, nnx.Param)
        and isinstance(kernel := variable.get_raw_value(), FrozenKernel)
    ]
    try:
        for variable, kernel in frozen:
            object.__setattr__(variable, "_raw_value", jnp.asarray(kernel))
        yield
    finally:
        for variable, kernel in frozen:
            object.__setattr__(variable, "_raw_value", kernel)
