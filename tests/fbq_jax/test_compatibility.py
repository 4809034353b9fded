"""Variables that version 0.1.0 wrote load, and compute what they computed then.

``compatibility/0.1.0.safetensors`` was written once, on a CPU, by version 0.1.0.  For
each entry of ``CASES`` it holds the variables of ``init`` after one training step, and
what ``run`` computed from them.  An array's name is ``CASE:in:PATH|DTYPE`` or
``CASE:out:PATH|DTYPE``, with the leaf's path as ``jax.tree_util.keystr`` writes it; its
bytes are stored as uint8.  Only every ``STRIDE``-th value of a float result is stored.
The file is never written again: if a test here fails, checkpoints of users no longer
load.

Only public names are used.  Names, shapes, dtypes and integers must be the same.
Floats may differ between CPUs in their last bits, which changes single codes.  Other
noise, or another threshold, changes floats by more than ``TOLERANCE``.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx
from safetensors.numpy import load_file

import fbq_jax
from fbq_jax import (
    FallbackConv,
    FallbackDot,
    Fp8Dot,
    GatedMLP,
    Int8Attention,
    Int8MLP,
    Int8Sequential,
    Recipe,
    freeze,
    optim,
)
from tests.marks import slow

FILE = Path(__file__).parent / "compatibility" / "0.1.0.safetensors"
STRIDE = 5
TOLERANCE = 1e-3  # of the Frobenius norm
RECIPE = Recipe(block=32)
DOT = FallbackDot(RECIPE)


def values(*shape):
    """An array of exact binary fractions, with a few large ones."""
    index = np.arange(np.prod(shape)).reshape(shape)
    small = (index * 7919 % 127 - 63) / 32
    return jnp.asarray(np.where(index % 241 == 7, 16 * small, small), jnp.float32)


X = values(2, 48, 40)


class Layers(nn.Module):
    """A layer of Flax, a convolution and a fused MLP."""

    @nn.compact
    def __call__(self, x):
        x = nn.Dense(16, dot_general=DOT, dtype=jnp.bfloat16, name="dense")(x)
        conv = FallbackConv(DOT)
        x = x.astype(jnp.float32)
        x = nn.Conv(16, (3,), conv_general_dilated=conv, name="conv")(x)
        return GatedMLP(16, dot_general=DOT, name="mlp")(x)


class Overwritten(nn.Module):
    """Layers whose state is its own gradient."""

    @nn.compact
    def __call__(self, x):
        x = nn.Dense(16, dot_general=Fp8Dot(history=4), name="fp8")(x)
        dot = FallbackDot(RECIPE, collection="_overwrite_with_gradient")
        return nn.Dense(8, dot_general=dot, name="int8")(x)


class NnxLayers(nnx.Module):
    """A layer of NNX and an einsum."""

    def __init__(self, rngs):
        arguments = {"rngs": rngs}
        dot = fbq_jax.nnx.FallbackDot(RECIPE, **arguments)
        op = fbq_jax.nnx.FallbackEinsum(RECIPE, **arguments)
        self.dense = nnx.Linear(40, 16, dot_general=dot, **arguments)
        self.einsum = nnx.Einsum("btd,df->btf", (16, 16), einsum_op=op, **arguments)

    def __call__(self, x):
        return self.einsum(self.dense(x))


class Flow(nn.Module):
    """Blocks between which only INT8 travels."""

    @nn.compact
    def __call__(self, x):
        blocks = [Int8Attention(num_heads=2), Int8MLP(24)]
        return Int8Sequential(blocks, name="blocks")(x[..., :16])


LAYERS, OVERWRITTEN, FLOW = Layers(), Overwritten(), Flow()
OPTIMIZER = optim.fp8_adamw(
    1e-2, b2=0.99, rounding="stochastic", master_dtype=jnp.float16
)


def init(model):
    return lambda: model.init(jax.random.key(1), X)


def train(model):
    """A forward pass in training: the output, and the state after it."""
    return lambda variables: model.apply(variables, X, mutable=["fallback"])


def overwritten_grads(variables):
    def loss(variables):
        y = OVERWRITTEN.apply(variables, X)
        return jnp.sum(y**2) / y.size

    return jax.grad(loss)(variables)


def train_nnx(model):
    return model(X), nnx.to_pure_dict(nnx.state(model))


def init_optimizer():
    params = {"kernel": values(12, 16).astype(jnp.bfloat16)}
    return params, OPTIMIZER.init(params)


def optimize(params_and_state):
    params, state = params_and_state
    grads = jax.tree.map(lambda p: p / 2 + 0.125, params)
    updates, state = OPTIMIZER.update(grads, state, params)
    return optax.apply_updates(params, updates), state


class Case(NamedTuple):
    """What makes variables of the right structure, and what computes from them."""

    init: Callable[[], Any]
    run: Callable[[Any], Any]


CASES = {
    "linen": Case(init(LAYERS), train(LAYERS)),
    "linen_frozen": Case(
        lambda: freeze(LAYERS, init(LAYERS)(), X), lambda v: LAYERS.apply(v, X)
    ),
    "linen_overwritten": Case(init(OVERWRITTEN), overwritten_grads),
    "int8_flow": Case(init(FLOW), train(FLOW)),
    "nnx": Case(lambda: NnxLayers(nnx.Rngs(1)), train_nnx),
    "nnx_frozen": Case(
        lambda: fbq_jax.nnx.freeze(NnxLayers(nnx.Rngs(1)), X), lambda model: model(X)
    ),
    "optimizer": Case(init_optimizer, optimize),
}


def leaves_of(tree):
    """Each leaf under its path."""
    return {
        jax.tree_util.keystr(path): leaf
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    }


def thinned(results):
    """The leaves of results as they are stored."""
    return {
        path: leaf if is_integer(leaf) else leaf.reshape(-1)[::STRIDE]
        for path, leaf in leaves_of(results).items()
    }


def is_integer(leaf):
    return jnp.issubdtype(leaf.dtype, jnp.integer)


@pytest.fixture(scope="module")
def stored():
    """``(case, "in" or "out")`` to the leaves, each under its path."""
    leaves: dict[tuple[str, str], dict[str, np.ndarray]] = {}
    for name, array in load_file(FILE).items():
        name, dtype = name.rsplit("|", 1)
        case, kind, path = name.split(":", 2)
        leaf = array.view(jnp.dtype(dtype)).reshape(array.shape[:-1])
        leaves.setdefault((case, kind), {})[path] = leaf
    return leaves


def described(leaves):
    return {path: (leaf.shape, jnp.dtype(leaf.dtype)) for path, leaf in leaves.items()}


def restore(like, leaves):
    """A tree like ``like`` with the leaves that are stored."""
    assert described(leaves_of(like)) == described(leaves)
    return jax.tree_util.tree_map_with_path(
        lambda path, _: jnp.asarray(leaves[jax.tree_util.keystr(path)]), like
    )


def assert_same(results, want):
    got = thinned(results)
    assert described(got) == described(want)
    for path, leaf in got.items():
        if is_integer(leaf):
            np.testing.assert_array_equal(leaf, want[path], path)
            continue
        a, b = (np.asarray(x, np.float64) for x in (leaf, want[path]))
        assert np.linalg.norm(a - b) <= TOLERANCE * np.linalg.norm(b), path


def loaded(name, stored):
    """The variables of a case, and what computes from them."""
    case, leaves = CASES[name], stored[name, "in"]
    if not name.startswith("nnx"):
        return restore(jax.eval_shape(case.init), leaves), case.run
    model = nnx.eval_shape(case.init)

    def run(arrays):
        graph, state = nnx.split(model)
        nnx.replace_by_pure_dict(state, arrays)
        return case.run(nnx.merge(graph, state))

    return restore(nnx.to_pure_dict(nnx.state(model)), leaves), run


@pytest.mark.parametrize("name", CASES)
def test_variables_load(name, stored):
    """They have the names, shapes and dtypes that they had."""
    loaded(name, stored)


# Layers of each kind, in training, are fast.
@pytest.mark.parametrize(
    "name", slow(CASES, CASES.keys() - {"linen", "int8_flow", "nnx"})
)
def test_variables_compute_what_they_did(name, stored):
    variables, run = loaded(name, stored)
    assert_same(jax.jit(run)(variables), stored[name, "out"])


def test_a_trained_model_freezes_to_the_same_codes(stored):
    """Bit for bit: a kernel is rounded to codes without a sum on the way."""
    like = jax.eval_shape(init(LAYERS))
    frozen = leaves_of(freeze(LAYERS, restore(like, stored["linen", "in"]), X))
    want = stored["linen_frozen", "in"]
    assert described(frozen) == described(want)
    for path, leaf in frozen.items():
        np.testing.assert_array_equal(leaf, want[path], path)
