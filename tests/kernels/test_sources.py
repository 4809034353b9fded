"""Sources round their values once, on every device."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from fbq_jax.kernels import layer_sources
from tests.gpus import h200s, needs_compiler


@jax.jit
def rounded(x):
    """Rounds to float16; XLA may remove the casts."""
    return layer_sources.round_to(x, jnp.float16).astype(jnp.float32)


@pytest.mark.parametrize("largest", [2.0**-14, 2.0**-20, 1.0, 1e5])
def test_float16_has_the_values_of_a_cast(largest):
    """Subnormal numbers, ties between them, normal numbers and overflows."""
    steps = np.arange(-(2**13), 2**13 + 1) / 2**13
    x = np.float32(largest * steps)
    with np.errstate(over="ignore"):
        np.testing.assert_array_equal(rounded(x), np.float16(x).astype(np.float32))


@needs_compiler
def test_a_gpu_rounds_subnormal_numbers_of_float16():
    """XLA removes a sum and its inverse."""
    sharding = NamedSharding(h200s(1, "x"), PartitionSpec())
    x = jax.ShapeDtypeStruct((1024,), jnp.float32, sharding=sharding)
    text = rounded.lower(x).compile().as_text()
    assert "round-nearest-even(" in text
    assert "reduce-precision(" in text
