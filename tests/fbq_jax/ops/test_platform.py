"""Kernels on accelerators, the reference on a CPU."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from fbq_jax.ops.op import call_kernel
from tests.fbq_jax.sharding.tools import mesh_of

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
def reference():
    return Counted(factor=2.0)


@pytest.fixture
def call(reference):
    return jax.jit(lambda x: call_kernel(Counted(3.0), reference, (x,), {}))


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
            lambda x, *, offset, dtype: (3 * x + offset).astype(dtype),
            lambda x, *, offset, dtype: (2 * x + offset).astype(dtype),
            (x,),
            {"offset": offset, "dtype": jnp.float32},
        )

    text = call.trace(X["x"], 1.0).lower(lowering_platforms=(platform,)).as_text()
    assert ("3.0" in text) == (platform == "cuda")
    np.testing.assert_array_equal(call(X["x"], 1.0), 2 * X["x"] + 5)


@pytest.mark.parametrize("platform", ["cpu", "cuda"])
def test_results_vary_over_the_axes_of_a_shard_map(call, platform):
    tree = {"x": jnp.arange(12.0).reshape(4, 3)}
    specs = {"in_specs": P("data"), "out_specs": P("data")}
    mapped = jax.jit(jax.shard_map(call, mesh=mesh_of(data=2), **specs))
    text = mapped.trace(tree).lower(lowering_platforms=(platform,)).as_text()
    assert ("3.0" in text) == (platform == "cuda")
    np.testing.assert_array_equal(mapped(tree)["y"], 2 * tree["x"])


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
