"""The modules of NNX models: which of them a product belongs to."""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from flax import nnx
from flax.errors import TraceContextError

from fbq_jax.contrib.qwix.internals import current_module, running_modules
from fbq_jax.contrib.qwix.products import Op
from fbq_jax.core.visitors import TraceContext
from fbq_jax.nnx.dot import activations_dot_name, dot_name, is_activations_dot
from fbq_jax.recipes import path_rules
from fbq_jax.recipes.path_rules import Pairs
from fbq_jax.recipes.rules_report import (
    ActivationProduct,
    activation_product,
    is_adapter,
)

# The attribute with the path of a module while ``quantize_nnx`` traces the model.
_PATH = "fbq_jax_path"


def modules_of(model: nnx.Module) -> dict[str, nnx.Module]:
    """The modules of a model, by their paths."""
    return {"/".join(map(str, path)): m for path, m in nnx.iter_modules(model)}


def matrices(module: nnx.Module) -> Iterator[tuple[str, nnx.Param[Any]]]:
    """The parameters of two or more dimensions that a module multiplies by itself.

    ``ToNNX`` leaves that to the Linen module inside, whose variables all its attributes
    are.
    """
    if isinstance(module, nnx.bridge.ToNNX):
        return
    for name, value in vars(module).items():
        if not isinstance(value, nnx.Param) or is_adapter(str(name)):
            continue
        if getattr(value, "ndim", 0) >= 2:
            yield name, value


class Place(NamedTuple):
    """Where a model computes a product of two activations.

    Attributes:
      shape: the shape of the right operand.
      module: the path of the module around it that has variables; None if none has.
      variable: the shape of the first variable of that module, without the axes of
        stacks.
    """

    shape: tuple[int, ...]
    module: str | None
    variable: tuple[int, ...]


@dataclasses.dataclass(eq=False)
class _Activations:
    """The products of a model that ``quantize_nnx`` traces.

    Attributes:
      places: maps the path of a module and the number of a product of two activations
        to what is known of it.
      weights: maps the path of a module and the name of a parameter that it multiplies
        by itself to the parameter's shape, without the axes of stacks.
    """

    places: dict[tuple[str, int], Place] = dataclasses.field(default_factory=dict)
    weights: dict[tuple[str, str], tuple[int, ...]] = dataclasses.field(
        default_factory=dict
    )

    def products(self, rules: Pairs) -> dict[tuple[str, int], ActivationProduct]:
        """What rules make of each."""
        return {
            key: activation_product(rules, path_rules.activations_name(*key), x.shape)
            for key, x in self.places.items()
        }


# What ``quantize_nnx`` records of a trace.
_activations: TraceContext[_Activations | None] = TraceContext(None)


@contextlib.contextmanager
def record_activations(model: nnx.Module) -> Iterator[_Activations]:
    """Collects the products of two activations of a model that is traced inside."""
    modules = {
        path: module
        for path, module in modules_of(model).items()
        if not isinstance(module, nnx.List | nnx.Dict | nnx.bridge.ToNNX)
    }
    recorded = _Activations()
    try:
        for path, module in modules.items():
            setattr(module, _PATH, path)
        with _activations(recorded):
            yield recorded
    finally:
        for module in modules.values():
            delattr(module, _PATH)


def first_variable(module: nnx.Module) -> nnx.Variable[Any] | None:
    """The first parameter of a module, or its first variable if it has none."""
    found = [v for _, v in nnx.iter_graph(module) if isinstance(v, nnx.Variable)]
    return min(found, key=lambda v: not isinstance(v, nnx.Param), default=None)


def _can_change(variable: nnx.Variable[Any]) -> bool:
    """Whether a value that is computed here may become a variable's."""
    try:
        variable.set_raw_value(variable.get_raw_value())
    except TraceContextError:
        return False
    return True


class _Owner(NamedTuple):
    """The module that holds a parameter, and the parameter's name."""

    module: nnx.Module
    name: str


class NnxModules:
    """The parameters of the NNX modules whose methods are running."""

    # ``_shown_parameters`` shows frozen parameters.
    intercepted: Mapping[str, Callable[..., Any]] = {}

    def __init__(self, model: nnx.Module):
        self.model = model
        self.sees_activations = _activations.value is not None or any(
            any(map(is_activations_dot, vars(module)))
            for _, module in nnx.iter_modules(model)
        )
        # Each module, which keeps its id from being used again, and how many products
        # of two activations it has computed.  A module may have no hash.
        self.activations: dict[int, tuple[nnx.Module, int]] = {}

    def has(self, x: Any, *, adapters: bool = False) -> bool:
        """Whether an array is a parameter, of LoRA only if ``adapters``."""
        if self._owner(x) is not None:
            return True
        return adapters and any(
            isinstance(value, nnx.Param) and value.get_raw_value() is x
            for module in self._modules()
            for value in vars(module).values()
        )

    def op(self, x: Any) -> Op | None:
        """The op for a product with a parameter; None leaves it in float."""
        owner = self._owner(x)
        assert owner is not None
        path = getattr(owner.module, _PATH, None)
        if _activations.value is not None and path is not None:
            _activations.value.weights[path, owner.name] = x.shape
        dot = getattr(owner.module, dot_name(owner.name), None)
        if dot is None or not (_can_change(dot.theta) or dot.evaluates):
            return None
        return dot

    def op_of_activations(self, shape: tuple[int, ...]) -> Op | None:
        """The op for a product of two activations; None leaves it in float."""
        module = current_module()
        if module is None:
            return None
        around = ((m, first_variable(m)) for m in running_modules())
        owner, variable = next((x for x in around if x[1] is not None), (None, None))
        if variable is not None and not _can_change(variable):
            return None
        _, number = self.activations.get(id(module), (module, 0))
        self.activations[id(module)] = module, number + 1
        # A module that the call itself makes has no path, and cannot keep an op.
        path = getattr(module, _PATH, None)
        if _activations.value is not None and path is not None:
            inside = () if variable is None else variable.shape
            place = Place(shape, getattr(owner, _PATH, None), inside)
            _activations.value.places[path, number] = place
        return getattr(module, activations_dot_name(number), None)

    def _owner(self, x: Any) -> _Owner | None:
        """Finds the module that holds a parameter."""
        for module in self._modules():
            for name, parameter in matrices(module):
                if parameter.get_raw_value() is x:
                    return _Owner(module, name)
        return None

    def _modules(self) -> Iterator[nnx.Module]:
        """The running module and those inside it, then all others of the model.

        A transformation such as ``nnx.remat`` makes new modules for what runs inside,
        which know nothing of the model.
        """
        for model in filter(None, (current_module(), self.model)):
            yield from (module for _, module in nnx.iter_modules(model))
