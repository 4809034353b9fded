"""Methods of modules that ``nnx.tabulate`` calls as they are.

It replaces all public functions of the classes of a model's modules by jitted ones,
which take and return arrays only.
"""

import functools
from collections.abc import Callable
from typing import Any, Concatenate, Generic, ParamSpec, Self, TypeVar, overload

Instance = TypeVar("Instance")
Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


class PlainMethod(Generic[Instance, Arguments, Result]):
    """Decorates a method, so that its class has this object in place of a function."""

    def __init__(self, method: Callable[Concatenate[Instance, Arguments], Result]):
        self._method = method
        functools.update_wrapper(self, method)

    def __call__(
        self, instance: Instance, *args: Arguments.args, **kwargs: Arguments.kwargs
    ) -> Result:
        """Calls the method of an instance."""
        return self._method(instance, *args, **kwargs)

    @overload
    def __get__(self, instance: None, owner: type) -> Self: ...

    @overload
    def __get__(
        self, instance: Instance, owner: type
    ) -> Callable[Arguments, Result]: ...

    def __get__(self, instance: Any, owner: type) -> Any:
        return self if instance is None else functools.partial(self, instance)
