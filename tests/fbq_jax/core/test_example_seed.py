"""Seeds of mapped layers, and of layers whose input is unknown."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.core.partial_eval import lazy_init

from fbq_jax.core.example_seed import example_seed

X = jnp.ones((3, 4, 2))
SEED = jnp.uint32(7)
each_wrap = pytest.mark.parametrize("wrap", [lambda f: f, jax.jit, jax.checkpoint])


@each_wrap
def test_each_mapped_example_has_a_seed(wrap):
    seed_of = wrap(example_seed)
    assert seed_of(SEED, X) == SEED
    once = jax.vmap(seed_of, (None, 0))(SEED, X)
    twice = jax.vmap(jax.vmap(seed_of, (None, 0)), (None, 0))(SEED, X)
    assert np.unique(once).size == 3
    assert np.unique(twice).size == 12
    np.testing.assert_array_equal(
        jax.vmap(seed_of, (None, 2))(SEED, jnp.moveaxis(X, 0, 2)), once
    )
    seeds = jnp.arange(3, dtype=jnp.uint32)
    np.testing.assert_array_equal(jax.vmap(seed_of)(seeds, X), seeds)


@each_wrap
def test_a_known_seed_does_not_depend_on_an_unknown_input(wrap):
    x = jax.ShapeDtypeStruct(X.shape, X.dtype)
    assert lazy_init(wrap(example_seed))(SEED, x) == SEED
    mapped = jax.vmap(wrap(example_seed), (None, 0))
    np.testing.assert_array_equal(lazy_init(mapped)(SEED, x), mapped(SEED, X))


@each_wrap
def test_an_unknown_seed_stays_unknown(wrap):
    @wrap
    def function(seed, x):
        return example_seed(seed, x), 2 * x

    unknown = jax.ShapeDtypeStruct((), jnp.uint32)
    doubled = lazy_init(lambda *args: function(*args)[1])(unknown, X)
    np.testing.assert_array_equal(doubled, 2 * X)


@each_wrap
def test_it_has_no_gradient(wrap):
    @wrap
    def function(x):
        return jnp.sum(x) * example_seed(SEED, x).astype(x.dtype)

    np.testing.assert_array_equal(jax.grad(function)(X), jnp.full(X.shape, 7.0))
