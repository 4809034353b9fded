"""The Llama example: its architecture, and the products it gives to a recipe."""

import dataclasses
import functools

import flax.traverse_util
import jax
import jax.extend.core
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name

import fbq_jax
from examples.llama.model import Llama
from examples.llama.model_config import LlamaConfig
from examples.llama.rotary import Llama3Scaling, rotate
from tests.examples.small import small_config
from tests.fbq_jax.bench.tools import float_backward
from tests.marks import rows_with_first_fast, with_first_fast

CONFIG = small_config(dtype=jnp.float32)
SCALING = Llama3Scaling(
    factor=8.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=8192,
)
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
    config = dataclasses.replace(CONFIG, head_dim=6, qkv_bias=True)
    shapes = jax.tree.map(jnp.shape, init(config))
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


def test_number_of_parameters_of_llama_3_8b():
    config = LlamaConfig(
        vocab_size=128256,
        hidden_size=4096,
        intermediate_size=14336,
        num_layers=32,
        num_heads=32,
        num_kv_heads=8,
    )
    variables = jax.eval_shape(Llama(config).init, jax.random.key(0), TOKENS)
    sizes = (leaf.size for leaf in jax.tree.leaves(variables))
    assert sum(sizes) == 8_030_261_248


def test_tied_head_is_the_embedding():
    tied = dataclasses.replace(CONFIG, tie_embeddings=True)
    params = init(tied)
    assert "lm_head" not in params
    untied = params | {"lm_head": {"kernel": params["embed"]["embedding"].T}}
    np.testing.assert_allclose(
        logits_of(tied, params, TOKENS), logits_of(CONFIG, untied, TOKENS), atol=1e-6
    )


def test_layers_are_initialized_differently():
    kernel = init(CONFIG)["layers"]["mlp"]["down"]["kernel"]
    assert not np.allclose(kernel[0], kernel[1])


def test_later_tokens_leave_earlier_logits_untouched():
    params = init(CONFIG)
    changed = TOKENS.copy()
    changed[:, 6] = (changed[:, 6] + 1) % 40
    before = logits_of(CONFIG, params, TOKENS)
    after = logits_of(CONFIG, params, changed)
    np.testing.assert_array_equal(before[:, :6], after[:, :6])
    assert np.all(np.any(np.not_equal(before[:, 6:], after[:, 6:]), axis=-1))


def test_grouped_queries_equal_repeated_key_and_value_heads():
    params = init(CONFIG)
    full = dataclasses.replace(CONFIG, num_kv_heads=CONFIG.num_heads)
    qkv = params["layers"]["attention"]["qkv"]["dense"]["kernel"]
    qkv = qkv.reshape(3, 32, 2, 4, 8)
    first, second, k, v = (qkv[:, :, :, i] for i in range(4))
    repeated = [head for q in (first, second) for head in (q, k, v)]
    kernel = jnp.stack(repeated, axis=3).reshape(3, 32, 12 * 8)
    repeated_params = jax.tree.map(lambda leaf: leaf, params)
    repeated_params["layers"]["attention"]["qkv"]["dense"]["kernel"] = kernel
    np.testing.assert_allclose(
        logits_of(CONFIG, params, TOKENS),
        logits_of(full, repeated_params, TOKENS),
        atol=1e-5,
    )


@pytest.mark.parametrize("scaling", [None, SCALING])
def test_rotated_products_depend_on_the_distance_only(scaling):
    config = dataclasses.replace(CONFIG, rope_scaling=scaling)
    q, k = np.random.default_rng(1).standard_normal((2, 1, 1, 1, 8), np.float32)
    tables = config.rotary_tables(12)
    turned_q = rotate(jnp.broadcast_to(q, (1, 12, 1, 8)), tables)[0, :, 0]
    turned_k = rotate(jnp.broadcast_to(k, (1, 12, 1, 8)), tables)[0, :, 0]
    products = turned_q @ turned_k.T
    np.testing.assert_allclose(products[0, 0], np.vdot(q, k), rtol=1e-5)
    np.testing.assert_allclose(products[1:, 1:], products[:-1, :-1], atol=1e-5)
    assert np.ptp(products[0]) > 0.1


def test_rotation_pairs_the_two_halves_of_a_head():
    tables = CONFIG.rotary_tables(2)
    x = jnp.zeros((1, 2, 1, 8)).at[..., 0].set(1.0)
    expected = np.zeros(8, np.float32)
    expected[[0, 4]] = np.cos(1.0), np.sin(1.0)
    np.testing.assert_allclose(rotate(x, tables)[0, 1, 0], expected, atol=1e-6)


def test_rope_scaling_keeps_fast_and_slows_slow_rotations():
    turns = np.array([8.0, 4.0, 2.5, 1.0, 0.1])
    frequencies = turns * 2 * np.pi / SCALING.original_max_position_embeddings
    factors = SCALING.scale(frequencies) / frequencies
    np.testing.assert_allclose(factors, [1, 1, (1 + 1 / 8) / 2, 1 / 8, 1 / 8])


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


@pytest.mark.exhaustive  # test_train.py has a run with saved bits
@pytest.mark.parametrize(
    ("dot_general", "options", "saved_bits"),
    [
        (fbq_jax.fallback_dot, {"remat": "codes"}, 10),
        (None, {"remat": "full"}, None),
        (fbq_jax.fallback_dot, {"unroll": True}, 10),
        (fbq_jax.fallback_dot, {"remat": "codes", "unroll": True}, 10),
    ],
)
def test_remat_and_unroll_change_neither_loss_nor_state_nor_gradients(
    dot_general, options, saved_bits
):
    config = dataclasses.replace(CONFIG, saved_bits=saved_bits)
    changed = dataclasses.replace(config, **options)
    outputs, (grads, _) = loss_and_grads(config, dot_general, "fallback")
    outputs_again, (grads_again, _) = loss_and_grads(changed, dot_general, "fallback")
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6),
        (outputs, grads),
        (outputs_again, grads_again),
    )


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


@pytest.mark.exhaustive  # test_train.py has a run with saved bits
@pytest.mark.parametrize(
    "dot_general",
    [None, pytest.param(fbq_jax.fallback_dot, marks=pytest.mark.exhaustive)],
)
def test_saved_bits_keep_loss_and_state_and_nearly_the_gradients(dot_general):
    saving = dataclasses.replace(CONFIG, saved_bits=10)
    outputs, (grads, _) = loss_and_grads(CONFIG, dot_general, "fallback")
    outputs_again, (grads_again, _) = loss_and_grads(saving, dot_general, "fallback")
    jax.tree.map(np.testing.assert_array_equal, outputs_again, outputs)

    def check(grad, saved):
        error = np.linalg.norm(saved - grad) / np.linalg.norm(grad)
        assert error < (0.005 if dot_general is None else 0.05)

    jax.tree.map(check, grads, grads_again)


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
    assert counts.keys() == {
        f"layers/{projection}/dot_general/count"
        for projection in (
            "attention/qkv/dense",
            "attention/out",
            "mlp/gate_up",
            "mlp/down",
        )
    }
    for count in counts.values():
        np.testing.assert_array_equal(count, np.ones(3))
    thetas = state["layers"]["attention"]["qkv"]["dense"]["dot_general"]["theta"]
    assert len(np.unique(thetas)) == 3


def test_dot_general_computes_only_the_four_projections_of_a_layer():
    kernels = set()

    def spy(lhs, rhs, *args, **kwargs):
        kernels.add(rhs.shape)
        return checkpoint_name(jax.lax.dot_general(lhs, rhs, *args, **kwargs), "spied")

    params = {"params": init(CONFIG)}
    jaxpr = jax.make_jaxpr(Llama(CONFIG, dot_general=spy).apply)(params, TOKENS)
    assert kernels == {(32, 64), (32, 32), (32, 48), (24, 32)}
    (scan,) = (eqn for eqn in equations(jaxpr.jaxpr) if eqn.primitive.name == "scan")
    assert scan.params["length"] == CONFIG.num_layers
    assert count_spied(scan.params["jaxpr"].jaxpr) == 4
    assert count_spied(jaxpr.jaxpr) == 4


def equations(jaxpr):
    for eqn in jaxpr.eqns:
        yield eqn
        for inner in jax.extend.core.jaxprs_in_params(eqn.params):
            yield from equations(inner)


def count_spied(jaxpr):
    names = (eqn.params.get("name") for eqn in equations(jaxpr))
    return sum(name == "spied" for name in names)


SIZE, EPS = "an integer from 1 to 2147483647", "a number from 1.17549e-38 to"


@pytest.mark.parametrize(
    ("changes", "accepted"),
    [
        ({"vocab_size": 0}, f"{SIZE}, got 0"),
        ({"num_layers": 2.0}, f"{SIZE}, got 2.0"),
        ({"num_layers": 10**20}, f"{SIZE}, got 1000"),
        ({"num_kv_heads": 3}, "a divisor of num_heads"),
        ({"head_dim": 7}, "an even number"),
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


def test_rope_scaling_names_the_bad_field():
    with pytest.raises(ValueError, match=r"^high_freq_factor takes a number above"):
        dataclasses.replace(SCALING, high_freq_factor=1.0)


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
