"""INT8 blocks: what operators exchange and save, gradients, training."""

import collections
import functools

import flax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx
from flax.errors import InvalidRngError

import fbq_jax
from fbq_jax import (
    Int8Attention,
    Int8MLP,
    Int8Sequential,
    assert_live,
    freeze,
    int8_flow,
)
from fbq_jax.int8_flow import blocks, operators
from fbq_jax.testing import array_error

BATCH, T, C, HIDDEN, HEADS = 4, 32, 32, 48, 4
TOKENS = BATCH * T
CAUSAL = functools.partial(jax.nn.dot_product_attention, is_causal=True)
MLP = int8_flow.mlp()
ATTENTION = int8_flow.attention(HEADS, T, attention_fn=CAUSAL, dtype=jnp.float32)
BLOCKS = int8_flow.Chain((("layers_0", ATTENTION), ("layers_1", MLP)))
SEED = jnp.uint32(5)
KEY = jax.random.key(0)
X = jax.random.normal(KEY, (BATCH, T, C))


class FloatMLP(nn.Module):
    """``Int8MLP`` in float."""

    @nn.compact
    def __call__(self, x):
        h = nn.Dense(HIDDEN, name="up")(nn.LayerNorm(name="norm")(x))
        return x + nn.Dense(C, name="down")(nn.gelu(h))


class Projections(nn.Module):
    @nn.compact
    def __call__(self, x):
        qkv = nn.Dense(3 * C, name="qkv")(x).reshape(*x.shape[:2], 3 * HEADS, -1)
        attended = CAUSAL(*jnp.split(qkv, 3, axis=2))
        return nn.Dense(C, name="out")(attended.reshape(x.shape))


class FloatAttention(nn.Module):
    """``Int8Attention`` in float."""

    @nn.compact
    def __call__(self, x):
        return x + Projections(name="attention")(nn.LayerNorm(name="norm")(x))


FLOAT = nn.Sequential([FloatAttention(), FloatMLP()])
INT8 = Int8Sequential([Int8Attention(HEADS, CAUSAL), Int8MLP(HIDDEN)])


@functools.cache
def variables_of_both():
    return tuple(jax.jit(model.init)(jax.random.key(1), X) for model in (INT8, FLOAT))


def test_parameters_are_those_of_flax():
    int8, flax = variables_of_both()
    jax.tree.map(np.testing.assert_array_equal, int8["params"], flax["params"])


def cotangent(y):
    return jnp.cos(jnp.arange(y.size)).reshape(y.shape).astype(y.dtype)


@functools.partial(jax.jit, static_argnums=0)
def outputs_and_gradients(operator, params, x, seed):
    def run(params, x):
        return int8_flow.apply(operator, params, x, seed=seed)

    y, pullback = jax.vjp(run, params, x)
    return y, pullback(cotangent(y))


@pytest.mark.exhaustive
def test_outputs_and_gradients_are_close_to_the_float_blocks():
    params = variables_of_both()[1]["params"]
    got = outputs_and_gradients(BLOCKS, params, X, SEED)

    @jax.jit
    def run_float(params, x):
        y, pullback = jax.vjp(lambda p, x: FLOAT.apply({"params": p}, x), params, x)
        return y, pullback(cotangent(y))

    exact = run_float(params, X)
    assert array_error(got[0], exact[0]).relative < 0.02
    cosines = jax.tree.map(lambda a, b: array_error(a, b).cosine, got[1], exact[1])
    assert min(jax.tree.leaves(cosines)) > 0.99
    assert cosines[1] > 0.999


def float_activations(avals):
    """Counts of arrays that are not INT8 and at least as large as an activation.

    Weights are smaller.
    """
    large = [aval for aval in avals if aval.size >= TOKENS * C]
    return collections.Counter(
        (aval.shape, aval.dtype.name)
        for aval in large
        if aval.dtype not in (jnp.int8, jnp.uint32)
    )


# The floats that the attention core saves for itself: its operands, which its
# checkpointed backward pass reads.
QKV = [jax.ShapeDtypeStruct((BATCH, T, HEADS, C // HEADS), jnp.float32)] * 3


def test_operators_exchange_only_int8():
    """Checks every value of the composition outside its operators."""
    params = variables_of_both()[1]["params"]
    codes = jax.eval_shape(lambda: operators.to_codes(X.reshape(1, -1, C), 32))

    def passes(params, x, dy):
        y, saved = BLOCKS.forward(params, x, SEED)
        return y, BLOCKS.backward(saved, dy, SEED)

    trace = jax.make_jaxpr(passes, return_shape=True)
    jaxpr, (y, (dx, _)) = trace(params, codes, codes)
    assert y.main.codes.dtype == dx.main.codes.dtype == jnp.int8
    calls = [e for e in jaxpr.eqns if e.primitive.name in ("jit", "pjit")]
    units = [e for e in calls if e.params["name"] != "fold"]  # of seeds
    assert len(units) == 2 * (3 + 5)  # of the attention and the MLP, in both passes
    between = float_activations(var.aval for e in jaxpr.eqns for var in e.outvars)
    core = jax.eval_shape(functools.partial(jax.vjp, CAUSAL), *QKV)[1]
    assert between == float_activations(jax.tree.leaves(core))


def test_saved_activations_are_int8():
    x = X.astype(jnp.bfloat16)
    params = variables_of_both()[1]["params"]

    def saved_of(operator, params):
        def run(params, x):
            return int8_flow.apply(operator, params, x, seed=SEED)

        saving = functools.partial(jax.vjp, run)
        return jax.tree.leaves(jax.eval_shape(saving, params, x)[1])

    saved = saved_of(MLP, params["layers_1"])
    assert not float_activations(saved)
    codes = sorted(leaf.shape[1:] for leaf in saved if leaf.dtype == jnp.int8)
    widths = [(TOKENS, C)] * 2 + [(TOKENS, HIDDEN)] * 2
    assert codes == sorted([*widths, (C, HIDDEN), (HIDDEN, C)])
    # A byte a value, plus two statistics a token and a scale a block.
    size = sum(leaf.size * leaf.dtype.itemsize for leaf in saved)
    assert size < 1.2 * sum(np.prod(shape) for shape in codes)

    core = {"attention_fn": jax.checkpoint(CAUSAL), "dtype": jnp.float32}
    lean = int8_flow.attention(HEADS, T, **core)
    saved = saved_of(lean, params["layers_0"])
    assert float_activations(saved) == float_activations(QKV)


def test_each_rounding_draws_independent_noise(monkeypatch):
    """An operator receives the same seed in both passes."""
    forward, backward, others = [], [], []

    class Probe:
        def forward(self, params, x, seed):
            del params
            forward.append(int(seed))
            return x, None

        def backward(self, saved, dy, seed):
            del saved
            backward.append(int(seed))
            return dy, {}

    def record(codes, *operands):
        others.append(int(operands[-1]))
        return codes

    codes = operators.to_codes(X[:1], 32)
    monkeypatch.setattr(blocks, "add", lambda a, _: a)
    monkeypatch.setattr(blocks, "add_grads", record)
    monkeypatch.setattr(blocks, "grad_to_codes", functools.partial(record, codes))
    branch = int8_flow.Chain((("a", Probe()), ("b", Probe())))
    block, alone = (int8_flow.SkipConnection(x) for x in (branch, Probe()))
    chain = int8_flow.Chain((("0", block), ("1", block), ("2", alone)))
    both = int8_flow.SkipConnection(chain)
    _, saved = both.forward({}, codes, SEED)
    blocks._apply_bwd(both, 32, (saved, SEED), X[:1])
    assert forward == backward[::-1]
    assert len(set(forward + others)) == len(forward) + len(others) == 5 + 5


def test_dropout_draws_from_its_own_stream_and_only_in_training(monkeypatch):
    layer, plain = Int8MLP(HIDDEN, dropout_rate=0.5), Int8MLP(HIDDEN)
    assert layer.operator(X, True) == plain.operator(X, False)
    int8, _ = variables_of_both()
    variables = {**int8, "params": int8["params"]["layers_1"]}
    seeds = []

    def apply(operator, params, x, *, seed, block):
        del params, block
        seeds.append((operator == layer.operator(x, False), int(seed)))
        return x

    monkeypatch.setattr(blocks, "apply", apply)
    for key in (0, 0, 1):
        layer.apply(variables, X, rngs={"dropout": jax.random.key(key)})
    assert seeds[0] == seeds[1] != seeds[2]
    assert all(drops for drops, _ in seeds)
    layer.apply(variables, X, deterministic=True)
    plain.apply(variables, X)
    assert seeds[3] == seeds[4]
    with pytest.raises(InvalidRngError, match="dropout"):
        layer.apply(variables, X)


def init(layer, x=X):
    jax.eval_shape(layer.init, jax.random.key(0), x)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: init(Int8MLP(8, block=48)), "Recipe.block takes one of .32, 64.*48"),
        (lambda: int8_flow.apply(MLP, {}, X, seed=SEED, block=48), "one of .32.*48"),
        (lambda: init(Int8MLP(8, dropout_rate=1.0)), "at least 0 and below 1; got 1.0"),
        (lambda: init(Int8Attention(5)), "got 5 heads and a width of 32"),
        (
            lambda: init(Int8Sequential([Int8MLP(8), Int8MLP(8, block=64)])),
            r"layers with the same block; got \[32, 64\]",
        ),
        (
            lambda: init(Int8Sequential([nn.Dense(8)])),
            "Int8Attention layers; got Dense",
        ),
        (lambda: init(Int8Sequential([])), r"one or more layers.*got \[\]"),
        (lambda: init(Int8MLP(8), X.astype(jnp.int32)), "x is int32; .* bfloat16"),
        (
            lambda: freeze(Int8MLP(8), jax.jit(Int8MLP(8).init)(KEY, X), X),
            r"it cannot freeze '\(root\)', of class Int8MLP",
        ),
        (lambda: init(Int8MLP(8), jnp.float32(1)), r"shape \(\); the INT8 data flow"),
        (lambda: init(Int8MLP(8), jnp.ones((2, 0))), r"shape \(2, 0\).* with C > 0"),
        (lambda: init(Int8Attention(2), jnp.ones(8)), r"\[..., T, C\].*shape \(8,\)"),
        # The blocks of NNX.
        (
            lambda: fbq_jax.nnx.Int8MLP(8, 8, block=48, rngs=nnx.Rngs(0)),
            "takes one of .32",
        ),
        (
            lambda: fbq_jax.nnx.Int8Attention(16, 0, rngs=nnx.Rngs(0)),
            "at least 1 .*; got 0 he",
        ),
        (
            lambda: fbq_jax.nnx.Int8Sequential([LINEAR]),
            "Int8Attention layers; got Linear",
        ),
        (
            lambda: fbq_jax.nnx.freeze(build(), X),
            "takes nnx.Linear.*'layers/./dot_general'",
        ),
    ],
)
def test_bad_input_is_named(call, message):
    with pytest.raises((TypeError, ValueError), match=message):
        call()


def test_operators_of_one_name_share_their_parameters():
    """Also in frozen dictionaries."""
    linear = operators.Linear(False)
    w = jax.random.normal(KEY, (C, C)) / C**0.5

    def gradients(*names):
        ops = zip(names, (linear, operators.Gelu(), linear), strict=True)
        params = {name: {"kernel": w} for name in names if name != "gelu"}

        def loss(params):
            y = int8_flow.apply(int8_flow.Chain(tuple(ops)), params, X, seed=SEED)
            return jnp.sum(y**2)

        grads = jax.grad(loss)(flax.core.freeze(params))
        assert isinstance(grads, flax.core.FrozenDict)
        return grads

    apart, shared = gradients("a", "gelu", "b"), gradients("a", "gelu", "a")
    expected = apart["a"]["kernel"] + apart["b"]["kernel"]
    np.testing.assert_array_equal(shared["a"]["kernel"], expected)


def test_no_tokens():
    y, _ = Int8Attention(HEADS).init_with_output(KEY, X[:, :0])
    assert y.shape == (BATCH, 0, C)


LINEAR = nnx.Linear(8, 8, rngs=nnx.Rngs(0))


def build(dropout_rate=0.0):
    rngs = nnx.Rngs(3)
    attention = fbq_jax.nnx.Int8Attention(C, HEADS, attention_fn=CAUSAL, rngs=rngs)
    return fbq_jax.nnx.Int8Sequential(
        [
            attention,
            fbq_jax.nnx.Int8MLP(C, HIDDEN, dropout_rate=dropout_rate, rngs=rngs),
        ]
    )


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
    counts = {
        name: int(s.count) for name, s in fbq_jax.nnx.fallback_stats(model).items()
    }
    names = ["layers/0", "layers/1"] if index is None else ["(root)"]
    assert counts == dict.fromkeys(names, 2)


def test_parameters_of_nnx_are_those_of_flax():
    rngs = nnx.Rngs(1)
    norm = nnx.LayerNorm(C, rngs=rngs)
    up, down = nnx.Linear(C, HIDDEN, rngs=rngs), nnx.Linear(HIDDEN, C, rngs=rngs)
    flax = {
        name: nnx.to_pure_dict(nnx.state(layer, nnx.Param))
        for name, layer in {"norm": norm, "up": up, "down": down}.items()
    }
    params = fbq_jax.nnx.Int8MLP(C, HIDDEN, rngs=nnx.Rngs(1)).parameters()
    jax.tree.map(np.testing.assert_array_equal, params, flax)
    lean = fbq_jax.nnx.Int8MLP(C, HIDDEN, use_bias=False, rngs=nnx.Rngs(1)).parameters()
    assert sorted(lean["up"]) == ["kernel"]


@nnx.jit
def nnx_gradients(model):
    """Those of the parameters, by a step that moves the state."""
    return nnx.grad(lambda model: jnp.sum(model(X) ** 2))(model)


@pytest.mark.exhaustive
def test_a_jitted_step_moves_the_state_and_its_noise():
    model, other = build(dropout_rate=0.5), build(dropout_rate=0.5)
    before = fbq_jax.nnx.fallback_stats(model)
    first, second = nnx_gradients(model), nnx_gradients(model)
    assert_live(before, fbq_jax.nnx.fallback_stats(model))
    assert len(jax.tree.leaves(nnx.state(model, fbq_jax.nnx.FallbackState))) == 2 * 4
    differ = jax.tree.map(lambda a, b: bool(jnp.any(a != b)), first, second)
    assert all(jax.tree.leaves(differ))
    # The state that a split carries goes on with the same noise.
    graphdef, state = nnx.split(other)
    copy = nnx.merge(graphdef, jax.tree.map(jnp.copy, state))
    for expected in first, second:
        jax.tree.map(np.testing.assert_array_equal, nnx_gradients(copy), expected)


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


def test_evaluation_draws_no_noise_and_drops_nothing(calls):
    model = build(dropout_rate=0.5)
    model.eval()
    model(X)
    model(X)
    assert calls[0] == calls[1]
    assert not calls[0][0]
    assert fbq_jax.nnx.fallback_stats(model)["layers/1"].count == 0
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
