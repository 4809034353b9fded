"""What computes the products beside bf16: recipes, and other libraries."""

import functools
import importlib
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from fbq_jax import recipes
from fbq_jax.ops import dispatch
from fbq_jax.recipes.schema import Recipe

# The recipes that are faster than bf16 and recommended for some case: all sections for
# whole steps, blocks and layers measure them.
TIMED = ("fallback", "block", "row_block_lhs", "fp8_row_block_lhs")


def forward_choice(recipe: Recipe, implementation: str | None) -> dispatch.Choice:
    """The choice for a recipe's forward GEMM on this device.

    Raises:
      ValueError: the implementation does not run it here, such as FP8 on a GPU without
        FP8 tensor cores.
    """
    fwd = recipe.fwd
    blocks = fwd.block_shape(recipe.block_shape) if fwd.splits_contraction else ()
    return dispatch.choose(
        "matmul", blocks, codes=recipe.codes, implementation=implementation
    )


def supported(
    names: Sequence[str], implementation: str | None
) -> Iterator[tuple[str, Recipe, str]]:
    """The named recipes that run here, with their backends; stderr names the others."""
    for name in names:
        recipe = recipes.NAMED[name]
        try:
            choice = forward_choice(recipe, implementation)
        except ValueError as error:
            print(f"without {name}: {error}", file=sys.stderr)
        else:
            yield name, recipe, choice.backend


def installed_int8_libraries() -> Iterator[tuple[str, dict[str, Any]]]:
    """Qwix and AQT where installed, as arguments of ``nn.Dense`` by name.

    stderr names the missing ones.
    """
    for name, dense_arguments in (("qwix", _qwix_int8), ("aqt", _aqt_int8)):
        try:
            yield dense_arguments()
        except ImportError as error:
            print(f"without {name}: {error}", file=sys.stderr)


def _qwix_int8() -> tuple[str, dict[str, Any]]:
    """Qwix: INT8 in all three products, a scale per channel, nearest rounding."""
    qwix = importlib.import_module("qwix._src.core.dot_general_qt")
    config = qwix.DotGeneralQtConfig(
        lhs_qtype=jnp.int8,
        rhs_qtype=jnp.int8,
        dlhs_grad_qtype=jnp.int8,
        drhs_grad_qtype=jnp.int8,
    )

    def dot(x: jax.Array, w: jax.Array, dims: Any, **_: Any) -> jax.Array:
        y: jax.Array = qwix.dot_general_qt(x, w, dims, config)
        return y

    return "Qwix INT8", {"dot_general": dot}


def _aqt_int8() -> tuple[str, dict[str, Any]]:
    """AQT: INT8 in all three products, stochastic rounding of the gradients."""
    config = importlib.import_module("aqt.jax.v2.config")
    layer = importlib.import_module("aqt.jax.v2.flax.aqt_flax").AqtDotGeneral
    int8 = config.fully_quantized(fwd_bits=8, bwd_bits=8)
    return "AQT INT8", {"dot_general_cls": functools.partial(layer, int8)}
