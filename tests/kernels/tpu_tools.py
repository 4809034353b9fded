"""TPU kernels without a TPU."""

import functools
import importlib.util

import pytest
from jax.experimental import pallas as pl

needs_compiler = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None, reason="needs libtpu"
)


@pytest.fixture
def interpreted(monkeypatch):
    """Interprets the kernels of a test."""
    call = functools.partial(pl.pallas_call, interpret=True)
    monkeypatch.setattr(pl, "pallas_call", call)
