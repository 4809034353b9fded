"""Steps that would repeat their noise say so; steps that do not are silent."""

import functools
import itertools
from contextlib import nullcontext

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx

import fbq_jax
from fbq_jax import (
    FallbackDot,
    GatedMLP,
    Int8MLP,
    Recipe,
    assert_live,
    fallback_dot,
    fallback_einsum,
    fallback_stats,
)
from fbq_jax.core import threshold
from fbq_jax.sharding import layer_names
from tests.marks import rows_with_first_fast

pytestmark = pytest.mark.usefixtures("every_cause_warns")
OWG = "_overwrite_with_gradient"
RECIPE = Recipe(block=32)
X = jax.random.normal(jax.random.key(0), (64, 64))
W = jax.random.normal(jax.random.key(1), (64, 64))
DIMS = (((1,), (0,)), ((), ()))


def trace(function, *args):
    """Traces a function; the warnings come without computing anything."""
    return jax.eval_shape(function, *args)


def summed(function):
    return lambda *args: jnp.sum(function(*args))


def dot(x, w):
    return fallback_dot(x, w, DIMS)


def einsum(x, w):
    return fallback_einsum("mk,kn->mn", x, w)


@pytest.mark.parametrize("function", [dot, einsum])
def test_a_gradient_without_state_is_warned_about_once(function):
    grad = jax.grad(summed(function), 1)
    with pytest.warns(UserWarning, match=r"no state: .*nnx\.FallbackDot.* new key"):
        trace(grad, X, W)
    trace(grad, X, W)


def test_no_gradient_of_a_weight_no_warning():
    trace(dot, X, W)
    trace(jax.grad(summed(dot)), X, W)  # of the input
    gemm = fbq_jax.Gemm()
    nearest = FallbackDot(Recipe(criterion=None, dlhs=gemm, drhs=gemm))
    trace(jax.grad(summed(lambda x, w: nearest(x, w, DIMS)), 1), X, W)


LAYERS = {
    "Dense": nn.Dense(64, dot_general=FallbackDot(RECIPE)),
    "GatedMLP": GatedMLP(64, dot_general=FallbackDot(RECIPE)),
    "Int8MLP": Int8MLP(64),
}


@pytest.mark.parametrize(
    ("name", "wrap"),
    rows_with_first_fast(
        itertools.product(LAYERS, [lambda f: f, jax.jit, jax.checkpoint])
    ),
)
def test_linen_training_with_an_immutable_collection(name, wrap):
    layer = LAYERS[name]
    variables = jax.eval_shape(layer.init, jax.random.key(0), X)

    def loss(params, x, mutable=False):
        out = layer.apply({**variables_, "params": params}, x, mutable=mutable)
        return jnp.sum(out[0] if mutable else out)

    variables_ = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), variables)
    # A gradient of the input, and training as documented, are silent.
    trace(jax.grad(wrap(loss), 1), variables["params"], X)
    training = functools.partial(loss, mutable=["fallback"])
    trace(jax.grad(wrap(training)), variables["params"], X)
    with pytest.warns(UserWarning, match=r"'fallback' is immutable.*mutable=\['fallb"):
        trace(jax.grad(wrap(loss)), variables["params"], X)


@pytest.mark.exhaustive
def test_linen_training_inside_a_transformation_that_is_immutable():
    """The warning's remedy gives each step its own noise."""
    dense = nn.Dense(64, dot_general=FallbackDot(fbq_jax.recipes.block))
    model = nn.WeightNorm(dense)
    variables = model.init(jax.random.key(0), X)

    def loss(params, variables, rngs=None):
        y, _ = model.apply(
            {**variables, "params": params}, X, rngs=rngs, mutable=["fallback"]
        )
        return jnp.sum(y**2)

    with pytest.warns(UserWarning, match=r"'fallback' immutable, as nn\.WeightNorm"):
        trace(jax.grad(loss), variables["params"], variables)
    layer_names.clear()
    first, second = (
        jax.grad(loss)(variables["params"], {}, {"fbq": jax.random.key(i)})
        for i in range(2)
    )
    layer = "layer_instance"
    assert np.any(first[layer]["kernel"] != second[layer]["kernel"])


def test_own_map_variables_of_parameters_keeps_the_state_mutable():
    class Doubled(nn.Module):
        @nn.compact
        def __call__(self, x):
            double = nn.map_variables(
                nn.Dense,
                "params",
                lambda params: jax.tree.map(lambda p: 2 * p, params),
                init=self.is_initializing(),
            )
            return double(64, dot_general=FallbackDot(RECIPE))(x)

    model = Doubled()
    variables = jax.eval_shape(model.init, jax.random.key(0), X)
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), variables)

    def loss(params):
        y, state = model.apply({**zeros, "params": params}, X, mutable=["fallback"])
        return jnp.sum(y), state

    _, state = jax.grad(loss, has_aux=True)(zeros["params"])
    assert next(iter(fallback_stats(state).values())).count == 1


def test_a_layer_that_lost_its_state_starts_anew_with_a_warning():
    model = nn.Sequential([LAYERS["Dense"], nn.Dense(8, dot_general=fallback_dot)])
    variables = jax.eval_shape(model.init, jax.random.key(0), X)
    state = {"layers_0": variables["fallback"]["layers_0"]}
    step = functools.partial(model.apply, mutable=["fallback"])
    trace(step, variables, X)
    with pytest.warns(UserWarning, match="'layers_1' has no state .* starts a new one"):
        trace(step, {"params": variables["params"], "fallback": state}, X)


def nnx_layer(dot, **options):
    return nnx.Linear(64, 64, dot_general=dot, rngs=nnx.Rngs(0), **options)


def nnx_grad(model):
    grad = nnx.grad(lambda model, x: jnp.sum(model(x)))
    nnx.eval_shape(grad, model, X)


def test_nnx_layers_with_another_dot_are_warned_about():
    with pytest.warns(UserWarning, match=r"FallbackDot outside any Linen module"):
        nnx_grad(nnx_layer(fallback_dot))
    attention = functools.partial(nnx.MultiHeadAttention, 4, 64, decode=False)
    layer_names.clear()
    with pytest.warns(UserWarning, match=r"FallbackDot outside any Linen module"):
        nnx_grad(attention(qkv_dot_general=fallback_dot, rngs=nnx.Rngs(0)))
    with pytest.warns(UserWarning, match=r"without rngs.*one FallbackDot\(rngs=rngs"):
        nnx_grad(nnx_layer(fbq_jax.nnx.FallbackDot(RECIPE)))
    layer_names.clear()
    general = nnx.LinearGeneral(
        64, 64, dot_general_cls=fbq_jax.nnx.FallbackDot, rngs=nnx.Rngs(0)
    )
    with pytest.warns(UserWarning, match=r"without rngs.*dot_general_cls"):
        nnx_grad(general)


def test_nnx_evaluation_mode_in_training():
    model = nnx_layer(fbq_jax.nnx.FallbackDot(RECIPE, rngs=nnx.Rngs(1)))
    nnx_grad(model)
    model.eval()
    nnx.eval_shape(lambda model: model(X), model)
    with pytest.warns(UserWarning, match=r"evaluation mode.* call model\.train\(\)"):
        nnx_grad(model)
    layer_names.clear()
    block = fbq_jax.nnx.Int8MLP(64, 64, rngs=nnx.Rngs(0))
    nnx_grad(block)
    block.eval()
    with pytest.warns(UserWarning, match="evaluation mode"):
        nnx_grad(block)


def trained_with_one(op_type):
    """Makes two layers of each kind, of two shapes, that share one op."""
    op, rngs = op_type(RECIPE, rngs=nnx.Rngs(1)), nnx.Rngs(0)

    def make(features):
        match op:
            case fbq_jax.nnx.FallbackEinsum():
                shape = 64, features
                return nnx.Einsum("ij,jk->ik", shape, einsum_op=op, rngs=rngs)
            case fbq_jax.nnx.FallbackConv():
                options = {"conv_general_dilated": op, "rngs": rngs}
                return nnx.Conv(64, features, (1,), **options)
            case _:
                return nnx.Linear(64, features, dot_general=op, rngs=rngs)

    return make(64), make(32)


@pytest.mark.parametrize(
    ("name", "lift"),
    rows_with_first_fast(
        itertools.product(
            ["FallbackDot", "FallbackEinsum", "FallbackConv"],
            [lambda f, *args: f(*args), nnx.jit, nnx.remat],
        )
    ),
)
def test_nnx_layers_that_train_with_one_op(name, lift):
    first, second = trained_with_one(getattr(fbq_jax.nnx, name))

    def run(*layers):
        return functools.reduce(lambda x, layer: layer(x), layers, X)

    if lift in (nnx.jit, nnx.remat):
        run = lift(run)
    for layer in (first, second):
        layer.eval()
    run(first, second)
    for layer in (first, second):
        layer.train()
    run(first, first)  # one layer, called twice
    with pytest.warns(UserWarning, match=rf"train with one {name}.*its own {name}, as"):
        run(first, second)
    run(first, second)


def test_nnx_attention_with_one_op():
    """Its queries, keys and values have kernels of one shape."""
    op = fbq_jax.nnx.FallbackDot(RECIPE, rngs=nnx.Rngs(1))
    make = functools.partial(
        nnx.MultiHeadAttention, 4, 64, decode=False, rngs=nnx.Rngs(0)
    )
    with pytest.raises(ValueError, match="layers 'key' and 'query' share one Fallback"):
        fbq_jax.nnx.fallback_stats(make(qkv_dot_general=op))
    attention = make(qkv_dot_general=op, out_dot_general=op)
    shapes = r"weights of shapes \[64, 4, 16\] and \[4, 16, 64\] train with one Fallb"
    with pytest.warns(UserWarning, match=shapes):
        nnx.eval_shape(lambda attention: attention(X), attention)


def test_an_nnx_op_that_moves_to_another_layer_is_not_shared():
    dot = fbq_jax.nnx.FallbackDot(RECIPE, rngs=nnx.Rngs(1))
    first, second = nnx_layer(dot), nnx_layer(jax.lax.dot_general)
    first(X)
    first.dot_general = nnx.static(jax.lax.dot_general)
    second.dot_general = nnx.data(dot)
    second(X)


def test_a_warning_changes_no_value():
    def grads(x, w):
        return jax.grad(summed(dot), (0, 1))(x, w)

    def core(x, w):
        return fbq_jax.dot_general(x, w, DIMS)[0]

    with pytest.warns(UserWarning, match="no state"):
        got = jax.jit(grads)(X, W)
    want = jax.jit(jax.grad(summed(core), (0, 1)))(X, W)
    jax.tree.map(np.testing.assert_array_equal, got, want)


def test_a_float_count_goes_on_where_its_dtype_ends():
    state = threshold.start(RECIPE, 7)
    seeds = []
    for count in (2.0**24 - 1, 2.0**24, 1.0):
        moved = {**state, "count": jnp.float32(count)}
        seeds.append(int(threshold.call_seed(threshold.canonicalize_state(moved))))
    assert len(set(seeds)) == 3
    integer = threshold.canonicalize_state({**state, "count": jnp.uint32(2**30)})
    assert integer["count"] == 2**30


def test_a_count_of_16_bits_does_not_train():
    layer, x = LAYERS["Dense"], X.astype(jnp.bfloat16)
    variables = jax.eval_shape(layer.init, jax.random.key(0), X)
    half = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, jnp.bfloat16), variables
    )
    trace(layer.apply, half, x)
    with pytest.raises(ValueError, match=r"'\(root\)': .*bfloat16.* up to 256 only"):
        trace(functools.partial(layer.apply, mutable=["fallback"]), half, x)

    model = nnx_layer(fbq_jax.nnx.FallbackDot(RECIPE, rngs=nnx.Rngs(1)))
    state = jax.tree.map(lambda x: x.astype(jnp.bfloat16), nnx.state(model))
    nnx.update(model, state)
    with pytest.raises(ValueError, match=r"count of its state is bfloat16"):
        model(x)
    model.eval()
    model(x)


def owg_counts(transform):
    """The counts before and after a step in which optax updates the state."""
    layer = nn.Dense(64, dot_general=FallbackDot(RECIPE, collection=OWG))
    variables = layer.init(jax.random.key(0), X)
    grads = jax.grad(lambda variables: jnp.sum(layer.apply(variables, X)))(variables)
    updates, _ = transform.update(grads, transform.init(variables))
    after = optax.apply_updates(variables, updates)
    return fallback_stats(variables, OWG), fallback_stats(after, OWG)


@pytest.mark.parametrize(
    "transform", [optax.sgd(0.1), optax.scale(2**-10), optax.clip(0.5)]
)
def test_a_state_that_optax_updates_is_not_live(transform):
    with pytest.raises(RuntimeError, match="neither scale nor clip it"):
        assert_live(*owg_counts(transform))


def test_mapped_layers_with_one_rng_have_their_own_seeds():
    layer = nn.vmap(
        nn.Dense,
        variable_axes={"params": None, "fallback": 0},
        split_rngs={"params": False},
    )(64, dot_general=FallbackDot(RECIPE))
    variables = layer.init(jax.random.key(0), jnp.stack([X] * 3))
    seeds = variables["fallback"]["dot_general"]["seed"]
    assert len(np.unique(seeds)) == 3
    assert np.all(seeds < 2**24)


class Stack(nn.Module):
    split: bool
    shared: bool = False

    @nn.compact
    def __call__(self, x):
        stack = nn.scan(
            lambda layer, x, _: (layer(x), None),
            variable_axes={"fallback": 0} | ({} if self.shared else {"params": 0}),
            variable_broadcast="params" if self.shared else False,
            split_rngs={"params": self.split},
            length=3,
        )
        return stack(nn.Dense(64, dot_general=FallbackDot(RECIPE)), x, None)[0]


def test_scanned_layers_with_one_seed():
    x = jnp.ones((64, 64))
    own, one = (Stack(split).init(jax.random.key(0), x) for split in (True, False))
    fallback_stats(own)
    layer_names.clear()
    jax.eval_shape(fallback_stats, one)
    fallback_stats(jax.eval_shape(lambda: one))
    with pytest.warns(UserWarning, match=r"stack 'Dense_0' share a seed.*split_rngs="):
        fallback_stats(one)
    fallback_stats(one)


def test_the_warning_says_how_layers_with_shared_parameters_get_seeds():
    stack = Stack(split=False, shared=True)
    variables = stack.init(jax.random.key(0), jnp.ones((64, 64)))
    remedy = r"share parameters.*the seed.*by jax\.random\.bits\(key, \(3,\)\)"
    with pytest.warns(UserWarning, match=remedy):
        fallback_stats(variables)
    layer_names.clear()
    state = variables["fallback"]["Dense_0"]["dot_general"]
    seeds = jax.random.bits(jax.random.key(1), (3,))
    assert seeds.dtype == state["seed"].dtype
    state["seed"] = seeds
    fallback_stats(variables)


@pytest.mark.parametrize(
    ("seeds", "warns"),
    [([[1, 2], [3, 2]], False), ([[1, 2], [1, 2]], True), ([[1, 1], [2, 2]], True)],
)
def test_an_axis_of_a_stack_has_one_seed_or_two_are_equal_by_chance(seeds, warns):
    layer = nn.Dense(8, dot_general=FallbackDot())
    state = layer.init(jax.random.key(0), jnp.ones((4, 8)))["fallback"]["dot_general"]
    state = {"fallback": {"dot_general": state | {"seed": jnp.array(seeds)}}}
    with pytest.warns(UserWarning, match="share a seed") if warns else nullcontext():
        fallback_stats(state)


@pytest.mark.parametrize("split", [True, False])
def test_stacked_nnx_layers_with_one_seed(split):
    def make(rngs):
        dot = fbq_jax.nnx.FallbackDot(RECIPE, rngs=rngs)
        return nnx.Linear(64, 64, dot_general=dot, rngs=rngs)

    make = nnx.vmap(make, in_axes=0 if split else None, axis_size=3)
    if split:
        make = nnx.split_rngs(splits=3)(make)
    layers = make(nnx.Rngs(0))
    warns = pytest.warns(UserWarning, match=r"share a seed.*nnx\.split_rngs")
    with nullcontext() if split else warns:
        fbq_jax.nnx.fallback_stats(layers)


@pytest.mark.parametrize(
    "dot", [fbq_jax.fp8_dot, FallbackDot(RECIPE, OWG)], ids=["fp8", "fallback"]
)
@pytest.mark.parametrize("lift", [lambda cls: cls, nn.remat], ids=["plain", "remat"])
def test_state_whose_gradient_is_not_taken(dot, lift):
    layer = lift(nn.Dense)(64, dot_general=dot)
    variables = layer.init(jax.random.key(0), X)

    def loss(params, state, x):
        return jnp.sum(layer.apply({"params": params, OWG: state}, x))

    args = variables["params"], variables[OWG], X
    for argnums in (0, 1), 2:
        jax.grad(loss, argnums)(*args)
    with pytest.warns(UserWarning, match="weight, but not to the collection '_over"):
        jax.grad(loss)(*args)


def test_nnx_fp8_state_whose_gradient_is_not_taken():
    layer = nnx.Linear(64, 64, dot_general=fbq_jax.nnx.Fp8Dot(4), rngs=nnx.Rngs(0))

    def grad(wrt):
        loss = nnx.remat(lambda layer: jnp.sum(layer(X)))
        argnums = nnx.DiffState(0, wrt)
        return nnx.jit(lambda layer: nnx.grad(loss, argnums=argnums)(layer))(layer)

    grad((nnx.Param, fbq_jax.nnx.Fp8Scaling))
    with pytest.warns(UserWarning, match="but not to the Fp8Scaling variables"):
        grad(nnx.Param)


def test_nnx_layers_that_share_an_fp8_dot():
    dot = fbq_jax.nnx.Fp8Dot(4)
    first, second = (
        nnx.Linear(64, features, dot_general=dot, rngs=nnx.Rngs(0))
        for features in (64, 32)
    )
    with pytest.warns(UserWarning, match="train with one Fp8Dot"):
        second(first(X))
