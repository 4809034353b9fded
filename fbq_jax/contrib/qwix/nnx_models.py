"""NNX models: ``quantize_nnx``, and the ops that it gives to modules."""

from collections.abc import Mapping
from typing import Any, TypeVar

from flax import nnx

from fbq_jax.contrib.qwix.nnx_classes import reach_products
from fbq_jax.contrib.qwix.nnx_modules import (
    Place,
    first_variable,
    matrices,
    modules_of,
    record_activations,
)
from fbq_jax.model_kind import check_nnx
from fbq_jax.nnx.dot import (
    FallbackDot,
    activations_dot_name,
    dot_name,
    is_activations_dot,
)
from fbq_jax.nnx.naming import name_layers
from fbq_jax.nnx.rules import (
    drop_unused_ops,
    quantize_layers,
    shared_parameters,
    stack_axes,
    take_rngs,
)
from fbq_jax.nnx.tracing import matrices_of, parameter_paths, trace_products
from fbq_jax.recipes import path_rules
from fbq_jax.recipes.rules_report import (
    ActivationProduct,
    RulesReport,
    rules_report,
    warn_of_idle_rules,
)
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
    model = nnx.clone(model, variables=False)
    reach_products(model)
    found = quantize_layers(model, pairs, **options)
    modules = modules_of(model)
    others = {
        path: path_rules.first_match(pairs, path)
        for path, module in modules.items()
        if path not in found and any(True for _ in matrices(module))
    }
    for path in others:
        for name, _ in list(matrices(modules[path])):
            vars(modules[path]).pop(dot_name(name), None)  # of earlier rules
    _drop_activations(modules)
    with record_activations(model) as recorded:
        trace_products(model, args, kwargs)
    _set_own_code(modules, others, recorded.weights, options)
    if path_rules.activations_rules(pairs):
        with record_activations(model) as recorded:
            trace_products(model, args, kwargs)
        _set_activations(modules, recorded.products(pairs), recorded.places, options)
    with record_activations(model) as recorded:
        products = trace_products(model, args, kwargs)
    quantized = {(product.layer, product.parameter) for product in products}
    names = parameter_paths(model)
    for layer, name in recorded.weights:
        if layer not in others:
            continue
        found[layer] = others[layer].pattern
        parameter = names[id(getattr(modules[layer], name))]
        if (layer, parameter) not in quantized:
            vars(modules[layer]).pop(dot_name(name), None)
    drop_unused_ops(model, pairs, found, products, args, kwargs)
    name_layers(model)
    activations = recorded.products(pairs).values()
    floats = shared_parameters(model, found)
    report = rules_report(
        pairs, found, matrices_of(model), products, activations, floats
    )
    warn_of_idle_rules(pairs, report, stacklevel=2)
    return model, report


def _set_own_code(
    modules: Mapping[str, nnx.Module],
    matches: Mapping[str, path_rules.Match],
    weights: Mapping[tuple[str, str], tuple[int, ...]],
    options: dict[str, Any],
) -> None:
    """Gives modules their ops for the parameters that they multiply by themselves.

    Args:
      modules: maps paths to modules.
      matches: maps the paths of those whose own code may multiply to their rules.
      weights: maps the path of a module and the name of a parameter to its shape,
        without the axes of stacks.
      options: of ``FallbackDot``.
    """
    for (path, name), shape in weights.items():
        recipe = matches[path].recipe if path in matches else None
        if recipe is None:
            continue
        dot = FallbackDot(recipe, **options)
        if stack := stack_axes(path, getattr(modules[path], name).shape, shape):
            dot.stack(stack, options["rngs"])
        setattr(modules[path], dot_name(name), nnx.data(dot))


def _drop_activations(modules: Mapping[str, nnx.Module]) -> None:
    """Removes the ops that earlier rules gave to products of two activations."""
    for module in modules.values():
        for name in list(filter(is_activations_dot, vars(module))):
            delattr(module, name)


def _set_activations(
    modules: Mapping[str, nnx.Module],
    products: Mapping[tuple[str, int], ActivationProduct],
    places: Mapping[tuple[str, int], Place],
    options: dict[str, Any],
) -> None:
    """Gives products of two activations their ops."""
    for key, product in products.items():
        if product.recipe is None:
            continue
        dot, place = FallbackDot(product.recipe, **options), places[key]
        owner = place.module
        stack: tuple[int, ...] = ()
        variable = None if owner is None else first_variable(modules[owner])
        if owner is not None and variable is not None:
            # A stack of modules has the axes that its variables have.
            stack = stack_axes(owner, variable.shape, place.variable)
        if stack:
            dot.stack(stack, options["rngs"])
        path, number = key
        setattr(modules[path], activations_dot_name(number), nnx.data(dot))
