"""Layers and ops under jit with shardings: one device's numbers, few collectives."""

import functools
import itertools
import warnings
from collections import Counter
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from fbq_jax import (
    FallbackDot,
    NormDense,
    Recipe,
    dot_general,
    fallback_dot,
    ops,
    ragged_dot,
    recipes,
    save_codes,
)
from fbq_jax.kernels.layer_sources import Gate, GateGrad, join_gate_up
from fbq_jax.kernels.quantized import Layout
from tests.collectives import collectives
from tests.fbq_jax.sharding.tools import assert_close, mesh_of, needs_devices, place
from tests.kernels.quantize_cases import heavy
from tests.marks import rows_with_first_fast, slow, with_first_fast

pytestmark = [needs_devices, pytest.mark.usefixtures("every_cause_warns")]

SIDE = 32
DOT = FallbackDot(Recipe(block=SIDE))
SEEDS = jnp.asarray([7], jnp.uint32)
BATCH = ("data", "fsdp")
returns_parts_of_axes = pytest.mark.skipif(
    jax.__version_info__ < (0, 10),
    reason="jax 0.9 cannot return an array that is sharded over a part of a mesh axis",
)


def compiled(function, *args):
    return jax.jit(function).lower(*args).compile()


def assert_equal(got, want):
    jax.tree.map(np.testing.assert_array_equal, got, want)


def quantizer(*blocks, roundings=("nearest", "stochastic"), **options):
    """``quantize`` in two layouts of these blocks."""
    rowwise, colwise = itertools.starmap(Layout, zip(roundings, blocks, strict=True))
    return functools.partial(ops.quantize, rowwise=rowwise, colwise=colwise, **options)


IN_BLOCKS = (SIDE, SIDE)
QUANTIZERS = {
    "blocks": quantizer(IN_BLOCKS, IN_BLOCKS),
    "fallback": quantizer(
        IN_BLOCKS, IN_BLOCKS, criterion="absmax", theta=jnp.asarray([5.0])
    ),
    "vectors": quantizer((1, None), (None, 1), roundings=["stochastic"] * 2),
    "row blocks": quantizer((1, SIDE), (SIDE, 1)),
    "rows, blocks": quantizer((1, SIDE), IN_BLOCKS),
}


ROWS_AND_COLUMNS = None, "data", "tensor", "fsdp"


@pytest.mark.parametrize(
    ("name", "spec"),
    [
        ("blocks", (None, BATCH, None, "tensor")),
        ("fallback", ROWS_AND_COLUMNS),
        ("vectors", ROWS_AND_COLUMNS),
        ("row blocks", ROWS_AND_COLUMNS),
        pytest.param("rows, blocks", ROWS_AND_COLUMNS, marks=pytest.mark.exhaustive),
    ],
)
def test_shards_have_the_codes_and_noise_of_the_whole(name, spec):
    """Bit for bit; only the scales of whole vectors need communication."""
    op, x = QUANTIZERS[name], heavy((1, 4, 128, 64))
    operands = place(mesh_of(), x, *spec), SEEDS
    run = compiled(op, *operands)
    got = run(*operands)
    assert_equal(got, jax.jit(op)(x, SEEDS))
    assert all(not leaf.is_fully_replicated for leaf in jax.tree.leaves(got))
    found = collectives(run)
    if name == "vectors":
        assert {(c.kind, c.dtype) for c in found} == {("all-reduce", "s32")}
        assert sum(c.size for c in found) == x.size // 64 // 4 + 64 // 2
    else:
        assert not found


FLOAT8 = quantizer(
    *((1, SIDE), (SIDE, 1)), roundings=["nearest"] * 2, dtype="float8_e4m3fn"
)
WITH_SUMS = functools.partial(
    QUANTIZERS["rows, blocks"], colwise=Layout("stochastic", IN_BLOCKS, sums=True)
)
BLOCKS, ROW_BLOCKS = QUANTIZERS["blocks"], QUANTIZERS["row blocks"]
THREE_FOR_TWO = (None, "tensor", BATCH), (1, 96, 128)
QUARTERS = (None, ("data", "tensor"), "fsdp"), (1, 160, 96)  # and halves


@pytest.mark.parametrize(
    ("op", "spec", "shape", "floats"),
    [
        pytest.param(  # two blocks for eight devices
            *(BLOCKS, (None, "all"), (1, 64, 96), 8 * 3), marks=returns_parts_of_axes
        ),
        *rows_with_first_fast(
            [
                (BLOCKS, *QUARTERS, 20 * 6),
                (ROW_BLOCKS, *THREE_FOR_TWO, 6 * 32),
                (BLOCKS, *THREE_FOR_TWO, 6 * 4),
                # Three for two, twice.
                (BLOCKS, (None, "fsdp", ("data", "tensor")), (1, 128, 192), 4 * 12),
                (WITH_SUMS, *THREE_FOR_TWO, 96),
                (FLOAT8, *THREE_FOR_TWO, 96 * 32),  # XLA for CPUs sends FP8 as float16
                (ROW_BLOCKS, *QUARTERS, 20 * 48),
            ],
            2,
        ),
    ],
)
def test_the_scales_of_split_blocks_are_all_reduced(op, spec, shape, floats):
    """Of all floats only the maxima of tiles travel."""
    mesh = mesh_of(all=8) if "all" in spec else mesh_of()
    x = heavy(shape).at[0, 40, 20].set(jnp.nan).at[0, 1, 70].set(jnp.inf)
    operands = place(mesh, x, *spec), SEEDS
    warning = r"quantize: axis [12] .* multiples of 32: scales are all-reduced"
    with pytest.warns(UserWarning, match=warning):
        run = compiled(op, *operands)
    got, want = run(*operands), jax.jit(op)(x, SEEDS)
    if op is WITH_SUMS:  # upper bounds
        assert np.all(got.colwise.sums >= want.colwise.sums)
        got, want = ((y.rowwise, *y.colwise.main[:2]) for y in (got, want))
    assert_equal(got, want)
    assert 0 < max(c.size for c in collectives(run) if c.dtype != "s8") <= floats


@returns_parts_of_axes
def test_six_devices_in_three_pairs():
    """Shardy shards over a part of six: pairs have equal codes, and floats stay."""
    mesh = Mesh(np.array(jax.devices()[:6]), "data")

    def op(x):
        return QUANTIZERS["blocks"](x.reshape(1, 3, 64, 96), SEEDS)

    x = heavy((192, 96))
    run = compiled(op, place(mesh, x, "data"))
    assert_equal(run(place(mesh, x, "data")), jax.jit(op)(x))
    blocks = x.size // SIDE**2
    assert all(c.size <= blocks for c in collectives(run) if c.dtype != "s8")


@pytest.mark.parametrize(
    ("spec", "shape", "what"),
    rows_with_first_fast(
        [
            # Two blocks and a half for two devices.
            ((None, "data"), (1, 80, 40), "1 of .* over data=2"),
            ((None, "data"), (1, 50, 40), "1 of .* over data=2"),
            ((None, None, ("tensor", "data")), (1, 32, 36), "2 .* tensor=2, data=2"),
        ]
    ),
)
def test_an_axis_without_whole_blocks_is_gathered_with_a_warning(spec, shape, what):
    op, x = jax.jit(BLOCKS), heavy(shape)
    with pytest.warns(UserWarning, match=f"quantize: axis {what}, .* of 32: .* gather"):
        got = op(place(mesh_of(), x, *spec), SEEDS)
    assert_equal(got, op(x, SEEDS))


class MLP(nn.Module):
    """Two layers, and the sharding constraints on activations of a sharded model."""

    hidden: tuple = ()
    out: tuple = ()

    @nn.compact
    def __call__(self, x):
        dense = functools.partial(nn.Dense, use_bias=False, dot_general=DOT)
        h = dense(256, name="up")(x)
        if self.hidden:
            h = jax.lax.with_sharding_constraint(h, P(*self.hidden))
        y = dense(128, name="down")(nn.silu(h))
        return jax.lax.with_sharding_constraint(y, P(*self.out)) if self.out else y


X = jax.random.normal(jax.random.key(0), (8, 64, 128))


def step_of(model):
    def step(params, state, x):
        def loss(params, x):
            y, updates = model.apply(
                {"params": params, "fallback": state}, x, mutable=["fallback"]
            )
            return jnp.mean(jnp.sin(y)), (y, updates)

        return jax.grad(loss, argnums=(0, 1), has_aux=True)(params, x)

    return step


@functools.cache
def one_device():
    variables = jax.jit(MLP().init)(jax.random.key(1), X)
    params, state = variables["params"], variables["fallback"]
    return params, state, jax.jit(step_of(MLP()))(params, state, X)


def run_sharded(layout):
    """The collectives of a step, whose results are those of one device."""
    mesh = layout.mesh()
    params, state, want = one_device()
    params = {
        name: {"kernel": place(mesh, p["kernel"], *layout.kernels.get(name, ()))}
        for name, p in params.items()
    }
    args = params, place(mesh, state), place(mesh, X, *layout.x)
    shardings = jax.tree.map(lambda p: p.sharding, (args[0], args[2]))
    step = step_of(MLP(layout.hidden, layout.out))
    with jax.set_mesh(mesh):
        run = jax.jit(step, out_shardings=(shardings, None)).lower(*args).compile()
        got = run(*args)
        assert_equal(run(*args), got)
    assert_close(got, want)
    # Thresholds and rates come from all blocks; counts and seeds are integers.
    assert_equal(got[1][1], want[1][1])
    return collectives(run)


class ModelLayout(NamedTuple):
    """How a model is sharded, and the sums that follow, by collective and size."""

    mesh: Callable
    kernels: dict
    x: tuple
    sums: dict
    hidden: tuple = ()
    out: tuple = ()


# The sums are of the kernels' gradients, and over the axis tensor also of Y and dX.
LAYOUTS = {
    "data": ModelLayout(
        lambda: mesh_of(data=8), {}, ("data",), {("all-reduce", 32768): 2}
    ),
    "halves of blocks": ModelLayout(
        lambda: mesh_of(fsdp=8),
        {"up": ("fsdp", None), "down": (None, "fsdp")},
        ("fsdp",),
        {("reduce-scatter", 4096): 2},
    ),
    "all": ModelLayout(
        mesh_of,
        {"up": ("fsdp", "tensor"), "down": ("tensor", "fsdp")},
        (BATCH,),
        {
            ("reduce-scatter", 8192): 2,
            ("all-reduce", 8192): 2,
            ("all-reduce", 16384): 2,
        },
    ),
    "sequence": ModelLayout(
        mesh_of,
        {"up": ("fsdp", "tensor"), "down": ("tensor", "fsdp")},
        (BATCH, "tensor"),
        {("reduce-scatter", 8192): 4, ("all-reduce", 8192): 2},
        hidden=(BATCH, None, "tensor"),
        out=(BATCH, "tensor"),
    ),
    "explicit": ModelLayout(
        lambda: mesh_of(AxisType.Explicit),
        {"up": ("fsdp", None), "down": ("fsdp", None)},
        (BATCH,),
        {("reduce-scatter", 16384): 2, ("all-reduce", 16384): 2},
    ),
}


@pytest.mark.parametrize("name", slow(LAYOUTS, LAYOUTS.keys() - {"all"}))
def test_devices_give_what_one_gives_and_exchange_codes(name):
    layout = LAYOUTS[name]
    with warnings.catch_warnings(record=True, action="always") as caught:
        found = run_sharded(layout)
    # One warning for each layer whose blocks are split, with the layer's path.
    split = ["up: axis 1 of", "down: axis 2 of"] if name == "halves of blocks" else []
    named = zip(caught, split, strict=True)
    assert all(str(w.message).startswith(start) for w, start in named)
    blocks = X.size // SIDE**2 * 2
    assert not any(c.kind in ("all-to-all", "collective-permute") for c in found)
    assert {c.dtype for c in found if c.kind == "all-gather"} <= {"f32", "s8"}
    large = [c for c in found if c.size > blocks or c.dtype == "s8"]
    # The floats that are gathered are fewer: scales, metrics and maxima of blocks.
    gathered = [c for c in large if c.kind == "all-gather"]
    assert {c.dtype for c in gathered} <= {"s8"}
    sums = Counter((c.kind, c.size) for c in large if c.kind != "all-gather")
    assert sums == layout.sums

    weights = sorted(c.size for c in gathered)
    tensor = 2 if "tensor" in layout.kernels.get("up", ()) else 1
    if name == "sequence":
        # Each kernel, forward and backward; and the tokens of other devices that the
        # products of a column-parallel layer need.
        activations = [2 * 64 * n for n in (128, 128)]
        assert set(weights) == {128 * 256 // tensor, *activations}
    else:
        assert weights == [128 * 256 // tensor] * (4 if layout.kernels else 0)


GATE = quantizer(
    *((SIDE, 64), (SIDE, 64)), criterion="absmax", theta=jnp.asarray([5.0])
)
GATE_ROWS = quantizer((1, 64), (SIDE, 1), roundings=["stochastic"] * 2)
GRAD_ROWS = functools.partial(
    GATE_ROWS, colwise=Layout("stochastic", (SIDE, 64), sums=True)
)


@pytest.mark.parametrize(
    ("quantize", "source", "columns"),
    rows_with_first_fast(
        [(GATE, Gate, 512), (GATE_ROWS, Gate, 512), (GRAD_ROWS, GateGrad, 256)]
    ),
)
def test_gate_and_up_are_sharded_alike(quantize, source, columns):
    """Each device has both, of the same columns."""
    whole = join_gate_up(heavy((1, 64, 256)), heavy((1, 64, 256), 1))
    factors = [GATE_ROWS(Gate(whole, None, 10), SEEDS).saved]

    def op(x, *factors):
        return quantize(source(x, *factors, None, 10), SEEDS)

    x = whole if source is Gate else heavy((1, 64, columns), 2)
    operands = x, *(factors if source is GateGrad else [])
    sharded = place(mesh_of(), x, None, "data", "tensor"), *operands[1:]
    run = compiled(op, *sharded)
    assert_equal(run(*sharded), jax.jit(op)(*operands))
    assert not collectives(run)


@pytest.mark.exhaustive
def test_gates_of_tiles_are_sharded_by_tile():
    """Where gate and up do not alternate, a shard of the columns lacks one of them."""
    seeds, rows = jnp.arange(8, dtype=jnp.uint32), 4 * jnp.arange(1, 9)

    def op(x):
        gate = Gate(x, rows, 10, interleaved=False)
        return GATE(gate, seeds, theta=jnp.full(8, 5.0))

    x = heavy((8, SIDE, 512))
    by_tile = place(mesh_of(), x, "data")
    run = compiled(op, by_tile)
    assert_equal(run(by_tile), jax.jit(op)(x))
    assert not collectives(run)
    by_column = place(mesh_of(), x, None, None, "tensor")
    with pytest.warns(UserWarning, match="the op cannot shard this axis"):
        run = compiled(op, by_column)
    assert_equal(run(by_column), jax.jit(op)(x))


def test_out_sharding():
    mesh = mesh_of(AxisType.Explicit, a=4)
    x, w = X[0], jnp.ones((128, 32))
    dims = (((1,), (0,)), ((), ()))
    sharding = NamedSharding(mesh, P("a", None))
    with jax.set_mesh(mesh):
        y = jax.jit(lambda x, w: fallback_dot(x, w, dims, out_sharding=sharding))(x, w)
    assert y.sharding.is_equivalent_to(sharding, 2)
    np.testing.assert_allclose(y, fallback_dot(x, w, dims), rtol=1e-6)


@pytest.mark.parametrize(
    "axes", with_first_fast([{"data"}, {"data", "fsdp", "tensor"}])
)
def test_shard_map_over_rows_is_the_same_product(axes):
    """Over some axes of a mesh, and over all."""
    mesh = mesh_of()
    w = jax.random.normal(jax.random.key(2), (128, 32))
    dims = (((2,), (0,)), ((), ()))

    def product(x, w):
        return dot_general(x, w, dims, recipe=Recipe(block=SIDE), theta=2.5)[0]

    specs = {"in_specs": (P("data"), P()), "out_specs": P("data")}
    mapped = jax.shard_map(product, mesh=mesh, axis_names=axes, **specs)
    np.testing.assert_allclose(
        jax.jit(mapped)(X, w), jax.jit(product)(X, w), rtol=1e-6, atol=1e-6
    )


ROWS, EXPERTS = 200, 4
RAGGED = Recipe(block=SIDE)


def ragged_step(x, w, sizes):
    """The output, both gradients and the stats of four experts."""
    options = {"recipe": RAGGED, "theta": 20.0, "key": jax.random.key(0)}
    dot = functools.partial(ragged_dot, **options)
    y, vjp, stats = jax.vjp(lambda x, w: dot(x, w, sizes), x, w, has_aux=True)
    return y, vjp(jnp.sin(y)), stats


def test_experts_stay_where_they_are():
    """Each device multiplies the tokens of its experts; weights do not travel."""
    mesh = mesh_of(expert=2, tensor=2)
    x, w = heavy((ROWS, 64)), heavy((EXPERTS, 64, 128), 1)
    sharded = place(mesh, w, "expert", None, "tensor")
    groups = jnp.array([70, 0, 33, 81])
    step = jax.jit(ragged_step, out_shardings=(None, (None, sharded.sharding), None))
    run = step.lower(x, sharded, groups).compile()
    y, (dx, dw), stats = run(x, sharded, groups)
    want_y, (want_dx, want_dw), want_stats = jax.jit(ragged_step)(x, w, groups)
    # A sum over experts has one term that is not zero, so it is exact.
    assert_equal((y, dw, stats), (want_y, want_dw, want_stats))
    assert_close(dx, want_dx)
    found = collectives(run)
    tiles = (ROWS + EXPERTS * (SIDE - 1)) // SIDE
    sizes = [("all-reduce", tiles * SIDE * 64)] * 2  # Y's half and dX
    assert [(c.kind, c.size) for c in found] == sizes

    explicit = place(mesh_of(AxisType.Explicit, expert=2, tensor=2), w, "expert")
    with (
        jax.set_mesh(explicit.sharding.mesh),
        pytest.raises(ValueError, match=r"automatic.*4@expert,64"),
    ):
        ragged_dot(x, explicit, groups)


class Scanned(nn.Module):
    @nn.compact
    def __call__(self, x):
        remat = functools.partial(nn.remat, policy=save_codes, prevent_cse=False)
        block, axes = remat(lambda m, x: (x + m(x), None)), {"params": 0, "fallback": 0}
        stack = nn.scan(block, axes, split_rngs={"params": True}, length=2)
        return stack(NormDense(128, dot_general=DOT), x)[0]


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_a_scanned_model_on_a_mesh(kind):
    variables = jax.jit(Scanned().init)(jax.random.key(0), X)
    args = variables["params"], variables["fallback"]
    want = jax.jit(step_of(Scanned()))(*args, X)
    mesh = mesh_of(kind, data=8)
    with jax.set_mesh(mesh):
        got = jax.jit(step_of(Scanned()))(*place(mesh, args), place(mesh, X, "data"))
    assert_close(got, want, rtol=1e-4)


def test_layers_of_one_shape_have_their_own_shardings():
    """As in an MLP: the first weight is sharded by columns, the second by rows."""
    mesh = mesh_of(tensor=4)
    x, up, down = heavy((256, 512)), heavy((512, 512), 1), heavy((512, 512), 2)

    def mlp(x, up, down):
        dot = functools.partial(
            dot_general,
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
    run = jax.jit(mlp)
    found = collectives(run.lower(*arguments).compile())
    assert [(kind, size) for kind, _, size, _ in found] == [("all-reduce", 256 * 512)]
    assert_close(run(*arguments), jax.jit(mlp)(x, up, down))
