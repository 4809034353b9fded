"""Optimizers that write the codes of NNX layers."""

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import fbq_jax
from fbq_jax import optim
from fbq_jax.nnx import CodeOptimizer
from tests.fbq_jax.optim.tools import X
from tests.marks import with_first_fast

ADAMW = optax.adamw(1e-3)
WRITER = optim.with_codes(ADAMW)


def linear(size, features, rngs):
    dot = fbq_jax.nnx.FallbackDot(rngs=rngs)
    return nnx.Linear(size, features, dtype=jnp.bfloat16, rngs=rngs, dot_general=dot)


class Layers(nnx.Module):
    def __init__(self, rngs):
        self.layers = nnx.List([linear(128, 256, rngs), linear(256, 256, rngs)])
        self.out = linear(256, 128, rngs)

    def __call__(self, x):
        for layer in self.layers:
            x = nnx.gelu(layer(x))
        return self.out(x)


class Tied(nnx.Module):
    """Two layers with one kernel."""

    def __init__(self, rngs):
        self.first, self.second = linear(128, 128, rngs), linear(128, 128, rngs)
        self.second.kernel = self.first.kernel

    def __call__(self, x):
        return self.second(nnx.gelu(self.first(x)))


class Stack(nnx.Module):
    """Equal layers in a loop."""

    def __init__(self, rngs):
        make = nnx.vmap(lambda rngs: linear(128, 128, rngs))
        self.layers = nnx.split_rngs(splits=3)(make)(rngs)

    def __call__(self, x):
        run = nnx.scan(
            lambda layer, x: layer(x), in_axes=(0, nnx.Carry), out_axes=nnx.Carry
        )
        return run(self.layers, x)


class Adapted(nnx.Module):
    """A layer with the adapter of LoRA, and a head."""

    def __init__(self, rngs):
        base, self.head = linear(128, 128, rngs), linear(128, 128, rngs)
        size = {"lora_rank": 8, "base_module": base, "dtype": jnp.bfloat16}
        self.lora = nnx.LoRA(128, out_features=128, rngs=rngs, **size)

    def __call__(self, x):
        return self.head(self.lora(x))


def loss_of(model, x):
    return jnp.mean(jnp.square(model(x).astype(jnp.float32)))


def train(model, optimizer, wrt=nnx.Param):
    """The losses of three steps."""

    @nnx.jit
    def step(model, optimizer, x):
        context = contextlib.nullcontext()
        if isinstance(optimizer, CodeOptimizer):
            context = optimizer.differentiable(model)
        with context:
            argnums = nnx.DiffState(0, wrt)
            loss, grads = nnx.value_and_grad(loss_of, argnums=argnums)(model, x)
        optimizer.update(model, grads)
        return loss

    return [float(step(model, optimizer, X)) for _ in range(3)]


@pytest.mark.parametrize("kind", with_first_fast([Layers, Tied, Stack, Adapted]))
def test_losses_are_those_without_codes(kind):
    plain, model = kind(nnx.Rngs(0)), kind(nnx.Rngs(0))
    want = train(plain, nnx.Optimizer(plain, ADAMW, wrt=nnx.Param))
    losses = train(model, CodeOptimizer(model, WRITER, X))
    assert losses == want
    dtypes = {x.dtype for x in jax.tree.leaves(nnx.state(model, nnx.Param))}
    assert dtypes == {jnp.dtype("float32")}
    fbq_jax.nnx.assert_live(model)


def is_adapter(path, value):
    in_head = "head" in path and isinstance(value, nnx.Param)
    return in_head or isinstance(value, nnx.LoRAParam)


@pytest.mark.parametrize("wrt", with_first_fast([nnx.LoRAParam, is_adapter]))
def test_the_base_of_lora(wrt):
    """Its codes are made once; the adapters, and a head, train."""
    plain, model = Adapted(nnx.Rngs(0)), Adapted(nnx.Rngs(0))
    want = train(plain, nnx.Optimizer(plain, ADAMW, wrt=wrt), wrt)
    if wrt is nnx.LoRAParam:  # in float
        with pytest.raises(ValueError, match="which the parameters lack"):
            CodeOptimizer(model, WRITER, X, wrt=wrt)
        fbq_jax.nnx.write_codes(model, X)
        optimizer = nnx.Optimizer(model, ADAMW, wrt=wrt)
    else:
        optimizer = CodeOptimizer(model, WRITER, X, wrt=wrt)
    codes = model.lora.base_module.dot_general.step_codes.get_value()
    assert train(model, optimizer, wrt) == want
    after = model.lora.base_module.dot_general.step_codes.get_value()
    jax.tree.map(np.testing.assert_array_equal, after, codes)
    fbq_jax.nnx.assert_live(model)


def test_codes_of_other_weights_are_errors():
    model = Layers(nnx.Rngs(0))
    with pytest.raises(ValueError, match="no codes to write"):
        fbq_jax.nnx.assert_live(model)
    fbq_jax.nnx.write_codes(model, X)
    halves = jax.tree.map(lambda x: x / 2, nnx.state(model, nnx.Param))
    average = nnx.clone(model)
    nnx.update(average, halves)
    with pytest.raises(ValueError, match="has codes of another weight: make codes of"):
        average(X)
    with pytest.raises(RuntimeError, match="layers/0/kernel, layers/1/kernel, out/ker"):
        fbq_jax.nnx.assert_live(average)
    fbq_jax.nnx.write_codes(average, X)
    fbq_jax.nnx.assert_live(average)
    plain = Layers(nnx.Rngs(0))
    nnx.update(plain, halves)
    np.testing.assert_array_equal(average(X), plain(X))


@pytest.mark.exhaustive
def test_codes_stay_after_a_context_and_leave_frozen_models():
    model = Layers(nnx.Rngs(0))
    fbq_jax.nnx.write_codes(model, X)
    with fbq_jax.nnx.quantize_weights_once(model, X):
        model(X)
    fbq_jax.nnx.assert_live(model)
    frozen = fbq_jax.nnx.freeze(model, X)
    assert not jax.tree.leaves(nnx.state(frozen, fbq_jax.nnx.StepCodes))
