"""FP8 AdamW: its equations, its state's size, and training compared with optax."""

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
from flax import nnx

from fbq_jax import optim
from tests.debugging import debugging
from tests.marks import with_first_fast

B1, B2, EPS = 0.9, 0.95, 1e-8


def normal(shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


def params_of(dtype=jnp.float32):
    tree = {
        "up": normal((16, 32), 1) / 4.0,
        "down": normal((32, 4), 2) / 6.0,
        "bias": np.zeros(4, np.float32),
    }
    return jax.tree.map(lambda p: jnp.asarray(p, dtype), tree)


def loss(params, x, y):
    params = optax.tree.cast(params, jnp.float32)
    out = jnp.tanh(x @ params["up"]) @ params["down"] + params["bias"][None]
    return jnp.mean((out - y) ** 2)


@functools.partial(jax.jit, static_argnums=0)
def run(optimizer, params, inputs, targets):
    def step(carry, batch):
        params, state = carry
        value, grads = jax.value_and_grad(loss)(params, *batch)
        with jax.numpy_dtype_promotion("standard"):  # optax.adamw needs it
            updates, state = optimizer.update(grads, state, params)
        return (optax.apply_updates(params, updates), state), value

    carry = (params, optimizer.init(params))
    (params, state), losses = jax.lax.scan(step, carry, (inputs, targets))
    return params, state, losses


def train(optimizer, params, steps):
    """Trains on noisy inputs whose scales differ a hundredfold."""
    x = normal((steps, 32, 16), 3) * np.logspace(0, -2, 16, dtype=np.float32)
    y = np.tanh(x @ normal((16, 4), 4)) + 0.05 * normal((steps, 32, 4), 5)
    return run(optimizer, params, x, y)


def distance(a, b):
    return float(optax.tree.norm(optax.tree.sub(a, b)))


def moments(state):
    return [
        np.asarray(s["w"].values, np.float64) * np.float64(s["w"].scale)
        for s in (state.mu, state.nu)
    ]


def half_step(x, dtype):
    """Half the distance between x's neighbours in a format, in float64."""
    _, exponent = np.frexp(x)
    info = ml_dtypes.finfo(dtype)
    return 2.0 ** (np.maximum(exponent - 1, info.minexp) - info.nmant - 1)


def test_each_update_follows_the_equations_from_the_stored_moments():
    """A float64 oracle reads the same state as the step."""
    optimizer = optim.scale_by_fp8_adam(B1, B2, EPS)
    shape = (24, 40)
    state = jax.jit(optimizer.init)({"w": jnp.zeros(shape)})
    update = jax.jit(optimizer.update)
    for t in range(1, 6):
        spread = 10.0 ** np.random.default_rng(t).uniform(-3.0, 0.0, shape)
        g = spread.astype(np.float32) * normal(shape, 10 + t)
        g64, (m, v) = np.asarray(g, np.float64), moments(state)
        m, v = B1 * m + (1 - B1) * g64, B2 * v + (1 - B2) * g64**2
        exact = m / (1 - B1**t) / (np.sqrt(v / (1 - B2**t)) + EPS)
        updates, state = update({"w": g}, state)
        np.testing.assert_allclose(updates["w"], exact, rtol=1e-5, atol=1e-6)
        m = np.where(moments(state)[1] == 0, 0.0, m)
        for moment, stored in ((m, state.mu["w"]), (v, state.nu["w"])):
            values, scale = (np.asarray(a, np.float64) for a in stored)
            unit = moment / scale
            allowed = half_step(unit, stored.values.dtype) + 1e-5 * np.abs(unit)
            assert np.all(np.abs(values - unit) <= allowed)
    assert state.count == 5


@pytest.mark.parametrize(
    ("b2", "rounding"),
    [
        (0.95, "nearest"),
        pytest.param(0.999, "stochastic", marks=pytest.mark.exhaustive),
    ],
)
def test_training_follows_adamw(b2, rounding):
    """300 steps: losses within 10 %, parameters within 20 % of the distance moved."""
    start = params_of()
    exact, _, exact_losses = train(optax.adamw(1e-2, b2=b2), start, 300)
    optimizer = optim.fp8_adamw(1e-2, b2=b2, rounding=rounding)
    got, _, losses = train(optimizer, start, 300)
    got_loss, exact_loss = (np.asarray(x)[-50:].mean() for x in (losses, exact_losses))
    assert got_loss < 0.2 * losses[0]
    assert got_loss == pytest.approx(exact_loss, rel=0.1)
    assert 0.0 < distance(got, exact) <= 0.2 * distance(exact, start)


def test_small_changes_of_the_second_moment_need_stochastic_rounding():
    """With nearest rounding, v does not change when the gradient falls to half."""
    g = jnp.ones((8, 512)).at[0, 0].set(2.0)

    def second_moment(rounding):
        optimizer = optim.scale_by_fp8_adam(B1, 0.99, rounding=rounding)
        step = jax.jit(lambda g, state: optimizer.update(g, state)[1])
        state = jax.jit(optimizer.init)(g)
        for scale, steps in ((1.0, 5), (0.5, 60)):
            # The largest value fixes the tensor's scale.
            smaller = (scale * g).at[0, 0].set(2.0)
            for _ in range(steps):
                state = step(smaller, state)
        return float(jnp.mean(state.nu.dequantize()[1:]))

    exact = (1 - 0.99**5) * 0.99**60 + (1 - 0.99**60) * 0.25
    assert second_moment("stochastic") == pytest.approx(exact, rel=0.05)
    assert abs(second_moment("nearest") / exact - 1) > 0.2


def test_each_moment_of_each_tensor_draws_noise_of_its_own():
    """Equal values round up or down without correlation."""
    optimizer = optim.scale_by_fp8_adam(rounding="stochastic")
    # The first value sets the scale: neither moment of the others is representable.
    g = jnp.full((128, 128), 0.8).at[0, 0].set(1.0)
    grads = {"a": g, "b": g}
    init, update = jax.jit(optimizer.init), jax.jit(optimizer.update)
    _, state = update(grads, init(grads))
    stored = [*state.mu.values(), *state.nu.values()]
    values = [np.ravel(x.values.astype(jnp.float32))[1:] for x in stored]
    np.testing.assert_allclose(np.corrcoef(values), np.eye(4), atol=0.05)


@pytest.mark.parametrize(
    ("master", "per_parameter"), [(None, 2), (jnp.float16, 4), (jnp.float32, 6)]
)
def test_bytes_of_the_state(master, per_parameter):
    params = params_of(jnp.bfloat16)
    optimizer = optim.fp8_adamw(1e-3, master_dtype=master)
    state = jax.jit(optimizer.init)(params)
    size = sum(p.size for p in jax.tree.leaves(params))
    tensors = 3 * (3 if master == jnp.float16 else 2)
    measured = sum(leaf.nbytes for leaf in jax.tree.leaves(state))
    assert measured == per_parameter * size + 4 * tensors + 4
    adamw = optax.adamw(1e-3).init(params_of())
    assert sum(leaf.nbytes for leaf in jax.tree.leaves(adamw)) == 8 * size + 4


def test_master_weights_carry_bfloat16_parameters():
    """Updates are about a thousandth; without a copy, rounding drops most of them."""
    start, options = params_of(jnp.bfloat16), {"b2": B2, "weight_decay": 0.0}
    from_start = optax.tree.cast(start, jnp.float32)
    exact, _, _ = train(optax.adamw(2e-4, **options), from_start, 100)
    moved = distance(exact, from_start)
    for master, tolerance in (("float32", 0.1), ("float16", 0.25)):
        optimizer = optim.fp8_adamw(2e-4, **options, master_dtype=master)
        got, state, _ = train(optimizer, start, 100)
        copy = state.master
        if master == "float16":
            copy = {name: tensor.dequantize() for name, tensor in copy.items()}
        assert distance(copy, exact) <= tolerance * moved
        for name, value in got.items():
            assert value.dtype == jnp.bfloat16
            rounded = np.asarray(copy[name].astype(jnp.bfloat16), np.float32)
            value = np.asarray(value, np.float32)
            np.testing.assert_allclose(value, rounded, rtol=2**-7, atol=1e-6)
    lost, _, _ = train(optim.fp8_adamw(2e-4, **options), start, 100)
    assert distance(optax.tree.cast(lost, jnp.float32), exact) > 0.8 * moved


def test_float32_parameters_and_their_master_copy_can_both_be_donated():
    optimizer = optim.with_master_weights(optax.sgd(0.5), jnp.float32)
    params = jnp.ones(4)
    step = jax.jit(lambda p, s: optimizer.update(p, s, p), donate_argnums=(0, 1))
    _, state = step(params, optimizer.init(params))
    assert np.all(state.master == 0.5)


def test_masked_and_none_leaves():
    """The state skips what ``optax.masked`` hides and what is None."""
    params = {"a": jnp.ones((2, 2)), "b": None, "c": jnp.ones(())}
    optimizer = optax.masked(optim.fp8_adamw(0.1), {"a": True, "b": None, "c": False})
    state = jax.jit(optimizer.init)(params)
    updates, state = jax.jit(optimizer.update)(params, state, params)
    assert float(updates["a"][0, 0]) == pytest.approx(-0.1, rel=1e-3)
    assert updates["b"] is None
    assert float(updates["c"]) == 1.0
    shapes = [leaf.shape for leaf in jax.tree.leaves(state)]
    assert shapes == [(), *[(2, 2), ()] * 2]  # the count comes first


@pytest.mark.parametrize(("value", "size"), [(np.nan, 4), (np.nan, 128), (np.inf, 4)])
def test_a_gradient_that_is_not_finite_stays_visible(value, size):
    optimizer = optim.scale_by_fp8_adam()
    grads = jnp.ones((size, size)).at[1, 1].set(value)
    update = jax.jit(optimizer.update)
    updates, state = update(grads, jax.jit(optimizer.init)(grads))
    np.testing.assert_array_equal(np.argwhere(np.isnan(updates)), [[1, 1]])
    updates, _ = update(jnp.ones((size, size)), state)
    assert np.all(np.isnan(updates))


SGD = optim.with_master_weights(optax.sgd(0.1), jnp.float32)
COMPLEX = {"w": jnp.ones(3, jnp.complex64)}


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: optim.fp8_adamw(1e-3, rounding="up"), ValueError, "'nearest'.*'up'"),
        (
            lambda: optim.fp8_adamw(1e-3, master_dtype=jnp.bfloat16),
            ValueError,
            "float32 or float16; got .*bfloat16",
        ),
        (lambda: SGD.update({}, None), ValueError, "pass them to update"),
        (lambda: SGD.init(COMPLEX), TypeError, "takes real parameters; got complex64"),
        (lambda: optim.fp8_adamw(1, b1=1 - 1e-10), ValueError, "b1 takes .* got 0.99"),
        (lambda: optim.fp8_adamw(1, b2=-0.1), ValueError, "b2 takes a .* got -0.1"),
        (lambda: optim.fp8_adamw(1, eps=10**400), ValueError, "eps takes .* got 1000"),
        (
            lambda: optim.fp8_adamw(1e-3).init(COMPLEX),
            TypeError,
            "takes real parameters; got complex64",
        ),
    ],
)
def test_bad_input_is_named(call, error, message):
    with pytest.raises(error, match=message):
        call()


@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
def test_small_gradients_give_no_large_steps(rounding):
    """Where the second moment is 0 in FP8 and the first would not be."""
    optimizer = optim.scale_by_fp8_adam(rounding=rounding)
    scales = np.logspace(0, -9, 10, dtype=np.float32)[:, None]

    @jax.jit
    def largest(grads):
        def step(state, g):
            updates, state = optimizer.update(g, state)
            return state, jnp.max(jnp.abs(updates))

        return jax.lax.scan(step, optimizer.init(grads[0]), grads)[1]

    grads = jnp.asarray(normal((100, 10, 512)) * scales)
    assert jnp.max(largest(grads)) < 6.0


@pytest.mark.parametrize("rounding", with_first_fast(["nearest", "stochastic"]))
@pytest.mark.parametrize("scale", with_first_fast([1e18, 1e30, 3e38]))
def test_huge_gradients_give_steps_of_the_learning_rate(rounding, scale):
    """Their squares overflow float32."""
    params = {"w": jnp.zeros(256)}
    grads = {"w": jnp.asarray(np.sign(normal(256)) * scale, jnp.float32)}
    optimizer = optim.fp8_adamw(1e-3, rounding=rounding)
    state = optimizer.init(params)
    for _ in range(3):
        updates, state = jax.jit(optimizer.update)(grads, state, params)
        want = -1e-3 * np.sign(grads["w"])
        np.testing.assert_allclose(updates["w"], want, rtol=0.15)


@pytest.mark.parametrize("flag", with_first_fast(["jax_debug_nans", "jax_debug_infs"]))
@pytest.mark.parametrize("scale", with_first_fast([0.0, 1.0]))
def test_healthy_updates_have_no_nan_or_inf_inside(flag, scale):
    """Also operation by operation, where a value that is not used counts."""
    params = {"w": jnp.ones(8)}
    optimizer = optim.fp8_adamw(1e-3, rounding="stochastic", master_dtype=jnp.float16)
    with debugging(flag):
        state = optimizer.init(params)
        optimizer.update({"w": jnp.full(8, scale)}, state, params)


@pytest.mark.parametrize(
    "optimizer",
    [
        optim.fp8_adamw(1e-2),
        optim.fp8_adamw(1e-2, master_dtype=jnp.float16),
        optim.with_master_weights(optax.sgd(0.1), jnp.float16),
    ],
)
def test_nnx_optimizers_update_as_the_functions_do(optimizer):
    """After its first update, ``nnx.Optimizer`` has mappings in place of tuples."""
    model = nnx.Linear(8, 4, rngs=nnx.Rngs(0))
    of_model = nnx.Optimizer(model, optimizer, wrt=nnx.Param)
    params = nnx.to_pure_dict(nnx.state(model, nnx.Param))
    grads = jax.tree.map(jnp.ones_like, nnx.state(model, nnx.Param))
    state = optimizer.init(params)
    for _ in range(3):
        of_model.update(model, grads)
        updates, state = optimizer.update(nnx.to_pure_dict(grads), state, params)
        params = optax.apply_updates(params, updates)
    trained = nnx.to_pure_dict(nnx.state(model, nnx.Param))
    jax.tree.map(np.testing.assert_array_equal, trained, params)
