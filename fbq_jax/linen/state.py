"""Where a Linen layer keeps its state: a variable of the module that is running."""

import itertools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax.core.scope import Scope, Variable
from flax.linen import module as flax_module

from fbq_jax.core import threshold
from fbq_jax.core.layer_stats import SLOT


def find_slot(
    module: nn.Module, collection: str, start: Callable[[Scope, str], Any]
) -> Variable:
    """The variable of this call in a collection: a module that calls twice has two.

    Args:
      module: the one that calls.
      collection: the variable's.
      start: makes its first value, of the scope and the name that it will have.

    Raises:
      ValueError: there is none, and the collection is not mutable.
    """
    scope = module.scope
    assert scope is not None
    names = (f"{SLOT}_{i}" if i else SLOT for i in itertools.count())
    name = next(n for n in names if not scope.name_reserved(n, collection))
    if not scope.is_mutable_collection(collection) and not scope.has_variable(
        collection, name
    ):
        raise ValueError(
            f"layer {'/'.join(module.path) or '(root)'!r} has no state {name!r} in "
            f"the collection {collection!r}: pass apply what init returned in it ("
            f"{{'params': ..., {collection!r}: ...}}), or start a new "
            f"one with mutable=[{collection!r}]"
        )
    return scope.variable(collection, name, start, scope, name)


def calling_module() -> nn.Module | None:
    """The Linen module whose method is running, if any."""
    return flax_module._context.module_stack[-1]


def with_floats(state: threshold.State) -> threshold.State:
    """The state as ``jax.grad`` takes it: it rejects integers."""
    return jax.tree.map(lambda x: x.astype(jnp.float32), state)


@jax.custom_vjp
def return_as_gradient(
    out: jax.Array, state: Mapping[str, jax.Array], new: threshold.State
) -> jax.Array:
    """``out``; the gradient with respect to ``state`` is ``new``, whatever out's is."""
    del state, new
    return out


def _return_as_gradient_fwd(
    out: jax.Array, state: Mapping[str, jax.Array], new: threshold.State
) -> tuple[jax.Array, threshold.State]:
    del state
    return out, new


def _return_as_gradient_bwd(
    new: threshold.State, out_grad: jax.Array
) -> tuple[jax.Array, threshold.State, None]:
    return out_grad, new, None


return_as_gradient.defvjp(_return_as_gradient_fwd, _return_as_gradient_bwd)
