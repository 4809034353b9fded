"""Packed codes: the round trip, the layout and the size."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fbq_jax.kernels import packing
from tests.kernels.quantize_cases import heavy
from tests.marks import with_first_fast

BITS = range(4, 13)
# The fewest, the most and the usual, and three planes.
SOME_BITS = with_first_fast([4, 7, 10, 12, 5, 6, 8, 9, 11], 4)


@functools.partial(jax.jit, static_argnums=1)
def pack_and_back(codes, bits):
    data = packing.pack(codes, bits)
    return data, packing.unpack(data, codes.shape[-1], bits)


@functools.partial(jax.jit, static_argnums=1)
def quantize_and_back(x, bits):
    packed = packing.quantize(x, bits)
    return packed, packing.dequantize(packed, x.shape[-1], bits)


@pytest.mark.parametrize("bits", with_first_fast(BITS, 3))
def test_every_code_survives_at_every_position_of_a_byte(bits):
    limit = 2 ** (bits - 1) - 1
    codes = np.arange(-limit, limit + 1, dtype=np.int32)
    # At most 8 values share a byte, so 8 copies, each shifted by one, cover all.
    codes = np.stack([np.roll(codes, i) for i in range(8)])
    data, back = pack_and_back(jnp.asarray(codes), bits)
    np.testing.assert_array_equal(back, codes)
    assert data.dtype == jnp.uint8


@pytest.mark.parametrize("bits", SOME_BITS)
def test_groups_have_no_spare_byte(bits):
    limit, widths = 2 ** (bits - 1) - 1, packing.chunk_widths(bits)
    assert sum(widths) == bits
    for size in (0, 1, 5, 127, 128, 129, 300):
        codes = np.random.default_rng(size).integers(-limit, limit + 1, (2, 3, size))
        codes = jnp.asarray(codes, jnp.int32)
        data, back = jax.eval_shape(lambda x: pack_and_back(x, bits), codes)
        assert back.shape == codes.shape
        last = sum(-(-(size % 128) * width // 8) for width in widths)
        assert data.shape == (2, 3, size // 128 * 16 * bits + last)
    np.testing.assert_array_equal(pack_and_back(codes, bits)[1], codes)


@pytest.mark.parametrize("size", [1, 5, 128, 300])
def test_words_have_four_bytes_each(size):
    @jax.jit
    def run(x):
        packed = packing.quantize(x, 7)
        words = packing.as_words(packed)
        values = (packing.dequantize(p, size, 7) for p in (packed, words))
        return packed, words, *values

    packed, words, expected, values = run(heavy((2, 3, size)))
    data, n = np.asarray(packed.data), packed.data.shape[-1]
    assert words.data.shape == (2, 3, -(-n // 4))
    found = np.asarray(words.data).astype("<u4").view(np.uint8)
    np.testing.assert_array_equal(found[..., :n], data)
    np.testing.assert_array_equal(values, expected)


@pytest.mark.parametrize("bits", [10, 7])
def test_layout_of_groups(bits):
    """With 10 bits, byte 128 + j has the low bits of values j, j + 32, j + 64, ..."""
    limit = 2 ** (bits - 1) - 1
    codes = np.random.default_rng(0).integers(-limit, limit + 1, (2, 128))
    data, _ = pack_and_back(jnp.asarray(codes.reshape(256), jnp.int32), bits)
    words, start, shift = codes + limit + 1, 0, bits
    for width in packing.chunk_widths(bits):
        shift -= width
        chunks = (words >> shift & (2**width - 1)).reshape(2, 8 // width, -1)
        plane = (chunks << (width * np.arange(8 // width))[:, None]).sum(axis=1)
        stop = start + 16 * width
        np.testing.assert_array_equal(data.reshape(2, -1)[:, start:stop], plane)
        start = stop


@pytest.mark.parametrize("bits", SOME_BITS)
def test_codes_and_scales_against_numpy(bits):
    x = heavy((4, 300), bits)
    packed, values = quantize_and_back(x, bits)
    limit = np.float32(2 ** (bits - 1) - 1)
    for g in range(3):
        group = np.asarray(x)[:, 128 * g : 128 * (g + 1)]
        amax = np.abs(group).max(axis=1, keepdims=True)
        np.testing.assert_array_equal(packed.scales[:, g : g + 1], amax / limit)
        codes = np.rint(np.clip(group * (limit / amax), -limit, limit))
        got = values[:, 128 * g : 128 * (g + 1)]
        np.testing.assert_array_equal(got, codes * (amax / limit))


@pytest.mark.parametrize("bits", [4, 12])
def test_special_groups(bits):
    x = np.ones((6, 256), np.float32)
    smallest = 2.0**-114
    x[0, :128] = 0.0
    x[1, :128] = smallest
    x[2, :128] = np.nextafter(np.float32(smallest), np.float32(0))
    x[3, 7], x[4, 7], x[5, 7] = np.nan, np.inf, -np.inf
    packed, values = quantize_and_back(jnp.asarray(x), bits)
    np.testing.assert_array_equal(values[:3, 0], np.float32([0, smallest, 0]))
    assert np.all(np.isnan(values[3:, :128]))
    assert np.all(np.isnan(packed.scales[3:, 0]))
    np.testing.assert_allclose(values[:, 128:], 1.0, rtol=1e-6)


@pytest.mark.gpu
@pytest.mark.parametrize("bits", BITS)
def test_gpu_and_cpu_agree(bits):
    x = heavy((64, 1100), bits)
    on = {}
    for platform in ("cpu", "gpu"):
        moved = jax.device_put(x, jax.devices(platform)[0])
        on[platform] = quantize_and_back(moved, bits)
    jax.tree.map(np.testing.assert_array_equal, on["gpu"], on["cpu"])
