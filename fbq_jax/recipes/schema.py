"""Recipes: how the three GEMMs of a linear layer are quantized."""

import dataclasses
import math
import operator
from collections.abc import Callable
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
    """A field of a recipe has a value that it does not accept."""

    def __init__(self, field: str, value: object, takes: str) -> None:
        super().__init__(field, value, takes)

    def __str__(self) -> str:
        field, value, takes = self.args
        return f"Recipe.{field} takes {takes}; got {value!r}"


class Quantizer(NamedTuple):
    """How one operand of an INT8 GEMM is quantized; ``Gemm`` documents the fields."""

    rounding: Rounding
    scales: Scales
    shards: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Gemm:
    """How one GEMM multiplies: in INT8, or unquantized in the operands' own dtype.

    Attributes:
      lhs: the rounding of lhs, ``"nearest"`` or ``"stochastic"``.
      rhs: the rounding of rhs.  None for both operands leaves the GEMM unquantized
        (``FLOAT_GEMM``).
      scales: which values share a scale, for both operands or as a pair (lhs, rhs).
        ``"block"``: a block of ``Recipe.block``.  ``"row"``: a row of lhs or a column
        of rhs, which is one vector along the contraction.  ``"tensor"``: the entire
        operand.
      shards: the number of shards that drhs splits its contraction, the tokens, into.
        Each has its own scales; the products are summed in float32.
      keeps: what the forward pass saves for an unquantized backward GEMM: X or W as
        ``"floats"``, or its forward ``"codes"``, whose values then replace it.
      reduce: the dtype in which devices sum partial products if the contraction is
        sharded.  None takes the product's own dtype, as XLA does for
        ``lax.dot_general``; or ``"float32"``; or ``"bfloat16"``; or, for drhs,
        ``"int8"``, codes with stochastic rounding (``fbq_jax.sharding.collectives``).
        INT8 halves the traffic of bfloat16 if each device keeps only its shard of the
        gradient, as with FSDP.  If every device needs the full gradient, it is then
        gathered in its own dtype; in float32, this takes more traffic in total than
        ``"bfloat16"``.
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
        """Whether the GEMM is unquantized."""
        return self.lhs is None

    @property
    def in_blocks(self) -> bool:
        """Whether the operands are in INT8 with one scale per block."""
        return not self.in_floats and "block" in self.scales

    @property
    def quantizers(self) -> tuple[Quantizer | None, Quantizer | None]:
        """How lhs and rhs are quantized; None if they are not."""
        if self.lhs is None or self.rhs is None:
            return None, None
        assert isinstance(self.scales, tuple)  # __post_init__ makes it one
        lhs, rhs = zip((self.lhs, self.rhs), self.scales, strict=True)
        return Quantizer(*lhs, self.shards), Quantizer(*rhs, self.shards)


#: An unquantized GEMM.
FLOAT_GEMM = Gemm(lhs=None, rhs=None)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recipe:
    """How the three GEMMs of a linear layer are quantized; validated when it is built.

    The GEMMs of ``Y [M, N] = X [M, K] . W [K, N]`` and their operands:

    ===== ================ ================ ====
    GEMM  product          lhs              rhs
    ===== ================ ================ ====
    fwd   ``Y = X . W``    X, may fall back W
    dlhs  ``dX = dY . W'`` dY               W
    drhs  ``dW = X' . dY`` X, no residual   dY
    ===== ================ ================ ====

    If both GEMMs that read a matrix use block scales, they share one set of blocks.

    The defaults are the method of arXiv 2503.08040: nearest rounding in the forward
    GEMM, stochastic rounding of X and dY in the backward GEMMs, and a threshold that
    moves to keep the fallback rate inside a range (its Algorithm 2).  The paper
    specifies neither the first threshold nor ``alpha``; the defaults here are our
    choice.

    Attributes:
      block: the sizes of a block along M, K and N, each 32, 64, 128 or 256; or one
        number for all three.  X has blocks (M, K), W (K, N) and dY (M, N).
      criterion: the metric that is compared with the threshold, ``"absmax"``, ``"l1"``
        or ``"l1_rel"`` (``fbq_jax.kernels.reference.quantize_fallback`` defines them);
        None turns fallback off.
      target_rate: the range ``(low, high)`` of the fallback rate, inside [0, 1].
      alpha: the largest factor, above 1, by which the threshold moves in one training
        forward.
      start: the first threshold, in the units of the criterion; ``"first_batch"`` takes
        the quantile of the first batch's blocks in the middle of ``target_rate``.
      bound: the value that the largest magnitude is scaled to before rounding: 127, the
        largest code; or 127.5, which rounds to it, as in AQT.
      fwd: the forward GEMM.
      dlhs: the GEMM of the activation's gradient.
      drhs: the GEMM of the weight's gradient.

    Raises:
      RecipeError: a field has a value that it does not accept, alone or together with
        another field.
      TypeError: a field is unknown.

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
        """Raises a TypeError that lists the fields if one is unknown."""
        known = [field.name for field in dataclasses.fields(cls)]
        if unknown := [name for name in fields if name not in known]:
            raise TypeError(
                f"Recipe has no field {unknown[0]!r}; its fields are: "
                f"{', '.join(known)}"
            )
        return super().__new__(cls)

    def __post_init__(self) -> None:
        sizes = self.block if isinstance(self.block, tuple) else (self.block,) * 3
        accepted = len(sizes) == 3 and all(
            isinstance(size, int) and size in BLOCK_SIDES for size in sizes
        )
        takes = f"one of {BLOCK_SIDES} or three of them, for M, K and N"
        self._require("block", accepted, takes)
        object.__setattr__(self, "block", sizes)
        self._check_threshold()
        for name in self._gemms():
            self._check_gemm(name)
        self._check_fallback()
        self._check_bound()
        self._check_codes()

    def _require(self, field: str, accepted: bool, takes: str) -> None:
        """Raises RecipeError unless the value of a field is accepted."""
        if not accepted:
            raise RecipeError(field, operator.attrgetter(field)(self), takes)

    def _check_threshold(self) -> None:
        """Checks the fields of the threshold, each on its own."""
        accepted = self.criterion is None or self.criterion in CRITERIA
        self._require("criterion", accepted, f"one of {CRITERIA} or None")
        rates = self.target_rate
        accepted = (
            isinstance(rates, tuple)
            and len(rates) == 2
            and all(_is_number(rate) for rate in rates)
            and 0.0 <= rates[0] < rates[1] <= 1.0
        )
        takes = "a pair (low, high) with 0 <= low < high <= 1"
        self._require("target_rate", accepted, takes)
        accepted = _is_number(self.alpha) and self.alpha > 1.0
        self._require("alpha", accepted, "a finite number above 1")
        start = self.start
        accepted = start == "first_batch" or (
            _is_number(start) and 1e-37 < start < 1e38
        )
        takes = "'first_batch' or a number above 0 that float32 can represent"
        self._require("start", accepted, takes)

    def _check_gemm(self, name: str) -> None:
        """Checks the fields of a GEMM, each on its own and then together."""
        gemm = getattr(self, name)
        self._require(name, isinstance(gemm, Gemm), "a Gemm(lhs=..., rhs=...)")

        def require(field: str, accepted: bool, takes: str) -> None:
            self._require(f"{name}.{field}", accepted, takes)

        _check_fields(gemm, require)
        if gemm.in_floats:
            _check_unquantized(name, gemm, require)
        else:
            _check_quantized(gemm, require)
        is_drhs, in_blocks = name == "drhs", gemm.scales == ("block", "block")
        require("reduce", gemm.reduce != "int8" or is_drhs, "'int8' only in a drhs")
        accepted = gemm.shards == 1 or (is_drhs and not in_blocks)
        require("shards", accepted, "1, except in a drhs without block scales")

    def _check_fallback(self) -> None:
        """Checks the forward GEMM: fallback needs nearest rounding and block scales."""
        if self.criterion is None:
            return
        takes = "'nearest' with fallback, because the residual is its rounding error"
        self._require("fwd.lhs", self.fwd.lhs == "nearest", takes)
        takes = "'block' with fallback (criterion=None turns it off)"
        self._require("fwd.scales", self.fwd.in_blocks, takes)

    def _check_bound(self) -> None:
        """Checks the bound: ops with block scales support 127 only."""
        self._require("bound", self.bound in BOUNDS, f"one of {BOUNDS}")
        in_blocks = [name for name, gemm in self._gemms().items() if gemm.in_blocks]
        takes = f"127.0 with block scales, as in {', '.join(in_blocks)}"
        self._require("bound", self.bound == 127.0 or not in_blocks, takes)

    def _check_codes(self) -> None:
        """Checks that GEMMs that read the same codes round in the same way."""
        fwd, dlhs, drhs = self._gemms().values()
        for name, gemm in {"dlhs": dlhs, "drhs": drhs}.items():
            accepted = gemm.keeps == "floats" or not fwd.in_floats
            takes = "'floats' if fwd is unquantized and has no codes"
            self._require(f"{name}.keeps", accepted, takes)
        accepted = dlhs.rhs == fwd.rhs or not (fwd.in_blocks and dlhs.in_blocks)
        takes = f"{fwd.rhs!r} as fwd.rhs does, because both GEMMs share the codes of W"
        self._require("dlhs.rhs", accepted, takes)
        accepted = drhs.rhs == dlhs.lhs or not (dlhs.in_blocks and drhs.in_blocks)
        takes = (
            f"{dlhs.lhs!r} as dlhs.lhs does, because both GEMMs share the codes of dY"
        )
        self._require("drhs.rhs", accepted, takes)

    def _gemms(self) -> dict[str, Gemm]:
        return {"fwd": self.fwd, "dlhs": self.dlhs, "drhs": self.drhs}

    @property
    def in_blocks(self) -> bool:
        """Whether all three GEMMs are in INT8 with one scale per block."""
        return all(gemm.in_blocks for gemm in self._gemms().values())

    @property
    def lhs_block(self) -> Block:
        """Rows and columns of a block of X."""
        return self.block_shape[:2]

    @property
    def rhs_block(self) -> Block:
        """Rows and columns of a block of W."""
        return self.block_shape[1:]

    @property
    def grad_block(self) -> Block:
        """Rows and columns of a block of dY."""
        return self.block_shape[::2]

    @property
    def block_shape(self) -> tuple[int, int, int]:
        """The sizes of a block along M, K and N."""
        assert isinstance(self.block, tuple)  # __post_init__ makes it one
        return self.block

    #: The earlier name of ``block_shape``.
    sides = block_shape


# Takes a field's name, whether its value is accepted, and what the field takes.
_Require = Callable[[str, bool, str], None]


def _check_fields(gemm: Gemm, require: _Require) -> None:
    """Checks each field on its own."""
    for side in ("lhs", "rhs"):
        accepted = getattr(gemm, side) in (*ROUNDINGS, None)
        require(side, accepted, f"one of {ROUNDINGS}, or None if unquantized")
    scales, shards = gemm.scales, gemm.shards
    pair = isinstance(scales, tuple) and len(scales) == 2
    accepted = pair and all(kind in SCALES for kind in scales)
    require("scales", accepted, f"one of {SCALES} or a pair of them, for lhs and rhs")
    require("shards", type(shards) is int and shards > 0, "an integer of at least 1")
    require("keeps", gemm.keeps in KEEPS, f"one of {KEEPS}")
    accepted = gemm.reduce in (None, *REDUCES)
    require("reduce", accepted, f"one of {REDUCES}, or None for the product's dtype")


def _check_unquantized(name: str, gemm: Gemm, require: _Require) -> None:
    """Checks that the fields about quantization have their defaults."""
    takes = "None if lhs is None, because INT8 GEMMs quantize both operands"
    require("rhs", gemm.rhs is None, takes)
    accepted = gemm.scales == ("block", "block")
    require("scales", accepted, "nothing (the default) if lhs and rhs are None")
    accepted = gemm.keeps == "floats" or name != "fwd"
    require("keeps", accepted, "'floats' in fwd")
    takes = "nothing (the default) if lhs and rhs are None: XLA sums it"
    require("reduce", gemm.reduce is None, takes)


def _check_quantized(gemm: Gemm, require: _Require) -> None:
    """Checks that both operands are quantized and that their scales fit together."""
    require("rhs", gemm.rhs is not None, "a rounding if lhs has one")
    accepted = "block" not in gemm.scales or gemm.scales == ("block", "block")
    require("scales", accepted, "'block' for both operands or for neither")
    require("keeps", gemm.keeps == "floats", "'floats' unless lhs and rhs are None")


def _is_number(value: Any) -> bool:
    return (
        isinstance(value, int | float)
        and not isinstance(value, bool)
        and math.isfinite(value)
    )
