"""LoRA of Qwix on an INT8 base."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import qwix as google_qwix
from flax import linen as nn
from flax import nnx
from jax import lax

import fbq_jax
from fbq_jax import Recipe, fallback_stats
from fbq_jax.contrib import qwix
from tests.fbq_jax.contrib.test_qwix import Raw
from tests.marks import rows_with_first_fast, with_first_fast

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of Qwix

SMALL = Recipe(block=32, start=2.0)
RULES = {"embed": None, ".*": SMALL}
TOKENS = jnp.arange(32).reshape(4, 8) % 16


def provider():
    return google_qwix.LoraProvider(module_path=".*", rank=4, alpha=8.0)


def loss_of(logits):
    scores = jax.nn.log_softmax(logits)
    targets = jnp.roll(TOKENS, 1, 1)[..., None]
    return -jnp.mean(jnp.take_along_axis(scores, targets, -1))


class Model(nnx.Module):
    """One layer of each kind: three that take an op, and one that does not."""

    def __init__(self):
        rngs = nnx.Rngs(0)
        self.embed = nnx.Embed(16, 32, rngs=rngs)
        self.raw = Raw(rngs)
        self.dense = nnx.Linear(32, 32, rngs=rngs)
        self.heads = nnx.LinearGeneral(32, (4, 8), rngs=rngs)
        self.einsum = nnx.Einsum("btd,df->btf", (32, 16), rngs=rngs)

    def __call__(self, tokens):
        x = self.raw(self.embed(tokens))
        x = nnx.remat(lambda layer, x: jnp.tanh(layer(x)))(self.dense, x)
        return self.einsum(x + self.heads(x).reshape(x.shape))


def add_lora(model):
    return google_qwix.apply_lora_to_model(model, provider(), TOKENS, rngs=nnx.Rngs(7))


def quantize(model, rules=RULES):
    return qwix.quantize_nnx(model, rules, TOKENS, quantize_rngs=nnx.Rngs(5))[0]


def freeze(model):
    return fbq_jax.nnx.freeze(model, TOKENS)


def train(model, steps=4):
    """The losses of steps that change the parameters of LoRA only."""
    optimizer = nnx.Optimizer(model, optax.sgd(1.0), wrt=nnx.LoRAParam)

    @nnx.jit
    def step(model, optimizer):
        loss, grads = nnx.value_and_grad(
            lambda model: loss_of(model(TOKENS)),
            argnums=nnx.DiffState(0, nnx.LoRAParam),
        )(model)
        optimizer.update(model, grads)
        return loss

    return [float(step(model, optimizer)) for _ in range(steps)]


def arrays(model, *filters):
    leaves = jax.tree.leaves_with_path(nnx.state(model, *filters))
    return {jax.tree_util.keystr(path): np.asarray(leaf) for path, leaf in leaves}


@pytest.fixture(scope="module")
def floats():
    losses = train(add_lora(Model()))
    assert losses[-1] < losses[0] - 0.3
    return losses


def changed(model, *changes):
    for change in changes:
        model = change(model)
    return model


ORDERS = {
    "LoRA, quantize": (add_lora, quantize),
    "quantize, LoRA": (quantize, add_lora),
    "LoRA, quantize, LoRA": (add_lora, quantize, add_lora),
    "quantize, LoRA, freeze": (quantize, add_lora, freeze),
    "LoRA, quantize, freeze": (add_lora, quantize, freeze),
    "quantize, freeze, LoRA": (quantize, freeze, add_lora),
    "LoRA, quantize, freeze, LoRA": (add_lora, quantize, freeze, add_lora),
}


@pytest.mark.exhaustive
@pytest.mark.parametrize("order", ORDERS)
def test_only_lora_trains_on_an_int8_base(order, floats):
    model, is_frozen = changed(Model(), *ORDERS[order]), freeze in ORDERS[order]
    assert len(arrays(model, nnx.LoRAParam)) == 8
    before, lora = arrays(model), arrays(model, nnx.LoRAParam)
    codes = [path for path, array in before.items() if array.dtype == np.int8]
    params = arrays(model, nnx.All(nnx.Param, nnx.Not(nnx.LoRAParam)))
    if is_frozen:
        assert len(codes) == 4
        assert {x.shape for x in params.values()} == {(16, 32), (32,), (4, 8)}
    stats = fbq_jax.nnx.fallback_stats(model)
    assert sorted(stats) == ["dense", "einsum", "heads", "raw/w_dot_general"]
    counts = {path: int(s.count) + 4 * (not is_frozen) for path, s in stats.items()}
    np.testing.assert_allclose(train(model), floats, rtol=0.01)
    after = arrays(model)
    for path in (*codes, *params):
        np.testing.assert_array_equal(after[path], before[path])
    for path, array in lora.items():
        assert np.any(array != after[path]), path
    stats = fbq_jax.nnx.fallback_stats(model)
    assert counts == {path: int(s.count) for path, s in stats.items()}


class Linen(nn.Module):
    """A layer that takes an op, and one that does not."""

    @nn.compact
    def __call__(self, tokens):
        x = nn.Embed(16, 32, name="embed")(tokens)
        x = nn.Dense(32, name="dense")(x)
        w = self.param("w", nn.initializers.lecun_normal(), (32, 16))
        return lax.dot_general(x, w, (((2,), (0,)), ((), ())))


def add_linen_lora(model):
    return google_qwix.apply_lora_to_model(model, provider())


def quantize_linen(model):
    return qwix.quantize(model, RULES, jax.random.key(0), TOKENS)[0]


def train_linen(model):
    variables = jax.jit(model.init)(jax.random.key(0), TOKENS)
    params = variables.pop("params")
    labels = jax.tree.map_with_path(
        lambda path, _: "lora" if "lora" in str(path[-1]) else "frozen", params
    )
    optimizer = optax.multi_transform(
        {"lora": optax.sgd(1.0), "frozen": optax.set_to_zero()}, labels
    )
    opt_state = optimizer.init(params)

    @jax.jit
    def step(params, state, opt_state):
        def loss(params):
            y, new = model.apply(
                {"params": params, **state}, TOKENS, mutable=["fallback"]
            )
            return loss_of(y), new

        (value, state), grads = jax.value_and_grad(loss, has_aux=True)(params)
        updates, opt_state = optimizer.update(grads, opt_state)
        return value, optax.apply_updates(params, updates), state, opt_state

    losses = []
    for _ in range(4):
        loss, params, variables, opt_state = step(params, variables, opt_state)
        losses.append(float(loss))
    return losses, {"params": params, **variables}


LINEN_ORDERS = {
    "LoRA, quantize": (add_linen_lora, quantize_linen),
    "quantize, LoRA": (quantize_linen, add_linen_lora),
    "LoRA, quantize, LoRA": (add_linen_lora, quantize_linen, add_linen_lora),
}


@pytest.fixture(scope="module")
def linen_floats():
    losses, _ = train_linen(add_linen_lora(Linen()))
    return losses


@pytest.mark.parametrize("order", with_first_fast(LINEN_ORDERS))
def test_linen(order, linen_floats):
    model = changed(Linen(), *LINEN_ORDERS[order])
    losses, variables = train_linen(model)
    assert "kernel_lora_a" in variables["params"]["dense"]
    assert "w_lora_b" in variables["params"]
    np.testing.assert_allclose(losses, linen_floats, rtol=0.01)
    assert losses[-1] < losses[0] - 0.1
    counts = {path: int(s.count) for path, s in fallback_stats(variables).items()}
    assert counts == {"(root)": 4, "dense": 4}


@pytest.mark.parametrize(
    ("model", "x", "floats", "layer"),
    rows_with_first_fast(
        [
            (nn.Dense(32), jnp.ones((2, 32)), {}, r"\(root\)"),
            (Linen(), TOKENS, {"dense": None}, "w"),  # in a model's own code
        ]
    ),
)
def test_lora_on_frozen_linen_weights_is_refused(model, x, floats, layer):
    rules = {**floats, ".*": SMALL}
    base, _ = qwix.quantize(model, rules, jax.random.key(0), x)
    model = add_linen_lora(base)
    variables = jax.jit(model.init)(jax.random.key(0), x)
    frozen = fbq_jax.freeze(base, variables, x)
    with pytest.raises(ValueError, match=f"layer '{layer}' is frozen, and LoRA finds"):
        jax.eval_shape(model.apply, frozen, x)


def test_ops_that_qwix_does_not_see_are_named():
    message, key = "Qwix changed this {}, and does not see", jax.random.key(0)
    with pytest.raises(ValueError, match=message.format("Model")):
        fbq_jax.nnx.quantize(add_lora(Model()), RULES)
    with pytest.raises(ValueError, match=message.format("Linen")):
        fbq_jax.quantize(add_linen_lora(Linen()), RULES, key, TOKENS)
    model, _ = fbq_jax.quantize(Linen(), RULES, key, TOKENS)
    with pytest.raises(ValueError, match=message.format("Linen")):
        jax.eval_shape(add_linen_lora(model).init, key, TOKENS)
    model = Model()
    fbq_jax.nnx.quantize(model, RULES, quantize_rngs=nnx.Rngs(5))
    model.dense.dot_general.qwix_path = ("dense", "dot_general")  # Qwix sets it
    with pytest.warns(UserWarning, match="does not see the products of its quantized"):
        model(TOKENS)
