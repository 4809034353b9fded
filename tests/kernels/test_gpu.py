"""The kernels on a GPU: accuracy, equal bits, special values and repeatability."""

import dataclasses
import functools
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fbq_jax import ops, ragged_dot, recipes, save_codes
from fbq_jax.kernels import reference
from fbq_jax.kernels.mosaic import gemm
from fbq_jax.kernels.quantized import CODE_DTYPES
from fbq_jax.kernels.sources import Matrix
from fbq_jax.ops import dispatch
from fbq_jax.ops.dispatch import Request
from tests import oracle
from tests.kernels import (
    gemm_cases,
    grouped_cases,
    quantize_cases,
    quantize_matmul_cases,
    threshold_cases,
)
from tests.kernels.gemm_cases import CASES, Case
from tests.kernels.grouped_cases import Case as Experts
from tests.kernels.mosaic.test_gemm import build_in_parts
from tests.kernels.quantize_cases import heavy, near, noisy
from tests.marks import rows_with_first_fast

pytestmark = pytest.mark.gpu

SIDES = (32, 64, 128, 256)
ALL_EXPERTS = grouped_cases.CASES | grouped_cases.ROW_CASES | grouped_cases.SMALL_CASES


both = pytest.mark.parametrize("implementation", ["mosaic", "triton"])


def ops_of(
    implementation: str, block_shape=(128, 128, 128), codes="int8", grouped=False
) -> SimpleNamespace:
    """The ops of an implementation; skips the test if it does not run here."""
    try:
        request = Request("matmul", block_shape, codes, grouped)
        dispatch.choose_for(request, implementation)
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


@pytest.fixture
def quantize(quantization):
    return quantization.quantize


def test_first_choice():
    """If no kernel ran here, all tests below would be skipped."""
    hopper = jax.devices()[0].compute_capability == "9.0"
    expected = "mosaic" if hopper else "triton"
    assert dispatch.choose("matmul", (128, 128, 128)).implementation == expected


@pytest.mark.parametrize("implementation", dispatch.IMPLEMENTATIONS)
@pytest.mark.parametrize(
    "case",
    [
        *CASES.values(),
        *(gemm_cases.FLOAT8_CASES | gemm_cases.FLOAT8_SMALL_CASES).values(),
    ],
)
def test_matmul_matches_float64(implementation, case):
    """Tensor cores keep about 14 bits of a sum of products of FP8 codes."""
    matmul = ops_of(implementation, case.blocks, case.dtype).matmul
    is_exact = implementation == "reference" or case.dtype == "int8"
    gemm_cases.check_against_float64(matmul, case, 1e-5 if is_exact else 2e-3)


@pytest.mark.parametrize("blocks", [(128, 128, 128), (1, 128, 128)])
def test_tiles_in_parts_have_the_same_products(monkeypatch, blocks):
    """A program for several devices divides the thread blocks of the GEMM."""
    ops_of("mosaic")
    fallback = 0.2 if blocks[0] > 1 else None
    args = gemm_cases.operands(Case((1, 4096, 512, 20480), blocks, fallback))
    multiply = functools.partial(gemm.matmul, dtype=jnp.bfloat16)
    whole = jax.jit(multiply)(*args)
    problems = build_in_parts(monkeypatch)
    parts = jax.jit(functools.partial(multiply))(*args)
    assert {problem.num_parts for problem in problems} == {5}
    np.testing.assert_array_equal(parts, whole)


@pytest.mark.parametrize("dtype", quantize_cases.SPECIAL_DTYPES)
def test_special_float8_quantization(dtype):
    quantize = ops_of("triton", codes="float8_e4m3fn").quantize
    for case in quantize_cases.special_float8(dtype):
        quantize_cases.check(quantize, case)


@pytest.mark.parametrize("name", gemm_cases.CHECKS)
def test_products(matmul, name):
    gemm_cases.CHECKS[name](matmul)


@pytest.mark.parametrize(
    ("blocks", "fallback", "codes"),
    [
        ((128, 128, 128), 0.2, "int8"),
        ((1, 128, 128), None, "int8"),
        ((1, 128, 1), None, "int8"),
        ((1, 128, 128), None, "float8_e4m3fn"),
        ((1, 128, 1), None, "float8_e4m3fn"),
    ],
)
@both
def test_matmul_has_no_race(implementation, blocks, fallback, codes):
    case = Case((1, 2048, 2048, 2048), blocks, fallback, codes)
    matmul = ops_of(implementation, blocks, codes).matmul
    multiply = functools.partial(matmul, dtype=jnp.bfloat16)
    _check_repeats(multiply, *gemm_cases.operands(case))


@pytest.mark.parametrize(
    ("rowwise", "colwise", "criterion"),
    [
        (near(128, 128), noisy(128, 128), "l1"),
        (near(1, 128), noisy(128, 1), None),
        (near(1, 128), noisy(128, 128), None),
    ],
)
def test_quantization_has_no_race(quantize, rowwise, colwise, criterion):
    x = heavy((1, 2048, 2048), dtype=jnp.bfloat16)
    theta = jnp.asarray([500.0], jnp.float32)

    def quantize_and_mask(x, theta):
        """Sets codes of unused residuals, which the kernel does not write, to 0."""
        seeds, how = quantize_cases.folded_seeds(1), {"criterion": criterion}
        out = quantize(x, seeds, theta, rowwise=rowwise, colwise=colwise, **how)
        residual = out.rowwise.residual
        if residual is None:
            return out
        is_used = jnp.repeat(jnp.repeat(residual.scales != 0, 128, 1), 128, 2)
        codes = jnp.where(is_used, residual.codes, jnp.int8(0))
        return out.rowwise.main, residual._replace(codes=codes), out.colwise, out.metric

    _check_repeats(quantize_and_mask, x, theta)


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


@pytest.mark.parametrize("case", quantize_cases.ALL)
def test_quantize(case):
    codes = case.options.get("dtype", "int8")
    quantize_cases.check(ops_of("triton", codes=codes).quantize, case)


@pytest.mark.parametrize("shape", [(0, 64, 64), (2, 0, 64), (2, 64, 0)])
def test_no_vectors(quantize, shape):
    source = quantize_cases.matrix(shape, "bfloat16")
    case = quantize_cases.Case(source, near(1, None), noisy(None, 1))
    quantize_cases.check(quantize, case)


@pytest.mark.parametrize("dtype", quantize_cases.SPECIAL_DTYPES)
def test_special_values(quantize, dtype):
    for case in (
        *quantize_cases.special_blocks(dtype),
        *quantize_cases.special_vectors(dtype),
        *quantize_cases.special_rows(dtype),
    ):
        quantize_cases.check(quantize, case)
    quantize_cases.check_special_layers(quantize, dtype)


@pytest.mark.parametrize("codes", CODE_DTYPES)
@pytest.mark.parametrize("block", [(32, 32), (64, 64), (128, 128), (256, 256)])
def test_transposed_codes_beside_maxima_of_nans(codes, block):
    """Triton stored wrong bytes there: triton-lang/triton issue 11111."""
    x = jnp.asarray(heavy((2, 520, 780), dtype=jnp.bfloat16))
    x = x.at[:, ::300, ::300].set(jnp.nan)
    case = quantize_cases.Case(
        lambda: Matrix(x), near(*block), near(*block), {"dtype": codes}
    )
    out = quantize_cases.check(ops_of("triton", codes=codes).quantize, case)
    is_finite = np.isfinite(out.rowwise.scales)
    assert 0 < is_finite.sum() < is_finite.size


@pytest.mark.parametrize("rows", [16, 32, 64, 128, 300])
@both
def test_two_products_into_one_accumulator(implementation, rows):
    """Triton summed them wrongly on other GPUs: triton-lang/triton issue 10821."""
    matmul = ops_of(implementation).matmul
    case = Case((1, rows, 2048, 512), (128, 128, 128), 1.0)
    gemm_cases.check_against_float64(matmul, case, 1e-5)


@pytest.mark.parametrize("criterion", ["l1", "l1_rel"])
def test_large_metrics(quantize, criterion):
    quantize_cases.check_large_metrics(quantize, criterion)


@pytest.mark.parametrize("name", quantize_matmul_cases.CASES)
def test_quantization_in_the_product(quantization, name):
    case = quantize_matmul_cases.CASES[name]
    quantize_matmul_cases.check(quantization.matmul, case)


@pytest.mark.parametrize("rows", [1, 2, 7, 8, 16, 31, 32])
@pytest.mark.parametrize("theta", [None, 100.0])
def test_quantization_in_large_products(quantization, rows, theta):
    """With few columns, several programs share the K blocks of a tile."""
    for columns, depth in ((1024, 4096), (4096, 1024), (28672, 512)):
        shape = 1, rows, depth, columns
        thetas = None if theta is None else (theta,)
        case = quantize_matmul_cases.Case(shape, (128, 128, 128), thetas)
        quantize_matmul_cases.check(quantization.matmul, case)


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
        quantize_matmul_cases.check(quantization.matmul, case)


@pytest.mark.parametrize("fallback", [False, True])
@pytest.mark.parametrize("dtype", quantize_cases.SPECIAL_DTYPES)
def test_special_blocks_in_the_product(quantization, dtype, fallback):
    quantize_matmul_cases.check_special(quantization.matmul, dtype, fallback)


@both
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
@pytest.mark.parametrize("codes", CODE_DTYPES)
def test_ordered_sums_do_not_depend_on_the_rows(implementation, codes, dtype):
    """Kernels for few rows and for many add the same products in the same order."""
    blocks = 1, 128, 128
    run = functools.partial(
        ops_of(implementation, blocks, codes).matmul, dtype=dtype, ordered=True
    )
    lhs, rhs = gemm_cases.operands(Case((1, 512, 2200, 300), blocks, None, codes))
    expected = np.asarray(run(lhs, rhs))
    for rows in (1, 8, 31, 128, 200, 256):
        part = jax.tree.map(lambda x, rows=rows: x[:, :rows], lhs)
        np.testing.assert_array_equal(run(part, rhs), expected[:, :rows])


@both
def test_ordered_sums_of_rows_that_the_product_quantizes(implementation):
    blocks = 1, 128, 128
    run = functools.partial(
        ops_of(implementation, blocks).matmul, dtype=jnp.bfloat16, ordered=True
    )
    case = quantize_matmul_cases.Case((1, 256, 2200, 300), blocks, None)
    lhs, rhs = quantize_matmul_cases.operands(case)
    expected = np.asarray(run(reference.quantize_nearest(lhs), rhs))
    for rows in (1, 3, 8):
        few = dataclasses.replace(lhs, values=lhs.values[:, :rows])
        np.testing.assert_array_equal(run(few, rhs), expected[:, :rows])


def test_quantization_in_the_product_has_no_race(quantization):
    case = quantize_matmul_cases.Case((1, 8, 4096, 4096), (128, 128, 128), (100.0,))
    multiply = functools.partial(quantization.matmul, dtype=jnp.bfloat16)
    _check_repeats(multiply, *quantize_matmul_cases.operands(case))


@both
@pytest.mark.parametrize("seed", range(5))
def test_small_problems(implementation, seed):
    """Each of 10 random shapes runs as a batch of 500 problems.

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
        of_x = {"rowwise": near(m, k), "colwise": noisy(m, k), "criterion": "absmax"}
        of_w = {"rowwise": near(n, k), "colwise": noisy(n, k)}
        lhs = ops.quantize(Matrix(x), seeds, theta, **of_x)
        rhs = ops.quantize(Matrix(w), seeds, **of_w)
        y = ops.matmul(lhs.rowwise, rhs.rowwise, dtype=jnp.float32)
        # Codes of residuals that are not used have no meaning.
        main, residual = lhs.rowwise.main, lhs.rowwise.residual.scales
        return residual, (main, lhs.colwise, lhs.metric, rhs), y

    residual, quantized, y = run(ops_of(implementation, (m, k, n)))
    expected_residual, expected, expected_y = run(ops_of("reference"))
    assert 0 < jnp.mean(expected_residual != 0) < 1
    np.testing.assert_array_equal(residual, expected_residual)
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


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("name", ALL_EXPERTS)
@both
def test_products_of_groups_match_float64(implementation, name, dtype):
    case = ALL_EXPERTS[name]
    ops = ops_of(implementation, case.blocks, case.dtype, grouped=True)
    if implementation == "mosaic" and case.fallback and case.blocks[0] == 1:
        pytest.skip("it has no residual with scales of rows")
    # Tensor cores keep about 14 bits of a sum of products of FP8 codes.
    tolerance = None if case.dtype == "int8" else 3e-3
    grouped_cases.check_matmul(ops.matmul, case, dtype, tolerance)
    grouped_cases.check_contract(ops.contract, case, dtype, tolerance)


@both
def test_nan_stays_in_its_group(implementation):
    grouped_cases.check_nan_stays_in_its_group(ops_of(implementation))


@both
@pytest.mark.parametrize(
    "granularity",
    [
        {"blocks": (128, 128, 128), "fallback": 0.2},
        {"blocks": (1, 128, 128), "tile": 128, "columns": (1, 128)},
    ],
)
def test_products_of_groups_have_no_race(implementation, granularity):
    ops = ops_of(implementation, granularity["blocks"], grouped=True)
    sizes = 700, 0, 128, 1, 2000, 259
    case = Experts(sum(sizes), sizes, (1024, 1600), **granularity)
    lhs, rhs, lhs_columns, grad_columns, groups = grouped_cases.problem(case)

    def multiply(*args):
        y = ops.matmul(*args, dtype=jnp.bfloat16)
        return jnp.where((groups < len(sizes))[:, None, None], y, jnp.zeros_like(y))

    _check_repeats(multiply, lhs, rhs, groups)
    contract = functools.partial(ops.contract, size=len(sizes), dtype=jnp.bfloat16)
    _check_repeats(contract, lhs_columns, grad_columns, groups)


@both
@pytest.mark.parametrize("name", ["fallback", "row_block_lhs"])
def test_experts_in_a_rematerialized_scan(implementation, name):
    """Y and all gradients, with several loads in one program."""
    ops_of(implementation)
    x = heavy((600, 256), dtype=jnp.bfloat16) / 20
    w = jax.random.normal(jax.random.key(1), (2, 5, 256, 256), jnp.bfloat16) / 16

    def grads(x, w, sizes, implementation):
        dot = functools.partial(
            ragged_dot,
            recipe=recipes.NAMED[name],
            theta=2.0,
            key=jax.random.key(2),
            implementation=implementation,
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


# Five hundred loads of each implementation.
@both
@pytest.mark.parametrize(
    ("seed", "loads"),
    rows_with_first_fast(
        [*[(seed, 8) for seed in range(3)], *[(1000 + seed, 40) for seed in range(12)]],
        3,
    ),
)
def test_random_experts(implementation, seed, loads):
    side = 128 if implementation == "mosaic" else 32
    ops = ops_of(implementation, (side,) * 3)
    grouped_cases.check_random_problems(ops, ops_of("reference"), seed, loads, side)


@pytest.mark.parametrize("dtype", quantize_cases.SPECIAL_DTYPES)
@pytest.mark.parametrize("block", [(128, 128), (32, 256)])
@pytest.mark.parametrize("scale", [1.0, 2.0**-10])
def test_codes_and_scales_of_the_reference_equal_those_on_a_cpu(dtype, block, scale):
    x = (heavy((2, 1000, 1500)) * scale).astype(dtype)
    seeds = quantize_cases.plain_seeds(2)
    theta = scale * jnp.asarray([20.0, 2.0])
    for rowwise, colwise, criterion in (
        (near(*block), near(*block), None),
        (noisy(*block), noisy(*block), None),
        (near(1, None), noisy(None, 1), None),
        (near(*block), noisy(*block), "absmax"),
    ):
        how = {"rowwise": rowwise, "colwise": colwise, "criterion": criterion}
        results = {}
        for platform in ("cpu", "gpu"):
            device = jax.devices(platform)[0]
            with jax.default_device(device):
                function = jax.jit(functools.partial(reference.quantize, **how))
                operands = Matrix(x), seeds, None if criterion is None else theta
                results[platform] = function(*jax.device_put(operands, device))
        jax.tree.map(np.testing.assert_array_equal, results["gpu"], results["cpu"])
