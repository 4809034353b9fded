"""Codes of 4 to 12 bits for what is only kept, packed without a bit to spare.

Values along the last axis form groups of 128; the last group may be shorter.  Per
group, with ``limit = 2**(bits - 1) - 1``,

    scale = amax / limit                                          (float32)
    codes = round_half_even(clip(x * (limit / amax), -limit, limit))

and special groups are those of ``fbq_jax.kernels.reference``: scale 0 where ``amax`` is
tiny, scale NaN where it is not finite.

``codes + limit`` has ``bits`` bits.  They are cut, from the top, into chunks whose
widths are powers of two (10 bits into 8 and 2), and the chunks of one width make a
plane of bytes.  A byte of a plane holds the chunks of ``8 / width`` values of one
group, which lie as far apart as the group has bytes in it: of 128 values with chunks of
2 bits, byte j has values j, j + 32, j + 64 and j + 96.  Neighbouring values thus lie in
neighbouring bytes, at one shift: loads are aligned, packing and unpacking are
elementwise, and nothing moves between the lanes of a GPU.  Nor does anything between
groups, so that an array that is sharded by whole groups stays where it is.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from fbq_jax.kernels.scales import find_amax, scale_and_inverse

GROUP = 128
TINY = 2.0**-114  # keeps scale and inverse normal up to 12 bits


class Packed(NamedTuple):
    """Packed codes and the scales of their groups.

    ``planes`` are uint8 ``[..., ceil(C * width / 8)]``, one for each chunk width;
    ``scales`` are float32 ``[..., ceil(C / 128)]``.
    """

    planes: tuple[jax.Array, ...]
    scales: jax.Array


def chunk_widths(bits: int) -> tuple[int, ...]:
    """The powers of two that sum to ``bits``, from the largest.

    >>> chunk_widths(10), chunk_widths(7)
    ((8, 2), (4, 2, 1))
    """
    return tuple(width for width in (8, 4, 2, 1) if bits & width)


def quantize(x: jax.Array, bits: int) -> Packed:
    """Quantizes float32 ``[..., C]`` to ``bits`` bits, nearest, and packs the codes."""
    size, limit = x.shape[-1], 2 ** (bits - 1) - 1
    padding = [(0, 0)] * (x.ndim - 1) + [(0, -size % GROUP)]
    groups = jnp.pad(x, padding).reshape(*x.shape[:-1], -(-size // GROUP), GROUP)
    scales, inverse = scale_and_inverse(find_amax(groups, -1), float(limit), TINY)
    inverse = inverse[..., None]
    v = jnp.clip(groups * inverse, -limit, limit)
    v = jnp.round(jnp.where(inverse > 0.0, v, 0.0))
    codes = v.astype(jnp.int32).reshape(*x.shape[:-1], -(-size // GROUP) * GROUP)
    return Packed(pack(codes[..., :size], bits), scales)


def dequantize(packed: Packed, size: int, bits: int) -> jax.Array:
    """The float32 ``[..., size]`` that packed codes stand for."""
    # Not jnp.repeat, which explicit mesh axes would have told a sharding.
    *lead, groups = packed.scales.shape
    scales = jnp.broadcast_to(packed.scales[..., None], (*lead, groups, GROUP))
    scales = scales.reshape(*lead, groups * GROUP)[..., :size]
    return unpack(packed.planes, size, bits).astype(jnp.float32) * scales


def pack(codes: jax.Array, bits: int) -> tuple[jax.Array, ...]:
    """Packs int32 codes ``[..., C]`` of at most ``2**(bits - 1) - 1`` in magnitude."""
    words = codes + (2 ** (bits - 1) - 1)
    planes, shift = [], bits
    for width in chunk_widths(bits):
        shift -= width
        chunks = (words >> shift & (2**width - 1)).astype(jnp.uint8)
        packed = [_pack(part, width) for part in _split(chunks, words.shape[-1], 8)]
        planes.append(_join(packed))
    return tuple(planes)


def unpack(planes: tuple[jax.Array, ...], size: int, bits: int) -> jax.Array:
    """The int32 codes ``[..., size]`` of ``pack``."""
    words = jnp.zeros((*planes[0].shape[:-1], size), jnp.int32)
    for plane, width in zip(planes, chunk_widths(bits), strict=True):
        parts = [_unpack(part, width) for part in _split(plane, size, width)]
        words = words << width | _join(parts)[..., :size].astype(jnp.int32)
    return words - (2 ** (bits - 1) - 1)


def _split(x: jax.Array, size: int, width: int) -> list[jax.Array]:
    """Cuts ``[..., size * width / 8]`` into groups ``[..., g, n]``.

    Whole ones are first; what is left of ``size`` values is a group of its own.
    """
    whole, n = size // GROUP, GROUP * width // 8
    groups = [x[..., : whole * n].reshape(*x.shape[:-1], whole, n)]
    if size % GROUP:
        groups.append(x[..., None, whole * n :])
    return groups


def _join(parts: list[jax.Array]) -> jax.Array:
    flat = [p.reshape(*p.shape[:-2], p.shape[-2] * p.shape[-1]) for p in parts]
    return jnp.concatenate(flat, axis=-1)


def _pack(chunks: jax.Array, width: int) -> jax.Array:
    """Chunks of ``width`` bits ``[..., g, n]`` to bytes ``[..., g, n * width / 8]``."""
    n, a_byte = chunks.shape[-1], 8 // width
    padding = [(0, 0)] * (chunks.ndim - 1) + [(0, -n % a_byte)]
    stride = -(-n // a_byte)
    chunks = jnp.pad(chunks, padding).reshape(*chunks.shape[:-1], a_byte, stride)
    packed = chunks[..., 0, :]
    for i in range(1, a_byte):
        packed |= chunks[..., i, :] << (i * width)
    return packed


def _unpack(packed: jax.Array, width: int) -> jax.Array:
    """Bytes ``[..., g, n]`` to chunks ``[..., g, n * 8 / width]``."""
    *lead, n = packed.shape
    shape = (*lead, 8 // width, n)
    shift = lax.broadcasted_iota(jnp.uint8, shape, len(lead)) * width
    chunks = packed[..., None, :] >> shift & (2**width - 1)
    return chunks.reshape(*lead, 8 // width * n)
