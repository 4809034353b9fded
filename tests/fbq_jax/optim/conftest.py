"""Fixtures that tests of optimizers share."""

import jax
import pytest


@pytest.fixture(autouse=True)
def standard_promotion():
    with jax.numpy_dtype_promotion("standard"):  # optax relies on it
        yield
