"""``Quantized``, the operand of the GEMMs: codes, scales and perhaps a second term."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp

from fbq_jax.kernels.rounding import Rounding

#: The rows and columns that share a scale; None for all of them.
Block = tuple[int | None, int | None]
Criterion = Literal["absmax", "l1", "l1_rel"]
CRITERIA: tuple[Criterion, ...] = get_args(Criterion)
CodeDtype = Literal["int8", "float8_e4m3fn"]
CODE_DTYPES: tuple[CodeDtype, ...] = get_args(CodeDtype)
#: The value of the threshold theta until an activation sets it.
UNSET = -1.0


class Term(NamedTuple):
    """INT8 or FP8 codes with a scale per block.

    Attributes:
      codes: int8 or float8_e4m3fn ``[..., R, C]``.
      scales: float32 ``[..., ceil(R/r), ceil(C/c)]``.
      sums: the largest ``sum |codes|`` of a row of each block, or an upper bound of it,
        float32 of the shape of ``scales``; or None.  A GEMM bounds its partial sums by
        the sums of rhs.
    """

    codes: jax.Array
    scales: jax.Array
    sums: jax.Array | None = None


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["main", "residual"],
    meta_fields=["block"],
)
@dataclasses.dataclass(frozen=True)
class Quantized:
    """Quantized matrices ``[..., R, C]``: the sum of one or two terms.

    Attributes:
      main: codes and scales.
      residual: the second term of the blocks that fell back, of the same shapes; None
        without fallback.  Its scale is 0 in the other blocks, whose codes have no
        meaning.
      block: the granularity, rows and columns ``(r, c)`` that share a scale; None for
        all rows or all columns.  The last blocks of a matrix may be partial.
    """

    main: Term
    residual: Term | None
    block: Block

    @property
    def codes(self) -> jax.Array:
        """The codes of the first term."""
        return self.main.codes

    @property
    def scales(self) -> jax.Array:
        """The scales of the first term."""
        return self.main.scales

    @property
    def sums(self) -> jax.Array | None:
        """The sums of the first term's codes."""
        return self.main.sums

    @property
    def sides(self) -> tuple[int, int]:
        """The rows and columns of a block, where neither is all of them.

        Raises:
          ValueError: all rows or all columns share a scale.
        """
        return known_sides(self.block)

    @property
    def terms(self) -> list[Term]:
        """The first term, and the second if there is one."""
        return [self.main] if self.residual is None else [self.main, self.residual]

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the matrices."""
        return self.main.codes.shape

    @property
    def mT(self) -> "Quantized":  # noqa: N802 (NumPy's name)
        """The transposed matrices, with the same codes and scales."""
        main, residual = jax.tree.map(lambda x: x.mT, (self.main, self.residual))
        return Quantized(main, residual, self.block[::-1])

    def dequantize(self, dtype: jax.typing.DTypeLike = jnp.float32) -> jax.Array:
        """The values, of the shape of the codes; terms are summed in float32."""
        values = jnp.zeros(self.shape, jnp.float32)
        for term in self.terms:
            scales = repeat_blocks(term.scales, self.block, self.shape)
            values += term.codes.astype(jnp.float32) * scales
        return values.astype(dtype)


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["values", "theta"],
    meta_fields=["block", "criterion"],
)
@dataclasses.dataclass(frozen=True)
class Unquantized:
    """An lhs that the GEMM itself quantizes to nearest: a few rows, in decoding.

    Attributes:
      values: bfloat16, float16 or float32 ``[B, M, K]``.
      theta: float32 ``[B]``, the thresholds of fallback.
      block: the granularity ``(m, k)``.
      criterion: ``"absmax"``, or None for no fallback.
    """

    values: jax.Array
    theta: jax.Array
    block: Block
    criterion: Criterion | None


class Layout(NamedTuple):
    """How one layout of a matrix ``[R, C]`` is quantized.

    Attributes:
      rounding: ``"nearest"`` or ``"stochastic"``.
      block: the rows and columns ``(r, c)`` of the matrix that share a scale; None for
        all of them.
      sums: whether ``Term.sums`` are computed.
    """

    rounding: Rounding
    block: Block
    sums: bool = False

    @property
    def is_split(self) -> bool:
        """Whether rows and columns have several scales."""
        return None not in self.block


class Layouts(NamedTuple):
    """A quantized matrix in one or both layouts; None for one not requested.

    INT8 tensor cores read both operands contiguously along the contraction.  An operand
    of two GEMMs may therefore be needed twice.

    Attributes:
      rowwise: the matrix ``[B, R, C]``.
      colwise: its transpose ``[B, C, R]``.
      metric: what the criterion of fallback compares with theta, float32
        ``[B, R/r, C/c]``; None without a criterion.
      saved: what the source saves for its backward pass, such as a norm's ``rstd``.
    """

    rowwise: Quantized | None
    colwise: Quantized | None
    metric: jax.Array | None = None
    saved: tuple[object, ...] = ()


def known_sides(block: Block) -> tuple[int, int]:
    """The rows and columns of a block, where neither is all of them.

    Raises:
      ValueError: all rows or all columns share a scale.
    """
    rows, columns = block
    if rows is None or columns is None:
        raise ValueError(
            "this takes scales of blocks, none of which has all rows or all columns; "
            f"got blocks of {block}"
        )
    return rows, columns


def product_block(
    lhs: "Quantized | Unquantized", rhs: Quantized
) -> tuple[int | None, int | None, int | None]:
    """The values along M, K and N that share a scale in ``lhs [M, K] . rhs [N, K]``.

    Raises:
      ValueError: the operands have other blocks of K, or rhs has two terms.
    """
    (m, k), (n, rhs_k) = lhs.block, rhs.block
    if k != rhs_k:
        raise ValueError(
            f"the blocks of lhs and rhs differ along the contraction: {k} and {rhs_k}"
        )
    if rhs.residual is not None:
        raise ValueError(
            "a product multiplies by one term of rhs, and this rhs has a residual: "
            "multiply by its dequantize(), or quantize it without one"
        )
    return m, k, n


def product_sides(
    lhs: "Quantized | Unquantized", rhs: Quantized
) -> tuple[int, int, int]:
    """``product_block`` for a GEMM that takes blocks with known sides.

    Raises:
      ValueError: as in ``product_block``, or a block has all rows or all columns.
    """
    product_block(lhs, rhs)
    (m, k), (n, _) = known_sides(lhs.block), known_sides(rhs.block)
    return m, k, n


def repeat_blocks(
    per_block: jax.Array, block: Block, shape: Sequence[int]
) -> jax.Array:
    """Repeats one value per block to one per element of ``shape``, ``[..., R, C]``."""
    for axis, (side, size) in enumerate(zip(block, shape[-2:], strict=True), start=-2):
        if side is not None:  # one value for all is broadcast
            per_block = jnp.repeat(per_block, side, axis=axis)
            per_block = jax.lax.slice_in_dim(per_block, 0, size, axis=axis)
    return per_block
