"""The families of models: training with INT8, and what runs fused."""

import dataclasses

import flax.traverse_util
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy

import fbq_jax
from examples.llama import hf
from examples.llama.model import Llama
from examples.llama.projections import fuses, why_not_fused
from tests.examples.make_hf_fixture import CONFIGS, FIXTURE

FAMILIES = [name.lower() for name in CONFIGS]


def loss_and_grads(config, dot_general, params, tokens):
    """A loss, its gradients, and the state of quantization after the step."""
    model = Llama(config, dot_general)
    shapes = jax.eval_shape(model.init, jax.random.key(0), tokens).get("fallback", {})
    state = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)

    def loss(params):
        variables = {"params": params, "fallback": state}
        logits, updates = model.apply(variables, tokens, mutable=["fallback"])
        targets = jax.nn.one_hot(jnp.roll(tokens, -1, axis=1), logits.shape[-1])
        return -jnp.mean(jax.nn.log_softmax(logits) * targets), updates

    (value, updates), grads = jax.jit(jax.value_and_grad(loss, has_aux=True))(params)
    return value, grads, updates


def cosine(a, b):
    a, b = (np.concatenate([x.ravel() for x in jax.tree.leaves(x)]) for x in (a, b))
    return float(np.vdot(a, b) / (np.linalg.norm(a) * np.linalg.norm(b)))


def load(family, **changes):
    config, params = hf.load(FIXTURE / family)
    reference = safetensors.numpy.load_file(FIXTURE / family / "reference.safetensors")
    config = dataclasses.replace(config, dtype=jnp.float32, **changes)
    return config, params, reference["tokens"]


@pytest.mark.exhaustive
@pytest.mark.parametrize("family", FAMILIES)
def test_int8_trains_every_family(family):
    config, params, tokens = load(family)
    expected, float_grads = loss_and_grads(config, None, params, tokens)[:2]
    quantized = dataclasses.replace(config, saved_bits=10, remat="codes")
    dot_general = fbq_jax.FallbackDot(fbq_jax.Recipe(block=32))
    loss, grads, state = loss_and_grads(quantized, dot_general, params, tokens)
    np.testing.assert_allclose(loss, expected, rtol=0.02)
    assert cosine(grads, float_grads) > 0.95
    # Alone, saved bits and remat keep the loss, and nearly every gradient.
    loss, saved = loss_and_grads(
        dataclasses.replace(config, saved_bits=10, remat="codes"), None, params, tokens
    )[:2]
    np.testing.assert_allclose(loss, expected, rtol=1e-6)  # another program
    for a, b in zip(*map(jax.tree.leaves, (saved, float_grads)), strict=True):
        assert cosine(a, b) > 0.999
    flat = flax.traverse_util.flatten_dict(state, sep="/")
    counts = [leaf for path, leaf in flat.items() if path.endswith("count")]
    assert len(counts) == 4
    for count in counts:
        np.testing.assert_array_equal(count, np.ones(config.num_layers))


@pytest.mark.parametrize("family", FAMILIES)
def test_what_keeps_a_model_from_running_fused_is_named(family):
    config, _ = hf.load(FIXTURE / family)
    assert why_not_fused(config, fbq_jax.fallback_dot) is None  # saves floats
    config = dataclasses.replace(config, saved_bits=10)
    assert why_not_fused(config, None) is None
    reason = why_not_fused(config, fbq_jax.fallback_dot)
    if family.startswith("gemma"):
        assert reason is not None
        assert "the gate gelu_tanh and norms that multiply by 1 + scale" in reason
    else:
        assert reason is None
    assert fuses(config, fbq_jax.fallback_dot) == (reason is None)
