"""Shardings that are found before compilation, as TPUs need; here on CPUs."""

import functools
from collections import Counter

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import fbq_jax
from fbq_jax import recipes
from fbq_jax.bench.collectives import collectives
from fbq_jax.sharding import propagation
from tests.fbq_jax.core.test_dot_general import product
from tests.fbq_jax.sharding.test_recipes_on_devices import COLLECTIVES, K, N, T, count
from tests.fbq_jax.sharding.tools import assert_close, mesh_of, needs_devices, place
from tests.kernels.test_reference import heavy

pytestmark = needs_devices
slow = pytest.mark.exhaustive
OPERANDS = heavy((1024, 512)), heavy((512, 512), 1), heavy((1024, 512), 2)


@pytest.fixture(autouse=True)
def no_callbacks(monkeypatch):
    """Treats the compiler for CPUs as one that cannot call Python."""
    monkeypatch.setattr(propagation, "_PLATFORMS", {"cpu"})


def layer(name):
    def step(x, w, dy):
        key = jax.random.key(0)
        return product(x, w, dy, recipe=recipes.NAMED[name], theta=2.0, key=key)

    return step


def sharded(mesh, *specs):
    return [place(mesh, x, *spec) for x, spec in zip(OPERANDS, specs, strict=True)]


def lowered_by_fsdp(name):
    """The layer, whose tokens and weights are on eight devices."""
    mesh = mesh_of(data=2, fsdp=4)
    tokens = P(("data", "fsdp"))
    x, w, dy = (
        jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, spec))
        for shape, spec in [((T, K), tokens), ((K, N), P("fsdp")), ((T, N), tokens)]
    )
    shardings = dy.sharding, x.sharding, w.sharding
    step = fbq_jax.partitioned(jax.jit(layer(name), out_shardings=shardings))
    return step.lower(x, w, dy)


def test_the_compiler_is_not_called_without_a_plan():
    x, w, dy = sharded(mesh_of(data=8), ("data",), (), ("data",))
    with pytest.raises(NotImplementedError, match=r"fbq_jax.partitioned\(jax.jit"):
        jax.jit(layer("block"))(x, w, dy)


# Here shards of tokens would need half of a mesh axis, and XLA gathers them.
WHOLE_AXES = [name for name in recipes.NAMED if name != "aqt_int8_local"]


@pytest.mark.parametrize(
    "name",
    ["fallback", *(pytest.param(name, marks=slow) for name in WHOLE_AXES[1:])],
)
def test_devices_exchange_what_they_do_on_other_platforms(name):
    found = count(lowered_by_fsdp(name).compile())
    # XLA gathers the factors of K rows, or their exponents, which have as many bytes.
    found["all-gather", "f32", K] += found.pop(("all-gather", "s32", K), 0)
    # A gather of K scales is not always needed twice.
    more = Counter(COLLECTIVES[name]) - found
    assert found <= Counter(COLLECTIVES[name])
    assert more <= Counter([("all-gather", "f32", K)])


def test_half_of_a_mesh_axis_is_gathered_with_a_warning():
    with pytest.warns(UserWarning, match="sharded over part of a mesh axis, but"):
        lowered_by_fsdp("aqt_int8_local")


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["fallback", "rowwise"])
@pytest.mark.parametrize(
    "specs",
    [
        (("data",), ("tensor",), ("data",)),  # partial sums of Y
        (("data",), (None, "tensor"), ("data", "tensor")),
    ],
)
def test_results_are_those_of_one_device(name, specs):
    step = layer(name)
    want = jax.jit(step)(*OPERANDS)
    got = fbq_jax.partitioned(jax.jit(step))(
        *sharded(mesh_of(data=2, tensor=4), *specs)
    )
    assert_close(got, want)


class Block(nn.Module):
    @nn.compact
    def __call__(self, x, _):
        dot_general = fbq_jax.fallback_dot
        y = fbq_jax.NormDense(256, dot_general=dot_general)(x)
        return x + nn.Dense(256, use_bias=False, dot_general=dot_general)(y), None


class Model(nn.Module):
    @nn.compact
    def __call__(self, x):
        blocks = nn.scan(
            nn.remat(Block, policy=fbq_jax.save_codes, prevent_cse=False),
            variable_axes={"params": 0, "fallback": 0},
            split_rngs={"params": True},
            length=2,
        )
        return blocks()(x, None)[0]


@pytest.fixture(scope="module")
def model():
    """A training step of scanned layers, its state and tokens."""
    x = heavy((8, 256, 256))
    variables = Model().init(jax.random.key(0), x)

    def step(variables, x, *, scale=1):
        def loss(params):
            state = {"params": params, "fallback": variables["fallback"]}
            y, updates = Model().apply(state, x, mutable=["fallback"])
            return jnp.mean(scale * y.astype(jnp.float32) ** 2), updates

        return jax.value_and_grad(loss, has_aux=True)(variables["params"])

    return step, variables, x


@pytest.mark.exhaustive
@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
def test_a_scanned_model_on_a_mesh(model, axis_type):
    step, variables, x = model
    want = jax.jit(step)(variables, x)
    mesh = jax.make_mesh((8,), ("data",), axis_types=(axis_type,))
    with jax.set_mesh(mesh):
        run = fbq_jax.partitioned(jax.jit(step))
        tokens = place(mesh, x, "data")
        got = run(jax.device_put(variables, NamedSharding(mesh, P())), tokens)
    assert_close(got, want, rtol=1e-4)


def test_a_function_is_traced_twice_for_each_new_argument():
    traced = []

    @functools.partial(jax.jit, static_argnums=3)
    def step(x, w, dy, rows):
        traced.append(rows)
        return layer("block")(x[:rows], w, dy[:rows])

    run = fbq_jax.partitioned(step)
    arrays = sharded(mesh_of(data=4), ("data",), (), ("data",))
    run(*arrays, 1024)
    run(*arrays, 1024)
    assert traced == [1024, 1024]
    run(*arrays, 512)  # The shapes of operands differ, and their shardings are unknown.
    assert traced == [1024, 1024, 512, 512, 512]
    run(*arrays, 512)
    assert traced == [1024, 1024, 512, 512, 512]


@pytest.mark.parametrize("first", [False, True])
def test_static_arguments_select_other_ops(first):
    """Without gradients, the ops of the forward pass have other results."""
    traced = []

    @functools.partial(jax.jit, static_argnums=3)
    def step(x, w, dy, train):
        traced.append(train)
        if train:
            return layer("block")(x, w, dy)
        return fbq_jax.dot_general(x, w, (((1,), (0,)), ((), ())))[0]

    run = fbq_jax.partitioned(step)
    arrays = sharded(mesh_of(data=4), ("data",), (), ("data",))
    for train in (first, not first, first, not first):
        assert_close(run(*arrays, train), step(*OPERANDS, train))
    want = [first] * 3 + [not first] * 3  # twice on the mesh, once on one device
    assert traced == want


def test_layers_of_one_shape_have_their_own_shardings():
    """As in an MLP: the first weight is sharded by columns, the second by rows."""
    mesh = mesh_of(tensor=4)
    x, up, down = heavy((256, 512)), heavy((512, 512), 1), heavy((512, 512), 2)

    def mlp(x, up, down):
        dot = functools.partial(
            fbq_jax.dot_general,
            dimension_numbers=(((1,), (0,)), ((), ())),
            recipe=recipes.block,
            key=jax.random.key(0),
        )
        return dot(dot(x, up)[0], down)[0]

    arguments = (
        place(mesh, x),
        place(mesh, up, None, "tensor"),
        place(mesh, down, "tensor"),
    )
    run = fbq_jax.partitioned(jax.jit(mlp))
    found = collectives(run.lower(*arguments).compile())
    assert [(kind, size) for kind, _, size, _ in found] == [("all-reduce", 256 * 512)]
    assert_close(run(*arguments), jax.jit(mlp)(x, up, down))
