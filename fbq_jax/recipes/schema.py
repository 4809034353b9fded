"""Recipes: what is quantized how in the three GEMMs of a linear layer."""

import dataclasses
import math
from typing import Any, Literal, NamedTuple, get_args

from fbq_jax.kernels.reference import CRITERIA, Block, Criterion
from fbq_jax.kernels.rounding import ROUNDINGS, Rounding

BLOCK_SIDES = (32, 64, 128, 256)
BOUNDS = (127.0, 127.5)

Scales = Literal["block", "row", "tensor"]
SCALES: tuple[Scales, ...] = get_args(Scales)
Keeps = Literal["floats", "codes"]
KEEPS: tuple[Keeps, ...] = get_args(Keeps)
Reduce = Literal["float32", "bfloat16", "int8"]
REDUCES: tuple[Reduce, ...] = get_args(Reduce)


class RecipeError(ValueError):
    """A field of a recipe holds something that it does not take."""

    def __init__(self, field: str, value: object, takes: str) -> None:
        super().__init__(field, value, takes)

    def __str__(self) -> str:
        field, value, takes = self.args
        return f"Recipe.{field} takes {takes}; got {value!r}"


class Quantizer(NamedTuple):
    """How one operand of a GEMM in INT8 is quantized; the fields are ``Gemm``'s."""

    rounding: Rounding
    scales: Scales
    shards: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Gemm:
    """How one GEMM multiplies: in INT8, or in the operands' own floats.

    Attributes:
      lhs: the rounding of lhs' codes, ``"nearest"`` or ``"stochastic"``.
      rhs: likewise, of rhs.  None for both is a GEMM in floats, ``FLOAT_GEMM``.
      scales: what shares a scale, for both operands or as a pair (lhs, rhs):
        ``"block"``, a block of ``Recipe.block``; ``"row"``, a row of lhs or a column of
        rhs, which is each vector that the GEMM contracts; ``"tensor"``, all of it.
      shards: parts of drhs' contraction, the tokens, that are quantized each with
        scales of its own; their products are summed in float32.
      keeps: what the forward pass keeps for a backward GEMM in floats: X or W as
        ``"floats"``, or its forward ``"codes"``, which then stand for it.
      reduce: what several devices sum their parts of a product in, where its
        contraction is cut over them: None, the product's own dtype, as XLA sums those
        of ``lax.dot_general``; ``"float32"``; ``"bfloat16"``; or, for drhs, ``"int8"``,
        codes with stochastic rounding (``fbq_jax.sharding.collectives``), half the
        traffic of bfloat16 where each device keeps its share, as with FSDP.  A gradient
        that is whole on each device is then gathered in its own dtype: with float32
        that is more in all than the traffic of bfloat16.
    """

    lhs: Rounding | None = "nearest"
    rhs: Rounding | None = "nearest"
    scales: Scales | tuple[Scales, Scales] = "block"
    shards: int = 1
    keeps: Keeps = "floats"
    reduce: Reduce | None = None

    def __post_init__(self) -> None:
        if isinstance(self.scales, str):
            object.__setattr__(self, "scales", (self.scales,) * 2)

    @property
    def in_floats(self) -> bool:
        """Whether nothing is quantized."""
        return self.lhs is None

    @property
    def in_blocks(self) -> bool:
        """Whether the operands are in INT8 with a scale a block."""
        return not self.in_floats and "block" in self.scales

    @property
    def quantizers(self) -> tuple[Quantizer | None, Quantizer | None]:
        """How lhs and rhs are quantized; None in floats."""
        if self.lhs is None or self.rhs is None:
            return None, None
        assert isinstance(self.scales, tuple)  # as __post_init__ leaves it
        lhs, rhs = self.scales
        return (
            Quantizer(self.lhs, lhs, self.shards),
            Quantizer(self.rhs, rhs, self.shards),
        )


#: A product in the operands' own floats.
FLOAT_GEMM = Gemm(lhs=None, rhs=None)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recipe:
    """What is quantized how.  Validated when it is built.

    The three GEMMs of ``Y [M, N] = X [M, K] . W [K, N]``, and their operands:

    ===== ================ ================ ====
    GEMM  product          lhs              rhs
    ===== ================ ================ ====
    fwd   ``Y = X . W``    X, may fall back W
    dlhs  ``dX = dY . W'`` dY               W
    drhs  ``dW = X' . dY`` X, no residual   dY
    ===== ================ ================ ====

    A matrix with block scales in both of its GEMMs has one set of blocks, which serve
    both.

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
      bound: what a largest magnitude is scaled to before it is rounded: 127, the last
        code, or, for AQT, 127.5, the edge of what rounds to it.
      fwd: the forward GEMM.
      dlhs: the GEMM of the activation's gradient.
      drhs: the GEMM of the weight's gradient.

    >>> Recipe(block=64, target_rate=(0.05, 0.1)).block
    (64, 64, 64)
    >>> Recipe(bound=1)
    Traceback (most recent call last):
      ...
    fbq_jax.recipes.schema.RecipeError: Recipe.bound takes one of (127.0, 127.5); got 1
    """

    block: int | tuple[int, int, int] = 128
    criterion: Criterion | None = "absmax"
    target_rate: tuple[float, float] = (0.1, 0.3)
    alpha: float = 1.5
    start: float | Literal["first_batch"] = "first_batch"
    bound: float = 127.0
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
        for name, gemm in self._gemms().items():
            _check_gemm(name, gemm)
        self._check_together()

    def _check_together(self) -> None:
        fwd, dlhs, drhs = self._gemms().values()
        if self.criterion is not None:
            if fwd.lhs != "nearest":
                takes = "'nearest' where there is fallback: the residual is its error"
                raise RecipeError("fwd.lhs", fwd.lhs, takes)
            if not fwd.in_blocks:
                takes = "'block' where there is fallback (criterion=None has none)"
                raise RecipeError("fwd.scales", fwd.scales, takes)
        if self.bound not in BOUNDS:
            raise RecipeError("bound", self.bound, f"one of {BOUNDS}")
        in_blocks = [name for name, gemm in self._gemms().items() if gemm.in_blocks]
        if self.bound != 127.0 and in_blocks:
            takes = f"127.0 with block scales, as {', '.join(in_blocks)} has"
            raise RecipeError("bound", self.bound, takes)
        for name, gemm in {"dlhs": dlhs, "drhs": drhs}.items():
            if gemm.keeps == "codes" and fwd.in_floats:
                takes = "'floats' where fwd is in floats and has no codes"
                raise RecipeError(f"{name}.keeps", gemm.keeps, takes)
        if fwd.in_blocks and dlhs.in_blocks and dlhs.rhs != fwd.rhs:
            takes = f"fwd.rhs' {fwd.rhs!r}: both GEMMs read one set of W's codes"
            raise RecipeError("dlhs.rhs", dlhs.rhs, takes)
        if dlhs.in_blocks and drhs.in_blocks and drhs.rhs != dlhs.lhs:
            takes = f"dlhs.lhs' {dlhs.lhs!r}: both GEMMs read one set of dY's codes"
            raise RecipeError("drhs.rhs", drhs.rhs, takes)

    def _gemms(self) -> dict[str, Gemm]:
        return {"fwd": self.fwd, "dlhs": self.dlhs, "drhs": self.drhs}

    @property
    def in_blocks(self) -> bool:
        """Whether all three GEMMs are in INT8 with a scale a block."""
        return all(gemm.in_blocks for gemm in self._gemms().values())

    @property
    def lhs_block(self) -> Block:
        """Rows and columns of a block of X."""
        m, k, _ = self.block_shape
        return m, k

    @property
    def rhs_block(self) -> Block:
        """Rows and columns of a block of W."""
        _, k, n = self.block_shape
        return k, n

    @property
    def grad_block(self) -> Block:
        """Rows and columns of a block of dY."""
        m, _, n = self.block_shape
        return m, n

    @property
    def block_shape(self) -> tuple[int, int, int]:
        """Sides of a block along M, K and N."""
        assert isinstance(self.block, tuple)  # as __post_init__ leaves it
        return self.block

    #: The earlier name of ``block_shape``.
    sides = block_shape


def _check_gemm(name: str, gemm: Gemm) -> None:
    """Raises RecipeError where a GEMM of its own cannot be."""
    if not isinstance(gemm, Gemm):
        raise RecipeError(name, gemm, "a Gemm(lhs=..., rhs=...)")

    def check(field: str, accepted: bool, takes: str) -> None:
        if not accepted:
            raise RecipeError(f"{name}.{field}", getattr(gemm, field), takes)

    for side in ("lhs", "rhs"):
        known = getattr(gemm, side) in (*ROUNDINGS, None)
        check(side, known, f"one of {ROUNDINGS}, or None for floats")
    scales, shards, keeps = gemm.scales, gemm.shards, gemm.keeps
    known = isinstance(scales, tuple) and len(scales) == 2
    known = known and all(kind in SCALES for kind in scales)
    check("scales", known, f"one of {SCALES} or a pair of them, for lhs and rhs")
    check("shards", type(shards) is int and shards > 0, "an integer from 1 on")
    check("keeps", keeps in KEEPS, f"one of {KEEPS}")
    known = gemm.reduce in (None, *REDUCES)
    check("reduce", known, f"one of {REDUCES}, or None for the product's own dtype")
    blocks = scales == ("block", "block")
    if gemm.in_floats:
        check("rhs", gemm.rhs is None, "None where lhs is: floats times floats")
        check("scales", blocks, "nothing (the default) where lhs and rhs are None")
        check("keeps", keeps == "floats" or name != "fwd", "'floats' in fwd")
        takes = "nothing (the default) where lhs and rhs are None: XLA sums it"
        check("reduce", gemm.reduce is None, takes)
    else:
        check("rhs", gemm.rhs is not None, "a rounding where lhs has one")
        mixed = "block" in scales and not blocks
        check("scales", not mixed, "'block' for both operands or for neither")
        check("keeps", keeps == "floats", "'floats' unless lhs and rhs are None")
    summed = gemm.reduce != "int8" or name == "drhs"
    check("reduce", summed, "'int8' only in a drhs")
    can_cut = name == "drhs" and not blocks
    check("shards", shards == 1 or can_cut, "1 but in a drhs without block scales")


def _is_number(value: Any) -> bool:
    return (
        isinstance(value, int | float)
        and not isinstance(value, bool)
        and math.isfinite(value)
    )
