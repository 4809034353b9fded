"""The kernels on a GPU: accuracy, equal bits, special values and repeatability."""

import functools
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fbq_jax import ops
from fbq_jax.ops import dispatch
from tests.kernels import fused_cases, gemm_cases, quantize_cases, threshold_cases
from tests.kernels.gemm_cases import CASES, Case
from tests.kernels.test_reference import heavy

pytestmark = pytest.mark.gpu

SIDES = (32, 64, 128, 256)


def ops_of(implementation: str, block_shape=(128, 128, 128)) -> SimpleNamespace:
    """The ops of an implementation; skips the test if it does not run here."""
    try:
        dispatch.choose("matmul", block_shape, implementation=implementation)
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


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_matmul_rounds_once(matmul, dtype):
    gemm_cases.check_rounds_once(matmul, dtype)


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


@pytest.mark.parametrize("case", fused_cases.QUANTIZE)
def test_fused_quantization(quantization, case):
    fused_cases.check_norm(quantization, *case)
    fused_cases.check_gate(quantization, *case)


@pytest.mark.parametrize("case", fused_cases.GRAD)
def test_gate_gradients(quantization, case):
    fused_cases.check_grad(quantization, *case)


@pytest.mark.parametrize("criterion", ["l1", "l1_rel"])
def test_large_metrics(quantization, criterion):
    quantize_cases.check_large_metrics(quantization, criterion)


@pytest.mark.parametrize("dtype", quantize_cases.SPECIAL_DTYPES)
def test_special_values_of_fused_quantization(quantization, dtype):
    fused_cases.check_special(quantization, dtype)


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
