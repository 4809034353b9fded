"""State and injection in Flax Linen, under each transformation."""

import functools

import flax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

from fbq_jax import (
    FallbackDot,
    Recipe,
    assert_live,
    dot_general,
    fallback_dot,
    fallback_stats,
    recipes,
    save_codes,
)
from fbq_jax.kernels.quantized import UNSET
from fbq_jax.sharding import layer_names
from tests.fbq_jax.jaxprs import codes_among, count_equations
from tests.kernels.quantize_cases import heavy
from tests.marks import with_first_fast

OWG = "_overwrite_with_gradient"
SMALL = FallbackDot(Recipe(block=32))
X = jax.random.normal(jax.random.key(0), (128, 64))


class Mlp(nn.Module):
    """Two layers with one dot_general object."""

    dot_general: FallbackDot = SMALL

    @nn.compact
    def __call__(self, x):
        x = nn.Dense(96, dot_general=self.dot_general, name="up")(x)
        return nn.Dense(64, dot_general=self.dot_general, name="down")(nn.silu(x))


class Layer(nn.Module):
    dot_general: FallbackDot = SMALL

    @nn.compact
    def __call__(self, x, _):
        return x + Mlp(self.dot_general, name="mlp")(x), None


class Scanned(nn.Module):
    dot_general: FallbackDot = SMALL
    axes: tuple[str, ...] = ("params", "fallback")

    @nn.compact
    def __call__(self, x):
        layers = nn.scan(
            Layer, dict.fromkeys(self.axes, 0), split_rngs={"params": True}, length=2
        )
        return layers(self.dot_general, name="layers")(x, None)[0]


@functools.partial(jax.jit, static_argnums=0)
def init(model, x=X):
    return model.init(jax.random.key(1), x)


@functools.partial(jax.jit, static_argnames=("model", "mutable"))
def apply(model, variables, x=X, mutable=False):
    return model.apply(variables, x, mutable=list(mutable) if mutable else False)


@functools.partial(jax.jit, static_argnames="model")
def train_step(model, variables, x):
    """The loss, the gradients and the new variables."""
    params, state = variables["params"], {"fallback": variables["fallback"]}

    def loss(params):
        y, updates = model.apply({"params": params, **state}, x, mutable=["fallback"])
        return jnp.mean((y - 1.0) ** 2), updates

    (value, updates), grads = jax.value_and_grad(loss, has_aux=True)(params)
    params = jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)
    return value, grads, {"params": params, **updates}


def test_training_converges_and_the_threshold_of_each_layer_follows():
    variables = init(Mlp())
    stats = fallback_stats(variables)
    assert sorted(stats) == ["down", "up"]
    assert all(s.count == 0 and s.theta == UNSET for s in stats.values())
    first, first_grads, variables = train_step(Mlp(), variables, X)
    stats = fallback_stats(variables)
    assert all(s.count == 1 for s in stats.values())
    assert stats["up"].theta != stats["down"].theta
    assert stats["up"].rate == pytest.approx(2 / 8, abs=0.06)
    for scale in (1.0, 3.0, 0.3):
        for _ in range(8):
            loss, _, variables = train_step(Mlp(), variables, scale * X)
        assert all(0.1 <= s.rate <= 0.3 for s in fallback_stats(variables).values())
    assert loss < 0.85 * first

    # The noise repeats from the same state, and changes with the state.
    start = init(Mlp())
    grads = train_step(Mlp(), start, X)[1]
    jax.tree.map(np.testing.assert_array_equal, grads, first_grads)
    moved = {"params": start["params"], "fallback": variables["fallback"]}
    other = train_step(Mlp(), moved, X)[1]
    assert np.any(other["up"]["kernel"] != grads["up"]["kernel"])


def test_evaluation_freezes_the_threshold():
    variables = init(Mlp())
    _, _, variables = train_step(Mlp(), variables, X)
    y = apply(Mlp(), variables, X)
    assert y.shape == X.shape
    z, same = apply(Mlp(), variables, X, mutable=("other",))
    assert "fallback" not in same
    np.testing.assert_array_equal(y, z)


def test_a_missing_state_is_named():
    """Without its collection, in a part of it, and in a scan that lists no state."""
    variables = init(Mlp())
    params = {"params": variables["params"]}
    with pytest.raises(
        ValueError, match=r"layer 'up' has no state 'dot_general'.*'fallback'"
    ):
        apply(Mlp(), params, X)
    for state in {}, {"fallback": {"down": variables["fallback"]["down"]}}:
        layer_names.clear()
        with pytest.warns(UserWarning, match="'up' has no state .* starts a new one"):
            _, updates = apply(Mlp(), params | state, X, mutable=("fallback",))
        assert fallback_stats(updates)["up"].count == 1
    with pytest.raises(ValueError, match="no state 'dot_general' in the collection"):
        init(Scanned(axes=("params",)))


@pytest.mark.parametrize("model", with_first_fast([Mlp, Scanned]))
def test_initial_weights_match_the_unquantized_model(model):
    """And need only the shape of the input."""
    quantized = init(model())
    plain = init(model(dot_general=None))["params"]
    jax.tree.map(np.testing.assert_array_equal, quantized["params"], plain)
    shape = jax.ShapeDtypeStruct(X.shape, X.dtype)
    lazy = model().lazy_init(jax.random.key(1), shape)
    assert jax.tree.map(jnp.shape, lazy) == jax.tree.map(jnp.shape, quantized)
    jax.tree.map(np.testing.assert_array_equal, lazy["fallback"], quantized["fallback"])


@pytest.mark.parametrize(
    "transform",
    [
        jax.checkpoint,
        jax.jit,
        lambda call: lambda x: jax.vmap(call)(x[None])[0],
        lambda call: lambda x: jax.lax.cond(x[0, 0] > 0.0, call, jnp.negative, x),
        lambda call: lambda x: jax.lax.fori_loop(0, 2, lambda _, x: call(x), x),
    ],
)
def test_a_transformation_of_jax_that_would_lose_the_state_is_an_error(transform):
    class Model(nn.Module):
        recipe: Recipe

        def setup(self):
            self.up = nn.Dense(32, dot_general=FallbackDot(self.recipe))

        def __call__(self, x):
            call = self.up if self.is_initializing() else transform(self.up.__call__)
            return call(x)

    x = jnp.ones((4, 32))

    def train(recipe):
        model = Model(recipe)
        variables = model.init(jax.random.key(0), x)
        model.apply(variables, x)  # evaluation
        model.apply(variables, x, mutable=["fallback"])

    train(recipes.rowwise)  # needs no state
    with pytest.raises(ValueError, match=r"layer 'up': its state cannot leave"):
        train(Recipe(block=32))


def test_save_codes_saves_codes_only():
    model = Mlp()
    variables = init(model)

    def loss(params):
        variables_ = {**variables, "params": params}
        return jnp.sum(model.apply(variables_, X, mutable=["fallback"])[0])

    backward = functools.partial(jax.vjp, jax.checkpoint(loss, policy=save_codes))
    _, vjp = jax.eval_shape(backward, variables["params"])
    saved = [x for x in jax.tree.leaves(vjp) if hasattr(x, "dtype")]
    codes = codes_among(saved)
    assert codes == [(1, 64, 96), (1, 64, 128), (1, 96, 64), (1, 96, 128)]
    inputs = {variables["params"][n]["kernel"].shape for n in ("up", "down")}
    activations = [
        x.shape
        for x in saved
        if x.dtype == jnp.float32 and x.size >= 64 * 64 and x.shape not in inputs
    ]
    assert activations in ([], [X.shape])


class Chain(nn.Module):
    """Layers whose gradients read no layer's output."""

    @nn.compact
    def __call__(self, x):
        for name in ("first", "second"):
            x = nn.Dense(128, use_bias=False, dot_general=SMALL, name=name)(x)
        return x


def test_save_codes_recomputes_no_product():
    def products(layer):
        variables = jax.eval_shape(init, layer())
        traced = train_step.trace(layer(), variables, X)
        return count_equations(traced.jaxpr.jaxpr, "dot_general")

    assert products(nn.remat(Chain, policy=save_codes)) == products(Chain)


@pytest.mark.parametrize("name", with_first_fast(["fallback", "per_tensor", "rowwise"]))
def test_examples_that_share_a_state_draw_noise_of_their_own(name):
    """As they do without state."""
    recipe = recipes.NAMED[name]
    layer = nn.Dense(64, use_bias=False, dot_general=FallbackDot(recipe))
    x, dy = heavy((64, 64)), heavy((64, 64), 2)
    variables = layer.init(jax.random.key(0), x)

    def of_layer(x, w):
        state = {"params": {"kernel": w}, "fallback": variables["fallback"]}
        return layer.apply(state, x, mutable=["fallback"])[0]

    def without_state(x, w):
        options = {"recipe": recipe, "key": jax.random.key(0)}
        return dot_general(x, w, (((1,), (0,)), ((), ())), **options)[0]

    @functools.partial(jax.jit, static_argnums=0)
    def differ(product):
        def gradients(x, dy):
            return jax.vjp(product, x, variables["params"]["kernel"])[1](dy)

        each = jax.vmap(gradients)(jnp.stack([x, x]), jnp.stack([dy, dy]))
        return [jnp.any(first != second) for first, second in each]

    assert differ(of_layer) == differ(without_state)


def test_dot_general_cls_keeps_the_same_paths():
    layer = nn.Dense(8, dot_general_cls=functools.partial(FallbackDot, recipes.block))
    variables = init(layer)
    plain = init(nn.Dense(8, dot_general=fallback_dot))
    assert jax.tree.structure(variables) == jax.tree.structure(plain)
    _, updates = apply(layer, variables, X, mutable=("fallback",))
    assert fallback_stats(updates)["(root)"].count == 1


class Products(nn.Module):
    """Two products in one module, the first of which can be left out."""

    @nn.compact
    def __call__(self, x, _=None, *, first=True):
        for name in ("a", "b") if first else ("b",):
            w = self.param(name, nn.initializers.normal(0.1), (64, 64))
            x = SMALL(x, w, (((1,), (0,)), ((), ())))
        return x, None


LIFTS = {
    "none": lambda layer: layer,
    "scan": functools.partial(
        nn.scan,
        variable_axes={"params": 0, "fallback": 0},
        split_rngs={"params": True},
        length=3,
    ),
    "remat": nn.remat,
    "jit": nn.jit,
}


@pytest.mark.parametrize("name", with_first_fast(LIFTS))
def test_each_product_of_a_module_has_a_state(name):
    """JAX may trace the module several times, which makes no more products."""

    class Lifted(nn.Module):
        @nn.compact
        def __call__(self, x):
            return LIFTS[name](Products)(name="layer")(x, None)[0]

    variables = init(Lifted())
    for _ in range(2):
        _, _, variables = train_step(Lifted(), variables, X)
    stats = fallback_stats(variables)
    assert sorted(stats) == ["layer", "layer/dot_general_1"]
    assert all(np.all(s.count == 2) for s in stats.values())
    seeds = [slot["seed"] for slot in variables["fallback"]["layer"].values()]
    assert len(np.unique(np.ravel(seeds))) == np.size(seeds)


def test_a_state_that_a_step_leaves_out_is_named():
    """States follow the order of calls, so the second product takes the first's."""
    variables = init(Products())
    _, updates = Products().apply(variables, X, first=False, mutable=["fallback"])
    with pytest.raises(RuntimeError, match="state of dot_general_1;"):
        assert_live(fallback_stats(variables), fallback_stats(updates))


@pytest.mark.parametrize(
    ("change", "got"),
    [
        (lambda state: jax.tree.map(lambda x: x[None], state), r"theta \[1\], rate"),
        (lambda state: {"theta": state["theta"]}, r"got theta \[\]\."),
    ],
)
@pytest.mark.parametrize("mutable", [False, ["fallback"]])
def test_a_state_of_other_layers_is_named(change, got, mutable):
    variables = init(Mlp())
    slot = variables["fallback"]["down"]
    slot["dot_general"] = change(slot["dot_general"])
    with pytest.raises(ValueError, match=f"state of down takes the scalars .*{got}"):
        Mlp().apply(variables, X, mutable=mutable)


def test_overwrite_with_gradient_of_examples_that_share_a_state():
    """It is the mean of their states, not the sum; zeros determine no threshold."""
    dot = FallbackDot(Recipe(block=32), collection=OWG)
    layer = nn.Dense(64, dot_general=dot)
    x = jnp.stack([X, 2.0 * X, 0.0 * X, 3.0 * X])
    variables = layer.init(jax.random.key(0), X)

    def state(x, apply):
        gradient = jax.grad(lambda v: jnp.sum(apply(v, x)))(variables)
        return gradient[OWG]["dot_general"]

    each = [state(example, layer.apply) for example in x]
    shared = state(x, jax.vmap(layer.apply, (None, 0)))
    assert each[0]["theta"] < shared["theta"] < each[3]["theta"]
    assert each[2]["theta"] == UNSET
    for name, value in shared.items():
        values = [one[name] for one in each if one[name] != UNSET]
        np.testing.assert_allclose(value, np.mean(values), rtol=1e-6)
    assert shared["count"] == 1.0


def test_overwrite_with_gradient_returns_the_next_state():
    """As a gradient of parameters, which Flax's TrainState puts in place of the old."""
    model = Mlp(dot_general=FallbackDot(Recipe(block=32), collection=OWG))
    variables = init(model)
    assert {x.dtype for x in jax.tree.leaves(variables[OWG])} == {jnp.dtype("float32")}

    @jax.jit
    @jax.grad
    def gradient(variables):
        return jnp.mean((model.apply(variables, X) - 1.0) ** 2)

    grads = gradient(variables)
    _, plain, after = train_step(Mlp(), init(Mlp()), X)
    same = functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6)
    jax.tree.map(same, grads["params"], plain)
    jax.tree.map(same, grads[OWG], after["fallback"])


def test_outside_a_module_there_is_no_state():
    w = jnp.ones((64, 32))
    y = fallback_dot(X, w, (((1,), (0,)), ((), ())))
    assert y.shape == (128, 32)
    np.testing.assert_allclose(y, X @ w, atol=0.3)


def test_liveness():
    variables = init(Mlp())
    before = fallback_stats(variables)
    _, _, after = train_step(Mlp(), variables, X)
    assert_live(before, fallback_stats(after))
    not_updated = "did not update the fallback state of down, up;"
    for error, message, *stats in (
        (RuntimeError, not_updated, before, before),
        (ValueError, r"got \[\] and \[\]", {}, {}),
        (TypeError, r"fallback_stats .*; got a mapping to dict", variables, after),
        (TypeError, r"fallback_stats .*; got Mlp", Mlp(), after),
    ):
        with pytest.raises(error, match=message):
            assert_live(*stats)


def test_liveness_of_donated_state():
    step = jax.jit(lambda s: jax.tree.map(lambda x: x + 1, s), donate_argnums=0)
    state = {"fallback": init(Mlp())["fallback"]}
    before = fallback_stats(state)
    after = step(state)
    with pytest.raises(ValueError, match=r"device_get\(fallback_stats\(...\)\) before"):
        assert_live(before, fallback_stats(after))
    before = jax.device_get(fallback_stats(after))
    assert_live(before, fallback_stats(step(after)))


@pytest.mark.parametrize("collection", with_first_fast(["fallback", OWG]))
def test_state_may_come_as_numpy_or_frozen(collection):
    """As a checkpoint restores it; nothing is written into the arrays."""
    model = nn.Dense(64, dot_general=FallbackDot(Recipe(block=32), collection))
    variables = init(model)
    restored = jax.tree.map(np.array, variables)
    kept = jax.tree.map(np.copy, restored)
    frozen = flax.core.freeze(restored)

    def grads(variables):
        def loss(variables):
            return jnp.sum(model.apply(variables, X, mutable=["fallback"])[0] ** 2)

        return jax.grad(loss, allow_int=True)(variables)["params"]

    expected = grads(variables)
    for other in (restored, frozen):
        pairs = zip(
            jax.tree.leaves(grads(other)), jax.tree.leaves(expected), strict=True
        )
        for leaf, value in pairs:
            np.testing.assert_array_equal(leaf, value)
    jax.tree.map(np.testing.assert_array_equal, restored, kept)


OF_OTHER = nn.Dense(8, dot_general=FallbackDot(collection="other"))


def test_stats_take_the_variables_of_a_model():
    variables = init(OF_OTHER)
    _, updates = apply(OF_OTHER, variables, X, mutable=("other",))
    assert fallback_stats(updates, "other")["(root)"].count == 1
    assert fallback_stats({"params": variables["params"]}) == {}


OTHER_COLLECTION = r"call fallback_stats\(variables, 'other'\)"
NO_VARIABLES = r"'fallback': state}; got the state of a coll"


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: FallbackDot("fallback"),
            r"takes a Recipe, such as .*; got 'fallback'",
        ),
        (lambda: FallbackDot(collection="params"), "for parameters; keep the state"),
        (lambda: FallbackDot(collection=3), r"name of a variable collection.*got 3"),
        (lambda: fallback_stats(init(OF_OTHER)), OTHER_COLLECTION),
        (lambda: fallback_stats(init(Mlp())["fallback"]), NO_VARIABLES),
    ],
)
def test_bad_arguments_are_named(call, message):
    with pytest.raises((TypeError, ValueError), match=message):
        call()
