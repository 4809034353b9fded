"""Optimizers that write the codes of NNX layers."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import fbq_jax
from fbq_jax import optim

X = jax.random.normal(jax.random.key(0), (256, 128)).astype(jnp.bfloat16)


@pytest.fixture(autouse=True)
def standard_promotion():
    with jax.numpy_dtype_promotion("standard"):  # optax relies on it
        yield


class Layers(nnx.Module):
    def __init__(self, rngs):
        def layer(size, features):
            dot = fbq_jax.nnx.FallbackDot(rngs=rngs)
            return nnx.Linear(
                size, features, dtype=jnp.bfloat16, rngs=rngs, dot_general=dot
            )

        self.layers = nnx.List([layer(128, 256), layer(256, 256)])
        self.out = layer(256, 128)

    def __call__(self, x):
        for layer in self.layers:
            x = nnx.gelu(layer(x))
        return self.out(x)


def loss_of(model, x):
    return jnp.mean(jnp.square(model(x).astype(jnp.float32)))


def losses_without_codes(optimizer, steps):
    model = Layers(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optimizer, wrt=nnx.Param)

    @nnx.jit
    def step(model, optimizer, x):
        loss, grads = nnx.value_and_grad(loss_of)(model, x)
        optimizer.update(model, grads)
        return loss

    return [float(step(model, optimizer, X)) for _ in range(steps)]


def test_losses_are_those_without_codes():
    """Bit for bit."""
    writer = optim.with_codes(optax.adamw(1e-3))
    model = Layers(nnx.Rngs(0))
    optimizer = fbq_jax.nnx.CodeOptimizer(model, writer, X)

    @nnx.jit
    def step(model, optimizer, x):
        with optimizer.differentiable(model):
            loss, grads = nnx.value_and_grad(loss_of)(model, x)
        optimizer.update(model, grads)
        return loss

    losses = [float(step(model, optimizer, X)) for _ in range(3)]
    assert losses == losses_without_codes(optax.adamw(1e-3), 3)
    assert model.out.kernel[...].dtype == jnp.float32
    weight = model.out.dot_general.step_codes.get_value()
    jax.tree.map(
        np.testing.assert_array_equal, weight, weight.of(model.out.kernel[...])
    )
