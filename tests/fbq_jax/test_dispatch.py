"""The choice of an implementation, and the library's seams."""

import jax.numpy as jnp
import pytest

from fbq_jax import dispatch, dot_general
from fbq_jax.kernels import reference

MATMUL = (((1,), (0,)), ((), ()))


def test_the_choice_says_why(monkeypatch):
    assert dispatch.choose("matmul") == (
        "matmul",
        "reference",
        "there is no kernel of its own for cpu",
    )
    monkeypatch.setenv("FBQ_IMPLEMENTATION", "reference")
    assert "asks for it" in dispatch.choose("matmul").reason


def test_an_unknown_implementation_is_named(monkeypatch):
    monkeypatch.setenv("FBQ_IMPLEMENTATION", "cublas")
    with pytest.raises(ValueError, match=r"='cublas' is not .*; there are: reference"):
        dot_general(jnp.ones((4, 4)), jnp.ones((4, 4)), MATMUL)


def test_an_implementation_is_a_module_of_functions(monkeypatch):
    """A new module in the table is what the library then calls."""
    calls = []

    class Spy:
        def __getattr__(self, op):
            calls.append(op)
            return getattr(reference, op)

    monkeypatch.setitem(dispatch.IMPLEMENTATIONS, "spy", Spy())
    monkeypatch.setenv("FBQ_IMPLEMENTATION", "spy")
    dot_general(jnp.ones((4, 4)), jnp.ones((4, 4)), MATMUL, theta=0.5)
    assert set(calls) == {"block_metric", "quantize", "quantize_fallback", "matmul"}
