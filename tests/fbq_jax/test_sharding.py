"""Layers under jit with shardings, on four devices."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from fbq_jax import FallbackDot, Recipe, dot_general, fallback_dot, fallback_stats

DOT = FallbackDot(Recipe(block=32))
X = jax.random.normal(jax.random.key(0), (128, 64))


def place(mesh, x, *spec):
    return jax.device_put(x, NamedSharding(mesh, P(*spec)))


@pytest.mark.parametrize(
    ("x_spec", "w_spec"),
    [(("a", None), (None, None)), ((None, None), (None, "a")), (("a",), ("a", None))],
)
def test_four_devices_give_what_one_gives(x_spec, w_spec):
    """Output, gradients, global rate and the bits of the noise."""
    mesh = jax.make_mesh((4,), ("a",), axis_types=(AxisType.Auto,))
    model = nn.Dense(96, dot_general=DOT)
    variables = model.init(jax.random.key(1), X)

    @jax.jit
    def step(params, state, x):
        def loss(params, x):
            y, updates = model.apply(
                {"params": params, "fallback": state}, x, mutable=["fallback"]
            )
            return jnp.mean(jnp.sin(y)), (y, updates)

        return jax.grad(loss, argnums=(0, 1), has_aux=True)(params, x)

    params, state = variables["params"], variables["fallback"]
    expected = step(params, state, X)
    sharded = dict(params, kernel=place(mesh, params["kernel"], *w_spec))
    got = step(sharded, state, place(mesh, X, *x_spec))
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6),
        got,
        expected,
    )
    assert fallback_stats(got[1][1])["(root)"].count == 1


def test_out_sharding():
    mesh = jax.make_mesh((4,), ("a",), axis_types=(AxisType.Explicit,))
    w = jnp.ones((64, 32))
    dims = (((1,), (0,)), ((), ()))
    sharding = NamedSharding(mesh, P("a", None))
    with jax.set_mesh(mesh):
        y = jax.jit(lambda x, w: fallback_dot(x, w, dims, out_sharding=sharding))(X, w)
    assert y.sharding.is_equivalent_to(sharding, 2)
    np.testing.assert_allclose(y, fallback_dot(X, w, dims), rtol=1e-6)


def test_shard_map_over_rows_is_the_same_product():
    mesh = jax.make_mesh((4,), ("a",), axis_types=(AxisType.Auto,))
    w = jax.random.normal(jax.random.key(2), (64, 32))
    dims = (((1,), (0,)), ((), ()))
    recipe = Recipe(block=32)

    def product(x, w):
        return dot_general(x, w, dims, recipe=recipe, theta=2.5)[0]

    mapped = jax.shard_map(product, mesh=mesh, in_specs=(P("a"), P()), out_specs=P("a"))
    np.testing.assert_allclose(
        jax.jit(mapped)(X, w), jax.jit(product)(X, w), rtol=1e-6, atol=1e-6
    )
