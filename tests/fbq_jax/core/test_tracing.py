"""What depends on what in a traced model."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from fbq_jax.core.tracing import (
    OUTPUTS,
    UnknownDependentsError,
    find_dependents,
    find_readers,
    mappable,
    observe_weight,
)

W = jnp.ones((3, 3))


def layer(x, w, name="layer"):
    """A product by a weight that is observed."""
    return x @ observe_weight(name, w)


def mapped(x, w):
    """Examples of a map that also has the size of the watch's axis."""
    return jax.vmap(layer, in_axes=(0, None))(x[None], w)


def stacked(x, w):
    return lax.scan(lambda x, w: (layer(x, w), None), x, w[None])[0]


# Calls that read the weight by the product of their layer only.
PRODUCTS = {
    "plain": layer,
    "view": lambda x, w: layer(x, w.T.astype(jnp.float16).astype(x.dtype)),
    "normalized": lambda x, w: layer(x, w / jnp.linalg.norm(w)),
    "jit": lambda x, w: jax.jit(layer)(x, w),
    "checkpoint": lambda x, w: jax.checkpoint(layer)(x, w),
    "vmap": mapped,
    "maps of two sizes": lambda x, w: mapped(jnp.stack([mapped(x, w)[0]] * 2)[0], w),
    "examples": lambda x, w: jax.vmap(layer)(x[None], w[None]),
    "scan": stacked,
}
# What else may read it.
READERS = {
    "sum": jnp.sum,
    "stop_gradient": lambda w: lax.stop_gradient(w).sum(),
    "comparison": lambda w: (w > 0).sum(),
    "argmax": jnp.argmax,
    "checkpoint": lambda w: jax.checkpoint(lambda w: jnp.sin(w).sum())(w),
    "loop": lambda w: lax.fori_loop(0, 2, lambda _, w: 2 * w, w).sum(),
    "branch": lambda w: lax.cond(w[0, 0] > 1, lambda: 1, lambda: 2),
    "vmap": lambda w: jax.vmap(jnp.sum)(w[None])[0],
}


@pytest.mark.parametrize("product", PRODUCTS)
def test_a_product_is_no_other_reader(product):
    def call(values, x):
        return PRODUCTS[product](x, values["w"])

    assert find_readers(call, {"w": W}, W, ["layer"]) == []
    assert find_readers(call, {"w": W}, W, ["other"]) == ["w"]
    dependents = find_dependents(lambda x, w: call({"w": w}, x), W, W, ["layer"])
    assert dependents == {OUTPUTS}


@pytest.mark.parametrize("reader", READERS)
def test_other_readers_are_found_by_their_names(reader):
    def call(values, x):
        for name, w in values.items():
            x = layer(x, w, name)
        return x, READERS[reader](values["b"])

    values = {"a": W, "b": jax.ShapeDtypeStruct((3, 3), jnp.float32), "c": W}
    assert find_readers(call, values, W, list(values)) == ["b"]


@pytest.mark.parametrize("nested", [False, True])
def test_weights_that_depend_on_the_input_are_found(nested):
    """Even on integers."""

    def call(tokens, w):
        factor = jnp.where(tokens[0] > 3, 2.0, 1.0)
        y = layer(W, w * factor)
        return layer(y, w, "other")

    def run(tokens, w):
        return jax.vmap(call, in_axes=(None, 0))(tokens, w[None])

    tokens = jnp.arange(4)
    dependents = find_dependents(run if nested else call, tokens, W, ["layer", "other"])
    assert dependents == {"layer"}  # not the product, nor the next layer


def test_functions_that_jax_cannot_map():
    def call(x, w, multiply=lax.ragged_dot):
        return multiply(x.T.T, w[None], jnp.array([3]))

    def transposed(w, x):
        return call(x, jnp.moveaxis(w, 0, 1))

    with pytest.raises(UnknownDependentsError, match="wrap that in"):
        find_dependents(transposed, W, W, [])
    dependents = find_dependents(
        lambda w, x: call(x, w.T, mappable(lax.ragged_dot)), W, W, []
    )
    assert dependents == {OUTPUTS}
