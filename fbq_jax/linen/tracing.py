"""What a Linen model that is traced tells: its products and its parameters."""

import dataclasses
import math
from collections.abc import Iterator, Mapping
from typing import Any

import jax
from flax import linen as nn
from flax.core import DenyList

from fbq_jax.core.visitors import Visitor
from fbq_jax.linen.state import KERNEL, LayerWeight
from fbq_jax.recipes.rules_report import (
    ActivationProduct,
    FloatProduct,
    QuantizedParameter,
)

ALL_STATE = DenyList("params")  # all collections but the parameters


@dataclasses.dataclass(eq=False)
class Recorder(Visitor):
    """Records what a report says.

    Attributes:
      dot: the ``RulesDot`` that reports.
      found: maps the path of each layer to its pattern.
      activations: maps the name of each product of two activations to it.
      floats: the products that rules leave in float.
      products: the quantized products with weights, without their rules.
    """

    dot: Any
    found: dict[str, str | None] = dataclasses.field(default_factory=dict)
    activations: dict[str, ActivationProduct] = dataclasses.field(default_factory=dict)
    floats: list[FloatProduct] = dataclasses.field(default_factory=list)
    products: list[QuantizedParameter] = dataclasses.field(default_factory=list)

    def see(self, product: Any) -> Any:
        """Records a product; reports have a row of their own for two activations."""
        if not isinstance(product, LayerWeight) or product.parameter is None:
            return product
        module, rhs = product.module, product.rhs
        path = product.parameter.path
        if not product.parameter.own_code:  # a layer may multiply by another one
            path = (*module.path, *_weight_name(module, rhs))
        self.products.append(
            QuantizedParameter(
                "/".join(path),
                rhs.shape,
                "/".join(module.path),
                None,
                product.config.recipe,
                product.ignores_precision,
            )
        )
        return product


def own_parameters(module: nn.Module) -> dict[str, tuple[int, ...]]:
    """The shapes of the parameters that a running module holds itself, by their names.

    Inside ``nn.scan`` and ``nn.vmap`` they are those of one layer.
    """
    assert module.scope is not None
    params = module.variables.get("params", {})
    leaves = {
        name: jax.tree.leaves(value)  # the parameter may be boxed
        for name, value in params.items()
        if not isinstance(value, Mapping)
    }
    return {name: found[0].shape for name, found in leaves.items() if found}


def parameter_leaves(params: Any) -> Iterator[tuple[tuple[str, ...], Any]]:
    """The path and the array of each parameter, which may be boxed."""
    for keys, leaf in jax.tree.leaves_with_path(params):
        dict_keys = (k for k in keys if isinstance(k, jax.tree_util.DictKey))
        yield tuple(str(k.key) for k in dict_keys), leaf


def _weight_name(module: nn.Module, rhs: Any) -> list[str]:
    """The parameter of a module that has the size of an operand, if only one has."""
    size = math.prod(rhs.shape)
    shapes = own_parameters(module)
    names = [name for name, shape in shapes.items() if math.prod(shape) == size]
    if KERNEL in names:
        return [KERNEL]
    return names if len(names) == 1 else []
