"""TPU kernels without a TPU."""

import functools
import importlib.util
import types
from collections.abc import Callable
from typing import Any

import jax
import pytest
from jax.experimental import pallas as pl

needs_compiler = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None, reason="needs libtpu"
)


def jitted(op: Callable[..., Any]) -> Callable[..., Any]:
    """The op as one program: each call is traced, and its keywords are static."""

    def run(*operands: Any, **options: Any) -> Any:
        return jax.jit(functools.partial(op, **options))(*operands)

    return run


def jitted_ops(module: types.ModuleType) -> Any:
    """What a module of ops has, with its functions as ``jitted`` makes them."""
    functions = {name: value for name, value in vars(module).items() if callable(value)}
    return types.SimpleNamespace(**{n: jitted(f) for n, f in functions.items()})


@pytest.fixture
def interpreted(monkeypatch):
    """Interprets the kernels of a test."""
    call = functools.partial(pl.pallas_call, interpret=True)
    monkeypatch.setattr(pl, "pallas_call", call)


@pytest.fixture
def on_tpu(monkeypatch):
    """Chooses as on a TPU."""
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
