"""Layers exported with symbolic sizes compute what they compute at concrete ones."""

import dataclasses
import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx
from jax import export

import fbq_jax
from fbq_jax import (
    FallbackDot,
    MoEMLP,
    Routing,
    dot_general,
    fallback_dot,
    freeze,
    recipes,
)
from fbq_jax.sharding import layer_names
from tests.marks import with_first_fast

K, N = 72, 40
MATMUL = (((1,), (0,)), ((), ()))
# Rows that are part of a block, several blocks, and several blocks of each sequence.
SIZES = [(1, 5), (3, 100), (2, 128)]


def values(*shape):
    """Normal values, of which a few are outliers."""
    x = jax.random.normal(jax.random.key(sum(shape)), shape)
    return x.at[..., 3].multiply(
        jnp.where(jnp.arange(shape[0]) % 2, 1.0, 20.0)[:, None]
    )


def assert_exported(function, *shape, sizes=SIZES):
    """Exports a function of an activation, and runs it at each size.

    Args:
      function: returns a tree of arrays.
      *shape: the symbolic sizes of the activation.
      sizes: the leading sizes to run at.
    """
    x = jax.ShapeDtypeStruct(shape, jnp.float32)
    run = jax.jit(lambda x: jax.tree.leaves(function(x)))
    exported = export.export(run)(x)
    for lead in sizes:
        x = values(*lead, shape[-1])
        got, want = jax.jit(exported.call)(x), run(x)
        jax.tree.map(np.testing.assert_array_equal, got, want)


def leading():
    return export.symbolic_shape("b, s")


def weighted(y):
    """A loss whose gradients differ between rows and columns."""
    return jnp.sum(jnp.sin(y) * jnp.linspace(-1.0, 2.0, N)[None, None])


def linen_calls(recipe):
    """Evaluation, a training step, and evaluation of the frozen layer."""
    layer = nn.Dense(N, dot_general=FallbackDot(recipe))
    variables = jax.jit(layer.init)(jax.random.key(1), values(2, 9, K))
    # The threshold is set, and moves.
    _, updates = layer.apply(variables, values(2, 9, K) / 50, mutable=["fallback"])
    trained = {**variables, **updates}
    frozen = freeze(layer, trained, values(2, 9, K))

    def step(variables, x):
        def loss(params, x):
            y, updates = layer.apply(
                {**variables, "params": params}, x, mutable=["fallback"]
            )
            return weighted(y), (y, updates)

        return jax.grad(loss, (0, 1), has_aux=True)(variables["params"], x)

    return lambda x: (
        layer.apply(trained, x),
        step(variables, x),  # sets the threshold
        step(trained, x),
        layer.apply(frozen, x),
    )


def nnx_calls(recipe):
    """The same calls, but for the step that sets the threshold."""
    rngs = nnx.Rngs(1)
    dot = fbq_jax.nnx.FallbackDot(recipe, rngs=rngs)
    layer = nnx.Linear(K, N, dot_general=dot, rngs=rngs)
    layer(values(2, 9, K) / 50)
    frozen = fbq_jax.nnx.freeze(layer, values(2, 9, K))
    graphdef, state = nnx.split(layer)

    def calls(x):
        layer = nnx.merge(graphdef, jax.tree.map(jnp.asarray, state))
        grads = nnx.grad(lambda layer: weighted(layer(x)))(layer)
        moved = nnx.state(layer)
        layer.eval()
        return grads, moved, layer(x), frozen(x)

    return calls


# Scales of rows of blocks, rows and the whole matrix, and FP8.
OTHERS = "row_block_lhs", "rowwise", "per_tensor", "fp8_row_block"


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        *[("fallback", SIZES), ("aqt_int8_local", SIZES[:2])],
        *[(name, SIZES[1:2]) for name in OTHERS],
    ],
)
def test_linen_layers(name, sizes):
    assert_exported(linen_calls(recipes.NAMED[name]), *leading(), K, sizes=sizes)


@pytest.mark.exhaustive
def test_nnx_layers():
    assert_exported(nnx_calls(recipes.fallback), *leading(), K, sizes=SIZES[1:2])


def test_a_mixture_of_experts_has_symbolic_tokens():
    layer = MoEMLP(Routing(4, capacity_factor=1.1), N, dot_general=fallback_dot)
    shape = jax.ShapeDtypeStruct((*leading(), K), jnp.float32)
    variables = jax.eval_shape(layer.init, jax.random.key(1), values(2, 9, K))
    run = jax.jit(functools.partial(layer.apply, mutable=["fallback", "expert_stats"]))
    exported = export.export(run)(variables, shape)
    assert exported.out_avals[0].shape == shape.shape


@pytest.mark.exhaustive
@pytest.mark.parametrize("factor", [1.1, None])
def test_a_mixture_of_experts_takes_any_number_of_tokens(factor):
    layer = MoEMLP(Routing(4, capacity_factor=factor), N, dot_general=fallback_dot)
    variables = jax.jit(layer.init)(jax.random.key(1), values(2, 9, K))

    collections = ["fallback", "expert_stats"]
    train = jax.jit(functools.partial(layer.apply, mutable=collections))
    _, updates = train(variables, values(2, 9, K) / 50)
    frozen = freeze(layer, {**variables, **updates}, values(2, 9, K))

    @jax.jit
    def run(x):
        y, moved = layer.apply(variables, x, mutable=collections)
        return (y, layer.apply(frozen, x)), moved["expert_stats"]

    shape = jax.ShapeDtypeStruct((*leading(), K), jnp.float32)
    call = jax.jit(export.export(run)(shape).call)
    for lead in (1, 1), (3, 100):
        (got, moved), (want, states) = (f(values(*lead, K)) for f in (call, run))
        # XLA sums the router's products in another order.
        chex.assert_trees_all_close(got, want, rtol=1e-4, atol=1e-4)
        chex.assert_trees_all_equal(moved, states)


@pytest.mark.exhaustive
def test_a_symbolic_size_may_be_a_multiple_of_the_block():
    """Sequences are then an axis of their own, with one block or more."""
    b, s = export.symbolic_shape("b, 128*s")
    sizes = [(2, 128), (1, 256)]
    assert_exported(linen_calls(recipes.fallback), b, s, K, sizes=sizes)


@pytest.mark.parametrize("name", with_first_fast(["fallback", "rowwise"]))
def test_a_size_that_may_be_zero_is_an_error_that_says_what_to_do(name):
    layer = nn.Dense(N, dot_general=FallbackDot(recipes.NAMED[name]))
    variables = layer.init(jax.random.key(1), values(2, 9, K))

    def apply(x):
        return layer.apply(variables, x[:, :-1])

    b, s = leading()
    with pytest.raises(ValueError, match=r"b\*s - b may be less: .*b\*s - b >= 1'"):
        assert_exported(apply, b, s, K)
    assert_exported(apply, b, s + 1, K, sizes=[(2, 9)])
    constrained = export.symbolic_shape("b, s", constraints=["b*s - b >= 1"])
    assert_exported(apply, *constrained, K, sizes=[(2, 9)])


@pytest.mark.parametrize("name", with_first_fast(["fallback", "rowwise"]))
def test_batch_and_contraction_may_be_symbolic(name):
    """The stack of matrices, and K of the forward product, as in attention."""
    b, k = export.symbolic_shape("b, k")
    numbers = ((2,), (1,)), ((0,), (0,))

    def product(x):
        return dot_general(x, x.mT, numbers, recipe=recipes.NAMED[name])[0]

    x = jax.ShapeDtypeStruct((b, 6, k), jnp.float32)
    run = jax.jit(product)
    exported = export.export(run)(x)
    x = values(2, 6, 150)
    np.testing.assert_array_equal(exported.call(x), run(x))


@pytest.mark.parametrize("name", with_first_fast(["switchback_m", "fallback"]))
def test_every_size_of_a_training_step_may_be_symbolic(name):
    m, k, n = export.symbolic_shape("m, k, n")

    def gradients(x, w):
        def loss(x, w):
            options = {"recipe": recipes.NAMED[name], "key": jax.random.key(0)}
            y, _ = dot_general(x, w, MATMUL, **options)
            return jnp.sum(jnp.sin(y))

        return jax.grad(loss, (0, 1))(x, w)

    run = jax.jit(gradients)
    shapes = (m, k), (k, n)
    exported = export.export(run)(*(jax.ShapeDtypeStruct(s, "float32") for s in shapes))
    arrays = [jax.random.normal(jax.random.key(0), s) for s in ((30, 150), (150, 20))]
    for got, want in zip(exported.call(*arrays), run(*arrays), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


def test_the_first_fallback_rate_is_rounded_in_64_bits():
    """In 32 bits, 0.55 times 10 blocks is 5.5, which would round to 6."""
    recipe = dataclasses.replace(recipes.fallback, block=32, target_rate=(0.15, 0.95))

    def rate(x):
        return dot_general(x, jnp.ones((64, 8)), MATMUL, recipe=recipe)[1].rate

    (rows,) = export.symbolic_shape("m")
    exported = export.export(jax.jit(rate))
    x = jax.random.normal(jax.random.key(0), (5 * 32, 64))
    call = exported(jax.ShapeDtypeStruct((rows, 64), jnp.float32)).call
    assert rate(x) == call(x) == 0.5


@pytest.mark.exhaustive
def test_a_layer_that_may_stay_in_float_is_exported_where_there_is_no_map():
    recipe = dataclasses.replace(recipes.block, where_slower="float")
    layer = nn.Dense(N, dot_general=FallbackDot(recipe))
    layer_names.clear()
    with pytest.warns(UserWarning, match="quantizes every layer"):
        variables = layer.init(jax.random.key(1), values(2, 9, K))
    assert_exported(lambda x: layer.apply(variables, x), *leading(), K)


def test_frozen_variables_are_an_argument_of_a_serialized_function():
    pytest.importorskip("flatbuffers")
    x = jax.random.normal(jax.random.key(0), (5, K))
    layer = nn.Dense(N, dot_general=FallbackDot(recipes.rowwise))
    frozen = freeze(layer, layer.init(jax.random.key(1), x), x)
    exported = export.export(jax.jit(layer.apply))(frozen, x)
    loaded = export.deserialize(exported.serialize())
    np.testing.assert_array_equal(loaded.call(frozen, x), layer.apply(frozen, x))
    assert loaded.in_tree == exported.in_tree


@pytest.mark.usefixtures("every_cause_warns")
@pytest.mark.parametrize("platform", ["cuda", "tpu"])
def test_the_reference_for_an_accelerator_is_exported_with_a_warning(platform):
    x = jax.ShapeDtypeStruct((256, 128), jnp.bfloat16)

    def exported(**options):
        dot = functools.partial(dot_general, dimension_numbers=MATMUL, **options)
        return export.export(jax.jit(lambda x: dot(x, x.T)), platforms=[platform])(x)

    exported(implementation="reference")  # asked for
    with pytest.warns(UserWarning, match="jax.numpy code in this program for") as found:
        exported()
    assert len(found) == 1
    assert platform in str(found[0].message)
