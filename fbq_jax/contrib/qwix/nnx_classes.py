"""Classes of NNX models in whose methods products are reached."""

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import jax.numpy as jnp
from flax import nnx

from fbq_jax.contrib.qwix.nnx_modules import NnxModules
from fbq_jax.contrib.qwix.providers import call_quantized
from fbq_jax.core.frozen_weight import FrozenKernel
from fbq_jax.model_kind import DerivedClasses
from fbq_jax.nnx.op_warnings import seen_by_qwix

M = TypeVar("M", bound=nnx.Module)


def reaching_products(model: M) -> M:
    """A model of a derived class, in whose methods products are reached.

    It has the modules of the given one, in which it takes that one's place.
    """
    derived: M = object.__new__(_intercepting_class(type(model)))
    vars(derived).update(vars(model))
    for _, node in list(nnx.iter_graph(derived)):
        if isinstance(node, list):
            node[:] = [derived if x is model else x for x in node]
        elif isinstance(node, dict | nnx.Pytree):
            fields = node if isinstance(node, dict) else vars(node)
            fields.update({name: derived for name, x in fields.items() if x is model})
    return derived


def _define(cls: Any) -> dict[str, Any]:
    """What a class defines in whose methods products are reached."""
    fields: dict[str, Any] = {"__reduce_ex__": _reduce}
    for name in dir(cls):
        method = inspect.getattr_static(cls, name)
        public = name == "__call__" or not name.startswith("_")
        inherited = any(name in vars(base) for base in nnx.Module.__mro__)
        if public and inspect.isfunction(method) and not inherited:
            fields[name] = _reaching_products(method)
    return fields


_intercepting_class = DerivedClasses(_define)


def _reduce(model: Any, protocol: Any) -> Any:
    """Pickles a model by its own class, which the derived one has the name of."""
    cls = model.unquantized
    reduced = cls.__reduce_ex__(model, protocol)
    if reduced[1][:1] != (type(model),):  # of the model's own ``__reduce__``
        return reduced
    new, (_, *args), *state = reduced
    return _unpickle, (new, cls, *args), *state


def _unpickle(new: Callable[..., Any], cls: Any, *args: Any) -> Any:
    return new(_intercepting_class(cls), *args)


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
