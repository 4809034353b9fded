"""Fixtures that tests of the library share."""

import pytest

from fbq_jax.sharding import layer_names


@pytest.fixture
def every_cause_warns():
    """Forgets which causes have warned before."""
    layer_names.clear()
