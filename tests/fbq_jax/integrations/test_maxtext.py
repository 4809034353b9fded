"""The layers, scans and training steps of MaxText, reproduced in small."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from fbq_jax import FallbackDot, Recipe, recipes
from fbq_jax.integrations.maxtext import Quantization
from tests.collectives import collectives

SIDE = 32
RECIPE = Recipe(block=SIDE)
LAYERS, HEADS, WIDTH = 2, 2, 64
X = jax.random.normal(jax.random.key(0), (4, 96, WIDTH))

# MaxText's rules from logical axes to mesh axes, for the axes used here.
RULES = (
    ("embed", "fsdp"),
    ("heads", "tensor"),
    ("activation_batch", ("data", "fsdp")),
    ("activation_heads", "tensor"),
    ("activation_embed", "tensor"),
)
NEEDS_DEVICES = pytest.mark.skipif(
    jax.device_count() < 8, reason="needs eight devices, or none but CPUs"
)
EMBEDDED = "activation_batch", "activation_length", "activation_embed"
OF_HEADS = "activation_batch", "activation_length", "activation_heads", "kv"


def shard(x, names):
    """Constrains the output of a layer; does nothing without a mesh."""
    if jax.sharding.get_abstract_mesh().empty:
        return x
    spec = nn.logical_to_mesh_axes(names, RULES)
    return jax.lax.with_sharding_constraint(x, spec)


class Bridge(nnx.bridge.ToNNX):
    """Flax's bridge, which in MaxText can also drop its generator."""

    def release_rngs(self):
        self.to_nnx__rngs = None


def make_dot_general(quant, kernel_axes, rngs):
    """An op, and the name of the layer attribute that holds it."""
    op = quant.dot_general_cls(mesh_axes=kernel_axes)()
    return f"{type(op).__name__}_0", Bridge(op, rngs=rngs)


class DenseGeneral(nnx.Module):
    """Asks ``quant`` for an op, bridges it and initializes it with a row of zeros."""

    def __init__(self, shape, axis, kernel_axes, dtype, quant, rngs):
        self.axis, self.dtype, self.quant = axis, dtype, quant
        init = nn.initializers.lecun_normal(in_axis=tuple(range(len(axis))))
        self.kernel = nnx.Param(
            init(rngs.params(), shape, jnp.float32),
            out_sharding=kernel_axes,
            eager_sharding=False,
        )
        self.name, op = make_dot_general(quant, kernel_axes, rngs)
        setattr(self, self.name, op)
        self(jnp.zeros((1, *shape[: len(axis)]), dtype), initializing=True)
        if not quant.needs_apply_rngs:
            op.release_rngs()

    def __call__(self, x, initializing=False):
        axis = tuple(a % x.ndim for a in self.axis)
        dims = (axis, tuple(range(len(axis)))), ((), ())
        kernel, op = self.kernel[...].astype(self.dtype), getattr(self, self.name)
        if initializing:
            op.lazy_init(x, kernel, dims, precision=None)
        return op(x, kernel, dims, precision=None, mutable=["aqt"])


class Block(nnx.Module):
    """A residual connection around projections to heads and back."""

    def __init__(self, dtype, rngs):
        quant, heads = Quantization(RECIPE), (HEADS, WIDTH // HEADS)
        axes = "embed", "heads", "kv"
        self.query = DenseGeneral((WIDTH, *heads), (-1,), axes, dtype, quant, rngs)
        axes = "heads", "kv", "embed"
        self.out = DenseGeneral((*heads, WIDTH), (-2, -1), axes, dtype, quant, rngs)

    def __call__(self, x):
        y = shard(self.query(x), OF_HEADS)
        return shard(x + self.out(jnp.sin(y)), EMBEDDED)


def is_variable(x):
    return isinstance(x, nnx.Variable)


def stacked(dtype):
    """The graph of one layer, and variables with a leading axis of layers."""

    def block(key):
        return Block(dtype, nnx.Rngs(params=key, dropout=1, aqt=2))

    def variables(key):
        return nnx.split(block(key), nnx.Param, ...)[1:]

    keys = jax.random.split(jax.random.key(0), LAYERS)
    graph = nnx.graphdef(nnx.eval_shape(block, keys[0]))
    # With this metadata the bridge passes Linen a box instead of an array.
    metadata = {nnx.PARTITION_NAME: "layers", "param_scan_axis": 0}
    annotate = functools.partial(nnx.Variable.replace, **metadata)
    layers = jax.jit(functools.partial(jax.lax.map, variables))(keys)
    return graph, *jax.tree.map(annotate, layers, is_leaf=is_variable)


def loss_of(graph, params, rest, x):
    """The loss, and the new variables other than parameters."""

    @jax.checkpoint
    def layer(x, variables):
        block = nnx.merge(graph, *variables, copy=True)
        y = block(x)
        return y, nnx.split(block, nnx.Param, ...)[2]

    y, rest = jax.lax.scan(layer, x, (params, rest))
    return jnp.mean(jnp.square(y.astype(jnp.float32))), rest


def grads_of(graph):
    return jax.value_and_grad(functools.partial(loss_of, graph), has_aux=True)


def states_of(rest):
    """The states of the two ops of each layer."""
    layers = nnx.to_pure_dict(rest)
    return [layers[k]["FallbackDotGeneral_0"]["dot_general"] for k in ("query", "out")]


def test_a_step_in_nnx():
    """Scanned and rematerialized layers; two microbatches accumulate gradients."""
    graph, params, rest = stacked(jnp.bfloat16)
    started = states_of(rest)
    for state in started:  # a row of zeros sets no threshold
        np.testing.assert_array_equal(state["theta"], -1.0)

    @jax.jit
    def step(params, rest, x):
        def microbatch(carry, x):
            total, rest = carry
            (loss, rest), grads = grads_of(graph)(params, rest, x)
            return (jax.tree.map(jnp.add, total, grads), rest), loss

        zeros = jax.tree.map(jnp.zeros_like, params)
        (grads, rest), losses = jax.lax.scan(microbatch, (zeros, rest), x)
        return jax.tree.map(lambda p, g: p - 0.05 * g, params, grads), rest, losses

    losses = []
    batch = X.astype(jnp.bfloat16).reshape(2, 2, *X.shape[1:])
    for _ in range(2):
        params, rest, loss = step(params, rest, batch)
        losses.append(float(loss.mean()))
    assert losses[1] < losses[0]
    seeds = set()
    for before, after in zip(started, states_of(rest), strict=True):
        np.testing.assert_array_equal(after["count"], before["count"] + 4)
        assert np.all(after["theta"] > 0.0)
        seeds.update(np.asarray(after["seed"]).tolist())
    assert len(seeds) == 2 * LAYERS


class KeepsRngs(Quantization):
    """MaxText's default for objects without this attribute."""

    needs_apply_rngs = True


def test_noise_needs_no_generator():
    """An op without a generator computes the same, with new noise in each step."""

    def steps(quant):
        rngs, axes = nnx.Rngs(params=0, dropout=1, aqt=2), ("embed", "mlp")
        layer = DenseGeneral((WIDTH, WIDTH), (-1,), axes, jnp.float32, quant, rngs)
        graph, params, rest = nnx.split(layer, nnx.Param, ...)
        generators = len(jax.tree.leaves(nnx.filter_state(rest, nnx.RngState)))

        @jax.jit
        def step(rest):
            def loss(params):
                layer = nnx.merge(graph, params, rest, copy=True)
                return jnp.mean(jnp.sin(layer(X))), nnx.split(layer, nnx.Param, ...)[2]

            return jax.grad(loss, has_aux=True)(params)

        found = []
        for _ in range(3):
            grads, rest = step(rest)
            state = nnx.to_pure_dict(rest)["FallbackDotGeneral_0"]["dot_general"]
            found.append((grads["kernel"][...], state))
        return generators, found

    none, found = steps(Quantization(RECIPE))
    some, want = steps(KeepsRngs(RECIPE))
    assert none == 0 < some
    jax.tree.map(np.testing.assert_array_equal, found, want)
    (_, _), (second, before), (third, after) = found
    assert before["theta"] == after["theta"] > 0.0
    assert before["count"] + 1 == after["count"]
    assert np.any(second != third)


@pytest.fixture(scope="module")
def one_device():
    """Layers in float32, so that sums over devices are not rounded to bfloat16."""
    graph, *variables = stacked(jnp.float32)
    return graph, variables, jax.jit(grads_of(graph))(*variables, X)


@NEEDS_DEVICES
@pytest.mark.parametrize("tensor", [1, 2])
def test_a_step_on_a_mesh(one_device, tensor):
    """Matches one device; weights and activations travel as codes only."""
    graph, (params, rest), want = one_device
    kinds = (AxisType.Auto,) * 3
    mesh = jax.make_mesh((2, 2, tensor), ("data", "fsdp", "tensor"), axis_types=kinds)

    def place(x, names):
        spec = nn.logical_to_mesh_axes(names, RULES)
        return jax.device_put(x, NamedSharding(mesh, spec))

    def place_layers(p):
        return p.replace(place(p.get_value(), ("layers", *p.out_sharding)))

    params = jax.tree.map(place_layers, params, is_leaf=is_variable)
    rest = place(rest, ())
    shardings = jax.tree.map(lambda x: x.sharding, (params, rest))
    with jax.set_mesh(mesh):
        run = jax.jit(
            grads_of(graph), out_shardings=((None, shardings[1]), shardings[0])
        )
        run = run.lower(params, rest, place(X, EMBEDDED)).compile()
        (loss, after), grads = run(params, rest, place(X, EMBEDDED))
    (want_loss, want_after), want_grads = want
    jax.tree.map(np.testing.assert_array_equal, after, want_after)
    np.testing.assert_allclose(loss, want_loss, rtol=1e-6)
    # Devices sum in another order, and a code next to a tie may differ.
    for a, b in zip(jax.tree.leaves(grads), jax.tree.leaves(want_grads), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-3 * np.abs(b).max())

    gathered = [w for w in collectives(run) if w.kind == "all-gather"]
    assert {w.dtype for w in gathered} == {"f32", "s8"}
    blocks = X.size // SIDE**2
    assert all(w.size <= blocks for w in gathered if w.dtype == "f32")
    kernel, tokens = WIDTH * WIDTH // tensor, X.size // 4
    # MaxText shards the features of activations between layers over "tensor".
    codes = {kernel} if tensor == 1 else {kernel, tokens}
    assert {w.size for w in gathered if w.dtype == "s8"} == codes


@NEEDS_DEVICES
def test_explicit_mode_is_for_data_parallelism():
    """JAX cannot infer the output sharding of the projection to the embedding."""
    kinds = (AxisType.Explicit,) * 2
    mesh = jax.make_mesh((2, 2), ("fsdp", "tensor"), axis_types=kinds)
    block = nnx.eval_shape(lambda: Block(jnp.float32, nnx.Rngs(0)))
    graph, params, rest = nnx.split(block.out, nnx.Param, ...)
    x = jnp.ones((4, SIDE, HEADS, WIDTH // HEADS))

    def typed(x, spec):
        sharding = NamedSharding(mesh, spec)
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

    def output_spec(x_spec, kernel_spec):
        def loss(params, rest, x):
            y = nnx.merge(graph, params, rest, copy=True)(x)
            return y.sum(), y

        kernel = jax.tree.map(lambda p: typed(p, kernel_spec), params)
        state = jax.tree.map(lambda s: typed(s, P()), rest)
        with jax.set_mesh(mesh):
            step = jax.grad(loss, has_aux=True)
            return jax.eval_shape(step, kernel, state, typed(x, x_spec))[
                1
            ].sharding.spec

    assert output_spec(P("fsdp"), P()) == P("fsdp", None, None)
    with pytest.raises(Exception, match="illegally sharded result"):  # FSDP
        output_spec(P("fsdp"), P(None, None, "fsdp"))
    with pytest.raises(Exception, match="ambiguous how the output should be sharded"):
        output_spec(P("fsdp", None, "tensor"), P("tensor"))  # tensor parallelism


def test_a_step_in_linen():
    """``nn.scan`` carries the collection; its gradient is the new state."""
    quant = Quantization(RECIPE, collection="_overwrite_with_gradient")

    class Layer(nn.Module):
        @nn.compact
        def __call__(self, x, _):
            kernel = self.param("kernel", nn.initializers.lecun_normal(), (WIDTH,) * 2)
            op = quant.dot_general_cls(mesh_axes=("embed", "mlp"))()
            return x + op(x, kernel, (((2,), (0,)), ((), ())), precision=None), None

    model = nn.scan(
        nn.remat(Layer),
        variable_axes={"params": 0, "aqt": 0, "_overwrite_with_gradient": 0},
        split_rngs={"params": True, "dropout": False},
        length=LAYERS,
    )()
    variables = jax.jit(model.init)(jax.random.key(0), X, None)

    @jax.jit
    def grads(variables):
        return jax.grad(lambda v: jnp.mean(jnp.square(model.apply(v, X, None)[0])))(
            variables
        )

    state = grads(variables)["_overwrite_with_gradient"]
    state = state["FallbackDotGeneral_0"]["dot_general"]
    np.testing.assert_array_equal(state["count"], np.ones(LAYERS))
    assert np.all(state["theta"] > 0.0)


def test_an_op_holds_a_linen_dot():
    quant = Quantization(recipes.block)
    assert quant.quant_mode == "train"
    assert quant.dot_general_cls()().dot == FallbackDot(recipes.block, "aqt")


def test_what_maxtext_cannot_carry_is_refused():
    with pytest.raises(ValueError, match=r"'aqt' or '_overwrite.*'fallback'"):
        Quantization(collection="fallback")
    with pytest.raises(TypeError, match="takes a Recipe"):
        Quantization("fallback")
    with pytest.raises(ValueError, match="mixture of experts"):
        Quantization().einsum(mesh_axes=("exp",))  # sparse_matmul=false
    with pytest.raises(ValueError, match="mixture of experts"):
        _ = Quantization().quant_dg  # sparse_matmul=true
