"""The families of models: training with INT8, and what runs fused."""

import dataclasses
import functools

import flax.traverse_util
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy

import fbq_jax
from examples.llama import flops, hf
from examples.llama.model import Llama
from examples.llama.projections import fuses, why_not_fused
from tests.examples.make_hf_fixture import CONFIGS, FIXTURE
from tests.examples.small import small_config

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
    flat = flax.traverse_util.flatten_dict(state, sep="/")
    counts = [leaf for path, leaf in flat.items() if path.endswith("count")]
    assert len(counts) == 4
    for count in counts:
        np.testing.assert_array_equal(count, np.ones(config.num_layers))


@pytest.mark.exhaustive
@pytest.mark.parametrize("family", ["gemma2", "gemma3"])
def test_saved_bits_and_remat_nearly_keep_the_gradients(family):
    config, params, tokens = load(family)
    expected, float_grads = loss_and_grads(config, None, params, tokens)[:2]
    saving = dataclasses.replace(config, saved_bits=10, remat="codes")
    loss, grads = loss_and_grads(saving, None, params, tokens)[:2]
    np.testing.assert_allclose(loss, expected, rtol=1e-6)  # another program
    jax.tree.map(
        lambda a, b: np.testing.assert_array_less(0.999, cosine(a, b)),
        grads,
        float_grads,
    )


@pytest.mark.exhaustive
def test_int8_traces_with_every_variant():
    config, params, tokens = load("gemma3", saved_bits=10, remat="codes")
    trace = functools.partial(loss_and_grads, config, fbq_jax.fallback_dot)
    loss, grads, _ = jax.eval_shape(trace, params, tokens)
    assert loss.shape == ()
    assert jax.tree.map(jnp.shape, grads) == jax.tree.map(jnp.shape, params)


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


def test_a_window_lowers_the_flops_of_attention():
    config = small_config(num_layers=2)
    heads = config.num_heads * config.head_dim
    linear = flops.per_token(config, 0)
    window = dataclasses.replace(config, sliding_window=4, sliding_layers=(1,))
    # Of 8 keys a query sees 4 on average. With the window, half of the queries see 2.
    assert flops.per_token(window, 8) - linear == 12 * heads * (4 + 3)
