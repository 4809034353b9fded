"""Fixtures that tests of the library share."""

import pytest

from fbq_jax.ops import dispatch
from fbq_jax.sharding import layer_names


@pytest.fixture
def every_cause_warns():
    """Forgets which causes have warned before."""
    layer_names.clear()


@pytest.fixture
def reference_everywhere(monkeypatch):
    """Asks for the reference, so that programs for accelerators may contain it."""
    monkeypatch.setenv(dispatch.ENVIRONMENT_VARIABLE, "reference")
