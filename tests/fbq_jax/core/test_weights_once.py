"""Weights that are quantized once, against those that every call quantizes."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import fbq_jax
from fbq_jax import (
    FallbackDot,
    GatedMLP,
    Gemm,
    MoEMLP,
    Routing,
    fallback_dot,
    quantize_weights_once,
    recipes,
)
from tests.fbq_jax.sharding.tools import mesh_of, needs_devices, place
from tests.marks import with_first_fast

K, F = 128, 192
BATCHES = jax.random.normal(jax.random.key(0), (3, 128, K), jnp.bfloat16)
MARK = "fbq_jax_once_"


class Block(nn.Module):
    """Two dense layers, or one and a fused one, or experts."""

    kind: str = "dense"
    dot: FallbackDot = fallback_dot

    @nn.compact
    def __call__(self, x, _=None):
        dense = functools.partial(nn.Dense, dtype=jnp.bfloat16, dot_general=self.dot)
        if self.kind == "dense":
            return x + dense(K)(nn.relu(dense(F)(x))), None
        if self.kind == "fused":
            return x + GatedMLP(F, dot_general=self.dot)(dense(K)(x)), None
        routing = Routing(num_experts=2)
        return x + MoEMLP(routing, 64, dtype=x.dtype, dot_general=self.dot)(x), None


class Stack(nn.Module):
    """A scan over blocks, and a head."""

    kind: str = "dense"
    remat: str = "none"
    unroll: int = 1

    @nn.compact
    def __call__(self, x):
        block = Block
        if self.remat != "none":
            policy = fbq_jax.save_codes if self.remat == "codes" else None
            block = nn.remat(Block, policy=policy, prevent_cse=False)
        scanned = nn.scan(
            block,
            variable_axes={"params": 0, "fallback": 0},
            split_rngs={"params": True},
            length=2,
            unroll=self.unroll,
        )
        x, _ = scanned(self.kind, name="layers")(x, None)
        return nn.Dense(64, dtype=jnp.bfloat16, dot_general=fallback_dot)(x)


class Single(nn.Module):
    """One block."""

    kind: str = "dense"
    dot: FallbackDot = fallback_dot

    @nn.compact
    def __call__(self, x):
        return Block(self.kind, self.dot)(x)[0]


def loss_of(y):
    return jnp.mean(jnp.square(y.astype(jnp.float32)))


def gradient_of(model):
    """Maps parameters, state and a batch to loss, state and gradient."""

    def gradient(params, state, x):
        def loss(params):
            variables = {"params": params, **state}
            y, moved = model.apply(variables, x, mutable=list(state))
            return loss_of(y), {name: moved[name] for name in state}

        return jax.value_and_grad(loss, has_aux=True)(params)

    return gradient


def start(model):
    variables = model.init(jax.random.key(1), BATCHES[0])
    return variables["params"], {"fallback": variables["fallback"]}


def accumulate(gradient, state, batches=BATCHES):
    """Scans over microbatches, whose states move from one to the next."""

    def microbatch(state, x):
        (loss, state), grads = gradient(state, x)
        return state, (loss, grads)

    return jax.lax.scan(microbatch, state, batches)


@jax.jit(static_argnums=0)
def in_every_call(gradient, params, state):
    return accumulate(functools.partial(gradient, params), state)


@jax.jit(static_argnums=0)
def once(gradient, params, state):
    fixed = quantize_weights_once(gradient, params, state, BATCHES[0])
    return accumulate(fixed, state)


def assert_equal(one, other):
    jax.tree.map(np.testing.assert_array_equal, one, other)


def assert_hoisted(function, params, *args):
    """Asserts that weights are quantized, and none in the function that is returned."""

    def run(params, *args):
        return quantize_weights_once(function, params, *args)(*args)

    assert MARK in str(jax.make_jaxpr(run)(params, *args))
    fixed = quantize_weights_once(function, params, *args)
    assert MARK not in str(jax.make_jaxpr(fixed)(*args))


MODELS = {
    "save_codes": Stack(remat="codes"),
    "remat": Stack(remat="all"),
    "scanned": Stack(),
    "unrolled": Stack(unroll=2),
    "single": Single(),
    "fused": Stack("fused"),
    "experts": Single("experts"),
}


@pytest.mark.parametrize("name", with_first_fast(MODELS, fast=2))
def test_losses_states_and_gradients_are_equal(name):
    gradient, (params, state) = gradient_of(MODELS[name]), start(MODELS[name])
    assert_equal(once(gradient, params, state), in_every_call(gradient, params, state))
    assert_hoisted(gradient, params, state, BATCHES[0])


@pytest.mark.parametrize("name", with_first_fast(recipes.NAMED, fast=0))
def test_every_recipe(name):
    model = Single(dot=FallbackDot(recipes.NAMED[name]))
    gradient, (params, state) = gradient_of(model), start(model)
    assert_equal(once(gradient, params, state), in_every_call(gradient, params, state))
    assert_hoisted(gradient, params, state, BATCHES[0])


def test_weights_are_quantized_before_the_loop():
    gradient, (params, state) = gradient_of(Stack()), start(Stack())
    program = once.trace(gradient, params, state).jaxpr
    (loop,) = [
        eqn
        for eqn in program.eqns
        if eqn.primitive.name == "scan" and eqn.params["length"] == len(BATCHES)
    ]
    assert MARK in str(program)
    assert MARK not in str(loop)


def test_nnx():
    class Model(nnx.Module):
        def __init__(self, rngs):
            dot = fbq_jax.nnx.FallbackDot(rngs=rngs)
            self.up = nnx.Linear(K, F, dtype=jnp.bfloat16, dot_general=dot, rngs=rngs)

        def __call__(self, x):
            return self.up(x)

    graphdef, params, state = nnx.split(Model(nnx.Rngs(0)), nnx.Param, ...)

    def gradient(params, state, x):
        def loss(params):
            model = nnx.merge(graphdef, params, state, copy=True)
            y = model(x)
            return loss_of(y), nnx.split(model, nnx.Param, ...)[2]

        return jax.value_and_grad(loss, has_aux=True)(params)

    assert_equal(once(gradient, params, state), in_every_call(gradient, params, state))
    assert_hoisted(gradient, params, state, BATCHES[0])


def test_outside_jit_and_without_a_gradient():
    model = Single()
    params, state = start(model)

    def forward(params, x):
        return model.apply({"params": params, **state}, x)

    fixed = quantize_weights_once(
        forward, params, jax.ShapeDtypeStruct(BATCHES.shape[1:], BATCHES.dtype)
    )
    np.testing.assert_array_equal(fixed(BATCHES[1]), forward(params, BATCHES[1]))
    assert_hoisted(forward, params, BATCHES[0])


@needs_devices
@pytest.mark.parametrize("kind", with_first_fast([AxisType.Auto, AxisType.Explicit]))
def test_sharded(kind):
    mesh = mesh_of(kind, data=2)
    model = nn.Dense(256, use_bias=False, dot_general=fallback_dot)
    gradient, x = gradient_of(model), jnp.ones((256, 256))
    variables = model.init(jax.random.key(0), x)
    state = {"fallback": variables["fallback"]}
    params = {"kernel": place(mesh, variables["params"]["kernel"], "data")}
    batches = place(mesh, jnp.stack([x, x + 1.0]), None, "data")

    def run(params, state, batches):
        fixed = functools.partial(gradient, params)
        plain = accumulate(fixed, state, batches)
        fixed = quantize_weights_once(gradient, params, state, batches[0])
        return plain, accumulate(fixed, state, batches)

    with jax.set_mesh(mesh):
        plain, with_codes = jax.jit(run)(params, state, batches)
        assert_hoisted(gradient, params, state, batches[0])
    assert_equal(with_codes, plain)


@needs_devices
def test_types_over_manual_axes():
    """A program for a batch that does not vary would not sum its gradient."""

    def gradient(w, x):
        return jax.grad(lambda w: loss_of(weight_product(x, w)))(w)

    def on_device(w, x):
        like = jax.ShapeDtypeStruct(x.shape, x.dtype)
        return quantize_weights_once(gradient, w, like)(x)

    mesh = mesh_of(data=2)
    mapped = jax.shard_map(
        on_device, mesh=mesh, in_specs=(P(), P("data")), out_specs=P()
    )
    with pytest.raises(TypeError, match=r"128\]',\), and got \('float32.*\{V:data\}"):
        jax.jit(mapped)(jnp.ones((K, K)), jnp.ones((256, K)))


@needs_devices
def test_a_jitted_function_with_shardings():
    mesh = mesh_of(data=2)
    sharded, copies = (NamedSharding(mesh, P(*spec)) for spec in (("data",), ()))
    jitted = jax.jit(weight_product, in_shardings=(sharded, copies))
    w, x = jnp.ones((K, F)), jax.random.normal(jax.random.key(0), (256, K))

    def forward(w, x):
        return jitted(x, w)

    fixed = jax.jit(quantize_weights_once(forward, w, x))
    np.testing.assert_array_equal(fixed(x), forward(w, x))
    assert fixed(x).sharding.is_equivalent_to(sharded, 2)
    assert_hoisted(forward, w, x)


def weight_product(x, w, recipe=recipes.block, key=None):
    dimensions = ((1,), (0,)), ((), ())
    return fbq_jax.dot_general(x, w, dimensions, recipe=recipe, key=key)[0]


STOCHASTIC = dataclasses.replace(
    recipes.block,
    fwd=Gemm(rhs="stochastic"),
    dlhs=Gemm(lhs="stochastic", rhs="stochastic"),
)


def rounded_stochastically(w, x):
    key = jax.random.key(x[0, 0].astype(jnp.int32))
    return weight_product(x, w, STOCHASTIC, key)


def of_inputs(w, x):
    return weight_product(x, w * jnp.max(x))


def in_cond(w, x):
    return jax.lax.cond(
        x[0, 0] > 0, lambda: weight_product(x, w), lambda: jnp.zeros_like(x)
    )


def in_while(w, x):
    return jax.lax.while_loop(
        lambda x: x[0, 0] < 1.0, lambda x: weight_product(x, w) + 1.0, x
    )


@pytest.mark.parametrize("remat", with_first_fast([True, False]))
def test_nested_scans_and_a_weight_of_all_layers(remat):
    """JAX itself takes the shared weight out of the scans, in parts."""
    keys = jax.random.split(jax.random.key(2), 3)
    weights = jax.random.normal(keys[0], (2, 2, K, K)) / K**0.5
    params = {"shared": jax.random.normal(keys[1], (K, K)) / K**0.5, "own": weights}
    x = jax.random.normal(keys[2], (K, K))

    def loss(params, x):
        def layer(x, w):
            return weight_product(
                jnp.tanh(weight_product(x, w)), params["shared"]
            ), None

        def group(x, ws):
            return jax.lax.scan(layer, x, ws)

        group = jax.checkpoint(group) if remat else group
        return loss_of(jax.lax.scan(group, x, params["own"], reverse=True)[0])

    fixed = quantize_weights_once(jax.grad(loss), params, x)  # a warning is an error
    assert_equal(jax.jit(fixed)(x), jax.jit(jax.grad(loss))(params, x))


def test_a_weight_of_all_steps_has_one_copy_of_its_codes():
    w, x = jnp.ones((K, F)), jnp.ones((4, 128, K))

    def loss(w, x):
        def chunk(total, x):
            return total + loss_of(weight_product(x, w)), None

        return jax.lax.scan(jax.checkpoint(chunk), 0.0, x)[0]

    def run(w, x):
        return quantize_weights_once(jax.grad(loss), w, x)(x)

    assert_hoisted(jax.grad(loss), w, x)
    assert f"i8[1,{K},{F}]" in str(jax.make_jaxpr(run)(w, x))
    assert f"i8[4,1,{K},{F}]" not in str(jax.make_jaxpr(run)(w, x))
    assert_equal(jax.jit(run)(w, x), jax.jit(jax.grad(loss))(w, x))


def test_a_jitted_function_with_a_constant():
    constant = np.ones((128, K), np.float32)

    @jax.jit
    def forward(w, x):
        return weight_product(x + constant, w)

    assert_hoisted(forward, jnp.ones((K, F)), jnp.ones((128, K)))


@pytest.mark.parametrize(
    "function", [of_inputs, in_cond, in_while, rounded_stochastically]
)
def test_weights_that_every_call_quantizes_warn(function):
    w, x = jnp.ones((K, K)), BATCHES[0].astype(jnp.float32)
    call = functools.partial(quantize_weights_once, function, w)
    with pytest.warns(UserWarning, match="quantize their weights in every call: a lay"):
        fixed = call(x)
    np.testing.assert_array_equal(fixed(2.0 * x), function(w, 2.0 * x))


def test_the_warning_names_layers():
    class Scaled(nn.Module):
        @nn.compact
        def __call__(self, x):
            kernel = self.param("kernel", nn.initializers.ones, (K, F), x.dtype)
            return fallback_dot(x, kernel * jnp.max(x), (((1,), (0,)), ((), ())))

    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            return Scaled(name="scaled")(
                nn.Dense(K, dtype=x.dtype, dot_general=fallback_dot)(x)
            )

    model = Model()
    gradient, (params, state) = gradient_of(model), start(model)
    with pytest.warns(UserWarning, match="weights in every call: scaled. quan"):
        quantize_weights_once(gradient, params, state, BATCHES[0])


def test_other_arguments_are_errors():
    fixed = quantize_weights_once(
        lambda w, x: x @ w, jnp.ones((K, F)), jnp.ones((4, K))
    )
    message = r"was made for \('float32\[4,128\]',\), and got \('float32\[2,128\]',\)"
    with pytest.raises(TypeError, match=message):
        fixed(jnp.ones((2, K)))
    with pytest.raises(TypeError, match="quantize_weights_once"):
        fixed(jnp.ones((4, K)), 1.0)


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:.*takes more time; not in one pass")  # of F
@pytest.mark.parametrize("name", MODELS)
def test_on_a_gpu(name):
    gradient, (params, state) = gradient_of(MODELS[name]), start(MODELS[name])
    assert_equal(once(gradient, params, state), in_every_call(gradient, params, state))
