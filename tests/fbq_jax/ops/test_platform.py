"""Kernels on accelerators, the reference on a CPU."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fbq_jax.ops.platform import call_kernel

X = {"x": jnp.arange(6.0).reshape(2, 3)}


class Counted:
    """A function of a tree that counts how often it is traced."""

    def __init__(self, factor):
        self.factor = factor
        self.traced = 0

    def __call__(self, tree):
        self.traced += 1
        return {"y": self.factor * tree["x"], "sums": tree["x"].sum(axis=0)}


@pytest.fixture
def kernel():
    return Counted(factor=3)


@pytest.fixture
def reference():
    return Counted(factor=2)


@pytest.fixture
def call(kernel, reference):
    return jax.jit(functools.partial(call_kernel, kernel, reference))


def test_a_cpu_computes_the_reference(call, kernel, reference):
    got = call(X)
    np.testing.assert_array_equal(got["y"], 2 * X["x"])
    np.testing.assert_array_equal(got["sums"], X["x"].sum(axis=0))
    assert kernel.traced == reference.traced == 1


@pytest.mark.parametrize("platform", ["cuda", "tpu"])
def test_a_program_for_an_accelerator_does_not_trace_the_reference(
    call, reference, platform
):
    text = call.trace(X).lower(lowering_platforms=(platform,)).as_text()
    assert "3.0" in text
    assert "2.0" not in text
    assert not reference.traced


@pytest.mark.parametrize("platform", ["cpu", "cuda"])
def test_options_may_be_traced(platform):
    @jax.jit
    def call(x, offset):
        offset = 5 * offset  # a tracer of this function
        return call_kernel(
            lambda x, *, offset: 3 * x + offset,
            lambda x, *, offset: 2 * x + offset,
            x,
            offset=offset,
        )

    text = call.trace(X["x"], 1.0).lower(lowering_platforms=(platform,)).as_text()
    assert ("3.0" in text) == (platform == "cuda")
    np.testing.assert_array_equal(call(X["x"], 1.0), 2 * X["x"] + 5)


def test_a_program_for_several_platforms_has_both(call):
    text = call.trace(X).lower(lowering_platforms=("cpu", "cuda")).as_text()
    assert "3.0" in text
    assert "2.0" in text


def test_without_jit_a_cpu_computes_the_reference(call):
    with jax.disable_jit():
        np.testing.assert_array_equal(call(X)["y"], 2 * X["x"])


def test_without_jit_an_accelerator_runs_the_kernel(call, monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    with jax.disable_jit():
        np.testing.assert_array_equal(call(X)["y"], 3 * X["x"])
