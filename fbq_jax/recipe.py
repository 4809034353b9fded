"""Recipes: what is quantized how in the three GEMMs of a linear layer."""

import dataclasses
import math
from typing import Any, Literal

from fbq_jax.kernels.reference import CRITERIA, Block, Criterion
from fbq_jax.kernels.rounding import ROUNDINGS, Rounding

BLOCK_SIDES = (32, 64, 128, 256)


class RecipeError(ValueError):
    """A field of a recipe holds something that it does not take."""

    def __init__(self, field: str, value: object, takes: str) -> None:
        super().__init__(field, value, takes)

    def __str__(self) -> str:
        field, value, takes = self.args
        return f"Recipe.{field} takes {takes}; got {value!r}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Gemm:
    """How the two operands of one GEMM are rounded to INT8."""

    lhs: Rounding = "nearest"
    rhs: Rounding = "nearest"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recipe:
    """What is quantized how.  Validated when it is built.

    The three GEMMs of ``Y [M, N] = X [M, K] . W [K, N]``, and their operands:

    ===== ================ ================ ================
    GEMM  product          lhs              rhs
    ===== ================ ================ ================
    fwd   ``Y = X . W``    X, may fall back W
    dlhs  ``dX = dY . W'`` dY               W, fwd's codes
    drhs  ``dW = X' . dY`` X, no residual   dY, dlhs' codes
    ===== ================ ================ ================

    The defaults are the method of arXiv 2503.08040: nearest rounding in the forward
    GEMM, stochastic rounding of X and dY in the backward ones, and a threshold that
    moves to keep the fallback rate inside a range (its Algorithm 2).  The paper gives
    neither the threshold's start nor ``alpha``: those are this library's choices.

    Attributes:
      block: sides of a block along M, K and N, each 32, 64, 128 or 256; one number
        stands for all three.  X has blocks (M, K), W (K, N) and dY (M, N).
      criterion: what is compared with the threshold, ``"absmax"``, ``"l1"`` or
        ``"l1_rel"`` (``fbq_jax.kernels.reference.quantize_fallback`` defines them);
        None for no fallback.
      target_rate: the range ``(low, high)``, inside [0, 1], for the share of blocks
        that fall back.
      alpha: the largest factor, above 1, by which the threshold moves in one training
        forward.
      start: the first threshold, in the units of the criterion, or ``"first_batch"``:
        the quantile of the first batch's blocks in the middle of ``target_rate``.
      backward_scales: ``"block"``, or ``"row"`` for one scale a row of lhs and a column
        of rhs in the two backward GEMMs, over their whole contraction, with codes of
        their own: not the paper's.
      fwd: rounding in the forward GEMM.
      dlhs: rounding in the GEMM of the activation's gradient.
      drhs: rounding in the GEMM of the weight's gradient.

    >>> Recipe(block=64, target_rate=(0.05, 0.1)).block
    (64, 64, 64)
    >>> Recipe(alpha=0.5)
    Traceback (most recent call last):
      ...
    fbq_jax.recipe.RecipeError: Recipe.alpha takes a finite number above 1; got 0.5
    """

    block: int | tuple[int, int, int] = 128
    criterion: Criterion | None = "absmax"
    target_rate: tuple[float, float] = (0.1, 0.3)
    alpha: float = 1.5
    start: float | Literal["first_batch"] = "first_batch"
    backward_scales: Literal["block", "row"] = "block"
    fwd: Gemm = Gemm()
    dlhs: Gemm = Gemm(lhs="stochastic")
    drhs: Gemm = Gemm(lhs="stochastic", rhs="stochastic")

    def __new__(cls, **fields: object) -> "Recipe":
        """Names the fields there are when one is unknown."""
        known = [field.name for field in dataclasses.fields(cls)]
        if unknown := [name for name in fields if name not in known]:
            raise TypeError(
                f"Recipe has no field {unknown[0]!r}; its fields are: "
                f"{', '.join(known)}"
            )
        return super().__new__(cls)

    def __post_init__(self) -> None:
        sides = self.block if isinstance(self.block, tuple) else (self.block,) * 3
        if len(sides) != 3 or not all(
            isinstance(side, int) and side in BLOCK_SIDES for side in sides
        ):
            takes = f"one of {BLOCK_SIDES} or three of them, for M, K and N"
            raise RecipeError("block", self.block, takes)
        object.__setattr__(self, "block", sides)
        if self.criterion is not None and self.criterion not in CRITERIA:
            raise RecipeError("criterion", self.criterion, f"one of {CRITERIA} or None")
        rates = self.target_rate
        if (
            not (isinstance(rates, tuple) and len(rates) == 2)
            or not all(_is_number(rate) for rate in rates)
            or not 0.0 <= rates[0] < rates[1] <= 1.0
        ):
            takes = "a pair (low, high) with 0 <= low < high <= 1"
            raise RecipeError("target_rate", rates, takes)
        if not _is_number(self.alpha) or not self.alpha > 1.0:
            raise RecipeError("alpha", self.alpha, "a finite number above 1")
        if self.start != "first_batch" and not (
            _is_number(self.start) and 1e-37 < self.start < 1e38
        ):
            takes = "'first_batch' or a number above 0 that float32 holds"
            raise RecipeError("start", self.start, takes)
        if self.backward_scales not in ("block", "row"):
            raise RecipeError(
                "backward_scales", self.backward_scales, "'block' or 'row'"
            )
        self._check_rounding()

    def _check_rounding(self) -> None:
        for name in ("fwd", "dlhs", "drhs"):
            gemm = getattr(self, name)
            if not isinstance(gemm, Gemm):
                raise RecipeError(name, gemm, "a Gemm(lhs=..., rhs=...)")
            for side in ("lhs", "rhs"):
                if getattr(gemm, side) not in ROUNDINGS:
                    raise RecipeError(
                        f"{name}.{side}", getattr(gemm, side), f"one of {ROUNDINGS}"
                    )
        if self.criterion is not None and self.fwd.lhs != "nearest":
            takes = "'nearest' where there is fallback: the residual is its error"
            raise RecipeError("fwd.lhs", self.fwd.lhs, takes)
        if self.backward_scales == "row":
            return  # Nothing is read twice.
        if self.dlhs.rhs != self.fwd.rhs:
            takes = f"fwd.rhs' {self.fwd.rhs!r}: both GEMMs read one set of W's codes"
            raise RecipeError("dlhs.rhs", self.dlhs.rhs, takes)
        if self.drhs.rhs != self.dlhs.lhs:
            takes = (
                f"dlhs.lhs' {self.dlhs.lhs!r}: both GEMMs read one set of dY's codes"
            )
            raise RecipeError("drhs.rhs", self.drhs.rhs, takes)

    @property
    def lhs_block(self) -> Block:
        """Rows and columns of a block of X."""
        m, k, _ = self.sides
        return m, k

    @property
    def rhs_block(self) -> Block:
        """Rows and columns of a block of W."""
        _, k, n = self.sides
        return k, n

    @property
    def grad_block(self) -> Block:
        """Rows and columns of a block of dY."""
        m, _, n = self.sides
        return m, n

    @property
    def sides(self) -> tuple[int, int, int]:
        """Sides of a block along M, K and N."""
        assert isinstance(self.block, tuple)  # as __post_init__ leaves it
        return self.block


def _is_number(value: Any) -> bool:
    return (
        isinstance(value, int | float)
        and not isinstance(value, bool)
        and math.isfinite(value)
    )
