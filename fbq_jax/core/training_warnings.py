"""Warnings about layers that are differentiated, but whose noise repeats.

A layer's weight is differentiated in training only.  So a layer that cannot draw new
noise in its next call wraps its weight, and JAX tells when a gradient reaches it.
"""

import functools
from typing import TypeVar

import jax

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


def needs_state(recipe: Recipe) -> bool:
    """Whether training differs from call to call: by noise, or by a threshold."""
    gemms = recipe.fwd, recipe.dlhs, recipe.drhs
    draws_noise = any("stochastic" in (gemm.lhs, gemm.rhs) for gemm in gemms)
    sums_in_int8 = any(gemm.reduce == "int8" for gemm in gemms)
    return recipe.criterion is not None or draws_noise or sums_in_int8
