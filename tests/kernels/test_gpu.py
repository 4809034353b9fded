"""The kernels on a GPU: accuracy, equal bits, special values and repeatability."""

import functools
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fbq_jax import ops, ragged_dot, save_codes
from fbq_jax.kernels.mosaic import gemm
from fbq_jax.ops import dispatch
from tests import oracle
from tests.kernels import (
    fused_cases,
    gemm_cases,
    grouped_cases,
    quantize_cases,
    quantize_matmul_cases,
    threshold_cases,
)
from tests.kernels.gemm_cases import CASES, Case
from tests.kernels.grouped_cases import Case as Experts
from tests.kernels.mosaic.test_gemm import build_in_parts
from tests.kernels.test_reference import heavy

pytestmark = pytest.mark.gpu

SIDES = (32, 64, 128, 256)
# Shapes of experts, and the loads of each: a thousand for each implementation.
SHAPES_OF_EXPERTS, LOADS = 25, 40
ALL_EXPERTS = grouped_cases.CASES | grouped_cases.SMALL_CASES


def ops_of(
    implementation: str, block_shape=(128, 128, 128), codes="int8"
) -> SimpleNamespace:
    """The ops of an implementation; skips the test if it does not run here."""
    try:
        dispatch.choose(
            "matmul", block_shape, codes=codes, implementation=implementation
        )
    except ValueError as error:
        pytest.skip(str(error))
    return SimpleNamespace(
        **{
            name: functools.partial(getattr(ops, name), implementation=implementation)
            for name in dispatch.OPS
        }
    )


@pytest.fixture(params=["mosaic", "triton"])
def matmul(request):
    return ops_of(request.param).matmul


@pytest.fixture
def quantization():
    return ops_of("triton")


def test_first_choice():
    """If no kernel ran here, all tests below would be skipped."""
    hopper = jax.devices()[0].compute_capability == "9.0"
    expected = "mosaic" if hopper else "triton"
    assert dispatch.choose("matmul", (128, 128, 128)).implementation == expected


@pytest.mark.parametrize("implementation", dispatch.IMPLEMENTATIONS)
@pytest.mark.parametrize("name", CASES)
def test_matmul_matches_float64(implementation, name):
    case = CASES[name]
    matmul = ops_of(implementation, case.blocks).matmul
    gemm_cases.check_against_float64(matmul, case)


@pytest.mark.parametrize("implementation", dispatch.IMPLEMENTATIONS)
@pytest.mark.parametrize(
    "case", (gemm_cases.FLOAT8_CASES | gemm_cases.FLOAT8_SMALL_CASES).values()
)
def test_float8_matmul_matches_float64(implementation, case):
    """Tensor cores keep about 14 bits of a sum of products of FP8 codes."""
    matmul = ops_of(implementation, case.blocks, case.dtype).matmul
    tolerance = 1e-5 if implementation == "reference" else 2e-3
    gemm_cases.check_against_float64(matmul, case, tolerance)


@pytest.mark.parametrize("blocks", [(128, 128, 128), (1, 128, 128)])
def test_tiles_in_parts_have_the_same_products(monkeypatch, blocks):
    """A program for several devices divides the thread blocks of the GEMM."""
    ops_of("mosaic")
    fallback = 0.2 if blocks[0] > 1 else None
    args = gemm_cases.operands(Case((1, 4096, 512, 20480), blocks, fallback))
    options = {"block_shape": blocks, "dtype": jnp.bfloat16}
    whole = jax.jit(functools.partial(gemm.matmul, **options))(*args)
    problems = build_in_parts(monkeypatch)
    parts = jax.jit(functools.partial(gemm.matmul, **options))(*args)
    assert {problem.num_parts for problem in problems} == {5}
    np.testing.assert_array_equal(parts, whole)


@pytest.mark.parametrize("implementation", ["mosaic", "triton"])
@pytest.mark.parametrize("blocks", [(1, 128, 128), (1, 128, 1)])
def test_float8_matmul_has_no_race(implementation, blocks):
    case = Case((1, 2048, 2048, 2048), blocks, None, "float8_e4m3fn")
    matmul = ops_of(implementation, blocks, case.dtype).matmul
    multiply = functools.partial(matmul, block_shape=blocks, dtype=jnp.bfloat16)
    _check_repeats(multiply, *gemm_cases.operands(case))


@pytest.mark.parametrize("case", quantize_cases.FLOAT8)
def test_float8_quantization(case):
    quantization = ops_of("triton", codes="float8_e4m3fn")
    shape, dtype, *options = case
    x = heavy(shape, dtype=dtype)
    quantize_cases.check_float8(quantization, quantization, x, *options)


@pytest.mark.parametrize("dtype", quantize_cases.SPECIAL_DTYPES)
def test_special_float8_quantization(dtype):
    quantization = ops_of("triton", codes="float8_e4m3fn")
    quantize_cases.check_special_float8(quantization, quantization, dtype)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_matmul_rounds_once(matmul, dtype):
    gemm_cases.check_rounds_once(matmul, dtype)


@pytest.mark.parametrize("name", ["scales of rows", "scales of rows and columns"])
def test_matmul_with_scales_of_rows_rounds_once(matmul, name):
    gemm_cases.check_rounds_once(matmul, jnp.bfloat16, name)


@pytest.mark.parametrize("blocks", [(1, 128, 128), (1, 128, 1)])
def test_matmul_with_scales_of_rows_has_no_race(matmul, blocks):
    args = gemm_cases.operands(Case((1, 2048, 2048, 2048), blocks, None))
    multiply = functools.partial(matmul, block_shape=blocks, dtype=jnp.bfloat16)
    _check_repeats(multiply, *args)


@pytest.mark.parametrize(
    ("sign", "sums"), [(1, None), (-1, None), (1, 127.0 * 256), (-1, np.nan)]
)
def test_matmul_largest_sums(matmul, sign, sums):
    gemm_cases.check_largest_sums(matmul, sign, sums)


def test_matmul_largest_sum_at_the_end(matmul):
    gemm_cases.check_largest_sums(matmul, 1, zero_columns=16)


def test_matmul_outlier_with_residual(matmul):
    gemm_cases.check_outlier_with_residual(matmul)


def test_matmul_outlier_scale(matmul):
    gemm_cases.check_outlier_scale(matmul)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_matmul_extreme_scales(matmul, dtype):
    gemm_cases.check_extreme_scales(matmul, dtype)


def test_matmul_nan_scales(matmul):
    gemm_cases.check_nan_scales(matmul, (128, 128, 128))


def test_matmul_extreme_codes(matmul):
    gemm_cases.check_extreme_codes(matmul, k=128)


def test_matmul_has_no_race(matmul):
    args = gemm_cases.operands(Case((1, 2048, 2048, 2048), (128, 128, 128), 0.2))
    multiply = functools.partial(
        matmul, block_shape=(128, 128, 128), dtype=jnp.bfloat16
    )
    _check_repeats(multiply, *args)


def test_quantization_has_no_race(quantization):
    x = heavy((1, 2048, 2048), dtype=jnp.bfloat16)
    quantize = functools.partial(
        quantization.quantize_fallback,
        block=(128, 128),
        criterion="l1",
        colwise="stochastic",
    )
    theta = jnp.asarray([500.0], jnp.float32)

    def quantize_and_mask(*args):
        """Sets codes of unused residuals, which the kernel does not write, to 0."""
        out = quantize(*args)
        is_used = jnp.repeat(jnp.repeat(out.residual.scales != 0, 128, 1), 128, 2)
        codes = jnp.where(is_used, out.residual.codes, jnp.int8(0))
        return out._replace(residual=out.residual._replace(codes=codes))

    _check_repeats(quantize_and_mask, x, theta, quantize_cases.seeds(1))


def _check_repeats(function, *args):
    """A hundred calls must return the same bits."""
    first = function(*args)

    @jax.jit
    def equal(a, b):
        same = jax.tree.map(lambda a, b: jnp.all(_bits(a) == _bits(b)), a, b)
        return jnp.all(jnp.stack(jax.tree.leaves(same)))

    assert all(equal(first, function(*args)) for _ in range(100))


def _bits(x):
    return jax.lax.bitcast_convert_type(x, f"uint{8 * x.dtype.itemsize}")


@pytest.mark.parametrize(
    ("shape", "dtype", "block", "rows", "columns"), quantize_cases.QUANTIZE
)
def test_quantize(quantization, shape, dtype, block, rows, columns):
    x = heavy(shape, dtype=dtype)
    quantize_cases.check_quantize(quantization, x, block, rows, columns)


@pytest.mark.parametrize(
    ("shape", "dtype", "block", "criterion", "theta", "columns"),
    quantize_cases.FALLBACK,
)
def test_fallback(quantization, shape, dtype, block, criterion, theta, columns):
    x = heavy(shape, dtype=dtype)
    quantize_cases.check_fallback(quantization, x, block, criterion, theta, columns)


@pytest.mark.parametrize(("shape", "dtype", "rows", "columns"), quantize_cases.VECTORS)
def test_vectors(quantization, shape, dtype, rows, columns):
    x = heavy(shape, dtype=dtype)
    quantize_cases.check_vectors(quantization, x, rows, columns)


@pytest.mark.parametrize("case", quantize_cases.ROW_BLOCKS)
def test_row_blocks(quantization, case):
    shape, dtype, *options = case
    quantize_cases.check_row_blocks(quantization, heavy(shape, dtype=dtype), *options)


@pytest.mark.parametrize("case", quantize_cases.COLWISE_IN_BLOCKS)
def test_row_blocks_and_blocks(quantization, case):
    shape, dtype, *options = case
    x = heavy(shape, dtype=dtype)
    quantize_cases.check_colwise_in_blocks(quantization, x, *options)


def test_quantization_of_row_blocks_has_no_race(quantization):
    x = heavy((1, 2048, 2048), dtype=jnp.bfloat16)
    modes = {"block": (128, 128), "rowwise": "nearest", "colwise": "stochastic"}
    for option in ({}, {"colwise_in_blocks": True}):
        quantize = functools.partial(
            quantization.quantize_row_blocks, **modes, **option
        )
        _check_repeats(quantize, x, quantize_cases.seeds(1))


def test_per_tensor_scale(quantization):
    quantize_cases.check_per_tensor_scale(quantization, heavy((2, 300, 141)))


@pytest.mark.parametrize("shape", [(0, 64, 64), (2, 0, 64), (2, 64, 0)])
def test_no_vectors(quantization, shape):
    x = jnp.zeros(shape, jnp.bfloat16)
    quantize_cases.check_vectors(quantization, x, "nearest", "stochastic")


@pytest.mark.parametrize("dtype", quantize_cases.SPECIAL_DTYPES)
def test_special_blocks(quantization, dtype):
    quantize_cases.check_special(quantization, dtype)
    quantize_cases.check_special_vectors(quantization, dtype)
    quantize_cases.check_special_row_blocks(quantization, dtype)


@pytest.mark.parametrize("case", fused_cases.QUANTIZE)
def test_fused_quantization(quantization, case):
    fused_cases.check_norm(quantization, *case)
    fused_cases.check_gate(quantization, *case)


@pytest.mark.parametrize("case", fused_cases.GRAD)
def test_gate_gradients(quantization, case):
    fused_cases.check_grad(quantization, *case)


@pytest.mark.parametrize("case", fused_cases.ROW_BLOCKS)
def test_fused_quantization_in_row_blocks(case):
    quantization = ops_of("triton", codes=case[-1])
    fused_cases.check_norm_row_blocks(quantization, *case)
    fused_cases.check_gate_row_blocks(quantization, *case)
    fused_cases.check_grad_row_blocks(quantization, *case)


@pytest.mark.parametrize(
    ("case", "row_counts", "interleaved"), fused_cases.QUANTIZE_TILES
)
def test_gates_of_tiles(quantization, case, row_counts, interleaved):
    fused_cases.check_gate(quantization, *case, row_counts, interleaved)


@pytest.mark.parametrize(("case", "row_counts", "interleaved"), fused_cases.GRAD_TILES)
def test_gate_gradients_of_tiles(quantization, case, row_counts, interleaved):
    fused_cases.check_grad(quantization, *case, row_counts, interleaved)


@pytest.mark.parametrize("criterion", ["l1", "l1_rel"])
def test_large_metrics(quantization, criterion):
    quantize_cases.check_large_metrics(quantization, criterion)


@pytest.mark.parametrize("dtype", quantize_cases.SPECIAL_DTYPES)
def test_special_values_of_fused_quantization(quantization, dtype):
    fused_cases.check_special(quantization, dtype)


@pytest.mark.parametrize("name", quantize_matmul_cases.CASES)
def test_quantization_in_the_product(quantization, name):
    quantize_matmul_cases.check(quantization, quantize_matmul_cases.CASES[name])


@pytest.mark.parametrize("rows", [1, 2, 7, 8, 16, 31, 32])
@pytest.mark.parametrize("theta", [None, 100.0])
def test_quantization_in_large_products(quantization, rows, theta):
    """With few columns, several programs share the K blocks of a tile."""
    for columns, depth in ((1024, 4096), (4096, 1024), (28672, 512)):
        shape = 1, rows, depth, columns
        thetas = None if theta is None else (theta,)
        case = quantize_matmul_cases.Case(shape, (128, 128, 128), thetas)
        quantize_matmul_cases.check(quantization, case)


@pytest.mark.parametrize("seed", range(10))
def test_quantization_in_random_products(quantization, seed):
    rng = np.random.default_rng(seed)
    for _ in range(5):
        m, k, n = (int(side) for side in rng.choice(SIDES, 3))
        M, (K, N) = int(rng.integers(1, 33)), rng.integers(1, 1500, 2).tolist()
        theta = [None, (0.0,), (20.0,), (np.inf,)][rng.integers(4)]
        m = [m, 1][rng.integers(2)] if theta is None else m
        dtype = str(rng.choice(quantize_cases.SPECIAL_DTYPES))
        case = quantize_matmul_cases.Case((1, M, K, N), (m, k, n), theta, dtype)
        quantize_matmul_cases.check(quantization, case)


@pytest.mark.parametrize("fallback", [False, True])
@pytest.mark.parametrize("dtype", quantize_cases.SPECIAL_DTYPES)
def test_special_blocks_in_the_product(quantization, dtype, fallback):
    quantize_matmul_cases.check_special(quantization, dtype, fallback)


def test_quantization_in_the_product_has_no_race(quantization):
    case = quantize_matmul_cases.Case((1, 8, 4096, 4096), (128, 128, 128), (100.0,))
    multiply = functools.partial(
        quantization.quantize_matmul,
        block_shape=case.blocks,
        criterion="absmax",
        dtype=jnp.bfloat16,
    )
    _check_repeats(multiply, *quantize_matmul_cases.operands(case))


@pytest.mark.parametrize("implementation", ["mosaic", "triton"])
@pytest.mark.parametrize("seed", range(10))
def test_small_problems(implementation, seed):
    """Each of 20 random shapes runs as a batch of 500 problems.

    A problem quantizes floats and multiplies, with its own threshold, seed and data.
    The result is compared with the reference on the same GPU.
    """
    rng = np.random.default_rng(seed)
    batch = 500
    M, K, N = (int(size) for size in rng.integers(1, 301, 3))
    m, k, n = (int(side) for side in rng.choice(SIDES, 3))
    if implementation == "mosaic":
        m, k, n = (max(side, 128) for side in (m, k, n))
    keys = jax.random.split(jax.random.key(seed), 4)
    x = jax.random.normal(keys[0], (batch, M, K))
    x *= jnp.where(jax.random.uniform(keys[1], x.shape) < 1e-3, 200.0, 1.0)
    w = jax.random.normal(keys[2], (batch, N, K), jnp.bfloat16)
    theta = jnp.exp(jax.random.uniform(keys[3], (batch,), maxval=7.0))
    seeds = jnp.arange(batch, dtype=jnp.uint32) * jnp.uint32(seed + 1)

    def run(ops):
        lhs = ops.quantize_fallback(
            x, theta, seeds, block=(m, k), criterion="absmax", colwise="stochastic"
        )
        rhs = ops.quantize(
            w, seeds, block=(n, k), rowwise="nearest", colwise="stochastic"
        )
        y = ops.matmul(
            lhs.main,
            lhs.residual,
            rhs.rowwise,
            block_shape=(m, k, n),
            dtype=jnp.float32,
        )
        residual_scales = lhs.residual.scales
        return (lhs.main, lhs.colwise, lhs.metric, residual_scales, rhs), y

    quantized, y = run(ops_of(implementation, (m, k, n)))
    expected, expected_y = run(ops_of("reference"))
    assert 0 < jnp.mean(expected[3] != 0) < 1
    jax.tree.map(np.testing.assert_array_equal, quantized, expected)
    # The error of sums in another order is relative to the operands, not to the result.
    error, x_size, w_size = (
        jnp.linalg.norm(z, axis=(1, 2)) for z in (y - expected_y, x, w.astype(x.dtype))
    )
    assert jnp.all(error <= 1e-6 * x_size * w_size)


@pytest.mark.parametrize("name", threshold_cases.METRICS)
@pytest.mark.parametrize("size", [1, 64, 2048, 57344])
def test_threshold(name, size):
    threshold_cases.check(ops, name, size)


@pytest.mark.parametrize("case", grouped_cases.QUANTIZE)
def test_quantization_of_grouped_rows(quantization, case):
    grouped_cases.check_quantize(quantization, *case)


@pytest.mark.parametrize("case", grouped_cases.FALLBACK)
def test_fallback_of_grouped_rows(quantization, case):
    grouped_cases.check_fallback(quantization, *case)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("name", ALL_EXPERTS)
@pytest.mark.parametrize("implementation", ["mosaic", "triton"])
def test_products_of_groups_match_float64(implementation, name, dtype):
    case = ALL_EXPERTS[name]
    ops = ops_of(implementation, case.blocks)
    grouped_cases.check_matmul(ops.ragged_matmul, case, dtype)
    grouped_cases.check_contraction(ops.ragged_contraction, case, dtype)


@pytest.mark.parametrize("implementation", ["mosaic", "triton"])
def test_nan_stays_in_its_group(implementation):
    grouped_cases.check_nan_stays_in_its_group(ops_of(implementation))


@pytest.mark.parametrize("implementation", ["mosaic", "triton"])
def test_products_of_groups_have_no_race(implementation):
    ops = ops_of(implementation)
    sizes = 700, 0, 128, 1, 2000, 259
    case = Experts(sum(sizes), sizes, (1024, 1600), (128, 128, 128), 0.2)
    lhs, residual, rhs, lhs_columns, grad_columns, groups = grouped_cases.problem(case)
    options = {"block_shape": case.blocks, "dtype": jnp.bfloat16}

    def multiply(*args):
        y = ops.ragged_matmul(*args, **options)
        return jnp.where((groups < len(sizes))[:, None, None], y, jnp.zeros_like(y))

    _check_repeats(multiply, lhs, residual, rhs, groups)
    contract = functools.partial(ops.ragged_contraction, size=len(sizes), **options)
    _check_repeats(contract, lhs_columns, grad_columns, groups)


@pytest.mark.parametrize("implementation", ["mosaic", "triton"])
def test_experts_in_a_rematerialized_scan(implementation):
    """Y and all gradients, with several loads in one program."""
    ops_of(implementation)
    x = heavy((600, 256), dtype=jnp.bfloat16) / 20
    w = jax.random.normal(jax.random.key(1), (2, 5, 256, 256), jnp.bfloat16) / 16

    def grads(x, w, sizes, implementation):
        dot = functools.partial(
            ragged_dot, theta=2.0, key=jax.random.key(2), implementation=implementation
        )

        @functools.partial(jax.checkpoint, policy=save_codes)
        def layer(x, w):
            return jnp.tanh(dot(x, w, sizes)[0]), None

        def loss(x, w):
            y = jax.lax.scan(layer, x, w)[0]
            return jnp.sum(y.astype(jnp.float32) ** 2), y

        return jax.value_and_grad(loss, (0, 1), has_aux=True)(x, w)

    step = jax.jit(grads, static_argnums=3)
    for sizes in ((100, 0, 200, 7, 293), (0, 600, 0, 0, 0), (128, 128, 0, 128, 1)):
        args = x, w, jnp.array(sizes)
        (_, y), (dx, dw) = step(*args, implementation)
        (_, want_y), (want_dx, want_dw) = step(*args, "reference")
        for got, want in ((y, want_y), (dx, want_dx), (dw, want_dw)):
            # Outputs of 16 bits that round the other way change later codes.
            assert oracle.relative(got, np.asarray(want, np.float64)) <= 2e-2
        total = sum(sizes)
        assert not np.any(np.asarray(y[total:], np.float32))
        assert not np.any(np.asarray(dx[total:], np.float32))
    assert step._cache_size() == 2


@pytest.mark.parametrize("implementation", ["mosaic", "triton"])
@pytest.mark.parametrize("seed", range(3))
def test_random_experts(implementation, seed):
    _check_random_experts(implementation, seed, loads=8)


@pytest.mark.exhaustive
@pytest.mark.parametrize("implementation", ["mosaic", "triton"])
@pytest.mark.parametrize("seed", range(SHAPES_OF_EXPERTS))
def test_many_random_experts(implementation, seed):
    _check_random_experts(implementation, 1000 + seed, LOADS)


def _check_random_experts(implementation, seed, loads):
    side = 128 if implementation == "mosaic" else 32
    ops = ops_of(implementation, (side,) * 3)
    grouped_cases.check_random_problems(ops, ops_of("reference"), seed, loads, side)
