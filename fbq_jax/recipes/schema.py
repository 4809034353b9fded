"""Recipes: how the three GEMMs of a linear layer are quantized."""

import dataclasses
import functools
import inspect
import operator
from collections.abc import Iterator
from typing import Any, Literal, NamedTuple, NoReturn, TypeVar, get_args

import numpy as np

from fbq_jax.kernels.quantized import CODE_DTYPES, CRITERIA, CodeDtype, Criterion
from fbq_jax.kernels.rounding import ROUNDINGS, Rounding
from fbq_jax.recipes.numbers_in_float32 import (
    INT32,
    is_number,
    is_positive_float32,
    is_positive_int32,
)

T = TypeVar("T")

BLOCK_SIDES = (32, 64, 128, 256)
# Tensor cores keep too few bits of the sums of longer products of FP8 codes.
FLOAT8_SIDES = BLOCK_SIDES[:-1]
BOUNDS = (127.0, 127.5)
# The blocks that speed maps are measured with (``fbq_jax.kernels.speed_map``).
MAPPED_BLOCK = (128, 128, 128)

Scales = Literal["block", "row_block", "row", "tensor"]
SCALES: tuple[Scales, ...] = get_args(Scales)
# Those that split the contraction into parts with scales of their own.
_SPLIT_SCALES = frozenset({"block", "row_block"})
Keeps = Literal["floats", "codes"]
KEEPS: tuple[Keeps, ...] = get_args(Keeps)
Reduce = Literal["float32", "bfloat16", "int32", "int8"]
REDUCES: tuple[Reduce, ...] = get_args(Reduce)
WhereSlower = Literal["quantize", "float"]
WHERE_SLOWER: tuple[WhereSlower, ...] = get_args(WhereSlower)


# A field's name, whether its value is accepted, and what the field takes.
_Check = tuple[str, bool, str]


def _names_fields(cls: type[T]) -> type[T]:
    """Makes a dataclass raise a TypeError that lists its fields if one is unknown.

    Its signature stays, with the fields and their defaults.
    """
    init: Any = cls.__init__
    known = list(inspect.signature(cls).parameters)

    @functools.wraps(init)
    def checked(self: T, *args: object, **fields: object) -> None:
        if unknown := [name for name in fields if name not in known]:
            raise TypeError(
                f"{cls.__name__} has no field {unknown[0]!r}; its fields are: "
                f"{', '.join(known)}"
            )
        init(self, *args, **fields)

    cls.__init__ = checked  # type: ignore[assignment]
    return cls


class RecipeError(ValueError):
    """A field of a recipe has a value that it does not accept."""

    def __init__(self, field: str, value: object, takes: str) -> None:
        super().__init__(field, value, takes)

    def __str__(self) -> str:
        field, value, takes = self.args
        return f"Recipe.{field} takes {takes}; got {value!r}"


class Quantizer(NamedTuple):
    """How one operand of a GEMM is quantized; ``Gemm`` documents the fields."""

    rounding: Rounding
    scales: Scales
    shards: int


@_names_fields
@dataclasses.dataclass(frozen=True, kw_only=True)
class Gemm:
    """How one GEMM multiplies: codes, or unquantized in the operands' own dtype.

    Attributes:
      lhs: the rounding of lhs, ``"nearest"`` or ``"stochastic"``.
      rhs: the rounding of rhs.  None for both operands leaves the GEMM unquantized
        (``FLOAT_GEMM``).
      scales: which values share a scale, for both operands or as a pair (lhs, rhs).
        ``"block"``: a block of ``Recipe.block``.  ``"row_block"``: one row of such a
        block of lhs or one column of such a block of rhs, along the contraction.
        ``"row"``: a row of lhs or a column of rhs, which is one vector along the
        contraction.  ``"tensor"``: the entire operand.
      shards: the number of shards that drhs splits its contraction, the tokens, into.
        Each has its own scales; the products are summed in float32.
      keeps: what the forward pass saves for an unquantized backward GEMM: X or W as
        ``"floats"``, or its forward ``"codes"``, whose values then replace it.
      reduce: the dtype in which devices sum partial products if the contraction is
        sharded.  None takes the product's own dtype, as XLA does for
        ``lax.dot_general``; or ``"float32"``; or ``"bfloat16"``; or ``"int32"``, exact
        products of INT8 codes that are scaled after the sum, so that any number of
        devices gives the bits of one; or, for drhs, ``"int8"``, codes with stochastic
        rounding (``fbq_jax.sharding.collectives``).
        INT32 needs scales ``"row"`` or ``"tensor"``: products of blocks are scaled
        first, and their sums are of floats.
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
        """Whether the operands are codes with one scale per block."""
        return not self.in_floats and self.scales == ("block", "block")

    @property
    def splits_contraction(self) -> bool:
        """Whether the operands are codes with scales for parts of the contraction."""
        return not self.in_floats and _SPLIT_SCALES.issuperset(self.scales)

    def block_shape(self, sizes: tuple[int, int, int]) -> tuple[int, int, int]:
        """The values of this GEMM's M, K and N that share a scale, if K has several.

        Args:
          sizes: the sizes of a block along this GEMM's M, K and N.
        """
        assert isinstance(self.scales, tuple)  # __post_init__ makes it one
        (lhs, rhs), (m, k, n) = self.scales, sizes
        return m if lhs == "block" else 1, k, n if rhs == "block" else 1

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


@_names_fields
@dataclasses.dataclass(frozen=True, kw_only=True)
class Recipe:
    """How the three GEMMs of a linear layer are quantized; validated when it is built.

    The GEMMs of ``Y [M, N] = X [M, K] . W [K, N]`` and their operands:

    ===== ================ ================ ====
    GEMM  product          lhs              rhs
    ===== ================ ================ ====
    fwd   ``Y = X . W``    X, may fall back W
    dlhs  ``dX = dY . W'`` dY               W
    drhs  ``dW = X' . dY`` X                dY
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
        or ``"l1_rel"`` (``fbq_jax.kernels.reference.quantize`` defines them);
        None turns fallback off.
      target_rate: the range ``(low, high)`` of the fallback rate, inside [0, 1].  Zero
        blocks do not count in the rate.
      alpha: the largest factor, above 1, by which the threshold moves in one training
        forward.
      start: the first threshold, in the units of the criterion; ``"first_batch"`` takes
        the quantile of the first batch's blocks in the middle of ``target_rate``.
      bound: the value that the largest magnitude is scaled to before rounding to INT8:
        127, the largest code; or 127.5, which rounds to it, as in AQT.
      codes: the dtype of the codes of all quantized GEMMs: ``"int8"``; or
        ``"float8_e4m3fn"``, FP8 with 3 bits after the leading one, whose largest value
        is 448.  FP8 codes are rounded to nearest, have scales ``"block"`` or
        ``"row_block"`` with blocks up to 128, and no fallback.
      fwd: the forward GEMM.
      dlhs: the GEMM of the activation's gradient.
      drhs: the GEMM of the weight's gradient.
      where_slower: what becomes of a layer whose shapes make INT8 slower than bf16, by
        the measured map of this GPU (``fbq_jax.dispatch.choose_layer``).
        ``"quantize"`` quantizes it all the same.  ``"float"`` leaves its three GEMMs
        unquantized, with a warning, and XLA sums them, whatever ``Gemm.reduce``; the
        layer's state keeps its structure, and ``count`` goes on.  The maps are of
        blocks of 128x128, which ``"float"`` needs in all GEMMs.

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
    codes: CodeDtype = "int8"
    fwd: Gemm = Gemm()
    dlhs: Gemm = Gemm(lhs="stochastic")
    drhs: Gemm = Gemm(lhs="stochastic", rhs="stochastic")
    where_slower: WhereSlower = "quantize"

    def __call__(self, *_args: object, **_kwargs: object) -> NoReturn:
        """Raises a TypeError that says what a layer takes."""
        raise TypeError(
            "a layer takes dot_general=FallbackDot(recipe), not the recipe itself; in "
            "NNX, fbq_jax.nnx.FallbackDot(recipe, rngs=rngs)"
        )

    def __post_init__(self) -> None:
        sizes = self.block if isinstance(self.block, tuple) else (self.block,) * 3
        for field, accepted, takes in self._checks(sizes):
            if not accepted:
                raise RecipeError(field, operator.attrgetter(field)(self), takes)
        object.__setattr__(self, "block", sizes)

    def _checks(self, sizes: tuple[int, ...]) -> Iterator[_Check]:
        """All checks, in an order in which each may rely on the previous ones."""
        accepted = len(sizes) == 3 and all(
            isinstance(size, int) and size in BLOCK_SIDES for size in sizes
        )
        takes = f"one of {BLOCK_SIDES} or three of them, for M, K and N"
        yield "block", accepted, takes
        yield from self._threshold_checks()
        for name, gemm in self._gemms().items():
            yield name, isinstance(gemm, Gemm), "a Gemm(lhs=..., rhs=...)"
            for field, accepted, takes in _gemm_checks(name, gemm):
                yield f"{name}.{field}", accepted, takes
        yield from self._joint_checks()
        yield "codes", self.codes in CODE_DTYPES, f"one of {CODE_DTYPES}"
        if self.codes == "float8_e4m3fn":
            yield from self._float8_checks(sizes)
        accepted = self.where_slower in WHERE_SLOWER
        yield "where_slower", accepted, f"one of {WHERE_SLOWER}"
        accepted = self.where_slower == "quantize" or (
            self.in_blocks and sizes == MAPPED_BLOCK
        )
        takes = "'quantize' unless all GEMMs have INT8 scales per 128x128 block"
        yield "where_slower", accepted, takes

    def _threshold_checks(self) -> Iterator[_Check]:
        """Checks the fields of the threshold, each on its own."""
        accepted = self.criterion in (*CRITERIA, None)
        yield "criterion", accepted, f"one of {CRITERIA} or None"
        rates, start = self.target_rate, self.start
        accepted = (
            isinstance(rates, tuple)
            and len(rates) == 2
            and all(is_number(rate) for rate in rates)
            and 0.0 <= rates[0] < rates[1] <= 1.0
        )
        yield "target_rate", accepted, "a pair (low, high) with 0 <= low < high <= 1"
        is_positive = is_positive_float32(self.alpha)
        accepted = is_positive and bool(np.float32(self.alpha) > 1)
        yield "alpha", accepted, "a finite number above 1, in float32"
        is_positive = is_number(start) and 1e-37 < start < 1e38
        takes = "'first_batch' or a number above 0 that float32 can represent"
        yield "start", start == "first_batch" or is_positive, takes

    def _joint_checks(self) -> Iterator[_Check]:
        """Checks fields that depend on each other."""
        fwd, dlhs, drhs = self._gemms().values()
        if self.criterion is not None:
            takes = (
                "'nearest' with fallback, because the residual is its rounding error"
            )
            yield "fwd.lhs", fwd.lhs == "nearest", takes
            takes = "'block' with fallback (criterion=None turns it off)"
            yield "fwd.scales", fwd.in_blocks, takes
        yield "bound", self.bound in BOUNDS, f"one of {BOUNDS}"
        # Ops with block scales support a bound of 127 only.
        split = [n for n, gemm in self._gemms().items() if gemm.splits_contraction]
        takes = f"127.0 with block scales, as in {', '.join(split)}"
        yield "bound", self.bound == 127.0 or not split, takes
        # GEMMs share codes only if there are any, and if they round in the same way.
        for name, gemm in {"dlhs": dlhs, "drhs": drhs}.items():
            accepted = gemm.keeps == "floats" or not fwd.in_floats
            takes = "'floats' if fwd is unquantized and has no codes"
            yield f"{name}.keeps", accepted, takes
        shares_w = "block" == fwd.scales[1] == dlhs.scales[1]
        accepted = None in (fwd.rhs, dlhs.rhs) or dlhs.rhs == fwd.rhs or not shares_w
        takes = f"{fwd.rhs!r} as fwd.rhs does, because both GEMMs share the codes of W"
        yield "dlhs.rhs", accepted, takes
        accepted = drhs.rhs == dlhs.lhs or not (dlhs.in_blocks and drhs.in_blocks)
        takes = (
            f"{dlhs.lhs!r} as dlhs.lhs does, because both GEMMs share the codes of dY"
        )
        yield "drhs.rhs", accepted, takes

    def _float8_checks(self, sizes: tuple[int, ...]) -> Iterator[_Check]:
        """Checks what FP8 codes support."""
        accepted = set(sizes) <= {*FLOAT8_SIDES}
        yield "block", accepted, f"sizes of {FLOAT8_SIDES} with codes in FP8"
        takes = "None with codes in FP8, which have no second term"
        yield "criterion", self.criterion is None, takes
        for name, gemm in self._gemms().items():
            for side in ("lhs", "rhs"):
                accepted = getattr(gemm, side) in ("nearest", None)
                yield f"{name}.{side}", accepted, "'nearest' with codes in FP8"
            takes = "'block' or 'row_block' with codes in FP8"
            yield f"{name}.scales", gemm.in_floats or gemm.splits_contraction, takes

    def _gemms(self) -> dict[str, Gemm]:
        return {"fwd": self.fwd, "dlhs": self.dlhs, "drhs": self.drhs}

    @property
    def in_blocks(self) -> bool:
        """Whether all three GEMMs are in INT8 with one scale per block."""
        gemms = self._gemms().values()
        return self.codes == "int8" and all(gemm.in_blocks for gemm in gemms)

    @property
    def batch_invariant(self) -> bool:
        """Whether a token's output Y depends on that token and W alone.

        It has the same bits in every batch, at any position and beside any padding, in
        training and in a frozen layer.  Tokens then share no scale, no threshold and no
        noise.  A sum over devices in floats still depends on their number, one with
        ``Gemm.reduce="int32"`` does not.

        >>> Recipe().batch_invariant
        False
        >>> Recipe(criterion=None, fwd=Gemm(scales="row")).batch_invariant
        True
        """
        fwd = self.fwd
        return (
            self.criterion is None
            and fwd.lhs == fwd.rhs == "nearest"
            and fwd.scales[0] in ("row", "row_block")
        )

    @property
    def lhs_block(self) -> tuple[int, int]:
        """Rows and columns of a block of X."""
        return self.block_shape[:2]

    @property
    def rhs_block(self) -> tuple[int, int]:
        """Rows and columns of a block of W."""
        return self.block_shape[1:]

    @property
    def grad_block(self) -> tuple[int, int]:
        """Rows and columns of a block of dY."""
        return self.block_shape[::2]

    @property
    def block_shape(self) -> tuple[int, int, int]:
        """The sizes of a block along M, K and N."""
        assert isinstance(self.block, tuple)  # __post_init__ makes it one
        return self.block


def check_no_recipe(dot_general: object) -> None:
    """Raises the TypeError of a recipe that takes the place of a ``dot_general``."""
    if isinstance(dot_general, Recipe):
        dot_general()


def _gemm_checks(name: str, gemm: Gemm) -> Iterator[_Check]:
    """Checks the fields of a GEMM, each on its own and then together."""
    for side in ("lhs", "rhs"):
        accepted = getattr(gemm, side) in (*ROUNDINGS, None)
        yield side, accepted, f"one of {ROUNDINGS}, or None if unquantized"
    scales, shards = gemm.scales, gemm.shards
    pair = isinstance(scales, tuple) and len(scales) == 2
    accepted = pair and all(kind in SCALES for kind in scales)
    yield "scales", accepted, f"one of {SCALES} or a pair of them, for lhs and rhs"
    takes = f"an integer from 1 to {INT32.max}"
    yield "shards", is_positive_int32(shards), takes
    yield "keeps", gemm.keeps in KEEPS, f"one of {KEEPS}"
    accepted = gemm.reduce in (None, *REDUCES)
    yield "reduce", accepted, f"one of {REDUCES}, or None for the product's dtype"
    in_blocks = scales == ("block", "block")
    if gemm.in_floats:
        takes = "None if lhs is None, because INT8 GEMMs quantize both operands"
        yield "rhs", gemm.rhs is None, takes
        takes = "nothing (the default) if lhs and rhs are None"
        yield "scales", in_blocks, takes
        yield "keeps", gemm.keeps == "floats" or name != "fwd", "'floats' in fwd"
        yield "reduce", gemm.reduce is None, f"{takes}: XLA sums it"
    else:
        yield "rhs", gemm.rhs is not None, "a rounding if lhs has one"
        splits = [kind in _SPLIT_SCALES for kind in scales]
        takes = "'block' or 'row_block' for both operands or for neither"
        yield "scales", splits[0] == splits[1], takes
        yield "keeps", gemm.keeps == "floats", "'floats' unless lhs and rhs are None"
    is_drhs = name == "drhs"
    yield "reduce", gemm.reduce != "int8" or is_drhs, "'int8' only in a drhs"
    accepted = shards == 1 and _SPLIT_SCALES.isdisjoint(scales)
    takes = (
        "'int32' only with scales 'row' or 'tensor' and without shards: products of "
        "blocks and of shards are scaled before they are summed, in floats"
    )
    yield "reduce", gemm.reduce != "int32" or accepted, takes
    accepted = shards == 1 or (is_drhs and _SPLIT_SCALES.isdisjoint(scales))
    yield "shards", accepted, "1, except in a drhs without block scales"
