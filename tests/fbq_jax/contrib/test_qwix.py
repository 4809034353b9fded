"""Models that multiply by their parameters in their own code."""

import functools
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

import fbq_jax
from fbq_jax import (
    FallbackConv,
    FallbackEinsum,
    Recipe,
    RulesDot,
    fallback_stats,
    recipes,
)
from fbq_jax.contrib import qwix
from fbq_jax.core.frozen_weight import FrozenKernel
from fbq_jax.nnx import dot as nnx_dot
from fbq_jax.recipes.rules_report import NOT_REACHED
from tests.fbq_jax.linen.test_whole_models import KEY, X, train
from tests.fbq_jax.nnx.test_whole_models import descend
from tests.marks import with_first_fast

SMALL = Recipe(block=32)
RULES = {"head": None, ".*": SMALL}
HAND = RulesDot(RULES)


def product(dot, x, w):
    """``x @ w`` by an op that is injected by hand."""
    return dot(x, w, (((x.ndim - 1,), (0,)), ((), ())))


# One product each, of x [..., 32] and w [32, 32]; each also by hand.
PRODUCTS = {
    "@": lambda x, w: x @ w,
    "dot": lambda x, w: jnp.dot(x, w),
    "tensordot": lambda x, w: jnp.tensordot(x, w, 1),
    "einsum": lambda x, w: jnp.einsum("btd,df->btf", x, w),
    "dot_general": lambda x, w: lax.dot_general(x, w, (((2,), (0,)), ((), ()))),
    "cast": lambda x, w: x @ w.astype(jnp.float16).astype(x.dtype),
    "jitted": jax.jit(lambda x, w: (x @ w).astype(x.dtype)),
    "view": lambda x, w: x @ w.reshape(2, 16, 32).reshape(32, 32),
    "left": lambda x, w: jnp.einsum("df,btd->btf", w, x),
}


class Layer(nn.Module):
    multiply: object = PRODUCTS["@"]
    op: object = None

    @nn.compact
    def __call__(self, x, _=None):
        w = self.param("w", nn.initializers.lecun_normal(), (32, 32))
        if self.op is None:
            y = self.multiply(x, w)
        else:
            w = w.astype(jnp.float16).astype(x.dtype) if self.multiply is CAST else w
            y = product(self.op, x, w)
        scores = jnp.einsum("btd,bsd->bts", y, y)  # activations only
        return x + jnp.einsum("bts,bsd->btd", nn.softmax(scores), y), None


CAST = PRODUCTS["cast"]


class Unrolled(nn.Module):
    """Layers with equal shapes, whose products JAX traces once."""

    multiply: object = PRODUCTS["@"]
    op: object = None

    @nn.compact
    def __call__(self, x):
        for _ in range(2):
            x, _ = Layer(self.multiply, self.op)(x)
        return Layer(self.multiply, self.op, name="head")(x)[0]


class Scanned(nn.Module):
    multiply: object = PRODUCTS["@"]
    op: object = None

    @nn.compact
    def __call__(self, x):
        axes = {"params": 0} | ({"fallback": 0} if self.op else {})
        layers = nn.scan(nn.remat(Layer), axes, split_rngs={"params": True}, length=2)
        return layers(self.multiply, self.op, name="layers")(x, None)[0]


@pytest.mark.parametrize("name", with_first_fast(PRODUCTS))
def test_every_product_has_the_bits_of_injection_by_hand(name):
    multiply = PRODUCTS[name]
    model, report = qwix.quantize(Unrolled(multiply), RULES, KEY, X)
    variables = train(model)
    by_hand = train(Unrolled(multiply, HAND))
    jax.tree.map(np.testing.assert_array_equal, variables, by_hand)
    stats = fallback_stats(variables)
    assert {path: int(s.count) for path, s in stats.items()} == {
        "Layer_0": 2,
        "Layer_1": 2,
    }
    assert [p.parameter for p in report.products] == ["Layer_0/w", "Layer_1/w"]
    assert [p[::2] for p in report.float_parameters] == [("head/w", "rule 'head'")]


@pytest.mark.exhaustive
def test_scanned_and_rematerialized_layers():
    model, report = qwix.quantize(Scanned(), {".*": SMALL}, KEY, X)
    variables = train(model)
    by_hand = train(Scanned(op=HAND))
    jax.tree.map(np.testing.assert_array_equal, variables, by_hand)
    assert fallback_stats(variables)["layers"].count.tolist() == [2, 2]
    assert [p.shape for p in report.products] == [(32, 32)]


@pytest.mark.exhaustive
def test_outside_jit_nothing_is_missed():
    """Neither in ``init`` nor in a gradient, however often the shapes have run."""
    floats = Unrolled()
    params = floats.init(KEY, X)
    before = floats.apply(params, X)
    model, _ = qwix.quantize(floats, RULES, KEY, X)
    variables = model.init(KEY, X)
    assert list(fallback_stats(variables)) == ["Layer_0", "Layer_1"]
    apply = functools.partial(model.apply, mutable=["fallback"])
    for _ in range(2):
        y, state = apply(variables, X)
        assert [int(s.count) for s in fallback_stats(state).values()] == [1, 1]
        np.testing.assert_array_equal(floats.apply(params, X), before)
    expected, _ = jax.jit(apply)(variables, X)
    np.testing.assert_allclose(y, expected, rtol=1e-5, atol=1e-5)
    loss = lambda variables: jnp.sum(apply(variables, X)[0])  # noqa: E731
    grads = jax.grad(loss, allow_int=True)(variables)
    assert float(jnp.abs(grads["params"]["Layer_0"]["w"]).max()) > 0


class Own(nn.Module):
    """A model that computes a function, which makes its parameters."""

    function: object

    @nn.compact
    def __call__(self, x):
        def param(name, *shape):
            return self.param(name, nn.initializers.normal(0.2), shape)

        return self.function(param, x)


@pytest.mark.exhaustive
def test_convolutions_and_einsums_of_several_axes():
    def net(conv, einsum):
        def apply(param, x):
            dims = {"dimension_numbers": ("NHC", "HIO", "NHC")}
            x = conv(x, param("conv", 2, 32, 32), (2,), "VALID", **dims)
            x = einsum("btd,dhk->bthk", x, param("up", 32, 2, 16))
            return einsum("bthk,hkd->btd", x, param("down", 2, 16, 32))

        return Own(apply)

    floats = net(lax.conv_general_dilated, jnp.einsum)
    model, report = qwix.quantize(floats, {".*": SMALL}, KEY, X)
    op = RulesDot({".*": SMALL})
    by_hand = train(net(FallbackConv(op), FallbackEinsum(op)))
    jax.tree.map(np.testing.assert_array_equal, train(model), by_hand)
    assert len(report.products) == 3


@pytest.mark.exhaustive
def test_layers_that_take_an_op_and_others_in_one_model():
    class Model(nn.Module):
        @nn.compact
        def __call__(self, tokens):
            embed = nn.Embed(16, 32, name="embed")
            x = nn.Dense(32, name="dense")(embed(tokens))
            return embed.attend(x)

    tokens = jnp.arange(32).reshape(4, 8) % 16
    model, report = qwix.quantize(Model(), {".*": recipes.block}, KEY, tokens)
    variables = model.init(KEY, tokens)
    assert set(fallback_stats(variables)) == {"dense", "embed"}
    assert {p.parameter for p in report.products} == {"dense/kernel", "embed/embedding"}
    frozen = fbq_jax.freeze(model, variables, tokens)
    serve = jax.jit(model.apply)
    np.testing.assert_array_equal(serve(frozen, tokens), serve(variables, tokens))
    kept = frozen["params"]["embed"]["embedding"]  # a gather reads it, too
    assert kept is variables["params"]["embed"]["embedding"]
    with pytest.raises(ValueError, match="has no codes in the collection"):
        serve({**frozen, "fallback": variables["fallback"]}, tokens)


class Gated(nn.Module):
    """A block whose einsums share its scope, with two matrices in one parameter."""

    @nn.compact
    def __call__(self, x, _=None):
        gating, down = NamedEinsum("gating_einsum", (2, 48, 32)), NamedEinsum("w")
        nn.share_scope(self, gating)
        nn.share_scope(self, down)
        gate = gating("...d,nfd->...nf", x)
        return x + down(
            "...f,fd->...d", nn.gelu(gate[..., 0, :]) * gate[..., 1, :]
        ), None


class NamedEinsum(nn.Module):
    weight_name: str
    shape: tuple[int, ...] = (48, 32)

    def setup(self):
        self.w = self.param(self.weight_name, nn.initializers.normal(0.1), self.shape)

    def __call__(self, equation, x):
        w = self.w.astype(jnp.bfloat16).astype(x.dtype)
        return jnp.einsum(equation, x, w)


class GatedStack(nn.Module):
    @nn.compact
    def __call__(self, x):
        x, _ = Gated(name="first")(x)
        scan = nn.scan(
            nn.remat(Gated), {"params": 0}, split_rngs={"params": True}, length=2
        )
        return scan(name="layers")(x, None)[0]


@pytest.mark.exhaustive
def test_frozen_linen_modules_that_multiply_in_their_own_code():
    started = Recipe(block=32, start=2.0)
    model, _ = qwix.quantize(GatedStack(), {".*": started}, KEY, X)
    variables = jax.jit(model.init)(KEY, X)
    frozen = fbq_jax.freeze(model, variables, X)
    assert jax.tree.leaves(frozen["params"]) == []
    codes = frozen["fallback"]["layers"]["dot_general"]["weight"].codes
    assert codes.mT.shape == (2, 1, 32, 96)
    serve = jax.jit(model.apply)
    np.testing.assert_array_equal(serve(frozen, X), serve(variables, X))
    with pytest.raises(
        ValueError, match="both the codes of a frozen weight and an unq"
    ):
        serve({**frozen, "params": variables["params"]}, X)
    with pytest.raises(ValueError, match="has no codes in the collection 'fallback'"):
        serve({**frozen, "fallback": variables["fallback"]}, X)
    with pytest.raises(
        (AttributeError, ValueError), match=r"FrozenParameter|is frozen"
    ):
        GatedStack().apply(frozen, X)


def test_state_does_not_leave_transformations_that_are_not_flaxs():
    def apply(param, x):
        w = param("w", 32, 32)
        x = jax.checkpoint(lambda x, w: jnp.sin(x @ w))(x, w)
        return lax.scan(lambda x, _: (x @ w, None), x, None, length=2)[0]

    with pytest.warns(UserWarning, match="quantize nothing.* layers here are none"):
        model, report = qwix.quantize(Own(apply), {".*": SMALL}, KEY, X)
    assert sorted(jax.eval_shape(model.init, KEY, X)) == ["params"]
    assert [p[::2] for p in report.float_parameters] == [("w", NOT_REACHED)]
    assert report.products == ()


EYE = np.eye(32)  # of float64
# Products of what JAX takes besides arrays of floats.
OPERANDS = {
    "a number": lambda x, w: jnp.dot(2.0, x) @ w,
    "numbers": lambda x, w: jnp.dot(2.0, 3) * lax.dot_general(2.0, 3.0, OUTER) * x @ w,
    "a bool": lambda x, w: jnp.dot(x @ w, True),
    "a complex number": lambda x, w: jnp.dot(1j, x) @ w,
    "a scalar of NumPy": lambda x, w: jnp.inner(np.float64(2), x) @ w,
    "0-d": lambda x, w: jnp.tensordot(jnp.array(2.0), x, 0) @ w,
    "float64 of NumPy": lambda x, w: x @ jnp.dot(a=EYE, b=w) + x @ (EYE @ w),
    "integers": lambda x, w: jnp.dot(jnp.ones(x.shape, int), w),
    "integers alone": lambda x, w: x @ w * jnp.vdot(np.arange(4), np.arange(4)),
    "complex": lambda x, w: jnp.einsum("btd,df->btf", x + 1j, w),
    "a list": lambda x, w: jnp.asarray([[1.0] * x.shape[-1]]) @ w,
    "weak": lambda x, w: jnp.dot(2.0, x.astype(jnp.bfloat16)) @ w.astype(jnp.bfloat16),
    "preferred": lambda x, w: jnp.matmul(x, w, preferred_element_type=jnp.bfloat16),
    "complex is preferred": lambda x, w: jnp.matmul(
        x, w, preferred_element_type=jnp.complex64
    ),
    "keywords": lambda x, w: lax.dot_general(lhs=x, rhs=w, dimension_numbers=INNER),
    "axes": lambda x, w: jnp.einsum(x, [0, 1, 2], w, [2, 3], [3, 0, 1]),
    "a scalar and two": lambda x, w: jnp.einsum(",btd,df->btf", 2.0, x, w),
    "vectors": lambda x, w: jnp.dot(x[0, 0], x[0, 1]) * x @ w,
    "nothing": lambda x, w: x[:0] @ w,
}
OUTER, INNER = (((), ()), ((), ())), (((2,), (0,)), ((), ()))


@pytest.mark.parametrize("name", with_first_fast(OPERANDS))
@pytest.mark.parametrize("rules", [None, recipes.block], ids=["float", "quantized"])
@pytest.mark.filterwarnings("ignore:quantize. the patterns")  # where all is complex
@jax.numpy_dtype_promotion("standard")
def test_operands_are_whatever_jax_takes(name, rules):
    multiply = OPERANDS[name]
    rules = {".*": rules, ".*@.*": rules}
    weight = nn.initializers.constant(0.5)
    linen = Own(lambda param, x: multiply(x, param("w", 32, 32)))
    quantized, _ = qwix.quantize(linen, rules, KEY, X)
    variables = quantized.init(KEY, X)
    params = {"params": variables["params"]}
    nnx_model = OwnNnx(lambda m, x: multiply(x, m.w[...]), w=nnx.Param(jnp.ones(1)))
    nnx_model.w = nnx.Param(weight(KEY, (32, 32)))
    nnx_quantized, _ = qwix.quantize_nnx(nnx_model, rules, X)
    mutable = {"mutable": ["fallback"]}
    for run, run_float, inputs in (
        (lambda v, x: quantized.apply(v, x, **mutable)[0], linen.apply, variables),
        (lambda _, x: nnx_quantized(x), lambda _, x: nnx_model(x), {}),
    ):
        found = run(inputs, X)
        expected = run_float(params, X)
        compiled = jax.jit(run_float)(params, X)
        assert found.dtype == expected.dtype
        assert found.weak_type == expected.weak_type
        assert found.shape == expected.shape
        if rules[".*"] is None:
            np.testing.assert_array_equal(found, expected)
            np.testing.assert_array_equal(jax.jit(run)(inputs, X), compiled)
        else:
            tolerance = 0.05 * float(jnp.abs(expected).max(initial=1.0))
            np.testing.assert_allclose(found, expected, atol=tolerance)


def in_kernel(call):
    """A function that computes both kinds of products in a kernel."""

    def multiply(x, w):
        def kernel(x, w, y):
            y[...] = x[...] @ w[...] + jnp.dot(x[...], x[...])

        return call(kernel, jax.ShapeDtypeStruct((32, 32), jnp.float32))(x[0], w)

    return multiply


KERNELS = {
    "interpreted": functools.partial(pl.pallas_call, interpret=True),
    "Mosaic": lambda kernel, out: plgpu.kernel(kernel, out_type=out),
}
needs_jax_0_10 = pytest.mark.skipif(
    jax.__version_info__ < (0, 10), reason="out_type of plgpu.kernel is of JAX 0.10"
)


@pytest.mark.parametrize(
    "name", ["interpreted", pytest.param("Mosaic", marks=needs_jax_0_10)]
)
def test_products_in_kernels_stay_as_they_are(name):
    multiply, x = in_kernel(KERNELS[name]), jax.random.normal(KEY, (1, 32, 32))
    rules = {".*": recipes.block, ".*@.*": recipes.block}
    linen = Own(lambda param, x: multiply(x, param("w", 32, 32)))
    variables = {"params": {"w": weight(32, 32)[...]}}
    model = OwnNnx(lambda m, x: multiply(x, m.w[...]), w=weight(32, 32))
    with pytest.warns(UserWarning, match="quantize nothing"):
        linen_quantized, report = qwix.quantize(linen, rules, KEY, x)
    with pytest.warns(UserWarning, match="quantize nothing"):
        quantized, nnx_report = qwix.quantize_nnx(model, rules, x)
    for found in (report, nnx_report):
        assert found.products == found.activation_products == ()
    runs = [
        lambda x: linen.apply(variables, x),
        lambda x: linen_quantized.apply(variables, x),
        model,
        quantized,
    ]
    programs = {str(jax.make_jaxpr(run)(x)) for run in runs}
    assert len(programs) == 1, programs
    if name == "interpreted":
        expected = runs[0](x)
        for run in runs[1:]:
            np.testing.assert_array_equal(run(x), expected)


class Raw(nnx.Module):
    def __init__(self, rngs):
        self.w = nnx.Param(jax.random.normal(rngs.params(), (32, 32)) / 6)

    def __call__(self, x):
        return x + jnp.einsum("btd,df->btf", x, self.w[...])


class Scaled(Raw):
    """With a vector that may look like a matrix."""

    def __init__(self, rngs, shape=(1, 1, 32)):
        super().__init__(rngs)
        self.scale = nnx.Param(jnp.ones(shape))

    def __call__(self, x):
        return super().__call__(x * self.scale[...].reshape(1, 1, 32))


class NnxModel(nnx.Module):
    def __init__(self, rngs):
        self.embed = nnx.Embed(16, 32, rngs=rngs)
        self.blocks = nnx.List([Scaled(rngs) for _ in range(2)])
        self.dense = nnx.Linear(32, 32, rngs=rngs)
        self.head = Scaled(rngs)

    def encode(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = nnx.remat(lambda block, x: block(x))(block, x)
        return x

    def __call__(self, tokens):
        return self.embed.attend(self.head(self.dense(self.encode(tokens))))


class Transposed(nnx.Module):
    def __init__(self, rngs):
        self.w = nnx.Param(jax.random.normal(rngs.params(), (2, 16, 32)) / 6)

    def __call__(self, x):
        return x @ self.w[...].reshape(32, 32).T.astype(jnp.bfloat16).astype(x.dtype)


TOKENS = jnp.arange(32).reshape(4, 8) % 16


@pytest.mark.exhaustive
def test_nnx_modules_that_multiply_in_their_own_code():
    model = NnxModel(nnx.Rngs(0))
    model.dense = Transposed(nnx.Rngs(2))
    rules = {"head": None, ".*": Recipe(block=32, start=2.0)}
    model, report = qwix.quantize_nnx(model, rules, TOKENS, quantize_rngs=nnx.Rngs(1))
    assert isinstance(model, NnxModel)
    quantized = ["blocks/0/w", "blocks/1/w", "dense/w", "embed/embedding"]
    assert {p.parameter: p.rule for p in report.products} == dict.fromkeys(
        quantized, ".*"
    )
    floats = {p.parameter: p.reason for p in report.float_parameters}
    assert floats.pop("head/w") == "rule 'head'"
    assert set(floats) == {"blocks/0/scale", "blocks/1/scale", "head/scale"}
    assert report.unused_rules == report.unmatched_layers == ()
    descend(model, TOKENS)
    model.encode(TOKENS)  # outside jit, by another method
    stats = fbq_jax.nnx.fallback_stats(model)
    assert {path: int(s.count) for path, s in stats.items()} == {
        "blocks/0/w_dot_general": 3,
        "blocks/1/w_dot_general": 3,
        "dense/w_dot_general": 2,
        "embed/embedding_dot_general": 2,
    }

    frozen = fbq_jax.nnx.freeze(model, TOKENS)
    codes = nnx.to_flat_state(nnx.state(frozen, nnx_dot.FrozenCodes))
    assert ["/".join(map(str, path)) for path, _ in codes] == [
        f"{name}_dot_general/weight" for name in quantized
    ]
    params = nnx.to_flat_state(nnx.state(frozen, nnx.Param))
    kept = {"/".join(map(str, p)) for p, v in params if jax.tree.leaves(v)}
    # A gather reads the embedding, too.
    assert kept == {*floats, "head/w", "embed/embedding"}
    model.eval()
    serve = nnx.jit(lambda model: model(TOKENS))
    np.testing.assert_array_equal(serve(frozen), serve(model))


class Stacked(nnx.Module):
    """Layers of their own code in a stack, with a vector in each."""

    def __init__(self, rngs, layers=2):
        make = functools.partial(Scaled, shape=32)
        self.layers = nnx.split_rngs(splits=layers)(nnx.vmap(make))(rngs)
        self.head = make(rngs)

    def __call__(self, x):
        scan = nnx.scan(
            lambda x, layer: layer(x), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry
        )
        return self.head(scan(x, self.layers))


@pytest.mark.exhaustive
def test_a_stack_of_nnx_modules_that_multiply_in_their_own_code():
    model = Stacked(nnx.Rngs(0))
    before = model(X)
    started = Recipe(block=32, start=2.0)
    model, report = qwix.quantize_nnx(
        model, {".*": started}, X, quantize_rngs=nnx.Rngs(1)
    )
    assert {p.parameter: p.shape for p in report.products} == {
        "head/w": (32, 32),
        "layers/w": (32, 32),
    }
    assert report.float_parameters == ()
    np.testing.assert_allclose(nnx.jit(lambda model: model(X))(model), before, atol=0.2)
    stats = fbq_jax.nnx.fallback_stats(model)
    assert {path: s.count.tolist() for path, s in stats.items()} == {
        "head/w_dot_general": 1,
        "layers/w_dot_general": [1, 1],
    }
    seeds = model.layers.w_dot_general.seed[...]
    assert seeds[0] != seeds[1]
    frozen = fbq_jax.nnx.freeze(model, X)
    assert frozen.layers.w_dot_general.weight.get_value().mT.shape == (2, 1, 32, 32)
    model.eval()
    serve = nnx.jit(lambda model: model(X))
    np.testing.assert_array_equal(serve(frozen), serve(model))


class OwnNnx(nnx.Module):
    """A model of some parts that computes a function of itself and the input."""

    def __init__(self, function, **parts):
        self.function = function
        for name, part in parts.items():
            setattr(self, name, part)

    def __call__(self, x):
        return self.function(self, x)


def weight(*shape):
    return nnx.Param(jax.random.normal(KEY, shape) / 6)


def test_nnx_products_that_state_cannot_leave_stay_in_float():
    """Those in transformations of JAX, and in modules of Linen."""

    def apply(model, x):
        return model.linen(jax.vmap(lambda x: x @ model.w[...])(model.up(x)))

    rngs = nnx.Rngs(0)
    linen = nnx.bridge.ToNNX(nn.Dense(32), rngs=rngs).lazy_init(X)
    model = OwnNnx(apply, up=nnx.Linear(32, 32, rngs=rngs), w=weight(32, 32))
    model.linen = linen
    model, report = qwix.quantize_nnx(
        model, {".*": SMALL}, X, quantize_rngs=nnx.Rngs(1)
    )
    assert [p.parameter for p in report.products] == ["up/kernel"]
    reasons = {parameter: why for parameter, _, why in report.float_parameters}
    assert reasons["w"] == reasons["linen/kernel"] == NOT_REACHED
    assert np.all(np.isfinite(nnx.jit(lambda model: model(X))(model)))
    assert list(fbq_jax.nnx.fallback_stats(model)) == ["up"]


def test_parameters_of_int8_blocks_are_not_in_float():
    block = fbq_jax.nnx.Int8MLP(32, 32, rngs=nnx.Rngs(0))
    model = OwnNnx(lambda m, x: m.block(x) @ m.w[...], block=block, w=weight(32, 32))
    _, report = qwix.quantize_nnx(model, {".*": SMALL}, X)
    assert [p.parameter for p in report.products] == ["w"]
    assert report.float_parameters == ()


class Named(Raw):
    """Its copies are made by a function of its own."""

    def __reduce__(self):
        return Named, (nnx.Rngs(0),)


@pytest.mark.parametrize("cls", [Raw, Named])
def test_a_model_can_be_pickled(cls):
    model, _ = qwix.quantize_nnx(
        cls(nnx.Rngs(0)), {".*": SMALL}, X, quantize_rngs=nnx.Rngs(1)
    )
    copy = pickle.loads(pickle.dumps(model))
    assert type(copy) is (type(model) if cls is Raw else Named)
    in_float = cls(nnx.Rngs(0))(X)
    assert np.array_equal(copy(X), in_float) == (cls is Named)
    np.testing.assert_array_equal(copy(X), model(X) if cls is Raw else in_float)


def test_the_given_model_stays_as_it_is():
    """The quantized one shares its parameters."""
    model = NnxModel(nnx.Rngs(0))
    before = nnx.graphdef(model)
    quantized, _ = qwix.quantize_nnx(model, RULES, TOKENS)
    with pytest.raises(TypeError, match="unknown"):
        qwix.quantize_nnx(model, RULES, TOKENS, unknown=1)
    assert nnx.graphdef(model) == before
    assert quantized.blocks[0].w is model.blocks[0].w


@pytest.mark.exhaustive
@pytest.mark.parametrize("remat", [nnx.remat, jax.checkpoint, nnx.jit])
def test_a_frozen_model_in_the_closure_of_a_transformation(remat):
    """Its parameters are shown as arrays inside the transformation, then hidden."""
    inner = Stacked(nnx.Rngs(0)).head
    started = Recipe(block=32, start=2.0)
    inner, _ = qwix.quantize_nnx(inner, {".*": started}, X, quantize_rngs=nnx.Rngs(1))
    frozen = fbq_jax.nnx.freeze(inner, X)
    inner.eval()

    def loss(model):
        return lambda x: jnp.mean(remat(lambda x: model(x))(x) ** 2)

    for run in (loss, lambda model: jax.jit(loss(model))):
        assert float(run(frozen)(X)) == float(run(inner)(X))
    grads = jax.jit(jax.grad(loss(frozen)))(X)
    np.testing.assert_allclose(grads, jax.grad(loss(inner))(X), atol=1e-3)
    assert isinstance(frozen.w.get_raw_value(), FrozenKernel)


def test_linen_states_that_do_not_tell_parameters_apart_are_not_frozen():
    class Methods(nn.Module):
        def setup(self):
            self.a, self.b = Matrix(), Matrix()

        def by(self, x, name):
            return x @ getattr(self, name).w

    class Matrix(nn.Module):
        def setup(self):
            self.w = self.param("w", nn.initializers.normal(), (32, 32))

        def parts(self, x):
            return x @ self.w.reshape(32, 32).T + x @ self.w

    started = {".*": Recipe(block=32, start=2.0)}
    model, _ = qwix.quantize(Methods(), started, KEY, X, "a", method="by")
    variables = jax.jit(lambda: model.init(KEY, X, "a", method="by"))()
    params = {**variables["params"], "b": variables["params"]["a"]}
    variables = {**variables, "params": params}
    frozen = fbq_jax.freeze(model, variables, X, "a", method="by")
    with pytest.raises(ValueError, match="has both the codes of a frozen weight"):
        jax.eval_shape(lambda: model.apply(frozen, X, "b", method="by"))
    frozen["params"]["b"] = frozen["params"]["a"]
    with pytest.raises(ValueError, match="has the codes of 'a/w', but multiplies by"):
        jax.eval_shape(lambda: model.apply(frozen, X, "b", method="by"))
    model, _ = qwix.quantize(Matrix(), started, KEY, X, method="parts")
    variables = jax.jit(lambda: model.init(KEY, X, method="parts"))()
    frozen = fbq_jax.freeze(model, variables, X, method="parts")
    serve = jax.jit(functools.partial(model.apply, method="parts"))
    np.testing.assert_array_equal(serve(frozen, X), serve(variables, X))


def test_parts_of_a_parameter_are_not_frozen():
    model = OwnNnx(lambda m, x: (x @ m.w[0]) * (x @ m.w[1]), w=weight(2, 32, 32))
    model, _ = qwix.quantize_nnx(
        model, {".*": recipes.block}, X, quantize_rngs=nnx.Rngs(1)
    )
    with pytest.raises(ValueError, match="layer 'w' multiplies by several weights"):
        fbq_jax.nnx.freeze(model, X)


def test_a_precision_is_ignored_on_request():
    def apply(model, x):
        precision = lax.Precision.HIGHEST
        return model.dense(jnp.einsum("btd,df->btf", x, model.w, precision=precision))

    dense = nnx.Linear(32, 8, precision="high", rngs=nnx.Rngs(0))
    model, rules = OwnNnx(apply, w=weight(32, 32), dense=dense), {".*": recipes.block}
    with pytest.raises(ValueError, match=r"layer .*: precision=high.*RulesDot"):
        qwix.quantize_nnx(model, rules, X)
    _, report = qwix.quantize_nnx(model, rules, X, ignore_precision=True)
    assert {p.parameter: p.ignores_precision for p in report.products} == {
        "dense/kernel": True,
        "w": True,
    }


@pytest.mark.parametrize("layers", [["second"], ["first", "second"]])
def test_owners_of_a_shared_nnx_parameter_have_their_own_ops(layers):
    def apply(model, x):
        multiplies = "first" in layers
        x = model.first(x) if multiplies else x * model.first.w[...].sum()
        return model.second(x)

    w = weight(32, 32)
    first, second = (OwnNnx(lambda m, x: x @ m.w[...], w=w) for _ in range(2))
    model = OwnNnx(apply, first=first, second=second)
    model, report = qwix.quantize_nnx(
        model, {".*": SMALL}, X, quantize_rngs=nnx.Rngs(1)
    )
    assert [product.layer for product in report.products] == layers
    stats = fbq_jax.nnx.fallback_stats(model)
    assert [path.split("/")[0] for path in stats] == layers


def mean_square(y):
    return jnp.mean(y**2)


def test_recipes_are_chosen_for_products_in_a_models_own_code():
    model, options = Unrolled(), {"loss": mean_square, "quantize": qwix.quantize}
    variables = model.init(KEY, X)
    rules, report = fbq_jax.choose_recipes(model, variables, X, **options)
    assert [layer.layer for layer in report.layers] == ["Layer_0", "Layer_1", "head"]
    used = qwix.quantize(model, rules, KEY, X)[1]
    assert {p.layer: p.rule for p in used.products} == {path: path for path in rules}


def test_recipes_are_chosen_for_products_in_an_nnx_models_own_code():
    model, options = NnxModel(nnx.Rngs(0)), {"quantize": qwix.quantize_nnx}
    options |= {"loss": mean_square, "layers": "blocks/.*|dense"}
    rules, _ = fbq_jax.nnx.choose_recipes(model, TOKENS, **options)
    assert list(rules) == ["blocks/0", "blocks/1", "dense"]
    made, used = qwix.quantize_nnx(model, rules, TOKENS, quantize_rngs=nnx.Rngs(1))
    assert made.blocks[0].w_dot_general.path.name == "blocks/0"  # in warnings, too
    assert {p.layer: p.rule for p in used.products} == {path: path for path in rules}
