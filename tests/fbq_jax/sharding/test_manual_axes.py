"""Noise inside ``shard_map`` and ``pmap``: each device draws its own."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from jax.sharding import PartitionSpec as P

from fbq_jax import (
    FallbackDot,
    Fp8Dot,
    GatedMLP,
    Int8MLP,
    Recipe,
    dot_general,
    fallback_stats,
    llm_int8_dot,
    nonlinear,
    ragged_dot,
)
from fbq_jax.sharding import layer_names
from tests.fbq_jax.sharding.tools import mesh_of, needs_devices
from tests.marks import rows_with_first_fast, with_first_fast

pytestmark = needs_devices

OWG = "_overwrite_with_gradient"
DEVICES, ROWS, K, N = 4, 32, 64, 32
RECIPE = Recipe(block=32, criterion=None)
DOT = FallbackDot(RECIPE)
DIMS = (((1,), (0,)), ((), ()))
X = jax.random.normal(jax.random.key(0), (ROWS, K))
# Every device has the same rows.
COPIES = jnp.tile(X, (DEVICES, 1))
W = jax.random.normal(jax.random.key(1), (K, N))
KEY = jax.random.key(2)


def grads(x, w, key=KEY):
    def loss(x, w):
        return jnp.sum(jnp.sin(dot_general(x, w, DIMS, recipe=RECIPE, key=key)[0]))

    return jax.grad(loss, (0, 1))(x, w)


def in_shard_map(function, *, check_vma):
    """Runs ``function`` on each device's rows of x and a copy of w; stacks results."""

    def local(x, w):
        if check_vma:  # each device has its own gradient of its copy
            w = jax.lax.pcast(w, "data", to="varying")
        return jax.tree.map(lambda y: y[None], function(x, w))

    specs = {"in_specs": (P("data"), P()), "out_specs": P("data")}
    mesh = mesh_of(data=DEVICES)
    mapped = jax.shard_map(local, mesh=mesh, check_vma=check_vma, **specs)
    return jax.jit(mapped)


def in_pmap(function):
    devices = jax.devices()[:DEVICES]
    mapped = jax.pmap(function, in_axes=(0, None), devices=devices)
    return lambda x, w: mapped(x.reshape(DEVICES, ROWS, K), w)


MAPS = {
    "shard_map": functools.partial(in_shard_map, check_vma=True),
    "unchecked": functools.partial(in_shard_map, check_vma=False),
    "pmap": in_pmap,
}


def distinct(x):
    return len(np.unique(np.asarray(x).reshape(DEVICES, -1), axis=0))


@pytest.mark.exhaustive
@pytest.mark.parametrize("check_vma", with_first_fast([True, False]))
def test_one_device_draws_the_noise_of_jit(check_vma):
    mesh = mesh_of(data=1)
    specs = {"in_specs": (P("data"), P()), "out_specs": (P("data"), P())}
    mapped = jax.shard_map(grads, mesh=mesh, check_vma=check_vma, **specs)
    got, want = jax.jit(mapped)(X, W), jax.jit(grads)(X, W)
    jax.tree.map(np.testing.assert_array_equal, got, want)


def test_devices_that_have_copies_draw_the_same_noise():
    """Over ``model`` everything is replicated, and stays so."""
    mesh = mesh_of(data=2, model=2)
    specs = {"in_specs": (P("data"), P()), "out_specs": (P("data"), P())}
    mapped = jax.shard_map(grads, mesh=mesh, **specs)
    dx, dw = jax.jit(mapped)(COPIES[: 2 * ROWS], W)
    assert dx.shape == (2 * ROWS, K)
    # As of lax.dot_general, the gradient of a replicated array is the devices' sum.
    np.testing.assert_allclose(dw, 2 * jax.jit(grads)(X, W)[1], atol=1.0)


def test_unknown_copies_over_several_axes_are_warned_about_once():
    layer_names.clear()
    mesh = mesh_of(data=2, model=2)
    specs = {"in_specs": (P("data"), P()), "out_specs": P("data"), "check_vma": False}

    def trace():
        mapped = jax.shard_map(lambda *args: grads(*args)[0], mesh=mesh, **specs)
        jax.eval_shape(mapped, COPIES[: 2 * ROWS], W)

    with pytest.warns(UserWarning, match="axes data, model draws its own .* Average"):
        trace()
    trace()


def ragged_grads(x, w):
    sizes = jnp.array([20, ROWS - 20])

    def loss(x, w):
        y, _ = ragged_dot(x, jnp.stack([w, w]), sizes, recipe=RECIPE, key=KEY)
        return jnp.sum(jnp.sin(y))

    return jax.grad(loss, (0, 1))(x, w)


def layer_grads(layer):
    variables = jax.jit(layer.init)(jax.random.key(0), X)

    def function(x, w):
        def loss(x, w):
            x = x + 0 * jnp.sum(w)
            y, _ = layer.apply(variables, x, mutable=["fallback"])
            return jnp.sum(jnp.sin(y))

        return jax.grad(loss, (0, 1))(x, w)

    return function


LAYERS = {
    "Dense": nn.Dense(N, dot_general=DOT),
    "GatedMLP": GatedMLP(N, dot_general=FallbackDot(Recipe(block=32))),
    "Int8MLP": Int8MLP(N),
}


@pytest.mark.parametrize(
    ("name", "layer"),
    rows_with_first_fast(
        [
            ("shard_map", "dot_general"),
            ("pmap", "dot_general"),
            ("unchecked", "ragged_dot"),
            ("shard_map", "ragged_dot"),
            ("unchecked", "dot_general"),
            ("shard_map", "Dense"),
            ("unchecked", "Dense"),
            ("shard_map", "GatedMLP"),
            ("unchecked", "Int8MLP"),
        ],
        4,
    ),
)
def test_every_layer_draws_noise_for_each_device(name, layer):
    functions = {"dot_general": grads, "ragged_dot": ragged_grads}
    function = functions.get(layer) or layer_grads(LAYERS[layer])
    dx, dw = MAPS[name](function)(COPIES, W)
    assert distinct(dx) == DEVICES
    if layer == "dot_general":
        assert distinct(dw) == DEVICES


def layers(dense, x):
    """A stack of layers that all have the same input."""
    options = {"split_rngs": {"params": True}, "length": 3}
    axes = {"params": 0, "fallback": 0}
    return nn.scan(lambda m, x, _: (x, m(x)), axes, **options)(dense, x, None)[1]


def test_errors_of_devices_layers_and_steps_average_out():
    """They are not correlated: gradients of the same data differ by noise alone."""
    dy = jax.random.normal(KEY, (ROWS, N))
    variables = jax.jit(nn.init(layers, LAYERS["Dense"]))(KEY, X)
    apply = nn.apply(layers, LAYERS["Dense"], mutable=["fallback"])
    params, state = variables["params"], variables["fallback"]

    def steps(x, _):
        def loss(params, state):
            y, moved = apply({"params": params, "fallback": state}, x)
            return jnp.sum(dy[None] * y), moved["fallback"]

        def step(state, _):
            return jax.grad(loss, has_aux=True)(params, state)[::-1]

        return jax.lax.scan(step, state, length=3)[1]

    grads = in_shard_map(steps, check_vma=False)(COPIES, W)["kernel"]
    errors = np.reshape(np.asarray(grads) - np.asarray(X.T @ dy), (-1, K * N))
    # It is 0.5 where the noise of X or that of dY repeats, and 1 where both do.
    np.testing.assert_allclose(np.corrcoef(errors), np.eye(len(errors)), atol=0.3)


def test_state_is_replicated_once_it_is_averaged():
    """The documented reduction, accepted by ``check_vma=True``."""
    layer = nn.Dense(N, dot_general=FallbackDot(Recipe(block=32)))
    variables = jax.jit(layer.init)(jax.random.key(0), X)
    scales = jnp.repeat(jnp.arange(1.0, DEVICES + 1), ROWS)[:, None]

    def step(variables, x):
        def train(state):
            updates = layer.apply({**variables, **state}, x, mutable=["fallback"])[1]
            return jax.lax.pmean(updates, "data")

        state = {"fallback": variables["fallback"]}
        return train(train(state))

    specs = {"in_specs": (P(), P("data")), "out_specs": P()}
    mapped = jax.shard_map(step, mesh=mesh_of(data=DEVICES), **specs)
    state = jax.jit(mapped)(variables, scales * COPIES)
    stats = fallback_stats(state)["(root)"]
    assert stats.count == 2
    assert 1.0 < stats.theta < 40.0


def test_delayed_scales_follow_all_devices():
    """Their state is a copy on each device, as JAX knows by ``check_vma=True``."""
    layer = nn.Dense(N, dot_general=Fp8Dot(history=4))
    variables = layer.init(jax.random.key(0), X)
    x = jnp.repeat(jnp.arange(1.0, DEVICES + 1), ROWS)[:, None] * COPIES

    def two_steps(variables, x):
        for _ in range(2):
            gradient = jax.grad(lambda v: jnp.sum(jnp.sin(layer.apply(v, x))))
            state = {OWG: gradient(variables)[OWG]}
            variables = {**variables, **state}
        return state[OWG]["dot_general"]

    specs = {"in_specs": (P(), P(("data", "fsdp"))), "out_specs": P()}
    mapped = jax.shard_map(two_steps, mesh=mesh_of(data=2, fsdp=2), **specs)
    state = jax.jit(mapped)(variables, x)
    chex.assert_trees_all_close(state, jax.jit(two_steps)(variables, x), rtol=1e-5)
    assert state["lhs"]["amax_history"][0] == jnp.max(jnp.abs(x))


@pytest.mark.parametrize(
    "layer",
    [
        lambda x, w: nonlinear.rms_norm(x, w[:, 0]),
        lambda x, w: nonlinear.silu_gate(x, jnp.broadcast_to(w[:, 0], x.shape)),
        lambda x, w: llm_int8_dot(x, w, DIMS),
        lambda x, w: Fp8Dot(scaling="current")(x, w, DIMS),
    ],
    ids=["norm", "gate", "llm_int8", "fp8"],
)
def test_the_gradient_of_a_copied_parameter_is_summed(layer):
    def grad(x, w):
        return jax.grad(lambda w: jnp.sum(jnp.sin(layer(x, w))))(w)

    mesh = mesh_of(data=DEVICES)
    mapped = jax.shard_map(grad, mesh=mesh, in_specs=(P("data"), P()), out_specs=P())
    got, want = jax.jit(mapped)(COPIES, W), DEVICES * jax.jit(grad)(X, W)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)
