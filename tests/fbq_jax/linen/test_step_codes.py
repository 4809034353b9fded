"""Weights that a step quantizes once, against those that every call quantizes."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from jax.sharding import AxisType

import fbq_jax
from fbq_jax import (
    FallbackDot,
    GatedMLP,
    Gemm,
    MoEMLP,
    NormDense,
    Routing,
    fallback_dot,
    quantize_weights_once,
    recipes,
)
from tests.fbq_jax.jaxprs import codes_among, count_quantized, equations
from tests.fbq_jax.sharding.tools import mesh_of, needs_devices, place
from tests.marks import with_first_fast

K, N = 32, 48
# Layers of so many inputs, hidden units and outputs.
LAYERS = {
    "dense": lambda dot, k: nn.Dense(k, dtype=jnp.bfloat16, dot_general=dot),
    "gated_mlp": lambda dot, k: GatedMLP(k, dot_general=dot),
    "norm_dense": lambda dot, k: NormDense(k, dot_general=dot),
    "experts": lambda dot, k: MoEMLP(Routing(num_experts=2), k, dot_general=dot),
    "einsum": lambda dot, k: fbq_jax.Einsum(
        (k, k),
        "...k,kn->...n",
        dtype=jnp.bfloat16,
        einsum_op=fbq_jax.FallbackEinsum(dot),
    ),
}
STOCHASTIC = dataclasses.replace(
    recipes.block,
    fwd=Gemm(rhs="stochastic"),
    dlhs=Gemm(lhs="stochastic", rhs="stochastic"),
)


def batches_of(width):
    return jax.random.normal(jax.random.key(0), (2, 4, 10, width), jnp.bfloat16)


BATCHES = batches_of(K)


class Layer(nn.Module):
    kind: str
    dot: FallbackDot

    @nn.compact
    def __call__(self, x, _):
        return x + LAYERS[self.kind](self.dot, x.shape[-1])(x), None


class Model(nn.Module):
    """A scan over rematerialized layers, and a head."""

    kind: str = "dense"
    dot: FallbackDot = fallback_dot
    stacked: tuple[str, ...] = ("params", "fallback", "fallback_codes")

    @nn.compact
    def __call__(self, x):
        layers = nn.scan(
            nn.remat(Layer, prevent_cse=False, policy=fbq_jax.save_codes),
            variable_axes=dict.fromkeys(self.stacked, 0),
            split_rngs={"params": True},
            length=3,
        )
        x, _ = layers(self.kind, self.dot, name="layers")(x, None)
        return nn.Dense(N, dtype=x.dtype, dot_general=self.dot, name="head")(x)


def step(model, variables, batches, *, once):
    """Losses, states and gradients of microbatches, each from the state before it."""
    codes = quantize_weights_once(model, variables, batches[0]) if once else {}
    params = variables["params"]

    def microbatch(state, x):
        def loss(params):
            of_call = {"params": params, "fallback": state, **codes}
            y, updates = model.apply(of_call, x, mutable=["fallback"])
            return jnp.mean(jnp.square(y.astype(jnp.float32))), updates["fallback"]

        (value, state), grads = jax.value_and_grad(loss, has_aux=True)(params)
        return state, (value, state, grads)

    return jax.lax.scan(microbatch, variables["fallback"], batches)[1]


def init(model, batches=BATCHES):
    variables = jax.jit(model.init)(jax.random.key(1), batches[0])
    return {name: variables[name] for name in ("params", "fallback")}


def assert_same_bits(model, batches=BATCHES, variables=None):
    variables = init(model, batches) if variables is None else variables
    run = jax.jit(functools.partial(step, model), static_argnames="once")
    with_codes, without = (run(variables, batches, once=once) for once in (True, False))
    jax.tree.map(np.testing.assert_array_equal, with_codes, without)


@pytest.mark.parametrize("kind", with_first_fast(LAYERS))
def test_results_are_the_same(kind):
    assert_same_bits(Model(kind))


@pytest.mark.parametrize(
    "name", with_first_fast(["row_block_lhs", "rowwise", "switchback"])
)
def test_results_are_the_same_with_every_recipe(name):
    assert_same_bits(Model(dot=FallbackDot(recipes.NAMED[name])))


@pytest.mark.gpu
@pytest.mark.parametrize("kind", LAYERS)
def test_on_a_gpu(kind):
    """With rows that a kernel can pack in one pass, which others warn of."""
    assert_same_bits(Model(kind), batches_of(128))


def test_the_loop_quantizes_no_weight():
    def counts(shape, *, once):
        run = functools.partial(step, Model(), once=once)
        jaxpr = jax.make_jaxpr(run)(init(Model()), BATCHES).jaxpr
        return count_quantized(jaxpr, shape), count_quantized(jaxpr, shape, length=2)

    for shape in (1, K, K), (1, K, N):  # of the layers and of the head
        everywhere, in_loop = counts(shape, once=False)
        assert everywhere == in_loop > 0
        everywhere, in_loop = counts(shape, once=True)
        assert everywhere > in_loop == 0


@pytest.mark.parametrize("kind", with_first_fast(["dense", "gated_mlp", "norm_dense"]))
@pytest.mark.parametrize("remat", [True, False])
def test_a_loop_over_layers_saves_no_codes_that_it_was_given(kind, remat, monkeypatch):
    """Codes of weights are inputs of the loop, which need no other place."""
    if not remat:
        monkeypatch.setattr(nn, "remat", lambda layer, **_: layer)
    model = Model(kind)
    variables = init(model)
    params, state = variables["params"], {"fallback": variables["fallback"]}
    codes = quantize_weights_once(model, variables, BATCHES[0])

    def saved(codes):
        """The shapes of the codes that loops write."""

        def loss(params):
            variables = {"params": params, **state, **codes}
            y, moved = model.apply(variables, BATCHES[0], mutable=["fallback"])
            return jnp.sum(y), moved

        jaxpr = jax.make_jaxpr(jax.grad(loss, has_aux=True))(params).jaxpr
        scans = equations(jaxpr, "scan")
        return set(codes_among(x.aval for scan in scans for x in scan.outvars))

    weights = set(codes_among(jax.tree.leaves(codes)))
    assert saved({}) & weights
    assert not saved(codes) & weights


class Residual(nn.Module):
    @nn.compact
    def __call__(self, x, _):
        return x + nn.Dense(K)(x), None


class Whole(nn.Module):
    """A model of Flax alone, which knows nothing of codes."""

    @nn.compact
    def __call__(self, x):
        rngs = {"params": True}
        layers = nn.scan(nn.remat(Residual), {"params": 0}, split_rngs=rngs, length=2)
        x, _ = layers(name="layers")(x.astype(jnp.float32), None)
        shared = nn.vmap(nn.Dense, {"params": None}, split_rngs={"params": False})
        return nn.RNN(nn.SimpleCell(K))(shared(K)(x))


@pytest.fixture(scope="module")
def whole():
    rules = {".*": recipes.fallback}
    return fbq_jax.quantize(Whole(), rules, jax.random.key(0), BATCHES[0])[0]


def codes_of(model, variables):
    """The shapes of the codes."""
    make = functools.partial(quantize_weights_once, model)
    return jax.eval_shape(make, variables, BATCHES[0])


def test_models_that_quantize_made_carry_codes(whole):
    codes = codes_of(whole, init(whole))["fallback_codes"]
    assert len(jax.tree.leaves(codes, is_leaf=lambda x: hasattr(x, "codes"))) == 4


@pytest.mark.exhaustive
def test_results_of_models_that_quantize_made_are_the_same(whole):
    assert_same_bits(whole)


@needs_devices
@pytest.mark.parametrize("kind", with_first_fast([AxisType.Explicit, AxisType.Auto]))
def test_codes_are_sharded_as_their_weights(kind):
    mesh = mesh_of(kind, data=2)
    model = nn.Dense(256, use_bias=False, dot_general=fallback_dot)
    x = jax.random.normal(jax.random.key(0), (2, 256, 256))
    variables = model.init(jax.random.key(0), x[0])
    variables["params"]["kernel"] = place(mesh, variables["params"]["kernel"], "data")
    with jax.set_mesh(mesh):
        batches = place(mesh, x, None, "data")
        make = jax.jit(functools.partial(quantize_weights_once, model))
        weight = make(variables, batches[0])["fallback_codes"]["dot_general"]
        assert weight.codes.rowwise.codes.sharding.shard_shape((1, 256, 256))[1] == 128
        assert_same_bits(model, batches, variables)


class Scaled(nn.Module):
    """A layer whose weight also depends on its input."""

    @nn.compact
    def __call__(self, x):
        kernel = self.param("kernel", nn.initializers.ones, (K, N), x.dtype)
        return fallback_dot(x, kernel * jnp.max(x), (((2,), (0,)), ((), ())))


@pytest.mark.parametrize(
    "layer",
    [nn.Dense(N, dtype=jnp.bfloat16, dot_general=FallbackDot(STOCHASTIC)), Scaled()],
)
def test_layers_that_quantize_in_every_call_are_named(layer):
    dense = nn.Dense(K, dtype=jnp.bfloat16, dot_general=fallback_dot)
    model = nn.Sequential([dense, layer])
    with pytest.warns(UserWarning, match=r"weights in every call: layers_1\. quant"):
        codes = codes_of(model, init(model))
    assert list(codes["fallback_codes"]) == ["layers_0"]


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (nn.Dense(N, dtype=jnp.bfloat16), "found no layer that quantizes its kernel"),
        (Model(stacked=("params", "fallback")), r"'layers/Dense_0'.*beside 'params'"),
    ],
)
def test_models_without_codes_are_errors(model, message):
    variables = jax.jit(model.init)(jax.random.key(0), BATCHES[0])
    with pytest.raises(ValueError, match=message):
        quantize_weights_once(model, variables, BATCHES[0])


def test_codes_of_another_dtype_are_an_error():
    single, half = (
        nn.Dense(N, dtype=dtype, dot_general=fallback_dot)
        for dtype in (jnp.float32, jnp.bfloat16)
    )
    variables = init(single)
    codes = codes_of(single, variables)
    with pytest.raises(ValueError, match=r"bfloat16\[1, 32, 48\] and has codes of fl"):
        jax.eval_shape(half.apply, {**variables, **codes}, BATCHES[0])
