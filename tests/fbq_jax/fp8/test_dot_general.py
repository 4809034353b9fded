"""FP8 dot products: their equations, Flax's op as a reference, state in Linen."""

import functools

import flax
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx
from flax.linen import fp8_ops
from flax.training.train_state import TrainState

import fbq_jax
from fbq_jax import Fp8Dot, fp8_dot, save_codes
from fbq_jax.fp8 import dot_general as fp8
from tests.debugging import debugging
from tests.marks import with_first_fast
from tests.oracle import relative

OWG = "_overwrite_with_gradient"
HISTORY = 3
X = jnp.asarray(np.random.default_rng(0).standard_normal((24, 32), np.float32))
MATMUL = (((1,), (0,)), ((), ()))


class Mlp(nn.Module):
    """Two layers that share one object, or that each have Flax's op."""

    dot_general: Fp8Dot | None = Fp8Dot(history=HISTORY)
    dtype: jnp.dtype | None = None

    @nn.compact
    def __call__(self, x):
        options = {"dot_general": self.dot_general}
        if self.dot_general is None:
            flax_op = functools.partial(
                fp8_ops.Fp8DirectDotGeneralOp, amax_history_length=HISTORY
            )
            options = {"dot_general_cls": flax_op}
        options["dtype"] = self.dtype
        x = nn.Dense(48, name="up", **options)(x)
        return nn.Dense(16, name="down", **options)(nn.silu(x))


def loss(variables, x, model):
    y = model.apply(variables, x)
    return jnp.mean((y - 1.0) ** 2), y


@functools.partial(jax.jit, static_argnames="model")
def train_step(variables, x, model=Mlp()):  # noqa: B008 (a constant)
    """The output, the gradients of the parameters and the next variables."""
    with jax.numpy_dtype_promotion("standard"):  # Flax's op needs it
        grads, y = jax.grad(loss, has_aux=True)(variables, x, model)
    params = jax.tree.map(
        lambda p, g: p - 1e-3 * g, variables["params"], grads["params"]
    )
    return y, grads["params"], {"params": params, OWG: grads[OWG]}


@functools.cache
def init(model):
    return jax.jit(model.init)(jax.random.key(1), X)


def test_beside_flax_over_steps():
    """Histories, scales, outputs and gradients agree while inputs grow and shrink."""
    ours, theirs = init(Mlp()), init(Mlp(None))
    jax.tree.map(np.testing.assert_array_equal, ours["params"], theirs["params"])
    names = {"lhs": "input", "rhs": "kernel", "grad": "output_grad"}
    for scale in (1.0, 4.0, 60.0, 0.2, 0.5, 0.5, 0.5):
        x = scale * X
        y, grads, ours = train_step(ours, x)
        z, flax_grads, theirs = train_step(theirs, x, Mlp(None))
        assert relative(y, z) <= 1e-6
        for name, state in ours[OWG].items():
            (flax_state,) = theirs[OWG][name].values()
            for operand, flax_name in names.items():
                got = state["dot_general"][operand]
                history = flax_state[f"{flax_name}_amax_history"]
                np.testing.assert_allclose(got["amax_history"], history, rtol=1e-6)
                flax_scale = flax_state[f"{flax_name}_scale"][0]
                np.testing.assert_allclose(got["scale"], flax_scale, rtol=1e-6)
        for got, expected in zip(
            *map(jax.tree.leaves, (grads, flax_grads)), strict=True
        ):
            assert relative(got, expected) <= 1e-6
        # If the last bit of a weight differs, its code may differ.
        ours["params"] = theirs["params"]
    assert ours[OWG]["up"]["dot_general"]["lhs"]["scale"] < 1.0


def test_beside_flax_in_bfloat16():
    """Flax rounds its scales to 16 bits, so only the first call has them alike."""
    ours, theirs = Mlp(dtype=jnp.bfloat16), Mlp(None, jnp.bfloat16)
    in_float = Mlp(jax.lax.dot_general, jnp.bfloat16)
    y, _, variables = train_step(init(ours), X, ours)
    z, _, same = train_step(init(theirs), X, theirs)
    np.testing.assert_array_equal(y, z)
    variables["params"] = same["params"]
    exact = in_float.apply({"params": same["params"]}, X)
    y, *_ = train_step(variables, X, ours)
    z, *_ = train_step(same, X, theirs)
    far = [relative(output, exact) for output in (y, z)]
    assert 0.02 < relative(y, z) < min(far) < max(far) < 0.08


def test_training_with_train_state_and_evaluation():
    model = Mlp()
    with jax.numpy_dtype_promotion("standard"):
        state = TrainState.create(
            apply_fn=model.apply, params=init(model), tx=optax.sgd(0.1)
        )
        gradient = jax.value_and_grad(
            functools.partial(loss, model=model), has_aux=True
        )

        @jax.jit
        def step(state):
            (value, _), grads = gradient(state.params, X)
            return state.apply_gradients(grads=grads), value

        losses = []
        for _ in range(20):
            state, value = step(state)
            losses.append(float(value))
    assert losses[-1] < 0.5 * losses[0]
    slot = state.params[OWG]["down"]["dot_general"]["grad"]
    assert np.all(slot["amax_history"] > 0)
    evaluate = jax.jit(functools.partial(model.apply, mutable=[OWG]))
    y, changed = evaluate(state.params, X)
    jax.tree.map(np.testing.assert_array_equal, changed[OWG], state.params[OWG])
    assert np.all(np.isfinite(y))


def codes_of(x, dtype, scale):
    largest = float(ml_dtypes.finfo(dtype).max)
    x = np.asarray(x, np.float32) / np.float32(scale)
    return np.clip(x, -largest, largest).astype(dtype).astype(np.float64)


@pytest.mark.parametrize("scaling", ["delayed", "current"])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_equations_in_float64(scaling, dtype):
    """Codes come from the reference cast, products are in float64."""
    rng = np.random.default_rng(3)
    shapes = ((2, 20, 33), (2, 33, 17), (2, 20, 17))
    operands = [
        jnp.asarray(size * rng.standard_normal(shape), dtype)
        for shape, size in zip(shapes, (3.0, 0.1, 1e-3), strict=True)
    ]
    scalings = fp8.Scalings()
    amax = [float(jnp.abs(a.astype(jnp.float32)).max()) for a in operands]
    if scaling == "delayed":  # half of the next amax, so some values saturate
        amax = [a / 2 for a in amax]
        scalings = fp8.Scalings(
            *(fp8.Scaling(jnp.float32(9.0), jnp.array([0.0, a, a / 3])) for a in amax)
        )

    @jax.jit
    def product(x, w, dy, scalings):
        multiply = functools.partial(fp8.matmul, fp8.Spec(jnp.float32, dtype, dtype))
        y, pullback = jax.vjp(multiply, x, w, scalings)
        return y, *pullback(dy)

    dy = operands[2].astype(jnp.float32)
    y, dx, dw, new = product(*operands[:2], dy, scalings)
    formats = (ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2)
    largest = [np.float32(ml_dtypes.finfo(f).max) for f in formats]
    scales = [
        np.float32(1) / (m / np.float32(a)) for m, a in zip(largest, amax, strict=True)
    ]
    inputs = [a.astype(jnp.float32) for a in operands]
    x, w, g = (
        codes_of(*args) * np.float64(args[2])
        for args in zip(inputs, formats, scales, strict=True)
    )
    # With current scaling, a tie may round to the other neighbour.
    assert relative(y, x @ w) <= 1e-5
    for got, exact in ((dx, g @ w.swapaxes(1, 2)), (dw, x.swapaxes(1, 2) @ g)):
        assert got.dtype == dtype
        tolerance = 1e-5 if dtype == jnp.float32 else 2**-8
        assert relative(got.astype(jnp.float32), exact) <= tolerance
    if scaling == "current":
        assert new == fp8.Scalings()
        return
    for old, state, scale, value in zip(scalings, new, scales, inputs, strict=True):
        assert state.scale == scale
        assert state.amax_history[0] == np.abs(value).max()
        # The oldest value, right after the last call's, is gone.
        expected = [old.amax_history[2], old.amax_history[0]]
        np.testing.assert_array_equal(state.amax_history[1:], expected)


@pytest.mark.parametrize("scaling", ["delayed", "current"])
def test_non_finite_values_stay_visible(scaling):
    scalings = fp8.start(2) if scaling == "delayed" else fp8.Scalings()
    product = jax.jit(functools.partial(fp8.matmul, fp8.Spec(*[jnp.float32] * 3)))
    for bad in (np.nan, np.inf, -np.inf):
        y = product(X[None].at[0, 3, 5].set(bad), X.T[None], scalings)[0]
        assert np.all(np.isnan(y[3]))
        if scaling == "delayed":
            assert np.all(np.isfinite(np.delete(y, 3, axis=0)))
    if scaling == "delayed":  # vector instructions may drop it in a large tensor
        x = jnp.ones((64, 256)).at[3, 5].set(jnp.nan)
        _, state = jax.jit(fp8.quantize, static_argnums=1)(x, fp8.E4M3, scalings.lhs)
        assert np.isnan(state.amax_history[0])


def test_an_overflow_leaves_the_scale_where_it_was():
    model = Mlp()
    variables = init(model)
    for x in (X, X, X.at[0, 0].set(jnp.inf)):
        _, _, variables = train_step(variables, x)
    before = variables[OWG]["up"]["dot_general"]["lhs"]
    _, _, after = train_step({**variables, "params": init(model)["params"]}, X)
    assert after[OWG]["up"]["dot_general"]["lhs"]["scale"] == before["scale"]
    assert before["amax_history"][0] == np.inf


def test_state_from_anywhere_and_a_scan_over_layers():
    """Frozen NumPy arrays; one state per layer of ``nn.scan``, under ``nn.remat``."""

    class Layer(nn.Module):
        @nn.compact
        def __call__(self, x, _):
            return x + nn.Dense(32, dot_general=Fp8Dot(history=HISTORY))(x), None

    class Stack(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.scan(
                nn.remat(Layer, policy=save_codes),
                variable_axes={"params": 0, OWG: 0},
                split_rngs={"params": True},
                length=2,
            )(name="layers")(x, None)[0]

    variables = init(Stack())
    loaded = flax.core.freeze(jax.tree.map(np.asarray, variables))
    _, _, after = train_step(loaded, X, Stack())
    history = after[OWG]["layers"]["Dense_0"]["dot_general"]["lhs"]["amax_history"]
    assert history.shape == (2, HISTORY)
    assert history[0, 0] == np.abs(X).max() != history[1, 0]


def linen_vmap(layer):
    mapped = nn.vmap(nn.Dense, variable_axes={"params": None, OWG: None})
    return mapped(8, use_bias=False, dot_general=layer.dot_general).apply


@pytest.mark.parametrize(
    "over_examples",
    with_first_fast([lambda layer: jax.vmap(layer.apply, (None, 0)), linen_vmap]),
)
def test_examples_that_share_a_state_record_the_largest_of_all(over_examples):
    """With their sum, scales would grow in each step."""
    layer = nn.Dense(8, use_bias=False, dot_general=Fp8Dot(history=HISTORY))
    x = jnp.stack([X[:8] * 2.0**i for i in range(4)])
    variables = layer.init(jax.random.key(0), x)

    def states(apply):
        gradient = jax.jit(
            jax.grad(lambda variables: jnp.sum(apply(variables, x) ** 2))
        )
        after = variables
        for _ in range(HISTORY + 1):
            after = {**after, OWG: gradient(after)[OWG]}
        return after[OWG]

    compare = functools.partial(np.testing.assert_allclose, rtol=1e-6)
    jax.tree.map(compare, states(over_examples(layer)), states(layer.apply))


def test_the_product_of_two_small_scales_is_not_zero():
    x, w = jnp.full((8, 16), 1e-30), jnp.full((16, 4), 1e-6)
    np.testing.assert_allclose(CURRENT(x, w, MATMUL), 1.6e-35, rtol=1e-6)


def test_current_scaling_in_plain_jax():
    y = CURRENT(X, X, (((0,), (0,)), ((), ())), preferred_element_type=jnp.bfloat16)
    assert (y.dtype, y.shape) == (jnp.bfloat16, (32, 32))
    assert relative(y.astype(jnp.float32), X.T @ X) < 0.05
    empty = jax.vjp(lambda x: CURRENT(x, X.T, MATMUL), X[:0])
    assert empty[1](empty[0])[0].shape == (0, 32)


CURRENT = Fp8Dot(scaling="current")
PARAMS = {"kernel": jnp.ones((32, 2)), "bias": jnp.ones(2)}


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: Fp8Dot(scaling="now"), ValueError, "'delayed', 'current'.*'now'"),
        (lambda: Fp8Dot(history=0), ValueError, r"positive integer up .* got 0"),
        (lambda: fp8_dot(X, X.T, MATMUL), ValueError, "scaling='current'"),
        (
            lambda: nn.Dense(2, dot_general=fp8_dot).apply({"params": PARAMS}, X),
            ValueError,
            "has no state 'dot_general'",
        ),
        (lambda: CURRENT(X, X.T.astype(int), MATMUL), TypeError, "rhs is int32"),
    ],
)
def test_bad_input_is_named(call, error, message):
    with pytest.raises(error, match=message):
        call()


@pytest.mark.parametrize("scale", with_first_fast([0.0, 1.0]))
@pytest.mark.parametrize("history", with_first_fast([None, HISTORY]))
def test_healthy_operands_have_no_nan_or_inf_inside(scale, history):
    """Also operation by operation, where a value that is not used counts."""
    scalings = fp8.Scalings() if history is None else fp8.start(history)
    x, spec = scale * X[None], fp8.Spec(*(jnp.float32,) * 3)
    with debugging("jax_debug_nans", "jax_debug_infs"):
        for _ in range(2):
            y, vjp = jax.vjp(functools.partial(fp8.matmul, spec), x, x.mT, scalings)
            scalings = vjp(y)[2]


class NnxMlp(nnx.Module):
    def __init__(self):
        def dense(*sizes):
            dot = fbq_jax.nnx.Fp8Dot(HISTORY)
            return nnx.Linear(*sizes, dot_general=dot, rngs=nnx.Rngs(0))

        self.up, self.down = dense(32, 48), dense(48, 16)

    def __call__(self, x):
        return self.down(nnx.silu(self.up(x)))


@nnx.jit
def nnx_step(model, x):
    """The output and the gradients of the parameters; updates state and parameters."""

    def loss(model):
        y = model(x)
        return jnp.mean((y - 1.0) ** 2), y

    wrt = nnx.DiffState(0, (nnx.Param, fbq_jax.nnx.Fp8Scaling))
    grads, y = nnx.grad(loss, argnums=wrt, has_aux=True)(model)
    scalings, grads = nnx.split_state(grads, fbq_jax.nnx.Fp8Scaling, nnx.Param)
    nnx.update(model, scalings)
    params = nnx.state(model, nnx.Param)
    nnx.update(model, jax.tree.map(lambda p, g: p - 1e-3 * g, params, grads))
    return y, nnx.to_pure_dict(grads)


def state_of(model):
    return {
        name: {"dot_general": {k: v._asdict() for k, v in layer["dot_general"].items()}}
        for name, layer in nnx.to_pure_dict(
            nnx.state(model, fbq_jax.nnx.Fp8Scaling)
        ).items()
    }


def test_beside_linen_over_steps():
    """Outputs, gradients, histories and scales agree while inputs grow and shrink."""
    linen, model = init(Mlp()), NnxMlp()
    nnx.update(model, nnx.State(linen["params"]))
    for scale in (1.0, 4.0, 60.0, 0.2, 0.5):
        z, linen_grads, linen = train_step(linen, scale * X)
        y, grads = nnx_step(model, scale * X)
        np.testing.assert_array_equal(y, z)
        jax.tree.map(np.testing.assert_array_equal, grads, linen_grads)
        jax.tree.map(np.testing.assert_array_equal, state_of(model), linen[OWG])
    assert linen[OWG]["up"]["dot_general"]["lhs"]["scale"] < 1.0
    before = state_of(model)
    model.eval()
    nnx.jit(lambda model: model(60.0 * X))(model)
    jax.tree.map(np.testing.assert_array_equal, state_of(model), before)


def test_bad_input_of_nnx_is_named():
    with pytest.raises(ValueError, match=r"takes a positive integer up to .*got 0"):
        fbq_jax.nnx.Fp8Dot(0)
    with pytest.raises(ValueError, match="up to 2147483647; got 2147483648"):
        Fp8Dot(history=2**31)
    with pytest.raises(ValueError, match=r"use fbq_jax\.nnx\.Fp8Dot in NNX"):
        nnx.Linear(32, 2, dot_general=fp8_dot, rngs=nnx.Rngs(0))(X)
    model = NnxMlp()
    fbq_jax.nnx.check_unshared(model)
    model.down.dot_general = model.up.dot_general
    with pytest.raises(ValueError, match=r"layers '.*' and '.*' share one Fp8Dot"):
        fbq_jax.nnx.check_unshared(model)
    for name, function in (
        ("check_unshared", fbq_jax.nnx.check_unshared),
        ("name_", fbq_jax.nnx.name_layers),
    ):
        with pytest.raises(TypeError, match=rf"fbq_jax\.nnx\.{name}.*got NoneType"):
            function(None)


def test_a_module_may_keep_the_op_of_a_layer_inside_it():
    model = NnxMlp()
    model.op = nnx.data(model.up.dot_general)
    fbq_jax.nnx.check_unshared(model)
    model.other = nnx.data([NnxMlp()])
    model.other[0].op = nnx.data(model.op)
    with pytest.raises(ValueError, match="layers 'up' and 'other/0' share one Fp8Dot"):
        fbq_jax.nnx.check_unshared(model)
