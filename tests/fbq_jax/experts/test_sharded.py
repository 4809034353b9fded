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
from fbq_jax import ExpertSharding, FallbackDot, MoEMLP, Recipe, Routing, ops, recipes
from fbq_jax.core.gemms import Spec
from fbq_jax.core.threshold import UNSET, Scalars
from fbq_jax.experts import codes as expert_codes
from fbq_jax.experts import mlp
from fbq_jax.experts.plan import Exchange, dispatch, exchange_plan
from fbq_jax.experts.rows import exchanged_rows, tiled_rows
from fbq_jax.kernels.quantized import Layout, repeat_blocks
from tests import oracle
from tests.fbq_jax.sharding.tools import assert_close, mesh_of, needs_devices
from tests.gpus import h200s, needs_compiler
from tests.kernels.quantize_cases import heavy
from tests.marks import rows_with_first_fast, with_first_fast

pytestmark = needs_devices

E, TOP_K, T, D, F = 8, 2, 512, 72, 64
EXPERT = ExpertSharding("expert")
WITH_COPIES = ExpertSharding("expert", copies="data")
OF_TWO_AXES = ExpertSharding(("one", "other"))
FALLBACK = dataclasses.replace(recipes.fallback, block=32)
X, DY = heavy((T, D), 0), heavy((T, D), 2)


MESHES = {
    EXPERT: {"expert": 4},
    WITH_COPIES: {"data": 2, "expert": 2},
    OF_TWO_AXES: {"one": 2, "other": 2},
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


JETFIRE = dataclasses.replace(recipes.jetfire, block=(64, 32, 32))


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("recipe", "capacity", "sharding"),
    [
        *[(recipes.fallback, None, sharding) for sharding in MESHES],
        (FALLBACK, 100, WITH_COPIES),
        (recipes.block, 100, EXPERT),
        (JETFIRE, None, OF_TWO_AXES),
    ],
)
def test_codes_for_many_loads(recipe, capacity, sharding):
    for seed in range(5):
        theta = (UNSET, 0.0, 3.0, 30.0)[seed % 4]
        assert_same_codes(seed, sharding, recipe, theta, capacity)


@functools.cache
def layer_of(recipe, **routing):
    dot = None if recipe is None else FallbackDot(recipe)
    return MoEMLP(Routing(E, TOP_K, **routing), F, dot_general=dot)


def step(layer, params, mesh=None):
    """The output, the gradients and the new state."""
    collections = ["fallback", "expert_stats", "intermediates"]

    def loss(params, x, state):
        variables = {"params": params, **state}
        y, updates = layer.apply(variables, x, mutable=collections)
        return jnp.vdot(DY, y), (y, updates)

    on_one_device = dataclasses.replace(layer, expert_sharding=None)
    state = jax.jit(on_one_device.init)(jax.random.key(1), X)
    del state["params"]
    with nullcontext() if mesh is None else jax.set_mesh(mesh):
        gradient = jax.jit(jax.grad(loss, (0, 1), has_aux=True))
        grads, (y, state) = gradient(params, X, state)
    return y, *grads, state


PARAMS = jax.jit(layer_of(None).init)(jax.random.key(1), X)["params"]


def sharded(params, mesh):
    """Parameters, with experts over one axis and hidden units over another."""
    tensor = "tensor" if "tensor" in mesh.shape else None
    specs = {
        "gate_up": P("expert", None, tensor),
        "down": P("expert", tensor),
        "router": P(),
    }
    return {
        name: {"kernel": jax.device_put(p["kernel"], NamedSharding(mesh, specs[name]))}
        for name, p in params.items()
    }


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("recipe", "sharding", "sizes"),
    [
        *[(recipe, EXPERT, MESHES[EXPERT]) for recipe in (None, recipes.fallback)],
        (recipes.jetfire, EXPERT, MESHES[EXPERT]),
        (recipes.block, WITH_COPIES, MESHES[WITH_COPIES]),
        (None, WITH_COPIES, {"data": 2, "expert": 2, "tensor": 2}),
        (FALLBACK, WITH_COPIES, {"data": 2, "expert": 2, "tensor": 2}),
    ],
)
def test_steps_are_those_of_one_device(recipe, sharding, sizes):
    """Up to exponentials, which devices may round in other ways."""
    layer = layer_of(recipe, capacity_factor=0.9)
    want = step(layer, PARAMS)
    mesh = mesh_of(**sizes)
    parallel = dataclasses.replace(layer, expert_sharding=sharding)
    got = step(parallel, sharded(PARAMS, mesh), mesh)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        if np.any(b):
            assert oracle.relative(a, b) < 1e-4
        else:
            assert not np.any(a)
    dw = got[1]["gate_up"]["kernel"]
    assert dw.sharding.shard_shape(dw.shape)[0] == E // mesh.shape["expert"]


@functools.partial(jax.jit, static_argnums=(0, 2))
def products(recipe, experts, sharding):
    """Two products, the rates, and the gradients of the operands."""
    w_up, w_down = heavy((E, D, F), 3), heavy((E, F, D), 4)
    options = {"recipe": recipe, "theta": 20.0, "key": jax.random.key(5)}
    dot = functools.partial(fbq_jax.ragged_dot, **options)

    def up_and_down(x, w_up, w_down):
        if sharding is None:
            plan = dispatch(experts, E)
            x, sizes = x[plan.order // TOP_K], [plan.group_sizes] * 2
        else:
            plan = exchange_plan(sharding, experts, E, None)
            sizes = plan, plan.back
        h, stats = dot(x, w_up, sizes[0])
        y, more = dot(h, w_down, sizes[1])
        return y[plan.positions] if sharding is None else y, (stats.rate, more.rate)

    y, vjp, rates = jax.vjp(up_and_down, X, w_up, w_down, has_aux=True)
    return (y, *rates), vjp(heavy((T, TOP_K, D), 6))


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("recipe", "sharding"),
    [(FALLBACK, EXPERT), (FALLBACK, WITH_COPIES), (recipes.block, WITH_COPIES)],
)
def test_products_are_those_of_one_device(recipe, sharding):
    """Bit for bit, except dW, whose sum copies of an expert share."""
    want, (dx, *dw) = products(recipe, random_experts(2), None)
    with jax.set_mesh(mesh_of(**MESHES[sharding])):
        got, (got_dx, *got_dw) = products(recipe, random_experts(2), sharding)
    jax.tree.map(np.testing.assert_array_equal, got, want)
    assert oracle.relative(got_dx, dx) < 1e-6  # a sum over a token's experts
    for own, whole in zip(got_dw, dw, strict=True):
        assert oracle.relative(own, whole) <= (1e-6 if sharding.copies else 0)


@pytest.mark.exhaustive
def test_fused_steps_have_the_bits_of_the_layers_in_sequence(monkeypatch):
    mesh = mesh_of(**MESHES[WITH_COPIES])
    layer = dataclasses.replace(layer_of(FALLBACK), expert_sharding=WITH_COPIES)
    got = step(layer, sharded(PARAMS, mesh), mesh)
    monkeypatch.setattr(mlp, "can_fuse", lambda *_: False)
    want = step(layer, sharded(PARAMS, mesh), mesh)
    jax.tree.map(np.testing.assert_array_equal, got, want)


@pytest.mark.exhaustive
def test_scan_and_remat():
    """A step is that of one device."""

    def blocks(layer, x):
        block = nn.remat(lambda m, x: (x + m(x), None), policy=fbq_jax.save_codes)
        axes = {"params": 0, "fallback": 0}
        return nn.scan(block, axes, split_rngs={"params": True}, length=2)(layer, x)[0]

    layer = layer_of(FALLBACK)
    variables = jax.jit(nn.init(blocks, layer))(jax.random.key(0), X)
    params = variables.pop("params")

    def step(sharding):
        of_sharding = dataclasses.replace(layer, expert_sharding=sharding)
        apply = nn.apply(blocks, of_sharding, ["fallback"])

        def loss(params):
            y, updates = apply({"params": params, **variables}, X)
            return jnp.vdot(DY, y), updates

        return jax.jit(jax.grad(loss, has_aux=True))(params)

    want = step(None)
    with jax.set_mesh(mesh_of(**MESHES[EXPERT])):
        assert_close(step(EXPERT), want, 1e-4)


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


@pytest.mark.exhaustive
def test_nnx_and_rules():
    """One projection in floats, and the other in INT8."""
    rules = {"down": None, ".*": FALLBACK}

    def forward(sharding, mesh):
        layer = fbq_jax.nnx.MoEMLP(
            D, Routing(E), F, expert_sharding=sharding, rngs=nnx.Rngs(0)
        )
        with nullcontext() if mesh is None else jax.set_mesh(mesh):
            fbq_jax.nnx.quantize(layer, rules, quantize_rngs=nnx.Rngs(1))
            y = nnx.jit(lambda layer, x: layer(x))(layer, X)
            return y, layer.load[...], layer.gate_up.dot_general.theta[...]

    mesh = mesh_of(**MESHES[WITH_COPIES])
    got, want = forward(WITH_COPIES, mesh), forward(None, None)
    assert oracle.relative(got[0], want[0]) < 1e-5
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
    ("recipe", "platform", "exchange", "sent"),
    rows_with_first_fast(
        [
            (recipes.jetfire, "cuda", "all_to_all", ["256xi8"]),
            (recipes.jetfire, "tpu", "ragged_all_to_all", ["256xi8"]),
            # The second bits say where dW's codes differ, and codes of the residual
            # follow.
            (recipes.fallback, "tpu", "ragged_all_to_all", ["256xi8", "128xi8"]),
        ]
    ),
)
@pytest.mark.usefixtures("reference_everywhere")
def test_tokens_are_sent_as_codes(recipe, platform, exchange, sent):
    """What returns is the experts' output."""
    mesh = mesh_of(expert=4)
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        text = program(recipe, mesh).lower(lowering_platforms=(platform,)).as_text()
    calls = re.findall(rf"\W{exchange}\W.*: \(tensor<\d+x(\w+)>", text)
    assert sorted(calls) == sorted([*sent, "256xbf16"])


@needs_compiler
@pytest.mark.exhaustive
@pytest.mark.usefixtures("reference_everywhere")
def test_compiled_programs_send_codes():
    """A training step on four H200s, in order: X, Y, dY and dX, and no other tokens."""
    mesh = h200s(4, "expert")
    sent = ["s8 256", "s8 64", "bf16 256", "s8 256", "bf16 256"]
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        step = program(recipes.block, mesh, grad=True)
        text = step.lower().compile().as_text()
    found = re.findall(r"= \(\((\w+)\[\d+,(\d+)\].* all-to-all-start\(", text)
    assert sorted(map(" ".join, found)) == sorted(sent)
    others = re.findall(
        r"= \(?(\w+)\[([\d,]*)\].* (?:all-gather|all-reduce|all-to-all)(?:-start)?\(",
        text,
    )
    sizes = [np.prod([int(n) for n in dims.split(",") if n]) for _, dims in others]
    # The gradient of the router, which is not sharded, is the largest.
    assert max(sizes) == 256 * E


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
    shapes = [jax.ShapeDtypeStruct(s, jnp.int32) for s in ((2048,), (1024, 2), (4, 8))]
    for capacity, rows in (None, 2048), (100, 400):
        plan = Exchange(*shapes, 2048, WITH_COPIES, mesh, capacity)
        assert plan.slots == 128 * -(-((rows + 4 * 127) // 128) // 2)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"mesh": {"other": 4}}, "mesh axes .*'expert'.* set by jax.set_mesh; got"),
        ({"kind": AxisType.Explicit}, r"of type AxisType.Auto"),
        ({"experts": 6}, "6 experts and 512 tokens"),
        ({"tokens": 510}, "8 experts and 510 tokens"),
        ({"tokens": 0}, "positive multiples .* 8 experts and 0 tokens"),
        ({"recipe": Recipe(criterion="l1")}, "criterion='absmax' or None"),
        ({"recipe": Recipe(block=256)}, "rows that divide 128"),
        ({"recipe": recipes.rowwise}, "devices take .* scales='block' .* got rowwise"),
        ({"recipe": recipes.row_block_lhs}, "scales='block' .* got row_block_lhs"),
        ({"recipe": recipes.fp8_row_block_lhs}, "INT8 .* got fp8_row_block_lhs"),
    ],
)
def test_what_does_not_fit_is_named(change, message):
    dot = FallbackDot(change.get("recipe", FALLBACK))
    routing = Routing(change.get("experts", E))
    layer = MoEMLP(routing, F, dot_general=dot, expert_sharding=EXPERT)
    x = X[: change.get("tokens", T)]
    kind = change.get("kind", AxisType.Auto)
    mesh = mesh_of(kind, **change.get("mesh", {"expert": 4}))
    with jax.set_mesh(mesh), pytest.raises(ValueError, match=message):
        jax.eval_shape(layer.init, jax.random.key(0), x)


@pytest.mark.parametrize(
    ("axes", "error", "message"),
    [
        (((), ()), ValueError, r"at least one axis .* each axis once"),
        (("expert", "expert"), ValueError, r"at least one axis .* each axis once"),
        *(
            (
                ("expert", copies),
                TypeError,
                "takes the names of mesh axes as copies; got",
            )
            for copies in (None, 3, (1,))
        ),
    ],
)
def test_axes_of_a_sharding(axes, error, message):
    assert WITH_COPIES.axes == ("data", "expert")
    with pytest.raises(error, match=message):
        ExpertSharding(*axes)


def kernels(api):
    """Those of a layer on the mesh that is set."""
    if api == "linen":
        moe = MoEMLP(Routing(E), F, expert_sharding=WITH_COPIES)
        params = jax.jit(moe.init)(jax.random.key(0), jnp.ones((128, D)))["params"]
        return params["gate_up"]["kernel"], params["down"]["kernel"]
    options = {"expert_sharding": WITH_COPIES, "rngs": nnx.Rngs(0)}
    layer = fbq_jax.nnx.MoEMLP(D, Routing(E), F, **options)
    return layer.gate_up.kernel[...], layer.down.kernel[...]


@pytest.mark.parametrize("api", with_first_fast(["linen", "nnx"]))
def test_kernels_are_sharded_from_the_start(api):
    with jax.set_mesh(mesh_of(data=2, expert=2)):
        specs = [kernel.sharding.spec for kernel in kernels(api)]
    assert specs == [P("expert")] * 2


def test_without_a_mesh_kernels_are_whole():
    assert all(kernel.sharding.is_fully_replicated for kernel in kernels("nnx"))
