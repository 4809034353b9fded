"""NNX models: ``quantize_nnx``, and the ops that it gives to modules."""

from collections.abc import Mapping
from typing import Any, TypeVar

from flax import nnx

from fbq_jax.contrib.qwix.nnx_classes import reaching_products
from fbq_jax.contrib.qwix.nnx_modules import (
    OwnProducts,
    first_variable,
    record_products,
)
from fbq_jax.model_kind import check_nnx
from fbq_jax.nnx.dot import (
    FallbackDot,
    activations_dot_name,
    dot_name,
    is_activations_dot,
)
from fbq_jax.nnx.naming import modules_of, name_layers
from fbq_jax.nnx.rules import (
    drop_unused_ops,
    quantize_layers,
    report_on,
    stack_axes,
    take_rngs,
)
from fbq_jax.nnx.tracing import (
    matrices,
    parameter_paths,
    stack_around,
    stacks_of,
)
from fbq_jax.recipes import path_rules
from fbq_jax.recipes.rules_report import RulesReport, of_own_code
from fbq_jax.recipes.schema import Recipe

M = TypeVar("M", bound=nnx.Module)


def quantize_nnx(
    model: M,
    rules: Mapping[str, Recipe | None],
    *args: Any,
    quantize_rngs: nnx.Rngs | None = None,
    implementation: str | None = None,
    ignore_precision: bool = False,
    **kwargs: Any,
) -> tuple[M, RulesReport]:
    """``fbq_jax.nnx.quantize``, which also reaches products in the model's own code.

    ``quantize`` says which products.  The rule for the module that holds the parameter
    decides.  A module that multiplies by its parameter ``w`` gets a ``FallbackDot`` as
    ``w_dot_general``.  A module's product of two activations gets a ``FallbackDot`` as
    ``activations_0_dot_general``, if a rule names it.  The class of the returned model
    is derived from the model's, and products are reached in its public methods.  A
    layer that is called outside of them multiplies by ``w`` in float.

    Args:
      model: does not change; the returned model shares its variables.
      rules: a mapping from patterns of paths to recipes, tried in order.
      *args: the arguments of a call of the model, which is traced; arrays may be
        ``jax.ShapeDtypeStruct``.
      quantize_rngs: seeds the noise of the layers, as the ``rngs`` of ``FallbackDot``.
      implementation: the implementation of the layers' ops, as in ``FallbackDot``.
      ignore_precision: whether to quantize products that ask for a precision.
      **kwargs: keyword arguments of the same call, and so its ``rngs``.

    Returns:
      The quantized model, and what became of each parameter.

    Raises:
      TypeError: as in ``fbq_jax.nnx.quantize``.
      ValueError: as in ``fbq_jax.nnx.quantize``.

    >>> import jax.numpy as jnp
    >>> from fbq_jax import recipes
    >>> class Head(nnx.Module):
    ...     def __init__(self):
    ...         self.w = nnx.Param(jnp.ones((16, 8)))
    ...     def __call__(self, x):
    ...         return x @ self.w[...]
    >>> model, report = quantize_nnx(Head(), {".*": recipes.block}, jnp.ones((4, 16)))
    >>> print(report)
    parameter  shape   rule  recipe
    w          16 x 8  .*    block
    """
    check_nnx("quantize", model)
    pairs = path_rules.as_pairs(rules)
    options: dict[str, Any] = {
        "rngs": take_rngs(model, args, kwargs, quantize_rngs),
        "implementation": implementation,
        "ignore_precision": ignore_precision,
    }
    model = reaching_products(nnx.clone(model, variables=False))
    layers = quantize_layers(model, pairs, **options)
    found = {layer.path: layer.pattern for layer in layers}
    modules = modules_of(model)
    others = {
        path: path_rules.first_match(pairs, path)
        for path, module in modules.items()
        if path not in found and any(True for _ in matrices(module))
    }
    for module in modules.values():
        _drop_ops(module)  # of earlier rules
    recorded, _ = record_products(model, args, kwargs)
    _set_ops(model, pairs, others, recorded, options)
    recorded, products = record_products(model, args, kwargs)
    quantized = {(product.layer, product.parameter) for product in products}
    names = parameter_paths(model)
    for layer, name in recorded.weights:
        if layer not in others:
            continue
        found[layer] = others[layer].pattern
        parameter = names[id(getattr(modules[layer], name))]
        if (layer, parameter) not in quantized:
            vars(modules[layer]).pop(dot_name(name), None)
    drop_unused_ops(model, layers, products, args, kwargs)
    name_layers(model)
    activations = recorded.products_by(pairs).values()
    report = report_on(model, pairs, found, products, activations, ())
    return model, of_own_code(report)


def _drop_ops(module: nnx.Module) -> None:
    """Removes the ops of products in a module's own code."""
    of_weights = {dot_name(name) for name, _ in matrices(module)}
    for name in list(vars(module)):
        if name in of_weights or is_activations_dot(name):
            delattr(module, name)


def _set_ops(
    model: nnx.Module,
    rules: path_rules.Pairs,
    matches: Mapping[str, path_rules.Match],
    recorded: OwnProducts,
    options: dict[str, Any],
) -> None:
    """Gives modules the ops of products in their own code.

    ``matches`` has the rules of modules that may multiply by their parameters.
    """
    modules, stacks = modules_of(model), stacks_of(model)
    # A stack of modules has the axes that its variables have.
    for path, shape in recorded.variables.items():
        variable = first_variable(modules[path])
        assert variable is not None
        stacks[path] = stack_axes(path, variable.shape, shape)

    def set_op(path: str, name: str, recipe: Recipe | None) -> None:
        if recipe is None:
            return
        dot = FallbackDot(recipe, **options)
        if stack := stack_around(stacks, path):
            dot.stack(stack, options["rngs"])
        setattr(modules[path], name, nnx.data(dot))

    for (path, name), shape in recorded.weights.items():
        stacks[path] = stack_axes(path, getattr(modules[path], name).shape, shape)
        if path in matches:
            set_op(path, dot_name(name), matches[path].recipe)
    for (path, number), product in recorded.products_by(rules).items():
        set_op(path, activations_dot_name(number), product.recipe)
