"""What a Linen model that is traced tells: its products and its parameters."""

import contextlib
import math
from collections.abc import Iterator, Mapping
from typing import Any

import jax
from flax import linen as nn
from flax.core import DenyList

from fbq_jax.recipes.rules_report import ProductRecorder, QuantizedParameter
from fbq_jax.recipes.schema import Recipe

#: The parameter that is the weight of a layer.
KERNEL = "kernel"
ALL_STATE = DenyList("params")  # all collections but the parameters

# Part of the key of JAX's trace caches: a layer that was traced before is traced again.
_recorder = jax.make_user_context(None)


@contextlib.contextmanager
def record_products() -> Iterator[ProductRecorder]:
    """Makes ops that are traced inside report to the recorder that it yields."""
    recorder = ProductRecorder()
    with _recorder(recorder):
        yield recorder


def record_product(
    module: nn.Module,
    parameter: tuple[str, ...] | None,
    rhs: Any,
    recipe: Recipe,
    *,
    ignores_precision: bool,
) -> None:
    """Records a product, if someone asked for it.

    Args:
      module: the calling layer.
      parameter: the path of the parameter that it multiplies by; None to find it among
        the layer's own.
      rhs: the right operand.
      recipe: of the product.
      ignores_precision: whether the layer asked for a precision that is ignored.
    """
    recorder: ProductRecorder | None = _recorder.value
    if recorder is None:
        return
    if parameter is None:
        parameter = (*module.path, *_weight_name(module, rhs))
    path, layer = "/".join(parameter), "/".join(module.path)
    recorder.products.append(
        QuantizedParameter(path, rhs.shape, layer, None, recipe, ignores_precision)
    )


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


def parameter_leaves(params: Any) -> Iterator[tuple[str, Any]]:
    """The path and the array of each parameter, which may be boxed."""
    for keys, leaf in jax.tree.leaves_with_path(params):
        dict_keys = (k for k in keys if isinstance(k, jax.tree_util.DictKey))
        yield "/".join(str(k.key) for k in dict_keys), leaf


def _weight_name(module: nn.Module, rhs: Any) -> list[str]:
    """The parameter of a module that has the size of an operand, if only one has."""
    size = math.prod(rhs.shape)
    shapes = own_parameters(module)
    names = [name for name, shape in shapes.items() if math.prod(shape) == size]
    if KERNEL in names:
        return [KERNEL]
    return names if len(names) == 1 else []
