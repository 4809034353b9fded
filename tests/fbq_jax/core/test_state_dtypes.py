"""State whose floats were cast, as together with the parameters, trains as it is."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st

import fbq_jax
from fbq_jax import FallbackDot, Fp8Dot, MoEMLP, Recipe, Routing, optim
from fbq_jax.core import threshold
from fbq_jax.core.state_dtypes import keep_dtype, round_into
from tests.kernels.quantize_cases import heavy
from tests.marks import with_first_fast

X = heavy((64, 32))
SMALL = Recipe(block=32)
BALANCED = Routing(4, 2, bias_update_rate=1e-3)
OWG = "_overwrite_with_gradient"
HALVES = [jnp.bfloat16, jnp.float16]
each_dtype = pytest.mark.parametrize("dtype", with_first_fast([*HALVES, jnp.float64]))


def cast_floats(tree, dtype):
    """The usual helper; not of ``count`` and ``seed``, which may be float32."""

    def cast(path, x):
        is_whole = any(name in jax.tree_util.keystr(path) for name in ("count", "seed"))
        casts = jnp.issubdtype(x.dtype, jnp.floating) and not is_whole
        return x.astype(dtype) if casts else x

    return jax.tree_util.tree_map_with_path(cast, tree)


def dtypes_of(tree):
    return [leaf.dtype for leaf in jax.tree.leaves(tree)]


def nnx_dot(rngs):
    return fbq_jax.nnx.FallbackDot(SMALL, rngs=rngs)


NNX_LAYERS = {
    "Linear": lambda r: nnx.Linear(32, 32, dot_general=nnx_dot(r), rngs=r),
    "Einsum": lambda r: nnx.Einsum(
        *("ab,bc->ac", (32, 32)),
        einsum_op=fbq_jax.nnx.FallbackEinsum(SMALL, rngs=r),
        rngs=r,
    ),
    "MoEMLP": lambda r: fbq_jax.nnx.MoEMLP(32, BALANCED, 32, recipe=SMALL, rngs=r),
    "Int8MLP": lambda r: fbq_jax.nnx.Int8MLP(32, 32, rngs=r),
}


@each_dtype
@pytest.mark.parametrize("name", with_first_fast(NNX_LAYERS))
def test_variables_of_nnx_keep_their_dtypes(name, dtype):
    """In place, without a warning of JAX."""
    with jax.enable_x64(dtype == jnp.float64):
        model = NNX_LAYERS[name](nnx.Rngs(0))
        graph, params, state = nnx.split(model, nnx.Param, ...)
        state = cast_floats(state, dtype)
        model = nnx.merge(graph, params, state)
        _, after = nnx.eval_shape(lambda model: (model(X), nnx.state(model)), model)
        _, after = nnx.split_state(after, nnx.Param, ...)
        assert dtypes_of(after) == dtypes_of(state)
        assert jnp.dtype(dtype) in dtypes_of(after)


LINEN_LAYERS = {
    "Dense": nn.Dense(32, dot_general=FallbackDot(SMALL)),
    "overwritten": nn.Dense(32, dot_general=FallbackDot(SMALL, collection=OWG)),
    "MoEMLP": MoEMLP(BALANCED, 32, dot_general=FallbackDot(SMALL)),
    "Int8MLP": fbq_jax.Int8MLP(32),
    "Fp8Dot": nn.Dense(32, dot_general=Fp8Dot(history=4)),
}


@each_dtype
@pytest.mark.parametrize("name", with_first_fast(LINEN_LAYERS))
def test_collections_of_linen_keep_their_dtypes(name, dtype):
    """So ``lax.scan`` carries them from step to step."""
    layer = LINEN_LAYERS[name]

    def step(variables, _):
        def loss(params, overwritten):
            given = {**variables, "params": params, **overwritten}
            mutable = [*variables.keys() - {"params", OWG}]
            y, updates = layer.apply(given, X, mutable=mutable)
            return jnp.mean(y**2), updates

        overwritten = {OWG: variables[OWG]} if OWG in variables else {}
        (grads, new), updates = jax.grad(loss, (0, 1), has_aux=True)(
            variables["params"], overwritten
        )
        return {**variables, **updates, **new}, grads

    with jax.enable_x64(dtype == jnp.float64):
        params = (variables := jax.jit(layer.init)(jax.random.key(0), X)).pop("params")
        variables = cast_floats(variables, dtype)
        assert jnp.dtype(dtype) in dtypes_of(variables)
        steps = functools.partial(jax.lax.scan, step, length=2)
        after, _ = jax.eval_shape(steps, {"params": params, **variables})
        del after["params"]
        assert dtypes_of(after) == dtypes_of(variables)


@each_dtype
def test_histories_of_an_nnx_layer_keep_their_dtypes(dtype):
    """And their maxima: small gradients do not become zeros in float16."""
    with jax.enable_x64(dtype == jnp.float64):
        dot = fbq_jax.nnx.Fp8Dot(history=4)
        model = nnx.Linear(32, 32, dot_general=dot, rngs=nnx.Rngs(0))
        nnx.update(dot, cast_floats(nnx.state(dot), dtype))
        wrt = nnx.DiffState(0, (nnx.Param, fbq_jax.nnx.Fp8Scaling))
        grads = nnx.grad(lambda model: 1e-9 * jnp.sum(model(X)), argnums=wrt)(model)
        scalings, _ = nnx.split_state(grads, fbq_jax.nnx.Fp8Scaling, nnx.Param)
        assert dtypes_of(scalings) == [jnp.dtype(dtype)] * 6
        of_grad = scalings["dot_general"]["grad"].get_value()
        assert of_grad.amax_history[0] > 0.0
        of_lhs = scalings["dot_general"]["lhs"].get_value()
        np.testing.assert_allclose(of_lhs.amax_history[0], np.abs(X).max(), rtol=4e-3)


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("master", [None, jnp.float32, jnp.float16])
def test_an_optimizer_stores_its_state_in_its_own_dtypes(dtype, master):
    """Scales of moments need the range of float32, and master weights its bits."""
    optimizer = optim.fp8_adamw(0.1, master_dtype=master)
    params = {"w": jnp.arange(4.0)}
    state = optimizer.init(params)
    _, after = jax.jit(optimizer.update)(params, cast_floats(state, dtype), params)
    assert dtypes_of(after) == dtypes_of(state)


@pytest.mark.parametrize("dtype", [jnp.float32, *HALVES])
def test_a_threshold_moves_by_small_factors(dtype):
    """A factor of 1.001 would be lost in 16 bits, and the rate stay out of range."""
    recipe = Recipe(alpha=1.001)
    metric = jnp.exp(0.1 * jax.random.normal(jax.random.key(0), (64, 8)))
    state = {**threshold.start(recipe), "theta": jnp.asarray(1.5, dtype)}

    def step(state, _):
        call = threshold.scalars_of(threshold.canonicalize_state(state))
        stats = threshold.apply(call, metric, metric, recipe)[1]
        return threshold.keep_dtypes(state, threshold.next_state(state, stats)), None

    state = {**state, "rate": state["rate"].astype(dtype)}
    state, _ = jax.jit(lambda s: jax.lax.scan(step, s, None, length=400))(state)
    low, high = recipe.target_rate
    assert low <= state["rate"] <= high
    assert state["theta"].dtype == dtype


@pytest.mark.parametrize("dtype", [jnp.float8_e4m3fn, jnp.int32])
def test_a_threshold_of_8_bits_does_not_train(dtype):
    model = NNX_LAYERS["Linear"](nnx.Rngs(0))
    model.dot_general.theta.set_value(jnp.ones((), dtype))
    layer = LINEN_LAYERS["Dense"]
    variables = layer.init(jax.random.key(0), X)
    variables["fallback"]["dot_general"]["theta"] = jnp.ones((), dtype)
    message = f"theta of its state is {jnp.dtype(dtype)}"
    with pytest.raises(ValueError, match=message):
        model(X)
    with pytest.raises(ValueError, match=message):
        layer.apply(variables, X, mutable=["fallback"])


LARGEST = float(jnp.finfo(jnp.float16).max)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(
    st.floats(-LARGEST, LARGEST, width=16),
    st.floats(width=32, allow_nan=False, allow_infinity=False, allow_subnormal=False),
    st.sampled_from(HALVES),
)
def test_a_value_moves_in_its_direction_and_stays_in_range(before, after, dtype):
    before = jnp.float32(before).astype(dtype)
    old = float(before)
    new = float(keep_dtype(before, jnp.float32(after)))
    limit = float(jnp.finfo(dtype).max)
    aim = min(max(after, -limit), limit)
    assert (new > old, new < old) == (aim > old, aim < old)
    assert abs(new) <= limit


@pytest.mark.parametrize("dtype", HALVES)
def test_rounding_keeps_zeros_and_infinities_apart(dtype):
    x = jnp.array([0.0, 1e-30, -1e-30, 3e38, -3.4e38, jnp.inf, -jnp.inf, jnp.nan, 1.0])
    y = np.asarray(round_into(x, dtype), np.float32)
    np.testing.assert_array_equal(np.sign(y), np.sign(x))
    np.testing.assert_array_equal(np.isinf(y), np.isinf(x))
