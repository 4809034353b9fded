"""NNX weights that a step quantizes once, against those that every call quantizes."""

import contextlib
import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx

import fbq_jax
from fbq_jax import Gemm, Routing, recipes
from fbq_jax.nnx import (
    FallbackDot,
    FallbackState,
    MoEMLP,
    StepCodes,
    quantize,
    quantize_weights_once,
)
from tests.fbq_jax.jaxprs import count_quantized
from tests.marks import with_first_fast

K, N = 32, 48
BATCHES, WIDE = (
    jax.random.normal(jax.random.key(0), (2, 4, 10, width)) for width in (K, 128)
)
# Layers of so many inputs, hidden units and outputs.
LAYERS = {
    "linear": lambda k, rngs: nnx.Linear(k, k, rngs=rngs),
    "experts": lambda k, rngs: MoEMLP(k, Routing(num_experts=2), k, rngs=rngs),
    "einsum": lambda k, rngs: nnx.Einsum("...k,kn->...n", (k, k), rngs=rngs),
    "conv": lambda k, rngs: nnx.Conv(k, k, 3, feature_group_count=2, rngs=rngs),
    "general": lambda k, rngs: nnx.LinearGeneral(k, (4, k // 4), rngs=rngs),
}
STOCHASTIC = dataclasses.replace(
    recipes.block,
    fwd=Gemm(rhs="stochastic"),
    dlhs=Gemm(lhs="stochastic", rhs="stochastic"),
)


class Residual(nnx.Module):
    def __init__(self, kind, width, rngs):
        self.layer = LAYERS[kind](width, rngs)
        self.dropout = nnx.Dropout(0.1, rngs=rngs)

    def __call__(self, x):
        return x + self.dropout(self.layer(x).reshape(x.shape))


class Model(nnx.Module):
    """A stack of rematerialized layers, a norm with running statistics and a head."""

    axes = 0

    def __init__(self, kind="linear", width=K):
        @nnx.split_rngs(splits=3)
        @nnx.vmap
        def stack(rngs):
            return Residual(kind, width, rngs)

        rngs = nnx.Rngs(0)
        self.layers = stack(rngs)
        self.norm = nnx.BatchNorm(width, rngs=rngs)
        self.head = nnx.Linear(width, N, rngs=rngs)
        quantize(self, {".*": recipes.fallback}, quantize_rngs=rngs)

    def __call__(self, x):
        @nnx.scan(in_axes=(self.axes, nnx.Carry), out_axes=nnx.Carry)
        @functools.partial(nnx.remat, policy=fbq_jax.save_codes)
        def run(layer, x):
            return layer(x)

        return self.head(self.norm(run(self.layers, x)))


def loss_of(model, x):
    return jnp.mean(jnp.square(model(x)))


@nnx.scan(in_axes=(nnx.Carry, 0), out_axes=(nnx.Carry, 0))
def of_nnx(model, x):
    """Losses and gradients of microbatches, by the transformations of NNX."""
    return model, nnx.value_and_grad(loss_of)(model, x)


def of_jax(model, batches):
    """The same by those of JAX."""
    graphdef, params, state = nnx.split(model, nnx.Param, ...)

    def microbatch(state, x):
        def loss(params):
            model = nnx.merge(graphdef, params, state, copy=True)
            return loss_of(model, x), nnx.split(model, nnx.Param, ...)[2]

        (value, state), grads = jax.value_and_grad(loss, has_aux=True)(params)
        return state, (value, grads)

    state, results = jax.lax.scan(microbatch, state, batches)
    nnx.update(model, state)
    return model, results


def step(model, batches, *, once, loop=of_nnx):
    context = contextlib.nullcontext()
    if once:
        context = quantize_weights_once(model, batches[0])
    with context:
        return loop(model, batches)[1]


def assert_same_bits(make, loop=of_nnx, batches=BATCHES):
    """And nothing else of the models differs."""
    one, other = make(), make()
    run = nnx.jit(step, static_argnames=("once", "loop"))
    results = [
        run(model, batches, once=once, loop=loop)
        for model, once in ((one, True), (other, False))
    ]
    jax.tree.map(np.testing.assert_array_equal, *results)
    states = (jax.tree.map(raw, nnx.state(model)) for model in (one, other))
    jax.tree.map(np.testing.assert_array_equal, *states)
    assert nnx.graphdef(one) == nnx.graphdef(other)


def raw(x):
    return jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x


@pytest.mark.parametrize("kind", with_first_fast(LAYERS))
def test_results_are_the_same(kind):
    assert_same_bits(lambda: Model(kind))


def test_results_are_the_same_with_transformations_of_jax():
    assert_same_bits(Model, loop=of_jax)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", LAYERS)
def test_on_a_gpu(kind):
    """With rows that a kernel can pack in one pass, which others warn of."""
    assert_same_bits(lambda: Model(kind, 128), batches=WIDE)


@pytest.mark.parametrize("loop", [of_nnx, of_jax])
def test_the_loop_quantizes_no_weight(loop):
    def counts(*, once):
        graphdef, state = nnx.split(Model())

        def run(state, batches):
            model = nnx.merge(graphdef, state)
            return step(model, batches, once=once, loop=loop)

        jaxpr = jax.make_jaxpr(run)(state, BATCHES).jaxpr
        head = (1, K, N)
        return count_quantized(jaxpr, head), count_quantized(jaxpr, head, len(BATCHES))

    everywhere, in_loop = counts(once=False)
    assert everywhere == in_loop > 0
    everywhere, in_loop = counts(once=True)
    assert everywhere > in_loop == 0


class Scaled(nnx.Linear):
    """A layer whose weight also depends on its input."""

    def __call__(self, x):
        dimensions = ((1,), (0,)), ((), ())
        return self.dot_general(x, self.kernel[...] * jnp.max(x), dimensions)


class Normalized(nnx.Module):
    """A layer whose weight is computed from its kernel."""

    def __init__(self, size, out, dot_general, rngs):
        linear = nnx.Linear(size, out, dot_general=dot_general, rngs=rngs)
        self.linear = nnx.WeightNorm(linear, rngs=rngs)

    def __call__(self, x):
        return self.linear(x)


@pytest.mark.filterwarnings("ignore:where_slower='float' quantizes every layer")
@pytest.mark.parametrize(
    ("kind", "recipe"),
    [
        (nnx.Linear, STOCHASTIC),
        (nnx.Linear, dataclasses.replace(recipes.fallback, where_slower="float")),
        (Scaled, recipes.fallback),
        (Normalized, recipes.fallback),
    ],
)
def test_layers_that_quantize_in_every_call_are_named(kind, recipe):
    rngs = nnx.Rngs(0)
    plain = nnx.Linear(K, K, dot_general=FallbackDot(), rngs=rngs)
    model = nnx.Sequential(
        plain, kind(K, N, dot_general=FallbackDot(recipe), rngs=rngs)
    )
    with (
        pytest.warns(UserWarning, match=r"in every call: layers/1\S*\. quantize_w"),
        quantize_weights_once(model, BATCHES[0, 0]),
    ):
        codes = nnx.to_flat_state(nnx.state(model, StepCodes))
    assert [path for path, _ in codes] == [("layers", 0, "dot_general", "step_codes")]


def test_codes_do_not_outlive_the_context():
    model = Model()
    before, graphdef = nnx.state(model, StepCodes), nnx.graphdef(model)
    failure = contextlib.suppress(ZeroDivisionError)
    with failure, quantize_weights_once(model, BATCHES[0]):
        assert len(nnx.to_flat_state(nnx.state(model, StepCodes))) == 2
        kept = nnx.clone(model)
        _ = 1 / 0
    assert nnx.state(model, StepCodes) == before
    assert nnx.graphdef(model) == graphdef
    with pytest.raises(ValueError, match=r"inside the context of fbq_jax\.nnx\.quant"):
        kept(BATCHES[0])


def test_codes_of_a_stack_that_are_not_sliced_are_an_error():
    class Unsliced(Model):
        axes = nnx.StateAxes({(nnx.Param, FallbackState, nnx.RngState): 0, ...: None})

    with (
        pytest.raises(ValueError, match="slice codes of stacked layers as their param"),
        quantize_weights_once(Unsliced(), BATCHES[0]),
    ):
        pass


@pytest.mark.parametrize(
    ("model", "error", "message"),
    [
        (lambda: nnx.Linear(K, N, rngs=nnx.Rngs(0)), ValueError, "found no layer that"),
        (lambda: fbq_jax.GatedMLP(N), TypeError, "use fbq_jax.quantize_weights_once"),
    ],
)
def test_other_models_are_errors(model, error, message):
    with pytest.raises(error, match=message), quantize_weights_once(model(), BATCHES):
        pass


def test_linen_layers_inside_quantize_in_every_call():
    class Mixed(nnx.Module):
        def __init__(self, rngs):
            dot = FallbackDot(recipes.block, rngs=rngs)
            self.first = nnx.Linear(K, K, dot_general=dot, rngs=rngs)
            second = nn.Dense(K, dot_general=fbq_jax.FallbackDot(recipes.block))
            self.second = nnx.bridge.ToNNX(second, rngs=rngs)
            self.second.lazy_init(BATCHES[0])

        def __call__(self, x):
            return self.second(self.first(x))

    model = Mixed(nnx.Rngs(0))
    want = model(BATCHES[0])
    with quantize_weights_once(model, BATCHES[0]):
        np.testing.assert_array_equal(model(BATCHES[0]), want)
