"""The modules of NNX models: which of them a product belongs to."""

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from flax import nnx
from flax.errors import TraceContextError

from fbq_jax.contrib.qwix.internals import current_module
from fbq_jax.contrib.qwix.products import Op
from fbq_jax.core.visitors import Visitor, visitor
from fbq_jax.nnx.dot import activations_dot_name, dot_name, is_activations_dot
from fbq_jax.nnx.naming import modules_of
from fbq_jax.nnx.tracing import ProductRecorder, matrices, trace_products
from fbq_jax.recipes import path_rules
from fbq_jax.recipes.path_rules import Pairs
from fbq_jax.recipes.rules_report import (
    ActivationProduct,
    QuantizedParameter,
    activation_product,
)

# The attribute with the path of a module that ``quantize_nnx`` traces.
_PATH = "fbq_jax_path"


@dataclasses.dataclass(eq=False)
class OwnProducts(ProductRecorder):
    """Records the products in a model's own code, too.

    Attributes:
      activations: maps the path of a module and the number of a product of two
        activations to the shape of the right operand.
      weights: maps the path of a module and the name of a parameter that it multiplies
        by itself to the parameter's shape, without the axes of stacks.
      variables: the same for the first variable of modules with products of two
        activations, by their paths.
    """

    activations: dict[tuple[str, int], tuple[int, ...]] = dataclasses.field(
        default_factory=dict
    )
    weights: dict[tuple[str, str], tuple[int, ...]] = dataclasses.field(
        default_factory=dict
    )
    variables: dict[str, tuple[int, ...]] = dataclasses.field(default_factory=dict)

    def products_by(self, rules: Pairs) -> dict[tuple[str, int], ActivationProduct]:
        """What rules make of each product of two activations."""
        return {
            key: activation_product(rules, path_rules.activations_name(*key), shape)
            for key, shape in self.activations.items()
        }


def record_products(
    model: nnx.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[OwnProducts, list[QuantizedParameter]]:
    """The products of a call of a model, and the quantized ones of parameters.

    The arguments are as in ``trace_products``.
    """
    recorded, model = OwnProducts(), nnx.clone(model)
    for path, module in modules_of(model).items():
        if not isinstance(module, nnx.List | nnx.Dict | nnx.bridge.ToNNX):
            setattr(module, _PATH, path)
    return recorded, trace_products(model, args, kwargs, recorded)


def first_variable(module: nnx.Module) -> nnx.Variable[Any] | None:
    """The first parameter of a module, or its first variable if it has none."""
    found = [v for _, v in nnx.iter_graph(module) if isinstance(v, nnx.Variable)]
    return min(found, key=lambda v: not isinstance(v, nnx.Param), default=None)


def _can_change(node: nnx.Variable[Any] | nnx.Module) -> bool:
    """Whether a value that is computed here may become one of a variable or a module.

    A module has a path.
    """
    try:
        if isinstance(node, nnx.Variable):
            node.set_raw_value(node.get_raw_value())
        else:
            setattr(node, _PATH, getattr(node, _PATH))
    except TraceContextError:
        return False
    return True


class NnxModules:
    """The parameters of the NNX modules whose methods are running."""

    # ``_shown_parameters`` shows frozen parameters.
    intercepted: Mapping[str, Callable[..., Any]] = {}

    def __init__(self, model: nnx.Module):
        self.model = model
        active: Visitor = visitor.value
        self.recorded = active if isinstance(active, OwnProducts) else None
        self.sees_activations = self.recorded is not None or any(
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
        module, name = owner
        path = getattr(module, _PATH, None)
        if self.recorded is not None and path is not None:
            self.recorded.weights[path, name] = x.shape
        dot = getattr(module, dot_name(name), None)
        if dot is None or not (_can_change(dot.theta) or dot.evaluates):
            return None
        return dot

    def op_of_activations(self, shape: tuple[int, ...]) -> Op | None:
        """The op for a product of two activations; None leaves it in float."""
        module = current_module()
        if module is None:
            return None
        variable, path = first_variable(module), getattr(module, _PATH, None)
        # A module that the call itself makes has no path, and cannot keep an op.
        node = module if variable is None and path is not None else variable
        if node is None or not _can_change(node):
            return None
        _, number = self.activations.get(id(module), (module, 0))
        self.activations[id(module)] = module, number + 1
        if self.recorded is not None and path is not None:
            self.recorded.activations[path, number] = shape
            if variable is not None:
                self.recorded.variables[path] = variable.shape
        return getattr(module, activations_dot_name(number), None)

    def _owner(self, x: Any) -> tuple[nnx.Module, str] | None:
        """The module that holds a parameter, and the parameter's name."""
        for module in self._modules():
            for name, parameter in matrices(module):
                if parameter.get_raw_value() is x:
                    return module, name
        return None

    def _modules(self) -> Iterator[nnx.Module]:
        """The running module and those inside it, then all others of the model.

        A transformation such as ``nnx.remat`` makes new modules for what runs inside,
        which know nothing of the model.
        """
        for model in filter(None, (current_module(), self.model)):
            yield from (module for _, module in nnx.iter_modules(model))
