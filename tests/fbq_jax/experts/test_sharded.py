"""Experts on several devices compute what one device computes."""

import dataclasses
import functools
import re
from contextlib import nullcontext

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import fbq_jax
from fbq_jax import (
    ExpertSharding,
    FallbackDot,
    MoEMLP,
    Recipe,
    Routing,
    ops,
    ragged_dot,
    recipes,
    save_codes,
)
from fbq_jax.core.gemms import Spec
from fbq_jax.core.threshold import UNSET, Scalars
from fbq_jax.experts import codes as expert_codes
from fbq_jax.experts import mlp
from fbq_jax.experts.plan import Exchange, dispatch, exchange_plan, plan_dispatch
from fbq_jax.experts.rows import exchanged_rows, tiled_rows
from fbq_jax.kernels import rounding
from fbq_jax.kernels.quantized import Layout, repeat_blocks
from fbq_jax.sharding.ragged_exchange import Slices, exchange_slices
from tests import oracle
from tests.fbq_jax.sharding.tools import mesh_of, needs_devices
from tests.gpus import h200s, needs_compiler
from tests.kernels.quantize_cases import heavy
from tests.marks import rows_with_first_fast, with_first_fast

pytestmark = needs_devices

E, TOP_K, T, D, F = 8, 2, 512, 72, 64
EXPERT = ExpertSharding("expert")
WITH_COPIES = ExpertSharding("expert", copies="data")
FALLBACK = dataclasses.replace(recipes.fallback, block=32)
X, DY = heavy((T, D), 0), heavy((T, D), 2)


MESHES = {
    EXPERT: {"expert": 4},
    WITH_COPIES: {"data": 2, "expert": 2},
    ExpertSharding(("one", "other")): {"one": 2, "other": 2},
}


def random_experts(seed):
    """Loads of very different sizes; one expert has all tokens with seed 0."""
    bias = 10.0 ** (seed % 4) * jax.random.normal(jax.random.key(seed), (E,))
    if seed == 0:
        bias = 100.0 * jax.nn.one_hot(3, E)
    noise = jax.random.gumbel(jax.random.key(seed + 1), (T, E))
    return jax.lax.top_k(bias[None] + noise, TOP_K)[1]


def scalars(theta):
    return Scalars(jnp.float32(theta), jnp.uint32(7), jnp.uint32(3), jnp.float32(0.2))


def quantized(recipe, rows, x, dy, theta):
    """What both projections quantize: X, and a gradient with a row per expert."""
    spec = Spec(recipe, jnp.float32, jnp.float32, jnp.float32, None)
    given = scalars(theta)
    lhs, stats = rows.quantize_lhs(spec, x, given, save=True, frozen=False)
    grad = rows.quantize_grad(spec, dy, given.later_seed(stats), frozen=False)
    main = lhs.rowwise
    if main.residual is not None:  # other codes have no meaning
        codes, scales, _ = main.residual
        falls = repeat_blocks(scales > 0.0, main.block, codes.shape)
        residual = main.residual._replace(codes=jnp.where(falls, codes, 0))
        main = dataclasses.replace(main, residual=residual)
    operands = main, lhs.colwise, grad.rowwise, grad.colwise
    return operands, (stats.rate, stats.theta, stats.next_theta)


@functools.cache
def on_devices(sharding, recipe, capacity=None):
    """The codes of each device, and its tiles."""

    @jax.jit
    def run(experts, x, dy, theta):
        plan, m = exchange_plan(sharding, experts, E, capacity), recipe.block
        rows = exchanged_rows(plan, m[0])
        return *quantized(recipe, rows, x, dy, theta), plan.tiles(m[0])

    return run


@functools.cache
def on_one_device(recipe, capacity=None):
    """The same codes by the ops for one device."""

    @jax.jit
    def run(experts, x, dy, theta):
        plan = dispatch(experts, E, capacity)
        rows = tiled_rows(plan.group_sizes, experts.size, recipe.block[0])
        x = x[plan.order // TOP_K]
        dy = dy.reshape(-1, dy.shape[-1])[plan.order]
        return quantized(recipe, rows, x, dy, theta)

    return run


def assert_same_codes(seed, sharding, recipe, theta, capacity=None):
    experts, dy = random_experts(seed), heavy((T, TOP_K, F), 1)
    # One NaN is in a block of several devices.
    args = experts, X.at[5, 3].set(jnp.nan) if seed == 3 else X, dy, theta
    want, want_stats = on_one_device(recipe, capacity)(*args)
    with jax.set_mesh(mesh_of(**MESHES[sharding])):
        got, stats, tiles = on_devices(sharding, recipe, capacity)(*args)
    np.testing.assert_array_equal(stats, want_stats)
    is_used = np.asarray(tiles.row_counts) > 0
    index = np.asarray(tiles.indices)[is_used]
    assert len(np.unique(index)) == len(index)
    sizes = np.bincount(np.ravel(experts), minlength=E)
    sizes = sizes if capacity is None else np.minimum(sizes, capacity)
    assert len(index) == np.sum(-(-sizes // recipe.block_shape[0]))
    assert np.sum(tiles.row_counts) == np.sum(sizes)
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for own, whole in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_array_equal(
            np.asarray(own)[is_used], np.asarray(whole)[index]
        )
    return want, want_stats


def test_codes_are_those_of_one_device():
    """Bit for bit, whatever the loads: also without a threshold from before."""
    for seed, theta in enumerate([UNSET, 10.0]):
        (x, *_), stats = assert_same_codes(seed, WITH_COPIES, FALLBACK, theta)
        assert np.any(x.residual.codes)
        assert 0.0 < stats[0] < 1.0


@pytest.mark.exhaustive
@pytest.mark.parametrize("sharding", MESHES)
@pytest.mark.parametrize(
    ("recipe", "capacity"),
    [
        (recipes.fallback, None),
        (FALLBACK, 100),
        (recipes.block, 100),
        (dataclasses.replace(recipes.jetfire, block=(64, 32, 32)), None),
    ],
)
def test_codes_for_many_loads(sharding, capacity, recipe):
    for seed in range(12):
        theta = (UNSET, 0.0, 3.0, 30.0)[seed % 4]
        assert_same_codes(seed, sharding, recipe, theta, capacity)


@functools.cache
def layer_of(recipe, **routing):
    dot = None if recipe is None else FallbackDot(recipe)
    return MoEMLP(Routing(E, TOP_K, **routing), F, dot_general=dot)


def step(layer, params, x, mesh=None):
    """The output, the gradients and the new state."""
    collections = ["fallback", "expert_stats", "intermediates"]
    state = {"expert_stats": {}} if layer.dot_general is None else {}

    def loss(params, x, state):
        variables = {"params": params, **state}
        y, updates = layer.apply(variables, x, mutable=collections)
        return jnp.vdot(DY, y), (y, updates)

    with nullcontext() if mesh is None else jax.set_mesh(mesh):
        state = jax.jit(layer.init)(jax.random.key(1), x)
        del state["params"]
        grads, (y, state) = jax.jit(jax.grad(loss, (0, 1), has_aux=True))(
            params, x, state
        )
    return y, *grads, state


PARAMS = jax.jit(layer_of(None).init)(jax.random.key(1), X)["params"]


def sharded(params, mesh, tensor=None):
    """Parameters, with experts over their axis and their hidden units over another."""
    specs = {
        "gate_up": P("expert", None, tensor),
        "down": P("expert", tensor),
        "router": P(),
    }
    return {
        name: {"kernel": jax.device_put(p["kernel"], NamedSharding(mesh, specs[name]))}
        for name, p in params.items()
    }


def check_step(recipe, sharding, sizes, tensor=None, **routing):
    """A step of the layer, whose exponentials devices may round in other ways."""
    layer = layer_of(recipe, **routing)
    want = step(layer, PARAMS, X)
    mesh = mesh_of(**sizes)
    parallel = dataclasses.replace(layer, expert_sharding=sharding)
    got = step(parallel, sharded(PARAMS, mesh, tensor), X, mesh)
    assert_close(got, want, 1e-4)
    dw = got[1]["gate_up"]["kernel"]
    assert dw.sharding.shard_shape(dw.shape)[0] == E // mesh.shape["expert"]


def assert_close(got, want, rtol=1e-5):
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        if np.any(b):
            assert oracle.relative(a, b) < rtol
        else:
            assert not np.any(a)


def products(recipe, experts, sharding=None):
    """Two products, the gradients of their operands, and the rates."""
    w_up, w_down = heavy((E, D, F), 3), heavy((E, F, D), 4)
    dot = functools.partial(
        ragged_dot, recipe=recipe, theta=20.0, key=jax.random.key(5)
    )

    def up_and_down(x, w_up, w_down):
        if sharding is None:
            plan = dispatch(experts, E)
            x = x[:, None].repeat(TOP_K, 1).reshape(-1, D)[plan.order]
            h, stats = dot(x, w_up, plan.group_sizes)
            y, more = dot(h, w_down, plan.group_sizes)
            return y[plan.positions], (stats.rate, more.rate)
        plan = exchange_plan(sharding, experts, E, None)
        h, stats = dot(x, w_up, plan)
        y, more = dot(h, w_down, plan.back)
        return y, (stats.rate, more.rate)

    y, vjp, rates = jax.vjp(up_and_down, X, w_up, w_down, has_aux=True)
    return y, rates, vjp(heavy((T, TOP_K, D), 6))


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("recipe", "sharding"),
    [
        (FALLBACK, EXPERT),
        (recipes.fallback, EXPERT),
        (recipes.jetfire, EXPERT),
        (recipes.block, WITH_COPIES),
        (FALLBACK, WITH_COPIES),
    ],
)
def test_products_are_those_of_one_device(recipe, sharding):
    """Bit for bit, except dW, whose sum copies of an expert share."""
    experts = random_experts(2)
    run = jax.jit(products, static_argnums=(0, 2))
    y, rates, (dx, *dw) = run(recipe, experts, None)
    with jax.set_mesh(mesh_of(**MESHES[sharding])):
        got_y, got_rates, (got_dx, *got_dw) = run(recipe, experts, sharding)
    np.testing.assert_array_equal(got_rates, rates)
    np.testing.assert_array_equal(got_y, y)
    assert_close(got_dx, dx, 1e-6)  # a sum over a token's experts
    if sharding.copies:
        assert_close(got_dw, dw, 1e-6)
    else:
        jax.tree.map(np.testing.assert_array_equal, got_dw, dw)


@pytest.mark.exhaustive
@pytest.mark.parametrize("sharding", [EXPERT, WITH_COPIES])
@pytest.mark.parametrize(
    "recipe", [None, recipes.fallback, recipes.block, recipes.jetfire]
)
def test_steps_of_recipes(sharding, recipe):
    check_step(recipe, sharding, MESHES[sharding], capacity_factor=0.9)


@pytest.mark.exhaustive
@pytest.mark.parametrize("recipe", [FALLBACK, recipes.block])
def test_fused_steps_have_the_bits_of_the_layers_in_sequence(monkeypatch, recipe):
    mesh = mesh_of(**MESHES[WITH_COPIES])
    layer = dataclasses.replace(layer_of(recipe), expert_sharding=WITH_COPIES)
    got = step(layer, sharded(PARAMS, mesh), X, mesh)
    monkeypatch.setattr(mlp, "can_fuse", lambda *_: False)
    want = step(layer, sharded(PARAMS, mesh), X, mesh)
    jax.tree.map(np.testing.assert_array_equal, got, want)


@pytest.mark.exhaustive
@pytest.mark.parametrize("recipe", [None, FALLBACK])
def test_a_step_with_tensor_parallelism(recipe):
    sizes = {"data": 2, "expert": 2, "tensor": 2}
    check_step(recipe, WITH_COPIES, sizes, tensor="tensor")


@pytest.mark.exhaustive
def test_freeze_and_vmap():
    mesh = mesh_of(**MESHES[EXPERT])
    layer = dataclasses.replace(layer_of(recipes.block), expert_sharding=EXPERT)
    with jax.set_mesh(mesh):
        variables = jax.jit(layer.init)(jax.random.key(0), X)
        want = jax.jit(layer.apply)(variables, X)
        frozen = fbq_jax.freeze(layer, variables, X)
        np.testing.assert_array_equal(jax.jit(layer.apply)(frozen, X), want)
        apply = functools.partial(layer.apply, variables)
        np.testing.assert_array_equal(jax.jit(jax.vmap(apply))(X[None])[0], want)


class Block(nn.Module):
    """A residual layer, for ``nn.scan``."""

    @nn.compact
    def __call__(self, x, _):
        layer = layer_of(FALLBACK)
        moe = dataclasses.replace(
            layer, expert_sharding=EXPERT, parent=self, name="moe"
        )
        return x + moe(x), None


def scanned(block):
    axes = {"params": 0, "fallback": 0}
    rngs = {"params": True}
    return nn.scan(block, variable_axes=axes, split_rngs=rngs, length=2)()


@pytest.mark.exhaustive
def test_scan_and_remat():
    def grads(model, params, state):
        def loss(params):
            variables = {"params": params, **state}
            y, updates = model.apply(variables, X, None, mutable=["fallback"])
            return jnp.vdot(DY, y[0]), updates

        return jax.jit(jax.grad(loss, has_aux=True))(params)

    remat = scanned(nn.remat(Block, policy=save_codes))
    with jax.set_mesh(mesh_of(**MESHES[EXPERT])):
        state = jax.jit(remat.init)(jax.random.key(0), X, None)
        params = state.pop("params")
        want = grads(scanned(Block), params, state)
        assert_close(grads(remat, params, state), want, 1e-4)


@pytest.mark.exhaustive
def test_nnx_and_rules():
    """One projection in floats, and the other in INT8."""
    rules = {"down": None, ".*": FALLBACK}

    def forward(sharding, mesh):
        layer = fbq_jax.nnx.MoEMLP(
            D, Routing(E), F, expert_sharding=sharding, rngs=nnx.Rngs(0)
        )
        with nullcontext() if mesh is None else jax.set_mesh(mesh):
            fbq_jax.nnx.quantize(layer, rules, rngs=nnx.Rngs(1))
            y = nnx.jit(lambda layer, x: layer(x))(layer, X)
            return y, layer.load[...], layer.gate_up.dot_general.theta[...]

    mesh = mesh_of(**MESHES[WITH_COPIES])
    got, want = forward(WITH_COPIES, mesh), forward(None, None)
    assert_close(got[0], want[0])
    jax.tree.map(np.testing.assert_array_equal, got[1:], want[1:])


def program(recipe, mesh, *, grad=False):
    """A layer in bfloat16, to lower for four devices of ``mesh``."""
    layer = MoEMLP(
        Routing(E, TOP_K),
        128,
        dtype=jnp.bfloat16,
        dot_general=FallbackDot(recipe),
        expert_sharding=EXPERT,
    )
    everywhere, by_expert = (NamedSharding(mesh, spec) for spec in (P(), P("expert")))

    def placed(x):
        sharding = by_expert if x.ndim > 2 else everywhere
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

    x = jax.ShapeDtypeStruct((T, 256), jnp.bfloat16, sharding=by_expert)
    variables = jax.tree.map(placed, jax.eval_shape(layer.init, jax.random.key(0), x))

    def forward(variables, x):
        return layer.apply(variables, x, mutable=["fallback", "expert_stats"])

    def backward(variables, x):
        params = variables.pop("params")

        def loss(params, x):
            y, updates = forward({"params": params, **variables}, x)
            return jnp.sum(y.astype(jnp.float32) ** 2), updates

        return jax.grad(loss, (0, 1), has_aux=True)(params, x)

    return jax.jit(backward if grad else forward).trace(dict(variables), x)


@pytest.mark.parametrize(
    ("recipe", "sent"),
    [
        (recipes.jetfire, ["256xi8"]),
        # The second bits say where dW's codes differ, and codes of the residual follow.
        pytest.param(
            recipes.fallback, ["256xi8", "128xi8"], marks=pytest.mark.exhaustive
        ),
    ],
)
@pytest.mark.parametrize(
    ("platform", "exchange"),
    rows_with_first_fast([("cuda", "all_to_all"), ("tpu", "ragged_all_to_all")]),
)
@pytest.mark.usefixtures("reference_everywhere")
def test_tokens_are_sent_as_codes(recipe, sent, platform, exchange):
    """What returns is the experts' output."""
    mesh = mesh_of(expert=4)
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        text = program(recipe, mesh).lower(lowering_platforms=(platform,)).as_text()
    calls = re.findall(rf"\W{exchange}\W.*: \(tensor<\d+x(\w+)>", text)
    assert sorted(calls) == sorted([*sent, "256xbf16"])


@needs_compiler
@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("recipe", "sent"),
    [
        (recipes.jetfire, ["s8 256", "bf16 256", "s8 256", "bf16 256"]),
        (recipes.block, ["s8 256", "s8 64", "bf16 256", "s8 256", "bf16 256"]),
    ],
)
@pytest.mark.usefixtures("reference_everywhere")
def test_compiled_programs_send_codes(recipe, sent):
    """A training step on four H200s, in order: X, Y, dY and dX, and no other tokens."""
    mesh = h200s(4, "expert")
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        text = program(recipe, mesh, grad=True).lower().compile().as_text()
    found = re.findall(r"= \(\((\w+)\[\d+,(\d+)\].* all-to-all-start\(", text)
    assert sorted(map(" ".join, found)) == sorted(sent)
    others = re.findall(
        r"= \(?(\w+)\[([\d,]*)\].* (?:all-gather|all-reduce|all-to-all)(?:-start)?\(",
        text,
    )
    sizes = [np.prod([int(n) for n in dims.split(",") if n]) for _, dims in others]
    # The gradient of the router, which is not sharded, is the largest.
    assert max(sizes) == 256 * E


def test_exchanged_slices():
    mesh, sizes = mesh_of(expert=4), np.random.default_rng(0).integers(0, 5, (4, 4, 2))
    starts = np.cumsum(sizes.reshape(4, -1), axis=1).reshape(sizes.shape) - sizes
    order = np.moveaxis(sizes, 1, 0)  # of each receiver
    targets = np.cumsum(order.reshape(4, -1), axis=1).reshape(order.shape) - order
    slices = Slices(starts, sizes, np.moveaxis(targets, 0, 1), order, targets)
    flat = [jnp.asarray(x.reshape(4, 8), jnp.int32) for x in slices]
    x = jax.random.normal(jax.random.key(0), (4, 40, 3))

    def local(x, *slices):
        given = Slices(*(s[0] for s in slices))
        return exchange_slices(x[0], 44, given, ("expert",))[None]

    specs = {"in_specs": P("expert"), "out_specs": P("expert"), "check_vma": False}
    got = jax.jit(jax.shard_map(local, mesh=mesh, **specs))(x, *flat)
    want = np.zeros((4, 44, 3), np.float32)
    for source, receiver, n in np.ndindex(sizes.shape):
        at, size = starts[source, receiver, n], sizes[source, receiver, n]
        to = slices.targets[source, receiver, n]
        want[receiver, to : to + size] = x[source, at : at + size]
    np.testing.assert_array_equal(got, want)


def test_noise_of_rows_and_packed_steps():
    seeds, rows = jnp.array([3, 9, 9], jnp.uint32), jnp.array([0, 5, 7])
    every = jax.jit(jax.vmap(lambda seed: rounding.noise(seed, 8, 21)))(seeds)
    got = jax.jit(rounding.noise_of_rows, static_argnums=2)(seeds, rows, 21)
    np.testing.assert_array_equal(got, every[jnp.arange(3), rows])
    steps = jax.random.randint(jax.random.key(0), (5, 21), -1, 2)
    packed = expert_codes._pack_steps(steps.astype(jnp.float32))
    assert (packed.shape, packed.dtype) == ((5, 6), jnp.int8)
    np.testing.assert_array_equal(expert_codes._unpack_steps(packed, 21), steps)


def test_sums_of_codes():
    layout = Layout("nearest", (32, 32), sums=True)
    seeds = jnp.zeros(3, jnp.uint32)
    quantize = jax.jit(ops.quantize, static_argnames=("rowwise", "colwise"))
    colwise = quantize(heavy((3, 32, 80)), seeds, rowwise=None, colwise=layout).colwise
    got = expert_codes._sums(colwise.codes[None, None], 32)
    np.testing.assert_array_equal(got[0, 0], colwise.sums)


def test_room_for_any_loads():
    """A capacity bounds it."""
    mesh = mesh_of(data=2, expert=2).abstract_mesh
    shape = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.int32)
    arrays = shape((2048,)), shape((1024, 2)), shape((4, 8))
    plan = Exchange(*arrays, 2048, WITH_COPIES, mesh, None)
    assert plan.slots == 128 * -(-((2048 + 4 * 127) // 128) // 2)
    plan = dataclasses.replace(plan, capacity=100)
    assert plan.slots == 128 * -(-((400 + 4 * 127) // 128) // 2)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"mesh": {"other": 4}}, "mesh axes .*'expert'.* set by jax.set_mesh; got"),
        ({"experts": 6}, "6 experts and 512 tokens"),
        ({"tokens": 510}, "8 experts and 510 tokens"),
        ({"tokens": 0}, "positive multiples .* 8 experts and 0 tokens"),
        ({"recipe": Recipe(criterion="l1")}, "criterion='absmax' or None"),
        ({"recipe": Recipe(block=256)}, "rows that divide 128"),
        ({"recipe": recipes.rowwise}, "devices take .* scales='block' .* got rowwise"),
    ],
)
def test_what_does_not_fit_is_named(change, message):
    dot = FallbackDot(change.get("recipe", FALLBACK))
    routing = Routing(change.get("experts", E))
    layer = MoEMLP(routing, F, dot_general=dot, expert_sharding=EXPERT)
    x = X[: change.get("tokens", T)]
    mesh = mesh_of(**change.get("mesh", {"expert": 4}))
    with jax.set_mesh(mesh), pytest.raises(ValueError, match=message):
        jax.eval_shape(layer.init, jax.random.key(0), x)


def test_axes_of_a_sharding():
    assert WITH_COPIES.axes == ("data", "expert")
    for axes in ((), ()), ("expert", "expert"):
        with pytest.raises(ValueError, match=r"at least one axis .* each axis once"):
            ExpertSharding(*axes)
    mesh = jax.make_mesh((4,), ("expert",), axis_types=(AxisType.Explicit,))
    experts = jnp.zeros((T, TOP_K), jnp.int32)
    with jax.set_mesh(mesh), pytest.raises(ValueError, match=r"of type AxisType.Auto"):
        plan_dispatch(Routing(E), experts, EXPERT)


@pytest.mark.parametrize("api", with_first_fast(["linen", "nnx"]))
def test_kernels_are_sharded_from_the_start(api):
    mesh = mesh_of(data=2, expert=2)
    x = jnp.ones((128, D))
    with jax.set_mesh(mesh):
        if api == "linen":
            moe = MoEMLP(Routing(E), F, expert_sharding=WITH_COPIES)
            params = jax.jit(moe.init)(jax.random.key(0), x)["params"]
            kernels = params["gate_up"]["kernel"], params["down"]["kernel"]
        else:
            sharding = {"expert_sharding": WITH_COPIES, "rngs": nnx.Rngs(0)}
            layer = fbq_jax.nnx.MoEMLP(D, Routing(E), F, **sharding)
            kernels = layer.gate_up.kernel[...], layer.down.kernel[...]
    assert [kernel.sharding.spec for kernel in kernels] == [P("expert")] * 2


def test_without_a_mesh_kernels_are_whole():
    sharding = {"expert_sharding": EXPERT, "rngs": nnx.Rngs(0)}
    layer = fbq_jax.nnx.MoEMLP(D, Routing(E), F, **sharding)
    assert layer.down.kernel[...].sharding.is_fully_replicated


@pytest.mark.parametrize("axes", [None, 3, (1,)])
def test_axes_are_names(axes):
    with pytest.raises(TypeError, match="takes the names of mesh axes as copies; got"):
        ExpertSharding("expert", copies=axes)
