"""Packed codes of 4 to 12 bits, for arrays saved for the backward pass.

Values along the last axis form groups of 128; the last group may be shorter.  For each
group, with ``limit = 2**(bits - 1) - 1``,

    scale = amax / limit                                          (float32)
    codes = round_half_even(clip(x * (limit / amax), -limit, limit))

As in ``fbq_jax.kernels.reference``, the scale is 0 where ``amax`` is tiny and NaN where
it is not finite.

The word ``codes + 2**(bits - 1)`` has ``bits`` bits.  It is split, from the top, into
chunks whose widths are powers of two: 10 bits become 8 and 2.  The chunks of one width
form a plane of bytes without unused bits.  A byte of a plane holds chunks of
``8 / width`` values of one group, spaced by the group's number of bytes in the plane.
For example, with 128 values and chunks of 2 bits, byte j holds values j, j + 32, j + 64
and j + 96.

So neighbouring values are in neighbouring bytes at the same shift.  Loads are aligned,
packing and unpacking are elementwise, and no data moves between the lanes of a GPU or
between groups.  The planes of a group follow each other, the widest first.  So an array
that is sharded at group boundaries needs no communication.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from fbq_jax.kernels.scales import find_amax, scale_and_inverse

GROUP = 128
TINY = 2.0**-114  # Above it, scale and inverse are normal floats, up to 12 bits.


class Packed(NamedTuple):
    """Packed codes of values ``[..., C]`` and the scales of their groups.

    Attributes:
      data: uint8 ``[..., n]``, ``16 * bits`` bytes for each group of 128 values; a
        shorter last group has ``ceil(size * width / 8)`` for each width.  Or the same
        in words, as kernels write it: see ``as_words``.
      scales: float32 ``[..., ceil(C / 128)]``.
    """

    data: jax.Array
    scales: jax.Array


def chunk_widths(bits: int) -> tuple[int, ...]:
    """The powers of two that sum to ``bits``, in descending order.

    >>> chunk_widths(10), chunk_widths(7)
    ((8, 2), (4, 2, 1))
    """
    return tuple(width for width in (8, 4, 2, 1) if bits & width)


def quantize(x: jax.Array, bits: int) -> Packed:
    """Rounds float32 ``[..., C]`` to codes of ``bits`` bits and packs them."""
    *lead, size = x.shape
    count, limit = -(-size // GROUP), 2 ** (bits - 1) - 1
    padding = [(0, 0)] * (x.ndim - 1) + [(0, -size % GROUP)]
    groups = jnp.pad(x, padding).reshape(*lead, count, GROUP)
    scales, inverse = scale_and_inverse(find_amax(groups, -1), float(limit), TINY)
    inverse = inverse[..., None]
    v = jnp.clip(groups * inverse, -limit, limit)
    v = jnp.round(jnp.where(inverse > 0.0, v, 0.0))
    codes = v.astype(jnp.int32).reshape(*lead, count * GROUP)
    return Packed(pack(codes[..., :size], bits), scales)


def as_words(packed: Packed) -> Packed:
    """The same with four bytes in a word, the lowest first: uint32 ``[..., n / 4]``.

    A loop over layers begins with zeros in place of what they save, which XLA writes
    four times as fast in words.
    """
    *lead, size = packed.data.shape
    padding = [(0, 0)] * len(lead) + [(0, -size % 4)]
    data = jnp.pad(packed.data, padding).reshape(*lead, -(-size // 4), 4)
    return packed._replace(data=lax.bitcast_convert_type(data, jnp.uint32))


def _as_bytes(data: jax.Array) -> jax.Array:
    """Reverses ``as_words``; bytes stay."""
    if data.dtype == jnp.uint8:
        return data
    *lead, size = data.shape
    return lax.bitcast_convert_type(data, jnp.uint8).reshape(*lead, 4 * size)


def dequantize(packed: Packed, size: int, bits: int) -> jax.Array:
    """Returns the float32 values ``[..., size]`` of packed codes of ``bits`` bits."""
    # Not jnp.repeat, which requires an output sharding for explicit mesh axes.
    *lead, groups = packed.scales.shape
    scales = jnp.broadcast_to(packed.scales[..., None], (*lead, groups, GROUP))
    scales = scales.reshape(*lead, groups * GROUP)[..., :size]
    return unpack(packed.data, size, bits).astype(jnp.float32) * scales


def pack(codes: jax.Array, bits: int) -> jax.Array:
    """Packs int32 codes ``[..., C]`` with magnitudes of at most ``2**(bits - 1) - 1``.

    Returns:
      The ``data`` of ``Packed``.
    """
    # Where XLA stores words between two fusions, it stores half as many bytes.
    words = (codes + 2 ** (bits - 1)).astype(jnp.uint16)
    return _join_groups(
        [_pack(x, bits) for x in _split_groups(words, codes.shape[-1], GROUP)]
    )


def unpack(data: jax.Array, size: int, bits: int) -> jax.Array:
    """Reverses ``pack``: returns int32 codes ``[..., size]``.

    ``data`` may be in words.
    """
    groups = _split_groups(_as_bytes(data), size, GROUP // 8 * bits)
    sizes = [size % GROUP or GROUP] if len(groups) == 1 else [GROUP, size % GROUP]
    words = [_unpack(x, n, bits) for x, n in zip(groups, sizes, strict=True)]
    return _join_groups(words) - 2 ** (bits - 1)


def _split_groups(x: jax.Array, size: int, n: int) -> list[jax.Array]:
    """Splits ``[..., C]`` into groups ``[..., g, n]`` of 128 of ``size`` values.

    The first array holds the full groups, if there are any; the last one holds a
    shorter last group.
    """
    full = size // GROUP
    groups = []
    # JAX cannot reshape a sharded array to no groups; a size may also be symbolic.
    if not (isinstance(size, int) and 0 < size < GROUP):
        groups.append(x[..., : full * n].reshape(*x.shape[:-1], full, n))
    if size % GROUP:
        groups.append(x[..., None, full * n :])
    return groups


def _join_groups(groups: list[jax.Array]) -> jax.Array:
    """Reverses ``_split_groups``."""
    flat = [x.reshape(*x.shape[:-2], x.shape[-2] * x.shape[-1]) for x in groups]
    return jnp.concatenate(flat, axis=-1)


def _pack(words: jax.Array, bits: int) -> jax.Array:
    """Packs words ``[..., g, n]`` into the bytes of their planes ``[..., g, m]``."""
    planes, shift = [], bits
    for width in chunk_widths(bits):
        shift -= width
        chunks = (words >> shift & (2**width - 1)).astype(jnp.uint8)
        planes.append(_pack_plane(chunks, width))
    return jnp.concatenate(planes, axis=-1)


def _unpack(data: jax.Array, n: int, bits: int) -> jax.Array:
    """Reverses ``_pack``: returns words ``[..., g, n]``."""
    words, start = jnp.zeros((*data.shape[:-1], n), jnp.int32), 0
    for width in chunk_widths(bits):
        stop = start + -(-n * width // 8)
        chunks = _unpack_plane(data[..., start:stop], width)[..., :n]
        words, start = words << width | chunks.astype(jnp.int32), stop
    return words


def _pack_plane(chunks: jax.Array, width: int) -> jax.Array:
    """Packs chunks ``[..., g, n]`` into bytes ``[..., g, n * width / 8]``."""
    n, per_byte = chunks.shape[-1], 8 // width
    padding = [(0, 0)] * (chunks.ndim - 1) + [(0, -n % per_byte)]
    stride = -(-n // per_byte)
    chunks = jnp.pad(chunks, padding).reshape(*chunks.shape[:-1], per_byte, stride)
    packed = chunks[..., 0, :]
    for i in range(1, per_byte):
        packed |= chunks[..., i, :] << (i * width)
    return packed


def _unpack_plane(packed: jax.Array, width: int) -> jax.Array:
    """Unpacks bytes ``[..., g, n]`` into chunks ``[..., g, n * 8 / width]``."""
    *lead, n = packed.shape
    shape = (*lead, 8 // width, n)
    shift = lax.broadcasted_iota(jnp.uint8, shape, len(lead)) * width
    chunks = packed[..., None, :] >> shift & (2**width - 1)
    return chunks.reshape(*lead, 8 // width * n)
