"""Strict settings for every test: four fake devices, no implicit promotion."""

import os

# Before JAX starts: its first backend reads it once.
os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=4"
)

import jax
import pytest

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skips what is marked ``gpu`` where there is none."""
    if item.get_closest_marker("gpu") and jax.default_backend() != "gpu":
        pytest.skip("needs a GPU")
