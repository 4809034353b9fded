"""Non-linear layers: exact forward passes, gradients within rounding."""

import functools
import math
from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fbq_jax import nonlinear, save_codes
from fbq_jax.kernels import packing
from tests.marks import slow, with_first_fast


class Case(NamedTuple):
    """A layer, the float layer it replaces, and a float64 version."""

    layer: object
    float_layer: object  # None for norms
    exact: object
    operands: int


def exact_norm(x, scale, bias=None):
    mean = 0.0 if bias is None else x.mean(-1, keepdims=True)
    rstd = 1 / np.sqrt(((x - mean) ** 2).mean(-1, keepdims=True) + 1e-6)
    return (x - mean) * rstd * scale + (0.0 if bias is None else bias)


def exact_gelu(x, approximate):
    if approximate:
        return x / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))
    return x / 2 * (1 + np.vectorize(math.erf)(x / np.sqrt(2)))


CASES = {
    "rms_norm": Case(nonlinear.rms_norm, None, exact_norm, 2),
    "layer_norm": Case(nonlinear.layer_norm, None, exact_norm, 3),
    "silu_gate": Case(
        nonlinear.silu_gate,
        lambda gate, up: jax.nn.silu(gate) * up,
        lambda gate, up: gate / (1 + np.exp(-gate)) * up,
        2,
    ),
    "gelu_gate": Case(
        nonlinear.gelu_gate,
        lambda gate, up: jax.nn.gelu(gate) * up,
        lambda gate, up: exact_gelu(gate, True) * up,
        2,
    ),
    "gelu": Case(nonlinear.gelu, jax.nn.gelu, lambda x: exact_gelu(x, True), 1),
    "gelu_erf": Case(
        functools.partial(nonlinear.gelu, approximate=False),
        functools.partial(jax.nn.gelu, approximate=False),
        lambda x: exact_gelu(x, False),
        1,
    ),
}
NORMS = ("rms_norm", "layer_norm")


# Tests share shapes, so that each layer is compiled once.
SMALL, LARGE = (3, 256), (64, 512)
# The second gate is one of the slow tests.
every_case = pytest.mark.parametrize("name", slow(CASES, ["gelu_gate"]))
every_pointwise_case = pytest.mark.parametrize(
    "name", slow([name for name in CASES if name not in NORMS], ["gelu_gate"])
)
first_case = pytest.mark.parametrize("name", with_first_fast(CASES))


def normal(shape, seed=0):
    return jax.random.normal(jax.random.key(seed), shape)


def operands_of(name, shape):
    """A case's operands: x or gate and up of ``shape``; the norms' scale and bias."""
    if name not in NORMS:
        return [normal(shape, seed) for seed in range(CASES[name].operands)]
    parameters = [1.0 + 0.5 * normal(shape[-1:], 1), normal(shape[-1:], 2)]
    return [normal(shape, 0), *parameters[: CASES[name].operands - 1]]


@functools.partial(jax.jit, static_argnums=0)
def vjp(layer, dy, *operands):
    return jax.vjp(layer, *operands)[1](dy)


def finite_differences(function, dy, operands):
    """Gradients of ``sum(dy * function(*operands))``; central, float64."""
    operands = [np.asarray(x, np.float64) for x in operands]
    gradients = []
    for x in operands:
        gradient = np.zeros_like(x)
        for i in np.ndindex(x.shape):
            center, h = x[i], 1e-5
            x[i] = center + h
            above = function(*operands)
            x[i] = center - h
            gradient[i] = np.sum(dy * (above - function(*operands))) / (2 * h)
            x[i] = center
        gradients.append(gradient)
    return gradients


def half_step(x, bits):
    """The rounding error bound of each value of x ``[R, C]``."""
    steps = [
        np.broadcast_to(np.abs(group).max(-1, keepdims=True), group.shape)
        for group in np.split(x, range(128, x.shape[-1], 128), axis=-1)
    ]
    return np.concatenate(steps, -1) / (2 ** (bits - 1) - 1) / 2


def norm_bounds(x, scale, dy, bits, centered):
    """Error bounds of dx and dscale, given half a step in ``normalized``."""
    x = x - x.mean(-1, keepdims=True) if centered else x
    rstd = 1 / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6)
    normalized, grad = x * rstd, dy * scale
    error = half_step(normalized, bits)
    moment = np.abs((grad * normalized).mean(-1, keepdims=True))
    moment_error = (np.abs(grad) * error).mean(-1, keepdims=True)
    dx = error * (moment + moment_error) + np.abs(normalized) * moment_error
    return [rstd * dx, (np.abs(dy) * error).sum(0), np.zeros_like(scale)]


@functools.partial(jax.jit, static_argnums=0)
def vjp_by_bits(layer, dy, *operands):
    return {
        bits: jax.vjp(functools.partial(layer, bits=bits), *operands)[1](dy)
        for bits in (4, 10, 12)
    }


@every_case
def test_gradients_are_within_half_a_step_of_finite_differences(name):
    """Bounds each gradient's error by half a step in each saved value."""
    case, shape = CASES[name], (2, 140)
    operands, dy = operands_of(name, shape), normal(shape, 9)
    gradients = vjp_by_bits(case.layer, dy, *operands)

    dy = np.asarray(dy, np.float64)
    exact = finite_differences(case.exact, dy, operands)
    for bits, got in gradients.items():
        if name in NORMS:
            x, scale = (np.asarray(a, np.float64) for a in operands[:2])
            bounds = norm_bounds(x, scale, dy, bits, name == "layer_norm")
        else:
            bounds = [np.abs(dy) * half_step(g / dy, bits) for g in exact]
        for gradient, expected, bound in zip(got, exact, bounds, strict=False):
            # The rest is float32's rounding.
            allowed = bound + 1e-5 * (np.abs(expected) + 1)
            assert np.all(np.abs(gradient - expected) <= allowed)


@every_case
def test_without_rounding_the_gradients_are_exact(name, monkeypatch):
    monkeypatch.setattr(nonlinear, "_quantize", lambda x, _: x)
    monkeypatch.setattr(packing, "dequantize", lambda x, *_: x)
    case, shape = CASES[name], (2, 37)
    operands, dy = operands_of(name, shape), normal(shape, 9)
    got = vjp(lambda *operands: case.layer(*operands), dy, *operands)
    exact = finite_differences(case.exact, np.asarray(dy, np.float64), operands)
    for gradient, expected in zip(got, exact, strict=True):
        np.testing.assert_allclose(gradient, expected, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
@every_pointwise_case
def test_forward_equals_jax_nn(name, dtype):
    """With and without differentiation."""
    case = CASES[name]
    operands = [x.astype(dtype) for x in operands_of(name, (4, 300))]

    @jax.jit
    def run(*operands):
        return case.layer(*operands), jax.vjp(case.layer, *operands)[0]

    expected = jax.jit(case.float_layer)(*operands)
    # Two programs may differ in the last bit of a sum of terms of about 4.
    ulp = float(jnp.finfo(dtype).eps)
    for y in run(*operands):
        assert y.dtype == dtype
        np.testing.assert_allclose(y, expected, rtol=ulp, atol=4 * ulp)


@first_case
def test_gradients_have_the_dtypes_of_their_operands(name):
    case = CASES[name]
    operands = [x.astype(jnp.bfloat16) for x in operands_of(name, SMALL)]
    if name in NORMS:
        operands[1] = operands[1].astype(jnp.float32)
    assert jax.eval_shape(case.layer, *operands).dtype == jnp.bfloat16
    dy = normal(SMALL, 9).astype(jnp.bfloat16)
    got = vjp(case.layer, dy, *operands)
    assert [g.dtype for g in got] == [x.dtype for x in operands]
    wide = [x.astype(jnp.float32) for x in (dy, *operands)]
    np.testing.assert_allclose(
        got[0].astype(jnp.float32), vjp(case.layer, *wide)[0], rtol=2**-8, atol=2**-8
    )


@first_case
def test_the_compiler_counts_only_packed_values_and_statistics(name):
    """The outputs of this program are the forward pass's residuals."""
    case, (rows, channels) = CASES[name], (256, 1024)
    operands = [x.astype(jnp.bfloat16) for x in operands_of(name, (rows, channels))]
    saving = jax.jit(lambda *operands: jax.vjp(case.layer, *operands)[1])
    compiled = saving.lower(*operands).compile()
    outputs = compiled.memory_analysis().output_size_in_bytes
    pointers = 8 * len(jax.tree.leaves(compiled.output_shardings))

    tensors = 2 if name.endswith("_gate") else 1
    packed = tensors * (rows * channels * 10 // 8 + rows * channels // 128 * 4)
    statistics = 4 * rows + 4 * channels if name in NORMS else 0
    assert outputs - pointers <= packed + statistics
    assert outputs >= packed


@every_pointwise_case
def test_a_layer_more_in_a_step_takes_the_memory_of_its_packed_values(name):
    """The compiler sees both passes, and could keep what it packs."""
    case, (rows, channels) = CASES[name], (256, 1024)

    def temporaries(layers):
        def loss(x, weight):
            for _ in range(layers):
                x = case.layer(*[x @ weight] * case.operands)
            return jnp.sum(x.astype(jnp.float32))

        shapes = (rows, channels), (channels, channels)
        operands = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes]
        compiled = jax.jit(jax.grad(loss)).lower(*operands).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    one = rows * channels * 10 // 8 + rows * channels // 128 * 4
    assert temporaries(10) - temporaries(8) <= 2 * case.operands * one


@first_case
def test_a_checkpoint_policy_saves_packed_values_and_no_floats(name):
    case = CASES[name]
    operands = operands_of(name, SMALL)

    @functools.partial(jax.checkpoint, policy=save_codes)
    def network(*operands):
        return jnp.sum(case.layer(*(2.0 * x for x in operands)) ** 2)

    saved = jax.tree.leaves(jax.jit(lambda *x: jax.vjp(network, *x)[1])(*operands))
    rows, channels = SMALL
    packed = [x.shape for x in saved if x.dtype == jnp.uint8]
    assert packed.count((rows, channels * 10 // 8)) == 1 + name.endswith("_gate")
    floats = [x for x in saved if x.dtype == jnp.float32 and x.shape == SMALL]
    inputs = [x for x in operands if x.shape == SMALL]
    assert all(any(np.array_equal(x, i) for i in inputs) for x in floats)


@first_case
def test_vmap_and_eager_calls_equal_a_batch(name):
    """Flax's norms are compared with eager ones in ``linen/test_norms.py``."""
    case, operands, dy = CASES[name], operands_of(name, SMALL), normal(SMALL, 9)
    expected = vjp(case.layer, dy, *operands)
    axes = [0 if x.shape == SMALL else None for x in operands]
    mapped = vjp(jax.vmap(case.layer, axes), dy, *operands)
    eager = jax.vjp(case.layer, *operands)[1](dy)
    for got in mapped, eager:
        chex.assert_trees_all_close(got, expected, rtol=1e-5, atol=1e-5)


@every_pointwise_case
def test_shards_of_whole_groups_need_no_communication(name):
    case, shape = CASES[name], LARGE
    mesh = jax.make_mesh((4,), ("model",), (jax.sharding.AxisType.Auto,))
    sharding = jax.NamedSharding(mesh, jax.P(None, "model"))
    operands = [jax.device_put(x, sharding) for x in operands_of(name, shape)]
    dy = jax.device_put(normal(shape, 9), sharding)
    compiled = vjp.lower(case.layer, dy, *operands).compile()
    for collective in ("all-", "collective-", "reduce-scatter"):
        assert collective not in compiled.as_text()
    expected = vjp(case.layer, *(jnp.asarray(np.asarray(x)) for x in (dy, *operands)))
    for a, b in zip(compiled(dy, *operands), expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@every_case
def test_non_finite_values_stay_visible(name, bad):
    case = CASES[name]
    operands = operands_of(name, SMALL)
    operands[0] = operands[0].at[1, 5].set(bad)
    dx = vjp(case.layer, normal(SMALL, 9), *operands)[0]
    hidden = 256 if name in NORMS else 128
    assert np.all(np.isnan(dx[1, :hidden]))
    assert np.all(np.isfinite(dx[1, hidden:]))
    assert np.all(np.isfinite(dx[::2]))


@first_case
def test_empty_batches(name):
    case, shape = CASES[name], (0, 130)
    operands = operands_of(name, shape)
    got = vjp(case.layer, normal(shape), *operands)
    assert [g.shape for g in got] == [x.shape for x in operands]
    assert not any(np.any(g) for g in got)


X, HALF = jnp.ones((2, 8)), jnp.ones((2, 8), jnp.bfloat16)


BITS = ValueError, "from 4 to 12"


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        *(
            (functools.partial(nonlinear.gelu, X, bits=bits), *BITS)
            for bits in (3, 13, 10.0, True, None)
        ),
        (lambda: nonlinear.gelu(X.astype(int)), TypeError, "x is int32; .* bfloat16"),
        (lambda: nonlinear.gelu([1.0, 2.0]), TypeError, "x is a list; .* an array"),
        (lambda: nonlinear.rms_norm(X, [1.0] * 8), TypeError, "scale is a list"),
        (lambda: nonlinear.gelu(jnp.float32(1)), ValueError, "x has no axis"),
        (lambda: nonlinear.rms_norm(X, X[0, :1]), ValueError, r"\(8,\); got \(1,\)"),
        (lambda: nonlinear.layer_norm(X, X[0], X), ValueError, "bias must have one"),
        (lambda: nonlinear.silu_gate(X, X[:1]), ValueError, r"\(2, 8\) and .*\(1, 8\)"),
        (lambda: nonlinear.silu_gate(X, HALF), ValueError, "same shape and dtype"),
    ],
)
def test_bad_input_is_named(call, error, message):
    with pytest.raises(error, match=message):
        call()
