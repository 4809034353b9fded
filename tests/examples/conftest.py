"""Fixtures that tests of the example share."""

import jax
import pytest


@pytest.fixture(scope="module")
def standard_promotion():
    """Optax, and the gradient of JAX's bfloat16 attention, rely on promotion."""
    with jax.numpy_dtype_promotion("standard"):
        yield


@pytest.fixture(scope="session")
def text(tmp_path_factory):
    """A file of text to train on."""
    file = tmp_path_factory.mktemp("data") / "text"
    file.write_text("".join(f"{n} and {n} is {2 * n}. " for n in range(1000)))
    return file
