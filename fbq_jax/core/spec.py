"""The static settings of a layer's GEMMs."""

from typing import Any, NamedTuple

from fbq_jax.kernels.quantized import Block, Layout
from fbq_jax.ops.products import reads_sums
from fbq_jax.recipes.schema import Quantizer, Recipe, Scales


class Plan(NamedTuple):
    """How a matrix is quantized for the GEMMs that read it.

    Attributes:
      rowwise: the layout of the matrix itself, or None.
      colwise: the layout of its transpose, or None.
      row_shards: the shards that rows are split into for the rowwise layout.
      column_shards: the shards that rows are split into for the colwise layout.
    """

    rowwise: Layout | None
    colwise: Layout | None
    row_shards: int = 1
    column_shards: int = 1


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

    def lhs(self, *, save: bool) -> Plan:
        """X ``[M, K]``: rowwise for Y and, if the backward pass needs it, for dW."""
        recipe = self.recipe
        backward = recipe.drhs.quantizers[0] if save else None
        return _plan(recipe.lhs_block, recipe.fwd.quantizers[0], backward)

    def rhs(self, *, save: bool) -> Plan:
        """W ``[K, N]``: colwise for Y and, if the backward pass needs it, for dX."""
        recipe = self.recipe
        backward = recipe.dlhs.quantizers[1] if save else None
        plan = _plan(recipe.rhs_block, backward, recipe.fwd.quantizers[1])
        return self._with_sums(plan)

    def grad(self, *, frozen: bool) -> Plan:
        """The gradient of Y ``[M, N]``: rowwise for dX and, unless frozen, colwise."""
        recipe = self.recipe
        colwise = None if frozen else recipe.drhs.quantizers[1]
        plan = _plan(recipe.grad_block, recipe.dlhs.quantizers[0], colwise)
        return self._with_sums(plan, rowwise=False)

    def _with_sums(self, plan: Plan, *, rowwise: bool = True) -> Plan:
        """Adds sums to the layouts that are the second operand of a GEMM."""
        recipe, dtypes = self.recipe, (self.dtype, self.lhs_dtype, self.rhs_dtype)
        block = recipe.block_shape
        if not reads_sums(block, dtypes, recipe.codes, self.implementation):
            return plan

        def add(layout: Layout | None) -> Layout | None:
            if layout is None or not layout.is_split or 1 in layout.block:
                return layout
            return layout._replace(sums=True)

        main = add(plan.rowwise) if rowwise else plan.rowwise
        return plan._replace(rowwise=main, colwise=add(plan.colwise))


def _plan(
    block: tuple[int, int], rowwise: Quantizer | None, colwise: Quantizer | None
) -> Plan:
    """The layouts that have a quantizer, of a matrix with these blocks."""
    r, c = block
    of_rows: dict[Scales, Block] = {"block": (r, c), "row_block": (1, c)}
    of_columns: dict[Scales, Block] = {"block": (r, c), "row_block": (r, 1)}
    of_rows |= {"row": (1, None), "tensor": (None, None)}
    of_columns |= {"row": (None, 1), "tensor": (None, None)}
    return Plan(
        rowwise and Layout(rowwise.rounding, of_rows[rowwise.scales]),
        colwise and Layout(colwise.rounding, of_columns[colwise.scales]),
        rowwise.shards if rowwise else 1,
        colwise.shards if colwise else 1,
    )
