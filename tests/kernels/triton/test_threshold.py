"""The delay threshold's kernel, in Triton's interpreter and compiled."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fbq_jax.kernels import threshold_reference
from tests.kernels import threshold_cases, triton_tools
from tests.marks import rows_with_first_fast, with_first_fast


def check(name, size):
    threshold_cases.check(triton_tools.interpreted("threshold"), name, size)


@pytest.mark.parametrize(
    ("name", "size"),
    rows_with_first_fast(itertools.product(threshold_cases.METRICS, [64, 1]), 2),
)
def test_matches_the_reference(name, size):
    check(name, size)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", threshold_cases.METRICS)
@pytest.mark.parametrize("size", [3000, 9000])
def test_many_blocks_match_the_reference(name, size):
    check(name, size)


def test_blocks_of_several_chunks_match_the_reference():
    check("ordinary", 3000)


@pytest.mark.parametrize("capability", with_first_fast([80, 90]))
def test_compiles_without_spills(capability):
    blocks, scalar = jnp.ones((2, 7168)), jax.ShapeDtypeStruct((2,), jnp.int32)
    theta, count = jnp.ones(2), jax.ShapeDtypeStruct((2,), jnp.uint32)
    (kernel,) = triton_tools.compile_kernels(
        "threshold",
        "move_threshold",
        *(blocks, blocks, theta, scalar, scalar, count),
        capability=capability,
        target_rate=(0.1, 0.3),
        alpha=1.3,
    )
    assert kernel.spills == 0


def test_unset_is_one_value():
    """Kernels test the sign only."""
    assert threshold_reference.UNSET < 0.0
    assert np.float32(threshold_reference.UNSET) == threshold_reference.UNSET
