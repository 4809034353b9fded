"""The static settings of a layer's GEMMs."""

from typing import Any, NamedTuple

import jax.numpy as jnp

from fbq_jax.ops import dispatch
from fbq_jax.recipes.schema import Gemm, Recipe


class GemmSpec(NamedTuple):
    """The static settings of one GEMM.

    Attributes:
      gemm: how the recipe quantizes it.
      block_shape: the values along the M, K and N of this GEMM that share a scale, if K
        has several.
      dtype: the output's dtype.
      implementation: the ops' implementation; None lets the dispatcher choose.
    """

    gemm: Gemm
    block_shape: tuple[int, int, int]
    dtype: Any
    implementation: str | None


class Spec(NamedTuple):
    """The static settings of a layer's three GEMMs.

    Attributes:
      recipe: how the three GEMMs are quantized.
      dtype: the dtype of Y.
      lhs_dtype: the dtype of X and dX.
      rhs_dtype: the dtype of W and dW.
      implementation: the ops' implementation; None lets the dispatcher choose.
    """

    recipe: Recipe
    dtype: Any
    lhs_dtype: Any
    rhs_dtype: Any
    implementation: str | None

    @property
    def bounds_sums(self) -> bool:
        """Whether the kernel of a GEMM reads ``Quantized.sums`` of its rhs.

        The one in Mosaic does for INT8 codes, except for outputs of 4 bytes.
        """
        if self.recipe.codes != "int8":
            return False
        choice = dispatch.choose(
            "matmul", self.recipe.block_shape, implementation=self.implementation
        )
        dtypes = self.dtype, self.lhs_dtype, self.rhs_dtype
        has_16_bits = any(jnp.dtype(dtype).itemsize == 2 for dtype in dtypes)
        return choice.implementation == "mosaic" and has_16_bits

    @property
    def fwd(self) -> GemmSpec:
        """The settings of ``Y = X . W``."""
        return self._gemm(self.recipe.fwd, self.recipe.block_shape, self.dtype)

    @property
    def dlhs(self) -> GemmSpec:
        """The settings of ``dX = dY . W'``."""
        m, k, n = self.recipe.block_shape
        return self._gemm(self.recipe.dlhs, (m, n, k), self.lhs_dtype)

    @property
    def drhs(self) -> GemmSpec:
        """The settings of ``dW = X' . dY``."""
        m, k, n = self.recipe.block_shape
        return self._gemm(self.recipe.drhs, (k, m, n), self.rhs_dtype)

    def _gemm(self, gemm: Gemm, sizes: tuple[int, int, int], dtype: Any) -> GemmSpec:
        return GemmSpec(gemm, gemm.block_shape(sizes), dtype, self.implementation)
