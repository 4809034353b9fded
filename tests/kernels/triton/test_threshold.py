"""The delay threshold's kernel, in Triton's interpreter."""

import itertools

import numpy as np
import pytest

from fbq_jax.kernels import quantized
from tests.kernels import threshold_cases, triton_tools
from tests.marks import rows_with_first_fast


@pytest.mark.parametrize(
    ("name", "size"),
    rows_with_first_fast(
        [
            *itertools.product(threshold_cases.METRICS, [64, 1, 3000]),
            *[(name, 9000) for name in ("ordinary", "tied")],
        ],
        3,
    ),
)
def test_matches_the_reference(name, size):
    threshold_cases.check(triton_tools.interpreted("threshold"), name, size)


def test_unset_is_one_value():
    """Kernels test the sign only."""
    assert quantized.UNSET < 0.0
    assert np.float32(quantized.UNSET) == quantized.UNSET
