"""The GEMM for TPUs, interpreted."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fbq_jax.kernels.tpu import gemm, steps
from tests.kernels import gemm_cases
from tests.kernels.gemm_cases import CASES, Case
from tests.kernels.tpu_tools import interpreted, jitted  # noqa: F401 (a fixture)
from tests.marks import slow, with_first_fast

pytestmark = pytest.mark.usefixtures("interpreted")

matmul = jitted(gemm.matmul)

SUPPORTED = [n for n, c in CASES.items() if set(c.blocks) <= {128, 256}]
FAST = "unaligned, fallback", "one element"


@pytest.mark.parametrize("name", slow(SUPPORTED, set(SUPPORTED) - set(FAST)))
def test_multiplies(name):
    gemm_cases.check_against_float64(matmul, CASES[name])


@pytest.mark.parametrize("fallback", with_first_fast([0.3, None]))
def test_many_tiles_and_chunks(monkeypatch, fallback):
    """Tiles beyond the edges, and a chunk with fewer blocks than the others."""
    monkeypatch.setattr(gemm, "_MAX_ROWS", 256)
    monkeypatch.setattr(gemm, "_MAX_COLUMNS", 256)
    of_two_blocks = 256 * 256 * 12 + 2 * 2 * (128 * 3 * 256 + 4 * 256)
    monkeypatch.setattr(gemm, "_VMEM_OF_TILES", of_two_blocks)
    case = Case((1, 300, 900, 700), (128, 128, 128), fallback)
    gemm_cases.check_against_float64(matmul, case)


@pytest.mark.parametrize(
    "name",
    [
        *("rounds once to bfloat16", "outlier scale", "outlier with residual"),
        pytest.param("rounds once to float16", marks=pytest.mark.exhaustive),
    ],
)
def test_products(name):
    gemm_cases.CHECKS[name](matmul)


def test_a_block_without_a_scale_is_nan_in_its_rows_and_columns_only():
    """Steps that fill up a group multiply the first block, by 0."""
    lhs, rhs = gemm_cases.operands(CASES["aligned, fallback"])
    lhs = gemm_cases.with_scales(lhs, lambda s: s.at[0, 0, 1].set(jnp.nan))
    got = matmul(lhs, rhs, dtype=jnp.float32)
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
            tiling = gemm.choose_tiling(shape, blocks, k, terms)
            assert tiling.blocks * tiling.chunks >= blocks
            codes = tiling.blocks * k * (terms * tiling.rows + tiling.columns)
            outputs = tiling.rows * tiling.columns * (4 + 2 * 4)
            assert 2 * codes + outputs < gemm.VMEM_LIMIT
