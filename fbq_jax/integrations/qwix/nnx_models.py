"""NNX models: ``quantize_nnx``, and the ops that it gives to modules."""

from collections.abc import Iterable, Mapping
from typing import Any

from flax import nnx

from fbq_jax.core import weight_products
from fbq_jax.core.weight_products import ParameterUse
from fbq_jax.integrations.qwix.nnx_classes import intercepting_class
from fbq_jax.integrations.qwix.nnx_modules import (
    matrices,
    modules_of,
    record_activations,
)
from fbq_jax.nnx.dot import (
    FallbackDot,
    Layer,
    activations_dot_name,
    dot_name,
    is_activations_dot,
)
from fbq_jax.nnx.naming import name_layers
from fbq_jax.nnx.rules import (
    drop_unused_ops,
    quantize_layers,
    stack_shape,
    trace_parameters,
    unchanged_on_error,
)
from fbq_jax.recipes import path_rules
from fbq_jax.recipes.rules_report import (
    ActivationProduct,
    RulesReport,
    warn_of_idle_rules,
)
from fbq_jax.recipes.schema import Recipe


def quantize_nnx(
    model: nnx.Module,
    rules: Mapping[str, Recipe | None],
    *args: Any,
    rngs: nnx.Rngs | None = None,
    implementation: str | None = None,
    ignore_precision: bool = False,
    **kwargs: Any,
) -> RulesReport:
    """``fbq_jax.nnx.quantize``, which also reaches products in the model's own code.

    ``quantize`` says which products.  The rule for the module that holds the parameter
    decides.  A module that multiplies by its parameter ``w`` gets a ``FallbackDot`` as
    ``w_dot_general``.  The model's class becomes one that is derived from it, in whose
    public methods products are reached.  A layer that is called outside of them
    multiplies by ``w`` in float.  A module's product of two activations gets a
    ``FallbackDot`` as ``activations_0_dot_general``, if a rule names it.

    Args:
      model: changed in place.
      rules: a mapping from patterns of paths to recipes, tried in order.
      *args: the arguments of a call of the model, which is traced; arrays may be
        ``jax.ShapeDtypeStruct``.
      rngs: seeds the noise of the layers, as in ``FallbackDot``.
      implementation: the implementation of the layers' ops, as in ``FallbackDot``.
      ignore_precision: whether to quantize products that ask for a precision.
      **kwargs: keyword arguments of the same call.

    Raises:
      TypeError: as in ``fbq_jax.nnx.quantize``.
      ValueError: as in ``fbq_jax.nnx.quantize``.
    """
    pairs = path_rules.as_pairs(rules)
    options: dict[str, Any] = {
        "rngs": rngs,
        "implementation": implementation,
        "ignore_precision": ignore_precision,
    }
    with unchanged_on_error(model):
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
        model.__class__ = intercepting_class(
            vars(type(model)).get("unquantized", type(model))
        )
        _drop_activations(modules)
        if any(match.recipe is not None for match in others.values()):
            parameters = trace_parameters(model, args, kwargs)
            _set_own_code(modules, others, parameters, options)
        if path_rules.activations_rules(pairs):
            with record_activations(model) as recorded:
                trace_parameters(model, args, kwargs)
            _set_activations(modules, recorded.products(pairs), options)
        with record_activations(model) as recorded:
            parameters = trace_parameters(model, args, kwargs)
        for path, _, use in parameters:
            layer, _, name = path.rpartition("/")
            if layer in others and not use.quantized:
                vars(modules[layer]).pop(dot_name(name), None)
            if layer in others and (use.quantized or use.in_float):
                found[layer] = others[layer].pattern
        drop_unused_ops(model, pairs, found, parameters)
        name_layers(model)
    activations = recorded.products(pairs).values()
    report = weight_products.report(pairs, found, parameters, activations)
    warn_of_idle_rules(pairs, report, stacklevel=2)
    return report


def _set_own_code(
    modules: Mapping[str, nnx.Module],
    matches: Mapping[str, path_rules.Match],
    parameters: Iterable[tuple[str, tuple[int, ...], ParameterUse]],
    options: dict[str, Any],
) -> None:
    """Gives modules their ops for the parameters that they multiply by themselves.

    Args:
      modules: maps paths to modules.
      matches: maps the paths of those whose own code may multiply to their rules.
      parameters: the path, the shape and the use of each parameter.
      options: of ``FallbackDot``.
    """
    for path, shape, use in parameters:
        layer, _, name = path.rpartition("/")
        recipe = matches[layer].recipe if layer in matches else None
        if recipe is None or not use.in_float or weight_products.is_adapter(name):
            continue
        if len(shape) - use.stacked >= 2:
            dot = FallbackDot(recipe, **options)
            if use.stacked:
                dot.stack(shape[: use.stacked], options["rngs"])
            setattr(modules[layer], dot_name(name), nnx.data(dot))


def _drop_activations(modules: Mapping[str, nnx.Module]) -> None:
    """Removes the ops that earlier rules gave to products of two activations."""
    for module in modules.values():
        for name in list(filter(is_activations_dot, vars(module))):
            delattr(module, name)


def _set_activations(
    modules: Mapping[str, nnx.Module],
    products: Mapping[tuple[str, int], ActivationProduct],
    options: dict[str, Any],
) -> None:
    """Gives products of two activations their ops."""
    for (path, number), product in products.items():
        if product.recipe is None:
            continue
        dot = FallbackDot(product.recipe, **options)
        layers = (m for _, m in nnx.iter_modules(modules[path]) if isinstance(m, Layer))
        # Where its layers are stacks, so is the module.
        if (layer := next(layers, None)) and (shape := stack_shape(path, layer)):
            dot.stack(shape, options["rngs"])
        setattr(modules[path], activations_dot_name(number), nnx.data(dot))
