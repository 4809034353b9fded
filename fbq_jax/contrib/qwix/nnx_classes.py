"""Classes of NNX models in whose methods products are reached."""

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import jax.numpy as jnp
from flax import nnx

from fbq_jax.contrib.qwix.nnx_modules import NnxModules
from fbq_jax.contrib.qwix.providers import call_quantized
from fbq_jax.core.frozen_weight import FrozenKernel
from fbq_jax.model_kind import QWIX_BASE, DerivedClasses
from fbq_jax.nnx.op_warnings import seen_by_qwix


def reach_products(model: nnx.Module) -> None:
    """Changes the class of a model to a derived one, in whose methods they are reached.

    The modules of a model may refer to it, so it stays the same object.
    """
    original = vars(type(model)).get("unquantized", type(model))
    model.__class__ = intercepting_class(original)


@DerivedClasses
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
        model = args[0]
        with seen_by_qwix(True), _shown_parameters(model):
            call = functools.partial(method, *args, **kwargs)
            return call_quantized(NnxModules(model), call)

    return wrapper


@contextlib.contextmanager
def _shown_parameters(model: nnx.Module) -> Iterator[None]:
    """Gives frozen parameters arrays of NaNs, which code other than layers' can read.

    The product that reads one is the op's, which reads its codes.
    """
    frozen = [
        (vars(module), name, variable)
        for _, module in nnx.iter_modules(model)
        for name, variable in vars(module).items()
        if isinstance(variable, nnx.Param)
        and isinstance(variable.get_raw_value(), FrozenKernel)
    ]
    try:
        for fields, name, variable in frozen:
            fields[name] = nnx.Param(jnp.asarray(variable.get_raw_value()))
        yield
    finally:
        for fields, name, variable in frozen:
            fields[name] = variable
