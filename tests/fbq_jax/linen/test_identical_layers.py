"""Identical layers are traced and lowered once, however many there are."""

import collections

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from fbq_jax import fallback_dot
from fbq_jax.ops.op import LocalOp


class Stack(nn.Module):
    layers: int

    @nn.compact
    def __call__(self, x):
        for _ in range(self.layers):
            x = nn.Dense(x.shape[-1], use_bias=False, dot_general=fallback_dot)(x)
        return x


@pytest.fixture
def traces(monkeypatch):
    """Counts how often the computation of each op is traced."""
    counts: collections.Counter[str] = collections.Counter()
    run = LocalOp.__call__

    def counted(self, *operands, **options):
        counts[self.op.name] += 1
        return run(self, *operands, **options)

    monkeypatch.setattr(LocalOp, "__call__", counted)
    jax.clear_caches()
    return counts


def lower_step(layers, x):
    """Lowers the gradient and the state update of a stack of layers."""
    model = Stack(layers)
    variables = jax.eval_shape(model.init, jax.random.key(0), x)
    if x.sharding is not None:
        whole = NamedSharding(x.sharding.mesh, PartitionSpec())
        variables = jax.tree.map(lambda x: x.update(sharding=whole), variables)

    def loss(params, state, x):
        variables = {"params": params, "fallback": state}
        y, state = model.apply(variables, x, mutable=["fallback"])
        return jnp.sum(y), state["fallback"]

    step = jax.jit(jax.grad(loss, (0, 2), has_aux=True))
    return step.lower(variables["params"], variables["fallback"], x)


@pytest.mark.exhaustive
def test_on_one_device(traces):
    x = jax.ShapeDtypeStruct((64, 128), jnp.float32)
    functions = lower_step(2, x).as_text().count("func.func")
    once = collections.Counter(traces)
    assert lower_step(6, x).as_text().count("func.func") == functions
    assert traces == once
    assert once.keys() == {"quantize", "move_threshold", "matmul"}


@pytest.mark.exhaustive
def test_on_several_devices(traces):
    """XLA partitions each call, but equal shards share what was traced."""
    mesh = Mesh(np.array(jax.devices()[:2]), ("data",))
    sharding = NamedSharding(mesh, PartitionSpec("data"))
    x = jax.ShapeDtypeStruct((512, 128), jnp.float32, sharding=sharding)
    lower_step(2, x).compile()
    once = collections.Counter(traces)
    lower_step(3, x).compile()
    assert traces - once == collections.Counter()
