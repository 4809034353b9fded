"""The Mosaic GEMM: what it computes in the interpreter, and how it compiles."""

import functools
import re

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from fbq_jax.kernels.mosaic import (
    gemm,
    gemm_kernel,
    gemm_products,
    gemm_promotion,
    gemm_scheduler,
    gemm_wgmma,
    grouped_gemm,
)
from fbq_jax.kernels.mosaic.gemm_problem import (
    BLOCK,
    UNROLL,
    Config,
    Problem,
    choose_wide,
    regions,
)
from fbq_jax.kernels.mosaic.gemm_scheduler import Scales
from tests.gpus import needs_compiler
from tests.kernels import gemm_cases, mosaic_tools, triton_tools
from tests.kernels.gemm_cases import CASES, Case, shapes
from tests.marks import with_first_fast

# What multiplies codes on the tensor cores.
PRODUCTS = {"int8": "s32.s8.s8", "float8_e4m3fn": "f32.e4m3.e4m3"}
SHARED = 227 * 1024  # bytes of shared memory that a thread block of Hopper may have
SUPPORTED = [
    name
    for name, case in CASES.items()
    if case.blocks[1] % BLOCK == 0
    and all(side == 1 or side % BLOCK == 0 for side in case.blocks)
]
# Two matrices, several tiles per thread block, and steps with and without residual.
MANY_TILES = Case((2, 130, 650, 450), (128, 128, 128), 0.4)


def interpreted_kernels(monkeypatch):
    """Makes the GEMM run in the interpreters."""
    schedule = triton_tools.interpreted("gemm_schedule")
    abs_sums = triton_tools.interpreted("abs_sums")
    monkeypatch.setattr(gemm, "_num_sms", lambda: mosaic_tools.NUM_SMS)
    monkeypatch.setattr(jax, "device_count", lambda: 1)
    monkeypatch.setattr(gemm, "list_steps", schedule.list_steps)
    monkeypatch.setattr(gemm, "max_abs_sum", abs_sums.max_abs_sum)
    # The interpreter's accumulators start at 0, whatever is stored in them.
    monkeypatch.setattr(gemm_promotion, "reset", lambda _: None)
    monkeypatch.setattr(gemm_promotion, "biased_float", _biased_float)
    # The interpreter knows no code inlined from Mosaic GPU.
    monkeypatch.setattr(gemm_products, "start_product", _start_product)


def build_in_parts(monkeypatch):
    """Makes the GEMMs those of several devices; returns the list of their problems."""
    problems = []

    def build(problem):
        problems.append(problem)
        return gemm_kernel.build(problem)

    monkeypatch.setattr(jax, "device_count", lambda: 2)
    for module in (gemm, grouped_gemm):
        monkeypatch.setattr(module, "build", build)
    return problems


@pytest.fixture
def interpreted(monkeypatch):
    """Returns the interpreted ``matmul`` for a given configuration."""
    interpreted_kernels(monkeypatch)

    def bind(config=None):
        matmul = functools.partial(gemm.matmul, config=config)
        return functools.partial(mosaic_tools.interpret, matmul)

    return bind


def _biased_float(running_sum):
    bits = running_sum + gemm_promotion.MAGIC_BITS
    return lax.bitcast_convert_type(bits, jnp.float32)


def _start_product(lhs, rhs, dtype):
    def multiply(accumulator):
        plgpu.wgmma(accumulator, lhs, rhs.transpose((1, 0)))
        return plgpu.wgmma_accumulator_load(accumulator)

    accumulator = plgpu.ACC((lhs.shape[0], rhs.shape[0]), dtype)
    product = pl.run_scoped(multiply, accumulator)
    return lambda: product


def test_weighted_running_sums_are_the_sum_of_the_steps():
    """The accumulator runs over three iterations and is reset once, after two."""
    rng = np.random.default_rng(0)
    products = rng.integers(-1000, 1000, 3 * UNROLL)
    first, last = rng.integers(1, 100, (2, 3 * UNROLL + 1)).astype(np.float32)
    totals = np.zeros(2)
    accumulator = 0
    for iteration in range(3):
        if iteration in (0, 2):
            accumulator = 0
        start = iteration * UNROLL
        steps = range(start, start + UNROLL + 1)
        scales = [Scales(first[n], last[n]) for n in steps]
        for n, weights in enumerate(
            gemm_promotion.running_weights(scales, iteration in (1, 2))
        ):
            accumulator += products[start + n]
            totals += np.asarray(weights) * accumulator
    np.testing.assert_array_equal(totals, [first[:-1] @ products, last[:-1] @ products])


@mosaic_tools.needs_interpreter
@pytest.mark.parametrize("name", SUPPORTED)
def test_matches_float64(interpreted, name):
    gemm_cases.check_against_float64(interpreted(), CASES[name])


@mosaic_tools.needs_interpreter
@pytest.mark.parametrize("name", with_first_fast(gemm_cases.FLOAT8_CASES))
def test_float8_matches_float64(interpreted, name):
    gemm_cases.check_against_float64(interpreted(), gemm_cases.FLOAT8_CASES[name])


@pytest.mark.exhaustive
@mosaic_tools.needs_interpreter
def test_float8_rounds_once(interpreted):
    case = gemm_cases.FLOAT8_CASES["scales of rows"]
    run = functools.partial(interpreted(), *gemm_cases.operands(case))
    wide, narrow = run(dtype=jnp.float32), run(dtype=jnp.bfloat16)
    np.testing.assert_array_equal(narrow, wide.astype(jnp.bfloat16))


@mosaic_tools.needs_interpreter
@pytest.mark.parametrize("wide", [0, 2, 3])
@pytest.mark.parametrize("group", [1, 8])
def test_every_configuration_matches_float64(interpreted, wide, group):
    gemm_cases.check_against_float64(interpreted(Config(group, wide)), MANY_TILES)


@mosaic_tools.needs_interpreter
@pytest.mark.parametrize("wide", with_first_fast([2, 0]))
def test_tiles_in_parts_match_float64(interpreted, monkeypatch, wide):
    problems = build_in_parts(monkeypatch)
    gemm_cases.check_against_float64(interpreted(Config(8, wide)), MANY_TILES)
    assert min(problem.num_parts for problem in problems) > 1


@pytest.mark.parametrize("tiles", range(1, 70))
def test_every_part_has_tiles(tiles):
    """And together, the parts have all tiles of a worker, in order."""
    sizes = (1, 128 * tiles, 128, 128)
    problem = Problem(*sizes, False, jnp.dtype(jnp.float32), Config(), num_sms=1)
    parts = problem.in_parts().num_parts
    ranges = [
        gemm_scheduler._part_of(jnp.int32(tiles), jnp.int32(part), parts)
        for part in range(parts)
    ]
    assert parts == min(5, tiles.bit_length())
    assert [start for start, _ in ranges] == [0, *(end for _, end in ranges[:-1])]
    assert ranges[-1][1] == tiles
    lengths = [end - start for start, end in ranges]
    assert min(lengths) > 0
    assert lengths == sorted(lengths, reverse=True)


@pytest.mark.parametrize("N", [128, 256, 384, 2048, 14336])
@pytest.mark.parametrize("wide", [0, 2, 4, 75])
def test_regions_cover_all_columns_once(N, wide):
    ends = [0]
    for region in regions(5, N, wide):
        assert region.first_column == ends[-1]
        assert region.first_column % BLOCK == 0
        ends.append(region.first_column + region.width * region.tile_columns)
    assert ends[-2] < N <= ends[-1]


def test_chosen_regions_share_out_the_last_round():
    """Tiles of one width would take six rounds of 192 columns, or eight of 128."""
    wide = choose_wide(32, 4096, num_sms=132)
    tiles = [region.num_tiles for region in regions(32, 4096, wide)]
    assert tiles == [512, 256]


@mosaic_tools.needs_interpreter
@pytest.mark.parametrize(
    "name", [name for name in gemm_cases.CHECKS if not name.startswith("extreme")]
)
def test_products(interpreted, name):
    gemm_cases.CHECKS[name](interpreted())


@mosaic_tools.needs_interpreter
@pytest.mark.parametrize("name", ["scales of rows", "scales of rows and columns"])
def test_scales_of_rows_in_wide_tiles_round_once(interpreted, name):
    matmul = interpreted(Config(8, 2))
    gemm_cases.check_rounds_once(matmul, jnp.bfloat16, name)


def test_scales_of_rows_with_a_residual_are_refused():
    case = gemm_cases.ROWS_AND_FALLBACK
    with pytest.raises(ValueError, match=r"a residual with scales per block .*\(1, 1"):
        gemm.matmul(*gemm_cases.operands(case), dtype=jnp.float32)


@mosaic_tools.needs_interpreter
def test_interpreter_detects_races():
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


def _stand_in_for_list_steps(scales, _residual_scales, *, padding, **_options):
    """Returns step lists of the right shapes, without a Triton kernel."""
    batch, rows, blocks = scales.shape
    count = jnp.zeros((batch, rows), jnp.int32)
    order = jnp.zeros((batch, rows, 2 * blocks + padding), jnp.int32)
    return count, order, order.astype(jnp.float32), count, count


def _stand_in_for_max_abs_sum(codes):
    batch, rows, depth = codes.shape
    return jnp.ones((batch, rows // BLOCK, depth // BLOCK))


def replace_triton_kernels(monkeypatch):
    """Makes the GEMM compile for an H200 without Triton kernels before it."""
    monkeypatch.setattr(gemm, "_num_sms", lambda: 132)
    monkeypatch.setattr(gemm, "list_steps", _stand_in_for_list_steps)
    monkeypatch.setattr(gemm, "max_abs_sum", _stand_in_for_max_abs_sum)


@pytest.mark.exhaustive
@needs_compiler
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
@pytest.mark.parametrize("fallback", [False, True])
@pytest.mark.parametrize("wide", [0, 16, 32])
def test_compiles_to_wgmma_without_spills(monkeypatch, wide, fallback, dtype):
    compiled(monkeypatch, (128, 128), Config(8, wide), dtype, fallback=fallback)


@pytest.mark.exhaustive
@needs_compiler
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
@pytest.mark.parametrize(("n", "wide"), [(128, 0), (128, 32), (1, 0)])
@pytest.mark.parametrize("codes", PRODUCTS)
def test_scales_of_rows_compile_without_spills(monkeypatch, codes, n, wide, dtype):
    kernel = compiled(monkeypatch, (1, n), Config(8, wide), dtype, codes)
    if codes != "int8" or n == 1 or dtype == jnp.float32:
        # The first of the four instructions that multiply a step adds nothing.
        flags = re.findall(r"setp\.ne\.b32 p, (\d), 0; wgmma", kernel.ptx)
        assert flags == ["0", "1", "1", "1"] * (len(flags) // 4)


def compiled(monkeypatch, sides, config, dtype, codes="int8", fallback=False):
    """The kernel of operands whose blocks have ``sides`` rows."""
    replace_triton_kernels(monkeypatch)
    matmul = functools.partial(gemm.matmul, dtype=dtype, config=config)
    shape, (m, n) = (1, 4096, 4096), sides
    lhs = shapes(shape, (m, 128), codes, fallback=fallback)
    (kernel,) = mosaic_tools.compile_kernels(
        matmul, lhs, shapes(shape, (n, 128), codes)
    )
    check_kernel(kernel, PRODUCTS[codes])
    return kernel


def test_unknown_instructions_are_slower_and_warn():
    with pytest.warns(UserWarning, match="writes WGMMA instructions in another way"):
        gemm_wgmma._set_flag([], 96, None)


def check_kernel(kernel, product=PRODUCTS["int8"]):
    assert re.search(rf"wgmma\.mma_async\S*{re.escape(product)}", kernel.ptx)
    assert kernel.spills == 0
    assert kernel.shared <= SHARED
    # ptxas warns (C7510, for example) when products wait for each other.
    assert "serializ" not in kernel.log.lower()
