"""Recipes: how the GEMMs of a layer are quantized; named recipes and their schema."""

import difflib
from typing import TYPE_CHECKING

from fbq_jax.recipes.presets import NAMED as NAMED
from fbq_jax.recipes.presets import aqt_int8 as aqt_int8
from fbq_jax.recipes.presets import aqt_int8_local as aqt_int8_local
from fbq_jax.recipes.presets import block as block
from fbq_jax.recipes.presets import fallback as fallback
from fbq_jax.recipes.presets import fallback_rowwise_bwd as fallback_rowwise_bwd
from fbq_jax.recipes.presets import fp8_row_block as fp8_row_block
from fbq_jax.recipes.presets import fp8_row_block_lhs as fp8_row_block_lhs
from fbq_jax.recipes.presets import jetfire as jetfire
from fbq_jax.recipes.presets import per_tensor as per_tensor
from fbq_jax.recipes.presets import per_tensor_bifurcated as per_tensor_bifurcated
from fbq_jax.recipes.presets import row_block as row_block
from fbq_jax.recipes.presets import row_block_lhs as row_block_lhs
from fbq_jax.recipes.presets import rowwise as rowwise
from fbq_jax.recipes.presets import switchback as switchback
from fbq_jax.recipes.presets import switchback_m as switchback_m
from fbq_jax.recipes.presets import switchback_q as switchback_q
from fbq_jax.recipes.schema import FLOAT_GEMM as FLOAT_GEMM
from fbq_jax.recipes.schema import Gemm as Gemm
from fbq_jax.recipes.schema import Recipe as Recipe
from fbq_jax.recipes.schema import RecipeError as RecipeError

if not TYPE_CHECKING:  # A type checker would take any name for a recipe.

    def __getattr__(name):
        """Raises an AttributeError that names the recipes."""
        close = difflib.get_close_matches(name, NAMED, n=1)
        meant = f" Did you mean {close[0]!r}?" if close else ""
        raise AttributeError(
            f"module 'fbq_jax.recipes' has no attribute {name!r}.{meant} The named "
            f"recipes are {', '.join(NAMED)}",
            name=name,
        )
