"""The GEMMs: the reference, XLA's, and kernels in their interpreters."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from fbq_jax.kernels import reference, xla_gemm
from fbq_jax.kernels.quantized import Quantized, Term
from fbq_jax.kernels.tpu import gemm as tpu_gemm
from fbq_jax.kernels.tpu import steps
from tests import oracle
from tests.gpus import h200s, needs_compiler
from tests.kernels import gemm_cases, triton_tools
from tests.kernels.gemm_cases import CASES, CHECKS, FLOAT8_CASES, Case
from tests.kernels.tpu_tools import interpreted, jitted  # noqa: F401 (a fixture)
from tests.marks import rows_with_first_fast, with_first_fast

pytestmark = pytest.mark.usefixtures("interpreted")
matmul = jax.jit(reference.matmul, static_argnames="dtype")
tpu = jitted(tpu_gemm.matmul)


def triton(lhs, rhs, *, dtype, sm=90, config=None):
    module = triton_tools.interpreted("gemm")
    return module.matmul(lhs, rhs, dtype=dtype, sm=sm, config=config)


ampere = functools.partial(triton, sm=80)
MORE = {f"FP8, {name}": case for name, case in FLOAT8_CASES.items()}
MORE["scales of rows, fallback"] = gemm_cases.ROWS_AND_FALLBACK
SMALL = {f"FP8, {n}": case for n, case in gemm_cases.FLOAT8_SMALL_CASES.items()}
EVERY_CASE = CASES | MORE | SMALL
ON_A_TPU = [name for name, case in CASES.items() if set(case.blocks) <= {128, 256}]
# With and without residuals, scales of rows and columns, one element.  Each of the
# others has what these have one by one, or other sizes of block.
FAST = {
    matmul: {"unaligned, fallback", "scales of rows", "scales of rows and columns"},
    triton: {
        *("aligned", "unaligned, fallback", "one element", "every block falls back"),
        *("scales of rows", "scales of rows and columns", "scales of columns"),
        *("FP8, scales of rows", "scales of rows, fallback"),
    },
    ampere: {"unaligned, fallback"},
    tpu: {"unaligned, fallback", "one element"},
}
BACKENDS = {
    "reference": (matmul, CASES | MORE),
    "triton": (triton, EVERY_CASE),
    "triton on Ampere": (ampere, ["unaligned, fallback", "32x32x32 blocks"]),
    "tpu": (tpu, ON_A_TPU),
}


@pytest.mark.parametrize(
    ("op", "name"),
    [
        pytest.param(
            *(op, name),
            marks=[pytest.mark.exhaustive] * (name not in FAST[op]),
            id=f"{backend}, {name}",
        )
        for backend, (op, names) in BACKENDS.items()
        for name in names
    ],
)
def test_products_match_float64(op, name):
    gemm_cases.check_against_float64(op, EVERY_CASE[name])


@pytest.mark.parametrize(
    ("op", "name"),
    [
        *[(matmul, name) for name in CHECKS],
        *[(triton, name) for name in ("rounds once to float16", "outlier scale")],
        *[(triton, name) for name in ("NaN scales", "extreme scales")],
        *[(tpu, name) for name in ("rounds once to bfloat16", "outlier scale")],
        (tpu, "outlier with residual"),
        *rows_with_first_fast([(triton, "extreme scales, bfloat16")], 0),
        *rows_with_first_fast([(tpu, "rounds once to float16")], 0),
    ],
)
def test_products(op, name):
    CHECKS[name](op)


@pytest.mark.parametrize("module", [xla_gemm, reference])
@pytest.mark.parametrize("shape", [(1, 70, 300, 90), (3, 33, 64, 20), (1, 1, 7, 1)])
def test_products_with_one_scale_per_row_match_float64(module, shape):
    lhs, rhs = gemm_cases.operands(Case(shape, (1, shape[2], 1), None))
    x, y = (Quantized(operand.main, None, (1, None)) for operand in (lhs, rhs))
    product = jax.jit(functools.partial(module.matmul, dtype=jnp.float32))(x, y)
    assert oracle.relative(product, gemm_cases.exact(lhs, rhs)) <= 1e-5


@pytest.mark.parametrize("module", [xla_gemm, reference])
def test_a_long_contraction_with_one_scale_does_not_overflow(module):
    k = 140_000
    term = Term(jnp.full((1, 2, k), 127, jnp.int8), jnp.full((1, 2, 1), 1e-3))
    operand = Quantized(term, None, (1, None))
    multiply = jax.jit(functools.partial(module.matmul, dtype=jnp.float32))
    expected = 127 * 127 * k * 1e-6
    np.testing.assert_allclose(multiply(operand, operand), expected, rtol=1e-5)


def product_and_sum(module, dtype):
    """A product, its sum with something else, and the arguments of both."""
    lhs, rhs = gemm_cases.operands(Case((1, 64, 128, 96), (1, 128, 1), None))
    x, y = (Quantized(operand.main, None, (1, None)) for operand in (lhs, rhs))
    z = jax.random.normal(jax.random.key(0), (1, 64, 96))

    def product(x, y, _):
        return module.matmul(x, y, dtype=dtype).astype(jnp.float32)

    return product, lambda *args: product(*args) + args[-1], (x, y, z)


@pytest.mark.parametrize("module", [xla_gemm, reference])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_a_sum_with_a_product_does_not_change_its_rounding(module, dtype):
    product, total, args = product_and_sum(module, dtype)
    optimized = {"xla_backend_optimization_level": 3}
    got = jax.jit(total).lower(*args).compile(compiler_options=optimized)(*args)
    np.testing.assert_array_equal(got, jax.jit(product)(*args) + args[-1])


@needs_compiler
def test_no_fusion_on_a_gpu_leaves_out_the_rounding_to_16_bits():
    _, total, args = product_and_sum(xla_gemm, "bfloat16")
    sharding = NamedSharding(h200s(1, "x"), P())
    shapes = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), args
    )
    text = jax.jit(total).lower(*shapes).compile().as_text()
    assert "reduce-precision" in text
    assert "bf16" not in text  # the sum is fused with the product's last step


# Triton.


@pytest.mark.parametrize("name", with_first_fast(["unaligned, fallback", "aligned"]))
def test_tiles_in_halves_match_float64(name):
    module = triton_tools.interpreted("gemm")
    config = module.Config(128, 128, halves=2, num_warps=4, num_stages=3, group=2)
    halves = functools.partial(triton, config=config)
    gemm_cases.check_against_float64(halves, CASES[name])


@pytest.mark.exhaustive
def test_nan_scales_of_small_blocks_propagate():
    gemm_cases.check_nan_scales(triton, (32, 64, 32))


@pytest.mark.parametrize(("op", "K"), [(triton, 140_032), (ampere, 600)])
def test_extreme_codes(op, K):
    """Ampere's conversion of the largest products is exact, too."""
    gemm_cases.check_extreme_codes(op, k=256, K=K)


@pytest.mark.parametrize("longest_first", [False, True])
@pytest.mark.parametrize(
    "shape", with_first_fast([(5, 1200), (2, 5), (1, 1), (70, 40)])
)
def test_steps_are_listed_in_order(shape, longest_first):
    """The matrices of a batch have residuals nowhere, in 30 % of blocks, everywhere."""
    rng = np.random.default_rng(0)
    shape = (3, *shape)
    scales = rng.random(shape, np.float32)
    is_used = rng.random(shape) < np.asarray([0.0, 0.3, 1.0])[:, None, None]
    residual = np.where(is_used, rng.random(shape, np.float32), np.float32(0))
    residual[:, 0, 0] = np.nan
    lists = triton_tools.interpreted("gemm_schedule").list_steps(
        jnp.asarray(scales), jnp.asarray(residual), longest_first=longest_first
    )
    used = np.count_nonzero(residual, axis=2)
    rows = np.argsort(-used * longest_first, axis=1, stable=True)
    np.testing.assert_array_equal(lists.rows, rows)
    for matrix, position in np.ndindex(shape[:2]):
        place, row = (matrix, position), (matrix, rows[matrix, position])
        expected = [
            (2 * j + term, scale)
            for j, pair in enumerate(zip(scales[row], residual[row], strict=True))
            for term, scale in enumerate(pair)
            if term == 0 or scale != 0
        ]
        assert lists.counts[place] == lists.regular_counts[place] == len(expected)
        expected += [(0, 0.0)] * (2 * shape[2] - len(expected))
        codes = [code for code, _ in expected]
        np.testing.assert_array_equal(lists.order[place], codes)
        np.testing.assert_array_equal(
            lists.scales[place], np.asarray([s for _, s in expected], np.float32)
        )


def test_outlier_steps_come_last():
    scales = np.asarray([[[1.0, 0.0, 2.0, 90.0, 0.5, np.nan, 1.0, 100.0]]], np.float32)
    residual = np.where(scales == 90.0, np.float32(0.5), 0)
    mean = 9000.0 ** (1 / 6)
    lists = triton_tools.interpreted("gemm_schedule").list_steps(
        jnp.asarray(scales), jnp.asarray(residual), outlier_ratio=80.0 / mean
    )
    assert (lists.regular_counts[0, 0], lists.counts[0, 0]) == (6, 9)
    expected = [1.0, 0.0, 2.0, 0.5, np.nan, 1.0, 90.0, 0.5, 100.0]
    np.testing.assert_array_equal(lists.scales[0, 0, :9], expected)
    np.testing.assert_array_equal(lists.order[0, 0, :9], [0, 2, 4, 8, 10, 12, 6, 7, 14])


def test_max_abs_sum():
    codes = np.random.default_rng(0).integers(-127, 128, (2, 256, 384)).astype(np.int8)
    codes[1, 200, 128:256] = -128
    sums = triton_tools.interpreted("abs_sums").max_abs_sum(jnp.asarray(codes))
    expected = np.abs(codes.astype(int)).reshape(2, 2, 128, 3, 128).sum(4)
    np.testing.assert_array_equal(sums, expected.max(2))
    assert sums[1, 1, 1] == 128 * 128


# TPUs.


@pytest.mark.parametrize("fallback", with_first_fast([0.3, None]))
def test_many_tiles_and_chunks(monkeypatch, fallback):
    """Tiles beyond the edges, and a chunk with fewer blocks than the others."""
    monkeypatch.setattr(tpu_gemm, "_MAX_ROWS", 256)
    monkeypatch.setattr(tpu_gemm, "_MAX_COLUMNS", 256)
    of_two_blocks = 256 * 256 * 12 + 2 * 2 * (128 * 3 * 256 + 4 * 256)
    monkeypatch.setattr(tpu_gemm, "_VMEM_OF_TILES", of_two_blocks)
    case = Case((1, 300, 900, 700), (128, 128, 128), fallback)
    gemm_cases.check_against_float64(tpu, case)


def test_a_block_without_a_scale_is_nan_in_its_rows_and_columns_only():
    """Steps that fill up a group multiply the first block, by 0."""
    lhs, rhs = gemm_cases.operands(CASES["aligned, fallback"])
    lhs = gemm_cases.with_scales(lhs, lambda s: s.at[0, 0, 1].set(jnp.nan))
    got = tpu(lhs, rhs, dtype=jnp.float32)
    assert np.isnan(got[0]).all()
    assert np.isfinite(got[1]).all()


def test_steps_are_those_used_in_order():
    scales = jnp.arange(1.0, 4.0).reshape(1, 1, 1, 3)
    residual = jnp.asarray([0.0, jnp.nan, 5.0]).reshape(1, 1, 1, 3)
    found = steps.list_used(scales, residual, multiple=4)
    assert found.counts.item() == 8
    np.testing.assert_array_equal(found.order[0, 0, 0], [0, 2, 3, 4, 5, 0, 0, 0])
    np.testing.assert_array_equal(found.scales[0, 0, 0], [1, 2, np.nan, 3, 5, 0, 0, 0])


def test_tiles_fit_into_memory():
    for M, N, blocks in [(1, 1, 1), (8192, 4096, 32), (65536, 28672, 512)]:
        for terms, k in [(1, 128), (2, 128), (2, 256)]:
            shape = jax.ShapeDtypeStruct((1, M, N), jnp.float32)
            tiling = tpu_gemm.choose_tiling(shape, blocks, k, terms)
            assert tiling.blocks * tiling.chunks >= blocks
            codes = tiling.blocks * k * (terms * tiling.rows + tiling.columns)
            outputs = tiling.rows * tiling.columns * (4 + 2 * 4)
            assert 2 * codes + outputs < tpu_gemm.VMEM_LIMIT
