"""The norms' modules stand in for Flax's: parameters, outputs, gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx

import fbq_jax

INIT = jax.nn.initializers.normal()
OPTIONS = [
    {},
    {"epsilon": 0.1, "scale_init": INIT},
    {"use_scale": False},
    {"dtype": jnp.bfloat16},
    {"dtype": jnp.bfloat16, "param_dtype": jnp.bfloat16},
    {"bits": 8},
]
X = 3.0 + jax.random.normal(jax.random.key(0), (4, 200))


def flax_options(options):
    return {name: value for name, value in options.items() if name != "bits"}


def assert_same(tree, other):
    """Equal structures and dtypes; values to a rounding of the narrower of them."""
    assert jax.tree.structure(tree) == jax.tree.structure(other)
    for a, b in zip(jax.tree.leaves(tree), jax.tree.leaves(other), strict=True):
        assert a.dtype == b.dtype
        rtol = 2**-7 if a.dtype == jnp.bfloat16 else 1e-5
        a, b = (np.asarray(v, np.float32) for v in (a, b))
        np.testing.assert_allclose(a, b, rtol=rtol, atol=1e-6)


@pytest.mark.parametrize("x_dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("name", ["RMSNorm", "LayerNorm"])
def test_linen(name, options, x_dtype):
    ours = getattr(fbq_jax, name)(**options)
    flaxs = getattr(nn, name)(**flax_options(options))
    x = X.astype(x_dtype)
    with jax.numpy_dtype_promotion("standard"):  # Flax's promotes its operands
        variables = ours.init(jax.random.key(1), x)
        assert_same(variables, flaxs.init(jax.random.key(1), x))
        y, pullback = jax.vjp(ours.apply, variables, x)
        expected, flax_pullback = jax.vjp(flaxs.apply, variables, x)
        np.testing.assert_array_equal(y, expected)
        assert y.dtype == expected.dtype
        dy = jnp.sin(jnp.arange(y.size).reshape(y.shape)).astype(y.dtype)
        check_gradients(pullback(dy), flax_pullback(dy), options)


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("name", ["RMSNorm", "LayerNorm"])
def test_nnx(name, options):
    ours = getattr(fbq_jax.nnx, name)(200, rngs=nnx.Rngs(1), **options)
    flaxs = getattr(nnx, name)(200, rngs=nnx.Rngs(1), **flax_options(options))
    x = X.astype(jnp.bfloat16)
    assert_same(nnx.to_pure_dict(nnx.state(ours)), nnx.to_pure_dict(nnx.state(flaxs)))
    with jax.numpy_dtype_promotion("standard"):
        y, expected = ours(x), flaxs(x)
        np.testing.assert_array_equal(y, expected)
        assert y.dtype == expected.dtype
        dy = jnp.sin(jnp.arange(y.size).reshape(y.shape)).astype(y.dtype)

        def gradients(model):
            def loss(model, x):
                return jnp.sum((model(x) * dy).astype(jnp.float32))

            grads = nnx.grad(loss, argnums=(0, 1))(model, x)
            return nnx.to_pure_dict(grads[0]), grads[1]

        check_gradients(gradients(ours), gradients(flaxs), options)


def check_gradients(got, expected, options):
    """Within what codes lose, and bfloat16 where something is."""
    assert jax.tree.structure(got) == jax.tree.structure(expected)
    tolerance = 0.02 if "bits" in options else 0.01
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        assert a.dtype == b.dtype
        a, b = (np.asarray(v, np.float32) for v in (a, b))
        assert np.linalg.norm(a - b) <= tolerance * np.linalg.norm(b)


def test_a_model_keeps_its_parameters_when_the_norm_is_swapped():
    class Model(nn.Module):
        norm: type[nn.Module]

        @nn.compact
        def __call__(self, x):
            return nn.Dense(8)(self.norm()(x))

    ours, flaxs = (Model(norm) for norm in (fbq_jax.RMSNorm, nn.RMSNorm))
    variables = flaxs.init(jax.random.key(1), X)
    assert_same(ours.init(jax.random.key(1), X), variables)
    np.testing.assert_array_equal(ours.apply(variables, X), flaxs.apply(variables, X))


def test_bits_reach_the_codes():
    def saved(norm):
        variables = norm.init(jax.random.key(1), X)
        leaves = jax.tree.leaves(jax.vjp(norm.apply, variables, X)[1])
        return sorted(x.shape[-1] for x in leaves if x.dtype == jnp.uint8)

    assert saved(fbq_jax.RMSNorm()) == [50, 200]
    assert saved(fbq_jax.LayerNorm(bits=4)) == [100]
    model = fbq_jax.nnx.LayerNorm(200, bits=4, rngs=nnx.Rngs(0))
    leaves = jax.tree.leaves(jax.vjp(lambda x: model(x), X)[1])
    assert [x.shape[-1] for x in leaves if x.dtype == jnp.uint8] == [100]


def test_bits_out_of_range_are_named():
    with pytest.raises(
        ValueError, match="bits must be an integer from 4 to 12; got 16"
    ):
        fbq_jax.RMSNorm(bits=16).init(jax.random.key(0), X)
