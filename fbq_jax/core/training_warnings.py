"""Warnings about layers that are differentiated, but whose state does not move.

A layer's weight is differentiated in training only.  So a layer whose next call would
have the same noise or scales wraps its weight, and JAX tells when a gradient reaches
it.
"""

import functools
from typing import Any, TypeVar

import jax
from jax.custom_derivatives import SymbolicZero

from fbq_jax.recipes.schema import Recipe
from fbq_jax.sharding.layer_names import warn_first

Tree = TypeVar("Tree")


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def warn_if_differentiated(cause: str, text: str, weight: Tree) -> Tree:
    """Returns ``weight``; warns once if its gradient is taken.

    The warning comes when JAX traces the gradient.  The compiled program does not
    change.

    Args:
      cause: identifies the cause; equal for warnings about the same thing.
      text: the text of the warning.
      weight: float arrays.
    """
    del cause, text
    return weight


def _forward(cause: str, text: str, weight: Tree) -> tuple[Tree, None]:
    warn_first(cause, text)
    return weight, None


warn_if_differentiated.defvjp(_forward, lambda *args: args[-1:])


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def warn_without_state_gradient(
    cause: str, text: str, weight: Tree, state: Any
) -> Tree:
    """Returns ``weight``; warns once if its gradient is taken, but the state's is not.

    For state whose new value is its gradient.

    Args:
      cause: as in ``warn_if_differentiated``.
      text: the text of the warning.
      weight: float arrays.
      state: float arrays.
    """
    del cause, text, state
    return weight


def _forward_of_both(
    cause: str, text: str, weight: Any, state: Any
) -> tuple[Any, None]:
    if _is_differentiated(weight) and not _is_differentiated(state):
        warn_first(cause, text)
    return jax.tree.map(lambda primal: primal.value, weight), None


def _is_differentiated(primals: Any) -> bool:
    return any(primal.perturbed for primal in jax.tree.leaves(primals))


def _backward_of_both(_cause: str, _text: str, _: None, gradient: Any) -> Any:
    def as_none(x: Any) -> Any:
        return None if isinstance(x, SymbolicZero) else x

    return jax.tree.map(as_none, gradient), None


warn_without_state_gradient.defvjp(
    _forward_of_both, _backward_of_both, symbolic_zeros=True
)


def warn_without_key(function: str, recipe: Recipe, rhs: Any) -> Any:
    """The weight of a call without a key; its gradient warns if its noise repeats.

    Args:
      function: the name of the function that was called.
      recipe: its recipe.
      rhs: the weight.
    """
    if not draws_noise(recipe):
        return rhs
    text = (
        f"a gradient is taken of fbq_jax.{function} without a key, so every call has "
        "the same noise: pass key= a new key in each call, such as "
        "jax.random.fold_in(key, step) of a key for each layer"
    )
    return warn_if_differentiated(f"{function} without key", text, rhs)


def needs_state(recipe: Recipe) -> bool:
    """Whether training differs from call to call: by noise, or by a threshold."""
    return recipe.criterion is not None or draws_noise(recipe)


def draws_noise(recipe: Recipe) -> bool:
    """Whether a training step rounds stochastically."""
    gemms = recipe.fwd, recipe.dlhs, recipe.drhs
    rounds = any("stochastic" in (gemm.lhs, gemm.rhs) for gemm in gemms)
    return rounds or any(gemm.reduce == "int8" for gemm in gemms)
