"""Nothing of a user's stays alive after its last use."""

import gc
import importlib
import sys
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx

import fbq_jax
from fbq_jax import RulesDot, recipes
from fbq_jax.contrib import qwix
from fbq_jax.core.visitors import Visitor
from tests.marks import slow

KEY, X = jax.random.key(0), jnp.ones((4, 64))
RULES = {".*": recipes.fallback}


def linen_model(dot=None):
    """A model of a class of its own, and a table that its method closes over."""
    table = np.ones((8, 8))

    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            w = self.param("w", nn.initializers.ones, (8, 8))
            return nn.Dense(8, dot_general=dot)(x) @ w + table[0, 0]

    return Model(), table


def train(model, variables):
    """A step of training, in a program of its own."""

    def loss(variables):
        return jnp.sum(model.apply(variables, X, mutable=["fallback"])[0])

    return jax.jit(jax.grad(loss, allow_int=True))(variables)


def quantize_linen(quantize):
    def use():
        model, table = linen_model()
        quantized, _ = quantize(model, RULES, KEY, X)
        train(quantized, quantized.init(KEY, X))
        return type(model), type(quantized), table

    return use


def freeze_linen(quantize):
    def use():
        model, table = linen_model()
        model, _ = quantize(model, RULES, KEY, X)
        variables = model.init_with_output(KEY, X)[1]
        _, state = model.apply(variables, X, mutable=["fallback"])
        variables = {**variables, **state}
        frozen = fbq_jax.freeze(model, variables, X)
        model.apply(frozen, X)
        leaves = [x for x in jax.tree.leaves((variables, frozen)) if x.ndim]
        return type(model), table, *leaves

    return use


def steps_of_linen():
    model, table = linen_model()
    model, _ = fbq_jax.quantize(model, {".*": recipes.block}, KEY, X)
    fbq_jax.quantize_weights_once(model, model.init(KEY, X), X)
    return type(model), table


def report_of_linen():
    dot = RulesDot(RULES)
    model, table = linen_model(dot)
    dot.report(model, KEY, X)
    return type(model), table


class NnxModel(nnx.Module):
    """Flax itself keeps the classes of NNX, so this one closes over nothing."""

    def __init__(self):
        self.up = nnx.Linear(64, 8, rngs=nnx.Rngs(0))
        self.w = nnx.Param(jnp.ones((8, 8)))

    def __call__(self, x):
        return self.up(x) @ self.w[...]


def use_nnx(model):
    """Calls a model, and trains and freezes it."""
    model(X)
    nnx.jit(nnx.grad(lambda model: jnp.sum(model(X))))(model)
    fbq_jax.nnx.fallback_stats(model)
    with fbq_jax.nnx.quantize_weights_once(model, X):
        model(X)
    frozen = fbq_jax.nnx.freeze(model, X)
    return frozen(X), frozen


def layers_of_nnx():
    model = NnxModel()
    fbq_jax.nnx.quantize(model, RULES, X, quantize_rngs=nnx.Rngs(0))
    y, frozen = use_nnx(model)
    return model, frozen, model.w[...], y


def own_code_of_nnx():
    model = NnxModel()
    quantized, _ = qwix.quantize_nnx(model, RULES, X, quantize_rngs=nnx.Rngs(0))
    y, frozen = use_nnx(quantized)
    return model, quantized, frozen, model.w[...], y


def product():
    w = jnp.ones((64, 8))
    dims = (((1,), (0,)), ((), ()))

    @jax.jit
    def step(x):
        return jax.grad(lambda w: jnp.sum(fbq_jax.fallback_dot(x, w, dims)))(w)

    step(X)
    return step, w


USES = {
    "quantize": quantize_linen(fbq_jax.quantize),
    "freeze": freeze_linen(fbq_jax.quantize),
    "quantize_weights_once": steps_of_linen,
    "report": report_of_linen,
    "nnx": layers_of_nnx,
    "qwix.quantize": quantize_linen(qwix.quantize),
    "qwix.freeze": freeze_linen(qwix.quantize),
    "qwix.quantize_nnx": own_code_of_nnx,
    "fallback_dot": product,
}


def visitors():
    """How many visitors are alive."""
    return sum(isinstance(x, Visitor) for x in gc.get_objects())


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", slow(USES, USES.keys() - {"quantize", "nnx"}))
def test_nothing_stays_alive(name):
    gc.collect()
    before = visitors()
    references = list(map(weakref.ref, USES[name]()))
    gc.collect()
    assert [type(ref()) for ref in references if ref() is not None] == []
    assert visitors() == before


@pytest.mark.exhaustive
@pytest.mark.filterwarnings("ignore")
def test_a_call_leaves_no_class_behind():
    """JAX never forgets a class of NNX."""
    model, _ = qwix.quantize_nnx(NnxModel(), RULES, X)
    linen, _ = qwix.quantize(linen_model()[0], RULES, KEY, X)
    variables = linen.init(KEY, X)
    classes = []
    for _ in range(3):
        model(X)
        linen.apply(variables, X, mutable=["fallback"])
        gc.collect()
        classes.append(len(nnx.Module.__subclasses__()))
    assert len(set(classes)) == 1


def test_equal_rules_give_one_class():
    model, _ = linen_model()
    quantized = [fbq_jax.quantize(model, RULES, KEY, X)[0] for _ in range(2)]
    assert quantized[0] == quantized[1]
    other, _ = fbq_jax.quantize(model, {".*": recipes.block}, KEY, X)
    assert type(other) is not type(quantized[0])


@pytest.mark.parametrize("package", ["qwix", "maxtext"])
def test_a_missing_package_says_what_to_install(package, monkeypatch):
    for name in list(sys.modules):
        if name == package or name.startswith((f"{package}.", "fbq_jax.contrib.")):
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)
    message = rf"{package} is missing: pip install 'fbq-jax\[{package}\]'"

    def use():
        module = importlib.import_module(f"fbq_jax.contrib.{package}")
        return module.quantize_models({".*": recipes.block}).__enter__()

    with pytest.raises(ModuleNotFoundError, match=message):
        use()
