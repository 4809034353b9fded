"""NNX's INT8 blocks compute what Linen's do and keep their state themselves."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from fbq_jax import Int8MLP as LinenMLP
from fbq_jax import assert_live
from fbq_jax.int8_flow import blocks
from fbq_jax.nnx import (
    FallbackState,
    Int8Attention,
    Int8MLP,
    Int8Sequential,
    fallback_stats,
    freeze,
)
from tests.fbq_jax.linen.test_int8_flow import (
    CAUSAL,
    HEADS,
    HIDDEN,
    INT8,
    C,
    X,
    cotangent,
)


def build(dropout_rate=0.0):
    rngs = nnx.Rngs(3)
    attention = Int8Attention(C, HEADS, attention_fn=CAUSAL, rngs=rngs)
    return Int8Sequential(
        [attention, Int8MLP(C, HIDDEN, dropout_rate=dropout_rate, rngs=rngs)]
    )


@nnx.jit
def step(layer, x):
    """The output and the gradients of the parameters and of x."""

    def loss(layer, x):
        y = layer(x)
        return jnp.sum(y * cotangent(y)), y

    grads, y = nnx.grad(loss, argnums=(0, 1), has_aux=True)(layer, x)
    return y, grads


@jax.jit
def linen_step(params, state, x):
    layer = LinenMLP(HIDDEN)

    def loss(params, x):
        y, new = layer.apply({"params": params, **state}, x, mutable=["fallback"])
        return jnp.sum(y * cotangent(y)), (y, new)

    grads, (y, new) = jax.grad(loss, argnums=(0, 1), has_aux=True)(params, x)
    return y, grads, new


@pytest.mark.exhaustive
def test_two_training_calls_equal_linens_bit_for_bit():
    layer = Int8MLP(C, HIDDEN, rngs=nnx.Rngs(3))
    params = layer.parameters()
    state = {"fallback": {"dot_general": layer.dot_general.state()}}
    before, first = fallback_stats(layer), None
    for _ in range(2):
        y, (grads, dx) = step(layer, X)
        z, (linen_grads, linen_dx), state = linen_step(params, state, X)
        grads = nnx.to_pure_dict(grads)
        np.testing.assert_array_equal(y, z)
        np.testing.assert_array_equal(dx, linen_dx)
        jax.tree.map(np.testing.assert_array_equal, grads, linen_grads)
        if first is not None:  # The second call draws new noise.
            differ = jax.tree.map(lambda a, b: bool(jnp.any(a != b)), first, grads)
            assert all(jax.tree.leaves(differ))
        first = grads
    assert_live(before, fallback_stats(layer))


@pytest.mark.parametrize("index", [0, None])
def test_attention_and_a_sequence_apply_what_linens_apply(index, monkeypatch):
    """The same operators with the same seeds on the same arrays."""
    made = []

    def apply(operator, params, x, *, seed, block):
        made.append((operator, params, int(seed), block))
        return x

    monkeypatch.setattr(blocks, "apply", apply)
    model, linen = build(), INT8
    layers = model.layers
    params = {f"layers_{i}": layer.parameters() for i, layer in enumerate(layers)}
    if index is not None:
        model, linen = layers[index], INT8.layers[index]
        params = params[f"layers_{index}"]
    state = {"fallback": {"dot_general": layers[0].dot_general.state()}}
    for _ in range(2):
        model(X)
        _, state = linen.apply({"params": params, **state}, X, mutable=["fallback"])
    for ours, theirs in (made[:2], made[2:]):
        jax.tree.map(np.testing.assert_array_equal, ours[1], theirs[1])
        assert ours[:1] + ours[2:] == theirs[:1] + theirs[2:]
    counts = {name: int(s.count) for name, s in fallback_stats(model).items()}
    names = ["layers/0", "layers/1"] if index is None else ["(root)"]
    assert counts == dict.fromkeys(names, 2)


def test_parameters_are_those_of_flax():
    rngs = nnx.Rngs(1)
    norm = nnx.LayerNorm(C, rngs=rngs)
    up, down = nnx.Linear(C, HIDDEN, rngs=rngs), nnx.Linear(HIDDEN, C, rngs=rngs)
    flax = {
        name: nnx.to_pure_dict(nnx.state(layer, nnx.Param))
        for name, layer in {"norm": norm, "up": up, "down": down}.items()
    }
    params = Int8MLP(C, HIDDEN, rngs=nnx.Rngs(1)).parameters()
    jax.tree.map(np.testing.assert_array_equal, params, flax)
    lean = Int8MLP(C, HIDDEN, use_bias=False, rngs=nnx.Rngs(1)).parameters()
    assert sorted(lean["up"]) == ["kernel"]


@pytest.fixture
def calls(monkeypatch):
    """Records of each call whether it has dropout, and its seed."""
    made = []

    def apply(operator, params, x, *, seed, block):
        del params
        made.append(("Dropout" in str(operator), int(seed)))
        assert block == 32
        return x

    monkeypatch.setattr(blocks, "apply", apply)
    return made


def test_split_and_merge_carry_the_state(calls):
    model = build()
    model(X)
    graphdef, state = nnx.split(model)
    assert len(jax.tree.leaves(nnx.state(model, FallbackState))) == 2 * 4
    loaded = nnx.merge(graphdef, jax.tree.map(jnp.copy, state))
    for copy in (model, loaded):
        copy(X)
        copy(X)
    first, *of_model = calls
    assert of_model[:2] == of_model[2:]
    assert len({first, *of_model}) == 3


def test_jit_updates_state_and_streams(monkeypatch):
    monkeypatch.setattr(blocks, "apply", lambda *_, seed, block: seed)  # noqa: ARG005
    model, call = build(dropout_rate=0.5), nnx.jit(lambda model, x: model(x))
    seeds = [int(call(model, X)) for _ in range(2)]
    model.eval()
    seeds += [int(call(model, X)) for _ in range(2)]
    assert len(set(seeds)) == 3
    assert seeds[2] == seeds[3]
    assert fallback_stats(model)["layers/1"].count == 2


def test_evaluation_draws_no_noise_and_drops_nothing(calls):
    model = build(dropout_rate=0.5)
    model.eval()
    model(X)
    model(X)
    assert calls[0] == calls[1]
    assert not calls[0][0]
    assert fallback_stats(model)["layers/1"].count == 0
    model(X, deterministic=False)  # draws new masks, though the state is frozen
    model(X, deterministic=False)
    model.train()
    model(X)
    assert [drops for drops, _ in calls[2:]] == [True] * 3
    assert len(set(calls[1:])) == 4
    model(X, deterministic=True)
    seed = calls[-1][1]
    plain = build()
    plain(X)
    plain(X)
    assert calls[-1] == (False, seed)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: Int8MLP(8, 8, block=48, rngs=nnx.Rngs(0)), "block takes one of .32"),
        (lambda: Int8Attention(16, 0, rngs=nnx.Rngs(0)), "at least 1 .*; got 0 heads"),
        (
            lambda: Int8Sequential([nnx.Linear(8, 8, rngs=nnx.Rngs(0))]),
            "takes Int8MLP and Int8Attention layers; got Linear",
        ),
        (lambda: freeze(build(), X), "freeze takes nnx.Linear.*'layers/./dot_general'"),
    ],
)
def test_bad_input_is_named(call, message):
    with pytest.raises((TypeError, ValueError), match=message):
        call()
