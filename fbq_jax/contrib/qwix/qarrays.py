"""Converts ``Quantized`` to ``qwix.QArray`` and back."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import qwix

from fbq_jax.kernels.quantized import Quantized, Term


def to_qarray(q: Quantized) -> qwix.QArray:
    """The same codes and scales as a ``qwix.QArray``.

    The tiles of a QArray have equal sizes.  If the last block is partial, scales are
    repeated for the largest tiles that divide both the block and the axis.

    Raises:
      ValueError: the matrices have a residual, and a QArray has one term only.
    """
    if q.residual is not None:
        raise ValueError("a qwix.QArray has one term, and this Quantized a residual")
    scales = q.scales
    for axis, side in zip((-2, -1), q.block, strict=True):
        size = q.shape[axis]
        if side is not None and scales.shape[axis] > 1 and size % side:
            tile = math.gcd(size, side)
            scales = jnp.repeat(scales, side // tile, axis=axis)
            scales = jax.lax.slice_in_dim(scales, 0, size // tile, axis=axis)
    return qwix.QArray(q.codes, scales)


def from_qarray(array: Any) -> Quantized:
    """The codes of an INT8 ``qwix.QArray`` ``[R, C]`` or ``[B, R, C]``, as a stack.

    Raises:
      ValueError: the array has another type or rank, or a zero point.
    """
    if jnp.dtype(array.qtype) != jnp.int8 or array.zero_point is not None:
        raise ValueError(
            "from_qarray takes a qwix.QArray of int8 without zero point; got "
            f"{array.qtype}{'' if array.zero_point is None else ' with one'}"
        )
    if array.ndim not in (2, 3):
        raise ValueError(
            f"from_qarray takes matrices, [R, C] or [B, R, C]; got {array.shape}"
        )
    codes, scales = array.qvalue, array.scale.astype(jnp.float32)
    if array.ndim == 2:
        codes, scales = codes[None], scales[None]
    scales = jnp.broadcast_to(scales, (len(codes), *scales.shape[1:]))
    return Quantized(Term(codes, scales), None, array.scale_tile_shape[-2:])
