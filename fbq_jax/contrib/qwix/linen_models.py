"""Linen models: ``quantize``, and the layer that a product belongs to."""

import functools
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from flax import linen as nn
from flax.core import Scope

from fbq_jax.contrib.qwix.internals import is_lora_active
from fbq_jax.contrib.qwix.products import Op
from fbq_jax.contrib.qwix.providers import call_quantized, refuse_lora
from fbq_jax.linen.dot import ParameterDot
from fbq_jax.linen.frozen import FrozenParameter
from fbq_jax.linen.rules import RulesDot
from fbq_jax.linen.state import Parameter, calling_module, can_keep_state
from fbq_jax.linen.tracing import parameter_leaves
from fbq_jax.linen.whole_models import inject_ops, quantize_with
from fbq_jax.recipes.rules_report import RulesReport, is_adapter, of_own_code
from fbq_jax.recipes.schema import Recipe

M = TypeVar("M", bound=nn.Module)


def quantize(
    model: M,
    rules: Mapping[str, Recipe | None] | RulesDot,
    rngs: Any,
    *args: Any,
    **kwargs: Any,
) -> tuple[M, RulesReport]:
    """``fbq_jax.quantize``, which also reaches products in the model's own code.

    Every product of an activation and a parameter is quantized by the rule for the
    module whose method computes it, whether by ``jnp.einsum``, ``jnp.dot``, ``@``,
    ``lax.dot_general`` or a convolution.  A product of two activations, as in
    attention, stays in float unless a rule names it (``fbq_jax.recipes.path_rules``).
    Of ``jnp.einsum`` the first operand then is the left one, in which blocks may fall
    back.  Products of two parameters stay in float, and so do those with parameters of
    LoRA, which Qwix may add before or after, and those inside a ``jax.checkpoint``,
    ``jax.vmap`` or ``lax.scan`` that the model, or a function such as
    ``jax.nn.dot_product_attention``, uses in place of Flax's: no state may leave those.
    ``fbq_jax.quantize`` documents the arguments.

    A call outside ``jit`` runs without ``jit`` inside, slowly.

    >>> import jax
    >>> import jax.numpy as jnp
    >>> from fbq_jax import recipes
    >>> class Model(nn.Module):
    ...     @nn.compact
    ...     def __call__(self, x):
    ...         w = self.param("w", nn.initializers.lecun_normal(), (16, 8))
    ...         return x @ w
    >>> x = jax.ShapeDtypeStruct((4, 16), jnp.float32)
    >>> model, report = quantize(Model(), {".*": recipes.block}, jax.random.key(0), x)
    >>> print(report)
    parameter  shape   rule  recipe
    w          16 x 8  .*    block
    """
    model, report = quantize_with(_run, model, rules, rngs, args, kwargs)
    return model, of_own_code(report)


def _run(dot: RulesDot, call: Callable[[], Any]) -> Any:
    """Calls a function whose layers have their op, and whose other products, too."""
    with inject_ops(dot):
        return call_quantized(LinenModules(dot), call)


class LinenModules:
    """The parameters that running Linen modules have read or made."""

    def __init__(self, dot: RulesDot):
        self.dot = dot
        # Each array, which keeps its id from being used again, and its parameter.
        self.parameters: dict[int, tuple[Any, Parameter]] = {}

    @property
    def intercepted(self) -> dict[str, Callable[..., Any]]:
        """What Qwix replaces: the methods by which modules read parameters."""
        scope = "flax.core.scope.Scope"
        return {
            f"{scope}.get_variable": self._get_variable,
            f"{scope}.put_variable": self._put_variable,
            f"{scope}.variables": self._variables,
        }

    def _get_variable(
        self, scope: Scope, collection: str, name: str, default: Any = None
    ) -> Any:
        """Reads a variable: an array of NaNs for a frozen parameter.

        The product that reads it is the op's, which reads its codes.
        """
        value = scope.get_variable(collection, name, default)
        if isinstance(value, FrozenParameter):
            array = value.nans()
            self._add(array, (*scope.path, name), value)
            return array
        if collection == "params":
            self._add_all(value, (*scope.path, name))
        return value

    def _put_variable(
        self, scope: Scope, collection: str, name: str, value: Any
    ) -> None:
        """Stores a variable."""
        scope.put_variable(collection, name, value)
        if collection == "params":
            self._add_all(value, (*scope.path, name))

    def _variables(self, scope: Scope) -> Any:
        """Reads all variables."""
        variables = scope.variables()
        self._add_all(variables.get("params"), scope.path)
        return variables

    def _add_all(self, tree: Any, path: tuple[str, ...]) -> None:
        for names, leaf in parameter_leaves(tree):
            self._add(leaf, (*path, *names), leaf)

    def _add(self, array: Any, path: tuple[str, ...], value: Any) -> None:
        self.parameters[id(array)] = array, Parameter(path, value, own_code=True)

    @property
    def sees_activations(self) -> bool:
        """Whether products of two activations matter."""
        return self.dot.sees_activations

    def has(self, x: Any, *, adapters: bool = False) -> bool:
        """Whether an array is a parameter, of LoRA only if ``adapters``."""
        parameter = self._parameter(x)
        if parameter is None:
            return False
        return adapters or not is_adapter(parameter.path[-1])

    def _parameter(self, x: Any) -> Parameter | None:
        """The parameter that an array is."""
        return self.parameters.get(id(x), (None, None))[1]

    def op(self, x: Any) -> Op | None:
        """The op for a product with a parameter; None leaves it in float."""
        if not self._can_keep_state():
            return None
        parameter = self._parameter(x)
        assert parameter is not None
        path = "/".join(parameter.path)
        if isinstance(parameter.value, FrozenParameter) and is_lora_active():
            refuse_lora(path)
        kind = functools.partial(ParameterDot, parameter=parameter)
        return self.dot.of_layer(path, kind)

    def op_of_activations(self, shape: tuple[int, ...]) -> Op | None:
        """The op for a product of two activations; None leaves it in float."""
        return self.dot.of_activations(shape) if self._can_keep_state() else None

    def _can_keep_state(self) -> bool:
        """Whether the state of the running module can leave what JAX traces."""
        module = calling_module()
        return module is not None and can_keep_state(module.scope)
