"""The functional core under JAX's own checks and modes."""

import functools

import jax
import numpy as np
import pytest

from fbq_jax import Recipe, dot_general, recipes
from tests.debugging import debugging
from tests.marks import with_first_fast

MATMUL = (((1,), (0,)), ((), ()))
RNG = np.random.default_rng(0)
X = RNG.standard_normal((48, 40), np.float32)
W = RNG.standard_normal((40, 24), np.float32)
DY = RNG.standard_normal((48, 24), np.float32)
RECIPES = {
    "fallback": Recipe(block=32),
    "l1": Recipe(block=32, criterion="l1"),
    "l1_rel": Recipe(block=32, criterion="l1_rel"),
    "fallback_rowwise_bwd": recipes.fallback_rowwise_bwd,
    "aqt_int8_local": recipes.aqt_int8_local,
    "per_tensor_bifurcated": recipes.per_tensor_bifurcated,
}


def product(x, w, dy, recipe, theta=None):
    """The output, both gradients and the stats."""
    dot = functools.partial(
        dot_general, recipe=recipe, theta=theta, key=jax.random.key(0)
    )
    y, vjp, stats = jax.vjp(lambda x, w: dot(x, w, MATMUL), x, w, has_aux=True)
    return y, *vjp(dy), stats


jitted = jax.jit(product, static_argnames="recipe")


def sparse(x):
    """With zero blocks, zero rows and a subnormal value."""
    x = np.array(x)
    x[:33] = 0.0
    x[-1, -1] = 1e-42
    return x


@pytest.mark.exhaustive
@pytest.mark.parametrize("change", [sparse, np.asarray, np.zeros_like])
@pytest.mark.parametrize("name", RECIPES)
def test_healthy_operands_have_no_nan_or_inf_inside(name, change):
    with debugging("jax_debug_nans", "jax_debug_infs"):
        product(change(X), W, change(DY), RECIPES[name])


@pytest.mark.parametrize(
    "name", with_first_fast(name for name in RECIPES if name not in ("l1", "l1_rel"))
)
def test_no_tracer_leaks(name):
    with jax.checking_leaks():
        jax.jit(functools.partial(product, recipe=RECIPES[name]))(X, W, DY)


@pytest.mark.parametrize("theta", [-1.0, -3.0, -np.inf, np.nan])
def test_a_traced_theta_that_is_no_threshold_is_unset(theta):
    """Only a concrete one can be an error."""
    got, unset = (jitted(X, W, DY, RECIPES["fallback"], t) for t in (theta, None))
    jax.tree.map(np.testing.assert_array_equal, got, unset)
    with pytest.raises(ValueError, match="at least 0"):
        dot_general(X, W, MATMUL, theta=theta)
