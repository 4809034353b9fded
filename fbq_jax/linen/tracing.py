"""Traces a Linen model to see what it does with its parameters."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
from flax import linen as nn
from flax.core import DenyList

from fbq_jax.core.weight_marks import record_products
from fbq_jax.core.weight_products import (
    ParameterUse,
    find_uses,
    split_arrays,
)

ALL_STATE = DenyList("params")  # all collections but the parameters


def trace_parameters(
    model: nn.Module, rngs: Any, args: Any, kwargs: Mapping[str, Any]
) -> list[tuple[str, tuple[int, ...], ParameterUse]]:
    """The path, the shape and the use of each parameter; computes nothing.

    Args:
      model: an unbound model.
      rngs: the PRNG keys of ``init``, which ``apply`` gets, too.
      args: its arguments; arrays may be ``jax.ShapeDtypeStruct``.
      kwargs: its keyword arguments, and ``method``.
    """
    arrays, rebuild = split_arrays((args, kwargs))
    rngs = rngs if isinstance(rngs, Mapping) else {"params": rngs}

    def init(rngs: Any, arrays: list[Any]) -> Any:
        args, kwargs = rebuild(arrays)
        return model.init(rngs, *args, **kwargs)

    def apply(variables: Any, rngs: Any, arrays: list[Any]) -> Any:
        args, kwargs = rebuild(arrays)
        return model.apply(variables, *args, rngs=rngs, mutable=ALL_STATE, **kwargs)

    # Attention with ``decode=True`` takes the whole sequence until it has a cache.
    variables = dict(jax.eval_shape(init, rngs, arrays))
    variables.pop("cache", None)
    return trace_uses(apply, variables, rngs, arrays)


def trace_uses(
    apply: Callable[..., Any], variables: Mapping[str, Any], *inputs: Any
) -> list[tuple[str, tuple[int, ...], ParameterUse]]:
    """The path, the shape and the use of each parameter; computes nothing.

    Args:
      apply: a function of the variables and the inputs that calls a model.
      variables: the variables of the model, or their shapes.
      *inputs: trees of arrays, or their shapes.
    """
    parameters = {
        position: "/".join(filter(None, map(_name, path[1:])))
        for position, (path, _) in enumerate(jax.tree.leaves_with_path(variables))
        if _name(path[0]) == "params"
    }
    with record_products() as recorder:
        closed = jax.make_jaxpr(apply)(variables, *inputs)
    return find_uses(closed, parameters, recorder)


def _name(key: Any) -> str:
    """The name of a variable or module; empty inside the box of a parameter."""
    return str(key.key) if isinstance(key, jax.tree_util.DictKey) else ""
