"""The Llama example: its architecture, and the products it gives to a recipe."""

import dataclasses
import functools
import re

import flax.traverse_util
import jax
import jax.extend.core
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name

import fbq_jax
from examples.llama.model import Llama
from tests.examples.small import small_config
from tests.fbq_jax.bench.tools import float_backward
from tests.marks import rows_with_first_fast, with_first_fast

CONFIG = small_config(dtype=jnp.float32)
TOKENS = np.random.default_rng(0).integers(40, size=(2, 10), dtype=np.int32)


@functools.cache
def init(config, scale=10.0):
    """Initial parameters, large enough for attention to be far from uniform."""
    params = jax.jit(Llama(config).init)(jax.random.key(0), TOKENS)["params"]
    return jax.tree.map(lambda p: p * scale if p.ndim > 2 else p, params)


def logits_of(config, params, tokens):
    return jax.jit(Llama(config).apply)({"params": params}, tokens)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("tie_embeddings", [False, True])
def test_logits_are_float32_for_float32_parameters(dtype, tie_embeddings):
    config = dataclasses.replace(CONFIG, dtype=dtype, tie_embeddings=tie_embeddings)
    key = jax.random.key(0)
    variables = jax.eval_shape(Llama(config).init, key, TOKENS)
    dtypes = {leaf.dtype for leaf in jax.tree.leaves(variables["params"])}
    assert dtypes == {jnp.dtype("float32")}
    logits = jax.eval_shape(Llama(config).apply, variables, TOKENS)
    assert logits.shape == (2, 10, 40)
    assert logits.dtype == jnp.float32


def test_bfloat16_approximates_float32():
    params = init(CONFIG, scale=1.0)
    exact = logits_of(CONFIG, params, TOKENS)
    rounded = logits_of(dataclasses.replace(CONFIG, dtype=jnp.bfloat16), params, TOKENS)
    error = jnp.linalg.norm(rounded - exact) / jnp.linalg.norm(exact)
    assert 1e-4 < error < 2e-2


def test_parameters_and_their_paths():
    params = init(dataclasses.replace(CONFIG, head_dim=6, qkv_bias=True))
    kernel = params["layers"]["mlp"]["down"]["kernel"]
    assert not np.allclose(kernel[0], kernel[1])  # each layer draws its own
    shapes = jax.tree.map(jnp.shape, params)
    assert flax.traverse_util.flatten_dict(shapes, sep="/") == {
        "embed/embedding": (40, 32),
        "layers/attention/qkv/norm/scale": (3, 32),
        "layers/attention/qkv/dense/kernel": (3, 32, (4 + 2 * 2) * 6),
        "layers/attention/qkv/dense/bias": (3, (4 + 2 * 2) * 6),
        "layers/attention/out/kernel": (3, 4 * 6, 32),
        "layers/mlp/norm/scale": (3, 32),
        "layers/mlp/gate_up/kernel": (3, 32, 2, 24),
        "layers/mlp/down/kernel": (3, 24, 32),
        "norm/scale": (32,),
        "lm_head/kernel": (32, 40),
    }


@functools.cache
def loss_and_grads(config, dot_general, collection):
    """A loss and the state after it; gradients of the parameters and the state."""
    model = Llama(config, dot_general)
    # The float model has the fastest initializer, and all variants share it.
    params = init(dataclasses.replace(config, saved_bits=None, remat="none"), scale=1.0)
    shapes = jax.eval_shape(model.init, jax.random.key(0), TOKENS)
    state = jax.tree.map(jnp.zeros_like, shapes.get(collection, {}))

    def loss(params, state):
        variables = {"params": params, collection: state}
        logits, updates = model.apply(variables, TOKENS, mutable=[collection])
        return jnp.mean(jnp.square(logits)), updates.get(collection)

    grad = jax.value_and_grad(loss, argnums=(0, 1), has_aux=True, allow_int=True)
    return jax.jit(grad)(params, state)


SAVED = {"saved_bits": 10}


@pytest.mark.exhaustive  # test_train.py has a run with saved bits
@pytest.mark.parametrize(
    ("dot_general", "before", "options", "error"),
    [
        (fbq_jax.fallback_dot, SAVED, {"remat": "codes"}, 0),
        (None, {}, {"remat": "full"}, 0),
        (fbq_jax.fallback_dot, SAVED, {"unroll": True}, 0),
        (fbq_jax.fallback_dot, SAVED, {"remat": "codes", "unroll": True}, 0),
        (None, {}, SAVED, 0.005),
        (fbq_jax.fallback_dot, {}, SAVED, 0.05),
    ],
)
def test_what_saves_memory_keeps_loss_and_state_and_nearly_the_gradients(
    dot_general, before, options, error
):
    """Saved bits change no forward pass; the rest changes sums in their last bits."""
    config = dataclasses.replace(CONFIG, **before)
    changed = dataclasses.replace(config, **options)
    outputs, (grads, _) = loss_and_grads(config, dot_general, "fallback")
    outputs_again, (grads_again, _) = loss_and_grads(changed, dot_general, "fallback")
    close = functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-6)
    if not error:
        jax.tree.map(close, (outputs, grads), (outputs_again, grads_again))
        return
    jax.tree.map(np.testing.assert_array_equal, outputs_again, outputs)

    def check(grad, saved):
        assert np.linalg.norm(saved - grad) < error * np.linalg.norm(grad)

    jax.tree.map(check, grads, grads_again)


@pytest.mark.parametrize(
    ("dtype", "tie_embeddings"),
    rows_with_first_fast(
        [
            (jnp.bfloat16, True),
            (jnp.float32, False),
            (jnp.float32, True),
            (jnp.bfloat16, False),
        ]
    ),
)
def test_saved_bits_leave_parameters_and_logits_as_they_are(dtype, tie_embeddings):
    config = dataclasses.replace(CONFIG, dtype=dtype, tie_embeddings=tie_embeddings)
    saving = dataclasses.replace(config, saved_bits=10)
    params = init(config)
    jax.tree.map(np.testing.assert_array_equal, init(saving), params)
    expected = logits_of(config, params, TOKENS)
    np.testing.assert_array_equal(logits_of(saving, params, TOKENS), expected)


# The backward GEMMs do not matter to the second, and compile faster in float.
OVERWRITTEN = fbq_jax.FallbackDot(
    float_backward(fbq_jax.recipes.fallback), collection="_overwrite_with_gradient"
)


@pytest.mark.exhaustive  # test_train.py has a run with saved bits
@pytest.mark.parametrize(
    "dot_general", with_first_fast([fbq_jax.fallback_dot, OVERWRITTEN])
)
def test_each_layer_has_its_own_quantization_state(dot_general):
    collection = dot_general.collection
    (_, mutated), (_, gradient) = loss_and_grads(CONFIG, dot_general, collection)
    # Flax replaces the state of this collection by its gradient.
    state = mutated if collection == "fallback" else gradient
    counts = {
        path: leaf
        for path, leaf in flax.traverse_util.flatten_dict(state, sep="/").items()
        if path.endswith("count")
    }
    names = ("attention/qkv/dense", "attention/out", "mlp/gate_up", "mlp/down")
    assert counts.keys() == {f"layers/{name}/dot_general/count" for name in names}
    for count in counts.values():
        np.testing.assert_array_equal(count, np.ones(3))
    thetas = state["layers"]["attention"]["qkv"]["dense"]["dot_general"]["theta"]
    assert len(np.unique(thetas)) == 3


def test_dot_general_computes_only_the_four_projections_of_a_layer():
    def spy(lhs, rhs, *args, **kwargs):
        return checkpoint_name(jax.lax.dot_general(lhs, rhs, *args, **kwargs), "spied")

    params = {"params": init(CONFIG)}
    jaxpr = jax.make_jaxpr(Llama(CONFIG, dot_general=spy).apply)(params, TOKENS)
    lines = [line for line in str(jaxpr).splitlines() if "name=spied" in line]
    widths = [re.search(r":f32\[2,10,([\d,]+)\] = name", line)[1] for line in lines]
    assert widths == ["64", "32", "48", "32"]
    assert f"length={CONFIG.num_layers}" in str(jaxpr)


SIZE, EPS = "an integer from 1 to 2147483647", "a number from 1.17549e-38 to"


@pytest.mark.parametrize(
    ("changes", "accepted"),
    [
        ({"vocab_size": 0}, f"{SIZE}, got 0"),
        ({"num_layers": 2.0}, f"{SIZE}, got 2.0"),
        ({"num_layers": 10**20}, f"{SIZE}, got 1000"),
        ({"num_kv_heads": 3}, "a divisor of num_heads"),
        ({"head_dim": 7}, "an even number, got 7; by default it is hidden_s"),
        ({"rope_theta": -1.0}, "a number from 1 to"),
        ({"rope_theta": "1e4"}, "a number from 1 to .*, got '1e4'"),
        ({"rope_theta": float("nan")}, "a number from 1 to .*, got nan"),
        ({"norm_eps": 0}, EPS),
        ({"norm_eps": 1e-50}, EPS),
        ({"norm_eps": float("inf")}, f"{EPS} .*, got inf"),
        ({"norm_eps": 10**400}, f"{EPS} .*, got 1000"),
        ({"rope_scaling": {"factor": 2}}, "LinearScaling or Llama3Scaling or Y"),
        ({"remat": "some"}, "one of none, codes, full, got 'some'"),
        ({"remat": True}, "one of none, codes, full, got True"),
        ({"saved_bits": 3}, "an integer from 4 to 12 or None, got 3"),
        ({"saved_bits": True}, "an integer from 4 to 12 or None, got True"),
        ({"tie_embeddings": "yes"}, "a bool"),
        ({"dtype": jnp.float16}, "jnp.bfloat16 or jnp.float32"),
        # A head has a width of its own, or shares hidden_size.
        ({"num_heads": 4, "hidden_size": 30}, r"a divisor of hidden_size \("),
        ({"num_experts": 0}, "an integer from 1"),
        ({"top_k": 3, "num_experts": 2}, r"at most num_experts \(2\), got"),
        ({"top_k": 0, "num_experts": 2}, "an integer from 1"),
        ({"renormalize": True, "num_experts": 2, "top_k": 1}, "False with a top_k of"),
        ({"activation": "gelu_tanh", "num_experts": 5}, "silu with num_exp"),
        ({"router_aux_loss_coef": -1.0, "num_experts": 5}, "a num"),
    ],
)
def test_config_names_the_bad_field(changes, accepted):
    with pytest.raises(ValueError, match=f"^{next(iter(changes))} takes {accepted}"):
        small_config(**changes)
    assert small_config(hidden_size=30, head_dim=8).head_dim == 8


@pytest.mark.parametrize(
    ("tokens", "accepted"),
    [
        (np.zeros((10,), np.int32), r"integers \[B, S\]"),
        (np.zeros((1, 10), np.float32), r"integers \[B, S\]"),
        (np.zeros((1, 11), np.int32), "sequences up to max_seq_len"),
    ],
)
def test_tokens_are_checked(tokens, accepted):
    config = dataclasses.replace(CONFIG, max_seq_len=10)
    with pytest.raises(ValueError, match=f"^tokens takes {accepted}"):
        Llama(config).init(jax.random.key(0), tokens)
