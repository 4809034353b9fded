"""The codes of frozen layers, and the formats that store them."""

import dataclasses
import subprocess
import sys

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx

import fbq_jax
from fbq_jax import FallbackDot, Recipe, recipes
from fbq_jax.export import FORMATS, BlockWeight, ExportError, frozen_weights
from tests.fbq_jax.linen.test_freezing import as_trained

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
X = jnp.ones((2, 64))


def frozen(recipe):
    layer = nn.Dense(48, use_bias=False, dot_general=FallbackDot(recipe))
    variables = as_trained(layer, X)
    return variables, fbq_jax.freeze(layer, variables, X)


def test_the_library_imports_it():
    """A page's ``fbq_jax.export`` needs no import of its own."""
    program = "import fbq_jax; fbq_jax.export.FORMATS"
    subprocess.run([sys.executable, "-c", program], check=True)


def weight(codes, scales, group=32):
    return BlockWeight(np.asarray(codes, np.int8), np.asarray(scales, "f4"), group)


def test_codes_times_scales_are_the_weight_within_half_a_step():
    # The last block has 16 outputs.
    variables, served = frozen(Recipe(block=32))
    found = frozen_weights(served)
    assert found.keys() == {"kernel"}
    codes, scales = found["kernel"].codes, found["kernel"].scales
    assert (codes.dtype, codes.shape) == (np.int8, (48, 64))
    assert (scales.dtype, scales.shape) == (np.float32, (48, 2))
    every = scales.repeat(found["kernel"].group, axis=1)
    error = np.abs(codes * every - variables["params"]["kernel"].T)
    assert np.all(error <= 0.501 * every)
    exact = served["fallback"]["dot_general"]["weight"].codes
    np.testing.assert_array_equal(codes, exact.main.codes[0])


def test_frozen_layers_under_scan_have_a_stack_of_weights():
    class Layer(nn.Module):
        @nn.compact
        def __call__(self, x):
            dot = FallbackDot(Recipe(block=32))
            return nn.Dense(64, use_bias=False, dot_general=dot)(x), None

    axes = {"params": 0, "fallback": 0}
    stack = nn.scan(Layer, axes, split_rngs={"params": True}, length=3)()
    (codes,) = frozen_weights(fbq_jax.freeze(stack, as_trained(stack, X), X)).values()
    assert codes.codes.shape == (3, 64, 64)
    assert codes.scales.shape == (3, 64, 2)


NNX_MODEL = nnx.eval_shape(lambda: nnx.Linear(4, 4, rngs=nnx.Rngs(0)))


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        (
            lambda: frozen(recipes.rowwise)[1],
            ExportError,
            "kernel has no scales per bl",
        ),
        (
            lambda: frozen(recipes.rowwise)[0],
            ExportError,
            "no frozen layer: pass those ",
        ),
        (
            lambda: frozen(recipes.fp8_row_block)[1],
            ExportError,
            "kernel has codes in float8_e4m3fn, .*: train with .* such as row_block",
        ),
        (lambda: NNX_MODEL, TypeError, "of a Linen model, .*; got Linear"),
        (lambda: nnx.state(NNX_MODEL), TypeError, "of a Linen model, .*; got State"),
    ],
)
def test_variables_without_weights_are_named(given, error, message):
    with pytest.raises(error, match=message):
        frozen_weights(given())


EVERY = tuple(FORMATS)
WHOLE = "blockwise_int8", "compressed-tensors"
IN_FLOAT16 = "compressed-tensors", "gguf"
GOOD = weight(np.zeros((32, 64)), np.zeros((32, 2)))
STACK = BlockWeight(np.ones((4, 256, 128), np.int8), np.ones((4, 256, 1), "f4"), 128)


def small(*codes_shape, scales=None):
    """A weight of zeros."""
    if scales is None:
        scales = np.zeros((codes_shape[0], -(-codes_shape[1] // 32)))
    return weight(np.zeros(codes_shape), scales)


NOT_WHOLE, OTHER_NAME = {"a.weight": small(32, 40)}, {"up/kernel": GOOD}
MIXED = {
    "a.weight": GOOD,
    "b.weight": weight(np.zeros((32, 64)), np.zeros((32, 1)), 64),
}
OF_ROWS = {"a.weight": small(32, 32, scales=np.arange(32)[:, None])}
TINY, HUGE = ({"a.weight": weight(np.ones((1, 32)), [[s]])} for s in (2e-8, 1e5))
NAN, INF = ({"a.weight": small(1, 32, scales=[[x]])} for x in (np.nan, np.inf))
FLOATS = {"a.weight": np.ones((32, 32), np.float32)}
NOT_FINITE = r"'a.weight' has .* not finite: .* NaN or an"


@pytest.mark.parametrize(
    ("names", "weights", "message"),
    [
        (WHOLE, NOT_WHOLE, "multiples of 32; a.weight has"),
        (WHOLE, MIXED, r"one size of blocks for all layers, got \[32, 64\]"),
        (WHOLE, OTHER_NAME, "'<module>.weight'; got 'up/kernel'"),
        (IN_FLOAT16, TINY, "a.weight has scales that float16 cannot .* as 2e-08: "),
        (IN_FLOAT16, HUGE, "a.weight has scales that float16 cannot .* as 100000: "),
        (["blockwise_int8"], OF_ROWS, r"at least 16 outputs; a.weight cannot be"),
        (["gguf"], {"a": small(2, 40)}, "multiples of 32, .* a has 40 in"),
        (EVERY, FLOATS, r"takes the BlockWeights .* 'a.weight'"),
        (EVERY, NAN, NOT_FINITE),
        (EVERY, INF, NOT_FINITE),
        (EVERY, {"a.weight": STACK}, r"'a.weight' is a stack \[4, 256, 128\]"),
    ],
)
def test_weights_that_formats_cannot_hold_are_named(names, weights, message):
    dtype = np.dtype(np.float16) if "float16" in message else BFLOAT16
    for name in names:
        with pytest.raises(ExportError, match=message):
            FORMATS[name](weights, dtype)


def test_blockwise_int8_takes_the_largest_rows_that_all_weights_have():
    rows = np.arange(128)[:, None]
    whole = weight(np.zeros((128, 64)), np.tile(rows // 64, (1, 2)))
    split = weight(np.zeros((64, 32)), rows[:64] // 32)
    encode = FORMATS["blockwise_int8"]
    for weights, size in (
        ({"a.weight": whole}, 64),
        ({"a.weight": whole, "b.weight": split}, 32),
    ):
        tensors, config = encode(weights, BFLOAT16)
        assert config["weight_block_size"] == [size, 32]
        assert tensors["a.weight"] is whole.codes
        scales = tensors["a.weight_scale_inv"]
        np.testing.assert_array_equal(scales.repeat(size, 0), whole.scales)
        assert scales.dtype == np.float32


def test_blockwise_int8_has_whole_blocks_in_each_part_of_a_joined_weight():
    # K and V of 64 outputs each have one scale.
    codes, scales = np.zeros((256, 32)), np.arange(256)[:, None] // 128
    encode = FORMATS["blockwise_int8"]
    for parts, size in (((), 128), ((128, 128), 128), ((128, 64, 64), 64)):
        joined = dataclasses.replace(weight(codes, scales), parts=parts)
        _, config = encode({"a.weight": joined}, BFLOAT16)
        assert config["weight_block_size"] == [size, 32]


def test_compressed_tensors_packs_four_codes_in_a_word():
    codes = weight([[-127, 0, 1, 127] * 8], [[0.1]])
    tensors, config = FORMATS["compressed-tensors"]({"a.weight": codes}, BFLOAT16)
    # Each byte is a code plus 128, the first one lowest.
    word = 1 | (128 << 8) | (129 << 16) | (255 << 24)
    packed = tensors["a.weight_packed"].view(np.uint32)
    np.testing.assert_array_equal(packed, np.full((1, 8), word))
    assert tensors["a.weight_scale"].dtype == BFLOAT16
    np.testing.assert_array_equal(tensors["a.weight_shape"], [1, 32])
    group = config["config_groups"]["group_0"]["weights"]
    assert (group["num_bits"], group["group_size"]) == (8, 32)


def q8_0(weight):
    """The scales and codes in the blocks of a weight."""
    (blocks,) = FORMATS["gguf"]({"a.weight": weight}, BFLOAT16)[0].values()
    blocks = blocks.reshape(len(blocks), -1, 34)
    codes = blocks[..., 2:].reshape(len(blocks), -1).view(np.int8)
    return blocks[..., :2].view(np.float16)[..., 0], codes


def test_q8_0_repeats_the_scales_of_larger_blocks():
    random = np.random.default_rng(0)
    codes = random.integers(-127, 128, (3, 160), np.int8)
    stored = weight(codes, random.uniform(0.001, 0.1, (3, 2)), 128)
    scales, kept = q8_0(stored)
    np.testing.assert_array_equal(kept, codes)  # byte for byte
    every = stored.scales[:, [0, 0, 0, 0, 1]]
    np.testing.assert_array_equal(scales, every.astype(np.float16))


def test_gguf_reads_the_values_of_q8_0():
    gguf = pytest.importorskip("gguf", reason="reads the blocks")
    random = np.random.default_rng(0)
    stored = weight(random.integers(-127, 128, (3, 64)), random.uniform(1, 2, (3, 2)))
    tensors, config = FORMATS["gguf"]({"a.weight": stored}, BFLOAT16)
    values = gguf.dequantize(tensors["a.weight"], gguf.GGMLQuantizationType.Q8_0)
    every = stored.scales.astype(np.float16).astype(np.float32).repeat(32, 1)
    np.testing.assert_array_equal(values, stored.codes * every)
    assert config == {}


def test_float16_scales_lose_one_part_in_2048_at_most():
    scales = 2.0 ** np.random.default_rng(0).uniform(-14, 15.9, (4096, 1))
    found, _ = q8_0(weight(np.zeros((4096, 32)), scales))
    error = np.abs(found.astype("f4") / scales.astype("f4") - 1)
    assert 2**-12 < error.max() <= 2**-11


def test_small_scales_lose_more_and_a_warning_says_so():
    # Scales below 2^-14 have steps of 2^-24.
    scales = np.float32([[0.1], [2.0**-14], [2.5 * 2.0**-24], [2.0**-23]])
    coarse = {"a.weight": weight(np.ones((4, 32)), scales)}
    message = "2 of 4 blocks have scales below 6.1e-05, where float16 .* up to 0.2 of"
    with pytest.warns(UserWarning, match=message):
        found, _ = q8_0(coarse["a.weight"])
    np.testing.assert_array_equal(found[1:, 0], [2.0**-14, 2.0**-23, 2.0**-23])
    with pytest.warns(UserWarning, match=message):
        FORMATS["compressed-tensors"](coarse, np.dtype(np.float16))
    found, _ = q8_0(weight(np.zeros((1, 32)), [[0.0]]))  # an empty block is exact
    assert found == 0
