"""The Mosaic GEMM, interpreted, and what it compiles to for Hopper."""

import functools
import re

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import pytest
from jax import lax

from fbq_jax.kernels.mosaic import gemm as module
from fbq_jax.kernels.mosaic import gemm_kernel as mosaic_kernel
from fbq_jax.kernels.mosaic.gemm_kernel import SIDE, Config
from fbq_jax.kernels.reference import Quantized
from tests.gpus import needs_compiler
from tests.kernels import gemm_cases, mosaic_tools, triton_tools
from tests.kernels.gemm_cases import CASES, Case

SHARED = 227 * 1024  # bytes that a thread block of Hopper may have
CASES_HERE = [
    name for name, case in CASES.items() if all(s % SIDE == 0 for s in case.blocks)
]
# A batch, several tiles each thread block, and residuals of every kind.
MANY = Case((2, 130, 650, 250), (128, 128, 128), 0.4)


@pytest.fixture
def interpreted(monkeypatch):
    monkeypatch.setattr(module, "_processors", lambda: mosaic_tools.PROCESSORS)
    for name in "steps", "longest":
        function = getattr(triton_tools.interpreted(name), name)
        monkeypatch.setattr(module, name, function)
    # The interpreter's accumulators start at 0, whatever is stored in them.
    monkeypatch.setattr(mosaic_kernel, "_start", lambda _: None)
    monkeypatch.setattr(mosaic_kernel, "_bits", _bits_of_sum)

    def bind(config=None):
        return functools.partial(
            mosaic_tools.interpret, functools.partial(module.matmul, config=config)
        )

    return bind


def _bits_of_sum(value):
    bits = value + mosaic_kernel.START_BITS
    return lax.bitcast_convert_type(bits, jnp.float32)


@mosaic_tools.needs_interpreter
@pytest.mark.parametrize("name", CASES_HERE)
def test_against_float64(interpreted, name):
    gemm_cases.check_against_float64(interpreted(), CASES[name])


@mosaic_tools.needs_interpreter
@pytest.mark.parametrize("config", [Config(1, 1), Config(8, 1), Config(2, 2)])
def test_configurations(interpreted, config):
    gemm_cases.check_against_float64(interpreted(config), MANY)


@mosaic_tools.needs_interpreter
@pytest.mark.parametrize("sign", [1, -1])
def test_largest_sums(interpreted, sign):
    gemm_cases.check_largest_sums(interpreted(), sign)


@mosaic_tools.needs_interpreter
def test_outlier_that_fell_back(interpreted):
    gemm_cases.check_outlier_that_fell_back(interpreted())


@mosaic_tools.needs_interpreter
def test_scales_far_apart(interpreted):
    gemm_cases.check_scales_far_apart(interpreted())


@mosaic_tools.needs_interpreter
def test_rounds_once(interpreted):
    gemm_cases.check_rounds_once(interpreted(), jnp.bfloat16)


@mosaic_tools.needs_interpreter
def test_nan_scales(interpreted):
    gemm_cases.check_nan_scales(interpreted(), (128, 128, 128))


@mosaic_tools.needs_interpreter
def test_the_interpreter_sees_races():
    def kernel(out, shared):
        shared[...] = jnp.zeros(128, jnp.float32)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(shared, out)
        plgpu.wait_smem_to_gmem(0)

    racy = plgpu.kernel(
        kernel,
        out_type=jax.ShapeDtypeStruct((128,), jnp.float32),
        scratch_types=[plgpu.SMEM((128,), jnp.float32)],
        num_threads=2,
        thread_name="warpgroup",
    )
    with pytest.raises(Exception, match="RACE DETECTED"):
        mosaic_tools.interpret(racy)


@needs_compiler
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
@pytest.mark.parametrize("fallback", [False, True])
@pytest.mark.parametrize("cluster", [1, 2])
def test_compiles_to_tensor_core_products_without_spills(
    monkeypatch, cluster, fallback, dtype
):
    def steps(scales, residual_scales, *, unused, far):
        """In place of a Triton kernel, which is not what is compiled here."""
        del residual_scales, far
        batch, rows, blocks = scales.shape
        shape = batch, rows, 2 * blocks + unused
        count = jnp.zeros((batch, rows), jnp.int32)
        order = jnp.zeros(shape, jnp.int32)
        return order, order.astype(jnp.float32), count, count

    monkeypatch.setattr(module, "_processors", lambda: 132)

    def longest(codes):
        return jnp.ones((codes.shape[0], codes.shape[1] // SIDE), jnp.int32)

    monkeypatch.setattr(module, "steps", steps)
    monkeypatch.setattr(module, "longest", longest)
    matmul = functools.partial(
        module.matmul, block_shape=(128,) * 3, dtype=dtype, config=Config(8, cluster)
    )
    operand = Quantized(
        jax.ShapeDtypeStruct((1, 4096, 4096), jnp.int8),
        jax.ShapeDtypeStruct((1, 32, 32), jnp.float32),
    )
    residual = operand if fallback else None
    (kernel,) = mosaic_tools.compile_kernels(matmul, operand, residual, operand)
    assert re.search(r"wgmma\.mma_async\S*s32\.s8\.s8", kernel.ptx)
    assert kernel.spills == 0
    assert kernel.shared <= SHARED
    # ptxas says so (C7510 and its like) when products wait for each other.
    assert "serializ" not in kernel.log.lower()
    assert (".multicast::cluster" in kernel.ptx) == (cluster == 2)
