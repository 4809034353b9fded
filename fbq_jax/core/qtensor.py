"""QTensor: a stack of matrices as INT8 codes with one scale per block."""

import dataclasses
import importlib
import math
from typing import Any

import jax
import jax.numpy as jnp

from fbq_jax import ops
from fbq_jax.core.serialization import (
    serializable_dataclass,
    serializable_namedtuple,
)
from fbq_jax.kernels import reference
from fbq_jax.kernels.reference import Block, Quantized
from fbq_jax.kernels.rounding import Rounding

serializable_namedtuple(Quantized)


@serializable_dataclass("main", "residual")
@dataclasses.dataclass(frozen=True)
class QTensor:
    """A quantized stack of matrices ``[B, R, C]``.

    Attributes:
      main: INT8 codes ``[B, R, C]`` and float32 scales
        ``[B, ceil(R/r), ceil(C/c)]``, one per block.
      residual: the second term of the blocks that fell back, in the same form, or
        None.  For other blocks its scale is 0 and its codes are arbitrary.
      block: the rows and columns ``(r, c)`` of a block; the last blocks of a matrix may
        be partial.
    """

    main: Quantized
    residual: Quantized | None
    block: Block

    @property
    def shape(self) -> tuple[int, ...]:
        """``(B, R, C)``."""
        return self.main.codes.shape

    @property
    def mT(self) -> "QTensor":  # noqa: N802 (NumPy's name)
        """The transposed matrices, with the same codes and scales."""
        main, residual = jax.tree.map(lambda x: x.mT, (self.main, self.residual))
        return QTensor(main, residual, self.block[::-1])

    def dequantize(self, dtype: jax.typing.DTypeLike = jnp.float32) -> jax.Array:
        """The values of the codes, ``[B, R, C]``; terms are summed in float32."""
        terms = [term for term in (self.main, self.residual) if term is not None]
        values = jnp.zeros(self.shape, jnp.float32)
        for term in terms:
            values += reference.dequantize(term, self.block)
        return values.astype(dtype)

    def to_qarray(self) -> Any:
        """The same codes and scales as a ``qwix.QArray``, ``[B, R, C]``.

        The tiles of a QArray have equal sizes.  If the last block is partial, scales
        are repeated for the largest tiles that divide both the block and the axis.

        Raises:
          ImportError: Qwix is not installed.
          ValueError: the QTensor has a residual, and a QArray has one term only.
        """
        if self.residual is not None:
            raise ValueError("a qwix.QArray has one term, and this QTensor a residual")
        codes, scales, _ = self.main
        for axis, side in zip((1, 2), self.block, strict=True):
            size = codes.shape[axis]
            if scales.shape[axis] > 1 and size % side:
                tile = math.gcd(size, side)
                scales = jnp.repeat(scales, side // tile, axis=axis)
                scales = jax.lax.slice_in_dim(scales, 0, size // tile, axis=axis)
        return importlib.import_module("qwix").QArray(codes, scales)

    @classmethod
    def from_qarray(cls, array: Any) -> "QTensor":
        """Converts an INT8 ``qwix.QArray``, ``[R, C]`` or ``[B, R, C]``.

        Raises:
          ValueError: the array has another type or rank, or a zero point.
        """
        if jnp.dtype(array.qtype) != jnp.int8 or array.zero_point is not None:
            raise ValueError(
                "a QTensor takes a qwix.QArray of int8 without zero point; got "
                f"{array.qtype}{'' if array.zero_point is None else ' with one'}"
            )
        if array.ndim not in (2, 3):
            raise ValueError(
                f"a QTensor takes matrices, [R, C] or [B, R, C]; got {array.shape}"
            )
        codes, scales = array.qvalue, array.scale.astype(jnp.float32)
        block = array.scale_tile_shape[-2:]
        if array.ndim == 2:
            codes, scales = codes[None], scales[None]
        scales = jnp.broadcast_to(scales, (len(codes), *scales.shape[1:]))
        return cls(Quantized(codes, scales), None, block)


def quantize(
    x: jax.Array,
    *,
    block: Block,
    rounding: Rounding = "nearest",
    seeds: jax.Array | None = None,
) -> QTensor:
    """Quantizes matrices to INT8 with one absmax scale per block.

    ``fbq_jax.kernels.reference.quantize`` defines the numerics.

    Args:
      x: bfloat16, float16 or float32 ``[B, R, C]``.
      block: the rows and columns of a block.
      rounding: ``"nearest"`` or ``"stochastic"``.
      seeds: uint32 ``[B]``, seeds stochastic rounding.

    Raises:
      ValueError: rounding is stochastic, and there are no seeds.

    >>> x = jnp.arange(6.0).reshape(1, 2, 3)
    >>> quantize(x, block=(128, 128)).main.codes
    Array([[[  0,  25,  51],
            [ 76, 102, 127]]], dtype=int8)
    """
    if seeds is None:
        if rounding == "stochastic":
            raise ValueError("stochastic rounding needs seeds, uint32 [B]")
        seeds = jnp.zeros(x.shape[0], jnp.uint32)
    main, _ = ops.quantize(x, seeds, block=block, rowwise=rounding, colwise=None)
    assert main is not None
    return QTensor(main, None, block)


def matmul(lhs: QTensor, rhs: QTensor, dtype: jax.typing.DTypeLike) -> jax.Array:
    """Multiplies ``lhs [B, M, K]``, including its residual, with ``rhs [B, K, N]``.

    INT8 products are exact inside a K block; blocks are scaled and summed in float32.

    Raises:
      ValueError: the operands' blocks differ along K, or rhs has a residual.
    """
    if rhs.residual is not None:
        raise ValueError(
            "matmul multiplies by one term of rhs, and this rhs has a residual: "
            "multiply by its dequantize(), or quantize it without one"
        )
    (m, k), (rhs_k, n) = lhs.block, rhs.block
    if k != rhs_k:
        raise ValueError(
            f"the blocks of lhs and rhs differ along the contraction: {k} and {rhs_k}"
        )
    return ops.matmul(
        lhs.main, lhs.residual, rhs.mT.main, block_shape=(m, k, n), dtype=dtype
    )
