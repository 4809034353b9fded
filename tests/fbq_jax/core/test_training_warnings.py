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
    fallback_stats,
)
from fbq_jax.core import threshold
from fbq_jax.sharding import layer_names
from tests.marks import rows_with_first_fast, with_first_fast

pytestmark = pytest.mark.usefixtures("every_cause_warns")
OWG = "_overwrite_with_gradient"
RECIPE = Recipe(block=32)
X = jax.random.normal(jax.random.key(0), (64, 64))
W = jax.random.normal(jax.random.key(1), (64, 64))
DIMS = (((1,), (0,)), ((), ()))


trace = jax.eval_shape  # The warnings come without computing anything.


def summed(function):
    return lambda *args: jnp.sum(function(*args))


def dot(x, w):
    return fallback_dot(x, w, DIMS)


def test_a_gradient_without_state_is_warned_about_once():
    grad = jax.grad(summed(dot), 1)
    with pytest.warns(UserWarning, match=r"no state: .*nnx\.FallbackDot.* new key"):
        trace(grad, X, W)
    trace(grad, X, W)


def test_no_gradient_of_a_weight_no_warning():
    trace(dot, X, W)
    trace(jax.grad(summed(dot)), X, W)  # of the input
    gemm = fbq_jax.Gemm()
    nearest = FallbackDot(Recipe(criterion=None, dlhs=gemm, drhs=gemm))
    trace(jax.grad(summed(lambda x, w: nearest(x, w, DIMS)), 1), X, W)


def raw_dot(x, w, recipe=RECIPE, key=None):
    return fbq_jax.dot_general(x, w, DIMS, recipe=recipe, key=key)[0]


def raw_ragged_dot(x, w, recipe=RECIPE, key=None):
    sizes = jnp.array([40, 24])
    return fbq_jax.ragged_dot(x, jnp.stack([w, w]), sizes, recipe=recipe, key=key)[0]


def scan_over(function):
    """The sum over two weights, one after the other."""

    def loss(x, w):
        def step(total, w):
            return total + jnp.sum(function(x, w)), None

        return jax.lax.scan(step, jnp.float32(0.0), jnp.stack([w, 2 * w]))[0]

    return loss


def vmap_over(function):
    return lambda x, w: jax.vmap(function, (None, 0))(x, jnp.stack([w, 2 * w]))


@pytest.mark.parametrize(
    ("function", "name"), [(raw_dot, "dot_general"), (raw_ragged_dot, "ragged_dot")]
)
@pytest.mark.parametrize(
    "wrap",
    with_first_fast([lambda f: f, jax.jit, jax.checkpoint, scan_over, vmap_over]),
)
def test_a_gradient_without_a_key_is_warned_about_once(function, name, wrap):
    grad = jax.grad(summed(wrap(function)), 1)
    with pytest.warns(UserWarning, match=f"fbq_jax.{name} without a key.* pass key="):
        trace(grad, X, W)
    trace(grad, X, W)


@pytest.mark.parametrize("function", [raw_dot, raw_ragged_dot])
def test_without_repeated_noise_there_is_no_warning_about_keys(function):
    trace(function, X, W)
    trace(jax.grad(summed(function)), X, W)  # of the activation
    key = jax.random.key(0)
    trace(jax.grad(summed(functools.partial(function, key=key)), 1), X, W)
    gemm = fbq_jax.Gemm()
    for recipe in (Recipe(dlhs=gemm, drhs=gemm), fbq_jax.recipes.rowwise):
        nearest = functools.partial(function, recipe=recipe)
        trace(jax.grad(summed(nearest), 1), X, W)


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

    variables = Doubled().init(jax.random.key(0), X)

    def loss(params):
        variables_ = {**variables, "params": params}
        y, state = Doubled().apply(variables_, X, mutable=["fallback"])
        return jnp.sum(y), state

    _, state = jax.grad(loss, has_aux=True)(variables["params"])
    assert next(iter(fallback_stats(state).values())).count == 1


def nnx_layer(dot, **options):
    return nnx.Linear(64, 64, dot_general=dot, rngs=nnx.Rngs(0), **options)


def nnx_grad(model):
    grad = nnx.grad(lambda model, x: jnp.sum(model(x)))
    nnx.eval_shape(grad, model, X)


attention = functools.partial(nnx.MultiHeadAttention, 4, 64, decode=False)


OUTSIDE = "FallbackDot outside any Linen module"
OURS = fbq_jax.nnx.FallbackDot
general = functools.partial(nnx.LinearGeneral, 64, 64)


@pytest.mark.parametrize(
    ("layer", "options", "message"),
    [
        (nnx_layer, {"dot": fallback_dot}, OUTSIDE),
        (attention, {"qkv_dot_general": fallback_dot, "rngs": nnx.Rngs(0)}, OUTSIDE),
        (nnx_layer, {"dot": OURS(RECIPE)}, r"without rngs.*one FallbackDot\(rngs=rngs"),
        (general, {"dot_general_cls": OURS, "rngs": nnx.Rngs(0)}, "without rngs.*_cls"),
        (
            general,
            {"dot_general_cls": lambda: seeded(RECIPE), "rngs": nnx.Rngs(0)},
            "made inside the function that is differentiated, as by dot_general_cls",
        ),
    ],
)
def test_nnx_layers_with_another_dot_are_warned_about(layer, options, message):
    with pytest.warns(UserWarning, match=message):
        nnx_grad(layer(**options))


def seeded(recipe):
    return OURS(recipe, rngs=nnx.Rngs(1))


@pytest.mark.parametrize("lift", with_first_fast([lambda f: f, nnx.jit, nnx.remat]))
def test_an_op_that_is_made_once_is_silent(lift):
    """Also in the function that trains, and if its recipe draws no noise."""
    grad = nnx.grad(lift(lambda model: jnp.sum(model(X))))
    grad(nnx_layer(seeded(RECIPE)))
    nnx.jit(lambda: grad(nnx_layer(seeded(RECIPE))))()
    rowwise = functools.partial(seeded, fbq_jax.recipes.rowwise)
    grad(general(dot_general_cls=rowwise, rngs=nnx.Rngs(0)))


@pytest.mark.parametrize(
    "make",
    [
        lambda: nnx_layer(fbq_jax.nnx.FallbackDot(RECIPE, rngs=nnx.Rngs(1))),
        lambda: fbq_jax.nnx.Int8MLP(64, 64, rngs=nnx.Rngs(0)),
    ],
)
def test_nnx_evaluation_mode_in_training(make):
    model = make()
    nnx_grad(model)
    model.eval()
    nnx.eval_shape(lambda model: model(X), model)
    with pytest.warns(UserWarning, match=r"evaluation mode.* call model\.train\(\)"):
        nnx_grad(model)


def trained_with_one(name):
    """Makes two layers of each kind, of two shapes, that share one op."""
    op_type, rngs = getattr(fbq_jax.nnx, name), nnx.Rngs(0)
    op = op_type(4) if name == "Fp8Dot" else op_type(RECIPE, rngs=nnx.Rngs(1))
    make = {
        "FallbackEinsum": lambda n: nnx.Einsum(
            "ij,jk->ik", (64, n), einsum_op=op, rngs=rngs
        ),
        "FallbackConv": lambda n: nnx.Conv(
            64, n, (1,), conv_general_dilated=op, rngs=rngs
        ),
    }.get(name, lambda n: nnx.Linear(64, n, dot_general=op, rngs=rngs))
    return make(64), make(32)


@pytest.mark.parametrize(
    ("name", "lift"),
    rows_with_first_fast(
        itertools.product(
            ["FallbackDot", "FallbackEinsum", "FallbackConv"],
            [lambda f: f, nnx.jit, nnx.remat],
        )
    ),
)
def test_nnx_layers_that_train_with_one_op(name, lift):
    first, second = trained_with_one(name)

    @lift
    def run(*layers):
        return functools.reduce(lambda x, layer: layer(x), layers, X)

    for mode in ("eval", "train"):
        for layer in (first, second):
            getattr(layer, mode)()
        # While they train, one layer may be called twice.
        run(first, second if mode == "eval" else first)
    with pytest.warns(UserWarning, match=f"train with one {name}.*its own {name}, as"):
        run(first, second)
    run(first, second)


def test_nnx_attention_with_one_op():
    op = fbq_jax.nnx.FallbackDot(RECIPE, rngs=nnx.Rngs(1))
    layer = attention(qkv_dot_general=op, out_dot_general=op, rngs=nnx.Rngs(0))
    shapes = r"weights of shapes \[64, 4, 16\] and \[4, 16, 64\] train with one Fallb"
    with pytest.warns(UserWarning, match=shapes):
        nnx.eval_shape(lambda layer: layer(X), layer)


def test_an_nnx_op_that_moves_to_another_layer_is_not_shared():
    dot = fbq_jax.nnx.FallbackDot(RECIPE, rngs=nnx.Rngs(1))
    first, second = nnx_layer(dot), nnx_layer(jax.lax.dot_general)
    first(X)
    first.dot_general = nnx.static(jax.lax.dot_general)
    second.dot_general = nnx.data(dot)
    second(X)


def test_a_float_count_goes_on_where_its_dtype_ends():
    state = threshold.start(RECIPE, 7)
    count, seeds = jnp.float32(2.0**24 - 1), set()
    for _ in range(4):
        moved = threshold.canonicalize_state({**state, "count": count})
        seeds.add(int(threshold.call_seed(moved)))
        count = (moved["count"] + 1).astype(jnp.float32)
    assert len(seeds) == 4
    integer = threshold.canonicalize_state({**state, "count": jnp.uint32(2**30)})
    assert integer["count"] == 2**30


def test_a_count_of_16_bits_does_not_train():
    def half(tree):
        return jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.bfloat16), tree)

    layer, x = LAYERS["Dense"], X.astype(jnp.bfloat16)
    variables = half(jax.eval_shape(layer.init, jax.random.key(0), X))
    trace(layer.apply, variables, x)
    with pytest.raises(ValueError, match=r"'\(root\)': .*bfloat16.* up to 256 only"):
        trace(functools.partial(layer.apply, mutable=["fallback"]), variables, x)

    model = nnx_layer(fbq_jax.nnx.FallbackDot(RECIPE, rngs=nnx.Rngs(1)))
    nnx.update(model, half(nnx.state(model)))
    with pytest.raises(ValueError, match=r"count of its state is bfloat16"):
        model(x)
    model.eval()
    model(x)


@pytest.mark.parametrize(
    "transform", [optax.sgd(0.1), optax.scale(2**-10), optax.clip(0.5)]
)
def test_a_state_that_optax_updates_is_not_live(transform):
    layer = nn.Dense(64, dot_general=FallbackDot(RECIPE, collection=OWG))
    before = layer.init(jax.random.key(0), X)
    grads = jax.grad(lambda variables: jnp.sum(layer.apply(variables, X)))(before)
    updates, _ = transform.update(grads, transform.init(before))
    after = optax.apply_updates(before, updates)
    with pytest.raises(RuntimeError, match="neither scale nor clip it"):
        assert_live(fallback_stats(before, OWG), fallback_stats(after, OWG))


def scanned(*, split, shared=False):
    """The variables of three scanned layers."""
    stack = nn.scan(
        lambda layer, x, _: (layer(x), None),
        variable_axes={"fallback": 0} | ({} if shared else {"params": 0}),
        variable_broadcast="params" if shared else False,
        split_rngs={"params": split},
        length=3,
    )

    class Stack(nn.Module):
        @nn.compact
        def __call__(self, x):
            layer = nn.Dense(64, dot_general=FallbackDot(RECIPE))
            return stack(layer, x, None)[0]

    return Stack().init(jax.random.key(0), X)


def test_scanned_layers_with_one_seed():
    fallback_stats(scanned(split=True))
    layer_names.clear()
    one = scanned(split=False)
    jax.eval_shape(fallback_stats, one)
    fallback_stats(jax.eval_shape(lambda: one))
    with pytest.warns(UserWarning, match=r"stack 'Dense_0' share a seed.*split_rngs="):
        fallback_stats(one)
    fallback_stats(one)


def test_the_warning_says_how_layers_with_shared_parameters_get_seeds():
    variables = scanned(split=False, shared=True)
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
    state = threshold.start(RECIPE) | {"seed": jnp.array(seeds)}
    with pytest.warns(UserWarning, match="share a seed") if warns else nullcontext():
        fallback_stats({"fallback": {"dot_general": state}})


@pytest.mark.parametrize("split", [True, False])
def test_stacked_nnx_layers_with_one_seed(split):
    def make(rngs):
        return nnx_layer(fbq_jax.nnx.FallbackDot(RECIPE, rngs=rngs))

    make = nnx.vmap(make, in_axes=0 if split else None, axis_size=3)
    layers = (nnx.split_rngs(splits=3)(make) if split else make)(nnx.Rngs(0))
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
    first, second = trained_with_one("Fp8Dot")
    with pytest.warns(UserWarning, match="train with one Fp8Dot"):
        second(first(X))
