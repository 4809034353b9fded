"""The norm modules match Flax's: parameters, outputs, gradients.

The calls are eager; ``core/test_nonlinear.py`` runs the functions under ``jax.jit``.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx

import fbq_jax
from tests.marks import rows_with_first_fast, with_first_fast

INIT = jax.nn.initializers.normal()
OPTIONS = [
    {},
    {"epsilon": 0.1, "scale_init": INIT},
    {"use_scale": False},
    {"dtype": jnp.bfloat16},
    {"dtype": jnp.bfloat16, "param_dtype": jnp.bfloat16},
    {"bits": 8},
]
# Each option with at least one dtype of x, and each kind of promotion.
CASES = [(options, jnp.float32) for options in OPTIONS[:4]]
CASES += [(options, jnp.bfloat16) for options in (OPTIONS[0], *OPTIONS[4:])]
X = 3.0 + jax.random.normal(jax.random.key(0), (4, 200))


def flax_options(options):
    return {name: value for name, value in options.items() if name != "bits"}


def assert_same(tree, other):
    """Equal structures and dtypes, and values equal up to the dtype's rounding."""
    assert jax.tree.structure(tree) == jax.tree.structure(other)
    for a, b in zip(jax.tree.leaves(tree), jax.tree.leaves(other), strict=True):
        assert a.dtype == b.dtype
        rtol = 2**-7 if a.dtype == jnp.bfloat16 else 1e-5
        a, b = (np.asarray(v, np.float32) for v in (a, b))
        np.testing.assert_allclose(a, b, rtol=rtol, atol=1e-6)


@pytest.mark.parametrize(("options", "x_dtype"), rows_with_first_fast(CASES))
@pytest.mark.parametrize("name", ["RMSNorm", "LayerNorm"])
def test_linen(name, options, x_dtype):
    norm = getattr(fbq_jax, name)(**options)
    flax_norm = getattr(nn, name)(**flax_options(options))
    x = X.astype(x_dtype)
    with jax.numpy_dtype_promotion("standard"):  # Flax's norm promotes its operands.
        variables = norm.init(jax.random.key(1), x)
        assert_same(variables, flax_norm.init(jax.random.key(1), x))
        y, pullback = jax.vjp(norm.apply, variables, x)
        expected, flax_pullback = jax.vjp(flax_norm.apply, variables, x)
        np.testing.assert_array_equal(y, expected)
        assert y.dtype == expected.dtype
        dy = jnp.sin(jnp.arange(y.size).reshape(y.shape)).astype(y.dtype)
        check_gradients(pullback(dy), flax_pullback(dy), options)


@pytest.mark.parametrize("options", with_first_fast(OPTIONS, 2))
@pytest.mark.parametrize("name", ["RMSNorm", "LayerNorm"])
def test_nnx(name, options):
    norm = getattr(fbq_jax.nnx, name)(200, rngs=nnx.Rngs(1), **options)
    flax_norm = getattr(nnx, name)(200, rngs=nnx.Rngs(1), **flax_options(options))
    x = X.astype(jnp.bfloat16)
    assert_same(*(nnx.to_pure_dict(nnx.state(m)) for m in (norm, flax_norm)))
    with jax.numpy_dtype_promotion("standard"):
        y, expected = norm(x), flax_norm(x)
        np.testing.assert_array_equal(y, expected)
        assert y.dtype == expected.dtype
        dy = jnp.sin(jnp.arange(y.size).reshape(y.shape)).astype(y.dtype)

        def gradients(model):
            def loss(model, x):
                return jnp.sum((model(x) * dy).astype(jnp.float32))

            grads = nnx.grad(loss, argnums=(0, 1))(model, x)
            return nnx.to_pure_dict(grads[0]), grads[1]

        check_gradients(gradients(norm), gradients(flax_norm), options)


def check_gradients(got, expected, options):
    """Within the rounding of saved values and of bfloat16 operands."""
    assert jax.tree.structure(got) == jax.tree.structure(expected)
    tolerance = 0.02 if "bits" in options else 0.01
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        assert a.dtype == b.dtype
        a, b = (np.asarray(v, np.float32) for v in (a, b))
        assert np.linalg.norm(a - b) <= tolerance * np.linalg.norm(b)


def test_bits_set_the_packed_width():
    def saved(function, *args):
        leaves = jax.tree.leaves(jax.vjp(function, *args)[1])
        return sorted(x.shape[-1] for x in leaves if x.dtype == jnp.uint8)

    for norm, width in (fbq_jax.RMSNorm(), 250), (fbq_jax.LayerNorm(bits=4), 100):
        assert saved(norm.apply, norm.init(jax.random.key(1), X), X) == [width]
    model = fbq_jax.nnx.LayerNorm(200, bits=4, rngs=nnx.Rngs(0))
    assert saved(lambda x: model(x), X) == [100]
    with pytest.raises(ValueError, match="an integer from 4 to 12; got 16"):
        fbq_jax.RMSNorm(bits=16).init(jax.random.key(0), X)
