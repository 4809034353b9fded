"""The fused Triton kernels: their results, and their compiled code."""

import functools
import re

import jax
import jax.numpy as jnp
import pytest

from fbq_jax.kernels import packing
from tests.kernels import fused_cases as cases
from tests.kernels.triton.test_quantize import SHARED
from tests.kernels.triton_tools import compile_kernels, interpreted
from tests.marks import with_first_fast


@pytest.fixture(scope="module")
def ops():
    return interpreted("fused")


@pytest.mark.parametrize(
    "case", with_first_fast(cases.QUANTIZE[1:] + cases.QUANTIZE[:1])
)
def test_rms_norm_quantize(ops, case):
    cases.check_norm(ops, *case)


@pytest.mark.parametrize("case", with_first_fast(cases.QUANTIZE))
def test_silu_gate_quantize(ops, case):
    cases.check_gate(ops, *case)


@pytest.mark.parametrize("case", with_first_fast(cases.GRAD))
def test_silu_gate_grad_quantize(ops, case):
    cases.check_grad(ops, *case)


@pytest.mark.parametrize("bits", with_first_fast([9, 5, 6, 8]))
def test_other_numbers_of_bits(ops, bits):
    """Chunks of other widths, at other positions in a word."""
    shape, block = (1, 32, 128), (32, 128)
    cases.check_gate(ops, shape, "bfloat16", bits, block, None, (0.0,), None)
    cases.check_grad(ops, shape, "bfloat16", bits, block, "nearest", None)


@pytest.mark.parametrize(
    "case", with_first_fast(cases.ROW_BLOCKS[3:] + cases.ROW_BLOCKS[:3])
)
def test_rms_norm_quantize_row_blocks(ops, case):
    cases.check_norm_row_blocks(ops, *case)


@pytest.mark.parametrize("case", with_first_fast(cases.ROW_BLOCKS))
def test_silu_gate_quantize_row_blocks(ops, case):
    cases.check_gate_row_blocks(ops, *case)


@pytest.mark.parametrize(
    "case", with_first_fast(cases.ROW_BLOCKS[1:] + cases.ROW_BLOCKS[:1])
)
def test_silu_gate_grad_quantize_row_blocks(ops, case):
    cases.check_grad_row_blocks(ops, *case)


@pytest.mark.exhaustive
@pytest.mark.parametrize(("case", "row_counts", "interleaved"), cases.QUANTIZE_TILES)
def test_silu_gate_quantize_of_tiles(ops, case, row_counts, interleaved):
    cases.check_gate(ops, *case, row_counts, interleaved)


@pytest.mark.exhaustive
@pytest.mark.parametrize(("case", "row_counts", "interleaved"), cases.GRAD_TILES)
def test_silu_gate_grad_quantize_of_tiles(ops, case, row_counts, interleaved):
    cases.check_grad(ops, *case, row_counts, interleaved)


@pytest.mark.exhaustive
@pytest.mark.parametrize("dtype", ["bfloat16"])
def test_special_values(ops, dtype):
    cases.check_special(ops, dtype)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("capability", "dtype", "bits", "block", "criterion"),
    [
        (90, "bfloat16", 10, (128, 128), "absmax"),
        (89, "float16", 12, (32, 128), None),
        (80, "float32", 11, (256, 128), "l1_rel"),
    ],
)
def test_compiles_without_spills(capability, dtype, bits, block, criterion):
    shape = (1, 4096, 4096)
    x, theta = jax.ShapeDtypeStruct(shape, dtype), jax.ShapeDtypeStruct((1,), "float32")
    gate_up = jax.ShapeDtypeStruct((1, 4096, 8192), dtype)
    norm_scale = jax.ShapeDtypeStruct((1, 4096), "float32")
    seeds = jax.ShapeDtypeStruct((1,), "uint32")
    packed = jax.eval_shape(lambda: packing.quantize(jnp.zeros(shape), bits))
    row_counts = jax.ShapeDtypeStruct((1,), "int32")
    compiled = functools.partial(
        compile_kernels, "fused", capability=capability, bits=bits, block=block
    )
    forward = {"criterion": criterion, "colwise": "stochastic"}
    backward = {"rowwise": "stochastic", "colwise": "stochastic"}
    tiles = {"interleaved": False}
    gate, grad = (gate_up, theta, seeds), (x, packed, packed, seeds)
    row_blocks = backward | {"colwise_in_blocks": True, "sums": ("colwise",)}
    kernels = [
        *compiled(
            "rms_norm_quantize", x, norm_scale, theta, seeds, epsilon=1e-5, **forward
        ),
        *compiled("silu_gate_quantize", *gate, **forward),
        *compiled("silu_gate_quantize", *gate, row_counts, **forward, **tiles),
        *compiled("silu_gate_grad_quantize", *grad, **backward),
        *compiled("silu_gate_grad_quantize", *grad, row_counts, **backward, **tiles),
        *compiled(
            *("rms_norm_quantize_row_blocks", x, norm_scale, seeds),
            epsilon=1e-5,
            **(backward | {"rowwise": "nearest"}),
        ),
        *compiled(
            *("silu_gate_quantize_row_blocks", gate_up, seeds),
            **(backward | {"rowwise": "nearest"}),
        ),
        *compiled("silu_gate_grad_quantize_row_blocks", *grad, **row_blocks),
    ]
    # The gradients of blocks of 256 rows take two passes, and one of these two kernels.
    assert len(kernels) == (9 if block[0] == 256 else 8)
    for kernel in kernels:
        assert kernel.spills == 0, kernel.name
        assert kernel.shared <= SHARED[capability], kernel.name
        # Loads of x take at least 8 bytes at once.
        assert re.search(r"ld\.global\.v[24]", kernel.ptx), kernel.name
