"""The quantized ragged dot against its definition in float64, group by group."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from fbq_jax import Gemm, Recipe, dot_general, ragged_dot, recipes, save_codes
from fbq_jax.core.threshold import Stats
from fbq_jax.experts import mlp
from fbq_jax.experts.ragged_dot import group_rates
from fbq_jax.kernels.tiles import Tiles, from_tiles
from fbq_jax.nonlinear import silu_gate
from tests import oracle
from tests.gpus import h200s, needs_compiler
from tests.kernels.quantize_cases import heavy
from tests.marks import rows_with_first_fast, slow

M, K, N = 200, 96, 50
SIZES = (70, 0, 33, 1, 80)
X, W, DY = heavy((M, K), 0), heavy((len(SIZES), K, N), 1), heavy((M, N), 2)
NEAREST = Recipe(block=32, dlhs=Gemm(), drhs=Gemm())
# Row scales in all products, of one tensor, of shards, and an unquantized product.
FAST_RECIPES = {"rowwise", "per_tensor", "aqt_int8_local", "switchback_m"}


def groups():
    """Each group's number and its rows."""
    ends = np.cumsum(SIZES)
    return [(g, slice(ends[g] - size, ends[g])) for g, size in enumerate(SIZES)]


@functools.partial(jax.jit, static_argnames="recipe")
def product(x, w, dy, sizes, recipe, **options):
    """The output, both gradients and the stats."""
    options.setdefault("key", jax.random.key(0))
    y, vjp, stats = jax.vjp(
        lambda x, w: ragged_dot(x, w, sizes, recipe=recipe, **options),
        x,
        w,
        has_aux=True,
    )
    return y, *vjp(dy), stats


def test_three_gemms_against_float64():
    """Every operand of every GEMM is rounded tile by tile."""
    m, k, n = block = (32, 64, 128)
    recipe, theta = Recipe(block=block), 20.0
    key = jax.random.key(9)
    sizes = jnp.array(SIZES)
    y, dx, dw, stats = product(X, W, DY, sizes, recipe, theta=theta, key=key)

    seed = int(jax.random.bits(key, (), jnp.uint32))
    want_y, want_dx, want_dw = np.zeros((M, N)), np.zeros((M, K)), np.zeros(W.shape)
    metrics = []
    tiles = [
        (g, slice(start, min(start + m, rows.stop)))
        for g, rows in groups()
        for start in range(rows.start, rows.stop, m)
    ]
    for t, (g, rows) in enumerate(tiles):

        def noise(stream, x, t=t):
            of_stream = oracle.fold(oracle.fold(seed, stream), t)
            return oracle.noise(int(of_stream), (m, x.shape[1]))[: len(x)]

        x, dy = X[rows], DY[rows]
        *_, x_fwd, metric = oracle.quantize_fallback(x, theta, (m, k))
        w = oracle.quantize(W[g], (k, n))[2]
        x_bwd = oracle.quantize(x, (m, k), noise(0, x))[2]
        dy = oracle.quantize(dy, (m, n), noise(2, dy))[2]
        want_y[rows], want_dx[rows] = x_fwd @ w, dy @ w.T
        want_dw[g] += x_bwd.T @ dy
        metrics.append(metric)
    for got, want in ((y, want_y), (dx, want_dx), (dw, want_dw)):
        assert oracle.relative(got, want) <= 1e-5
    assert not np.any(y[sum(SIZES) :])
    assert not np.any(dx[sum(SIZES) :])
    assert not np.any(dw[1])
    got = np.asarray(stats.metric)
    np.testing.assert_array_equal(got[: len(tiles)], metrics)
    assert not np.any(got[len(tiles) :])
    assert stats.rate == pytest.approx(np.mean(np.stack(metrics) > theta))
    assert 0.1 < stats.rate < 0.9


def same_as_alone(recipe):
    """Which of Y, dX and dW have the bits that a group's rows give alone.

    Noise depends on the position of a row, and no scale spans two tiles of a group.
    """
    scales = [gemm.scales for gemm in (recipe.fwd, recipe.dlhs, recipe.drhs)]
    return (
        scales[0][0] != "tensor",
        recipe.dlhs.lhs == "nearest" and scales[1][0] != "tensor",
        recipe.drhs.lhs == recipe.drhs.rhs == "nearest"
        and not {"row", "tensor"} & {*scales[2]},
    )


@pytest.mark.parametrize(
    "name",
    slow(["nearest", *recipes.NAMED], {*recipes.NAMED, "nearest"} - FAST_RECIPES),
)
def test_a_group_computes_as_its_rows_alone(name):
    """By every recipe: bit for bit, or with an error of the same size."""
    recipe = dataclasses.replace({"nearest": NEAREST, **recipes.NAMED}[name], block=32)
    key = jax.random.key(3)
    y, dx, dw, _ = product(X, W, DY, jnp.array(SIZES), recipe, theta=20.0, key=key)

    # A tile has scales of its own in place of the shards of a few rows.
    whole = dataclasses.replace(recipe, drhs=dataclasses.replace(recipe.drhs, shards=1))

    @jax.jit
    def alone(x, w, dy):
        dims = (((1,), (0,)), ((), ()))
        dot = functools.partial(dot_general, recipe=whole, theta=20.0, key=key)
        y, vjp = jax.vjp(lambda x, w: dot(x, w, dims)[0], x, w)
        return y, *vjp(dy)

    g, rows = groups()[2]
    x, w, dy = (np.asarray(a, np.float64) for a in (X[rows], W[g], DY[rows]))
    for got, want, exact, same in zip(
        (y[rows], dx[rows], dw[g]),
        alone(X[rows], W[g], DY[rows]),
        (x @ w, dy @ w.T, x.T @ dy),
        same_as_alone(recipe),
        strict=True,
    ):
        if same:
            np.testing.assert_array_equal(got, want)
        else:
            error = oracle.relative(want, exact)
            assert oracle.relative(got, exact) <= 1.6 * error + 1e-6


def test_sizes_are_known_at_run_time_only():
    """One program serves all sizes: empty groups, and more rows than exist."""
    recipe = Recipe(block=32, criterion=None)
    step = jax.jit(lambda sizes: ragged_dot(X, W, sizes, recipe=recipe)[0])
    one, none, many = (
        step(jnp.array(sizes))
        for sizes in ((0, M, 0, 0, 0), (0,) * 5, (0, 0, 50, 900, 7))
    )
    assert step._cache_size() == 1
    assert oracle.relative(one, X @ W[1]) < 0.1
    assert not np.any(none)
    assert oracle.relative(many[:50], X[:50] @ W[2]) < 0.1
    assert oracle.relative(many[50:], X[50:] @ W[3]) < 0.1


LARGEST = 2**31 - 1
# Sizes, and those that have the same effect.
SUMS = {
    "int32": [
        ((150, LARGEST, 5, LARGEST, LARGEST), (150, 50, 0, 0, 0)),
        ((90, -LARGEST - 1, 7, -5, 2), (90, 0, 7, 0, 2)),
    ],
    "uint32": [((150, 2**32 - 1, 1, 0, 7), (150, 50, 0, 0, 0))],
    "int8": [((90, 127, 127, 127, 127), (90, 110, 0, 0, 0))],
    "uint8": [((90, 255, 255, 255, 255), (90, 110, 0, 0, 0))],
}


@pytest.mark.parametrize(
    ("name", "dtype"),
    rows_with_first_fast(
        [
            *[("switchback_m", dtype) for dtype in SUMS],
            *[(name, "int32") for name in recipes.NAMED if name != "switchback_m"],
        ],
        4,
    ),
)
def test_a_sum_of_any_size_counts_as_the_number_of_rows(name, dtype):
    """Forward and backward, bit for bit; also in GEMMs that are in float."""
    recipe = dataclasses.replace(recipes.NAMED[name], block=32)
    for sizes, same in SUMS[dtype]:
        got = product(X, W, DY, jnp.array(sizes, dtype), recipe)
        want = product(X, W, DY, jnp.array(same), recipe)
        jax.tree.map(np.testing.assert_array_equal, got, want)


@pytest.mark.parametrize(
    # With the other tiles' blocks, the second number would be rounded to 1.
    ("target_rate", "above"),
    [((0.4, 0.6), 6), ((0.116, 0.136), 2)],
)
def test_a_first_threshold_counts_the_tiles_that_have_rows(target_rate, above):
    """18 of 20 groups are empty, and 4 of 25 tiles, with 12 blocks, hold rows."""
    w = jnp.ones((20, K, 8))
    sizes = jnp.zeros(20, jnp.int32).at[jnp.array([3, 11])].set(64)
    recipe = Recipe(block=32, target_rate=target_rate)
    _, stats = jax.jit(lambda sizes: ragged_dot(X, w, sizes, recipe=recipe))(sizes)
    amax = np.abs(X[:128]).reshape(4, 32, 3, 32).max(axis=(1, 3))
    assert stats.theta == np.sort(amax.ravel())[11 - above]
    assert stats.rate == pytest.approx(above / 12)


def test_rates_of_groups_count_blocks_that_are_not_zero():
    """A NaN counts, and does not fall back."""
    metric = jnp.array([[[3.0, 0.0]], [[1.0, 5.0]], [[jnp.nan, 4.0]], [[0.0, 0.0]]])
    zero = jnp.float32(0.0)
    stats = Stats(zero, jnp.float32(2.0), metric, zero, jnp.uint32(1))
    rates = group_rates(stats, jnp.array([0, 0, 2, 3]), 3)
    np.testing.assert_allclose(rates, [2 / 3, 0.0, 1 / 2], rtol=1e-6)


def test_no_rows_and_no_columns():
    empty = jnp.zeros(2, jnp.int32)
    args = jnp.zeros((0, K)), W[:2], jnp.zeros((0, N)), empty, recipes.fallback
    y, dx, dw, stats = product(*args)
    assert (y.shape, dx.shape, stats.rate) == ((0, N), (0, K), 0.0)
    assert not np.any(dw)
    y, stats = jax.jit(ragged_dot)(X[:, :0], W[:, :0], jnp.array(SIZES))
    np.testing.assert_array_equal(y, jnp.zeros((M, N)))
    assert stats.rate == 0.0


def test_vmap():
    sizes = jnp.array([SIZES, SIZES[::-1]])
    each = jax.jit(
        jax.vmap(lambda s: ragged_dot(X, W, s, recipe=NEAREST, theta=20.0)[0])
    )(sizes)
    for got, s in zip(each, sizes, strict=True):
        want = product(X, W, DY, s, NEAREST, theta=20.0)[0]
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5 * np.abs(want).max())


def test_remat_saves_codes_only():
    """Of two scanned and rematerialized layers."""
    w, sizes = jnp.ones((2, 8, K, K)), jnp.full(8, M // 8)

    def loss(w):
        @functools.partial(jax.checkpoint, policy=save_codes)
        def layer(x, w):
            return jnp.tanh(ragged_dot(x, w, sizes, recipe=NEAREST, theta=2.0)[0]), None

        return jnp.sum(jax.lax.scan(layer, jnp.ones((M, K)), w)[0])

    _, vjp = jax.eval_shape(functools.partial(jax.vjp, loss), w)
    saved = [x for x in jax.tree.leaves(vjp) if hasattr(x, "dtype")]
    tiles = (M + 8 * 31) // 32
    codes = sorted(x.shape for x in saved if x.dtype == jnp.int8)
    assert codes == [(2, 8, K, K), (2, tiles, K, 32)]
    floats = [x.shape for x in saved if x.dtype == jnp.float32 and x.size >= M * K]
    assert set(floats) <= {w.shape, (2, M, K)}  # the layers' inputs


WIDTH, TOP_K = 512, 2


def read_gate(y, gate_up, positions):
    del gate_up, positions
    return silu_gate(*jnp.split(y, 2, axis=-1))


def read_gate_grad(dy, gate_up, positions):
    del positions
    gate, up = jnp.split(gate_up, 2, axis=-1)
    _, vjp = jax.vjp(lambda gate, up: jax.nn.silu(gate) * up, gate, up)
    return jnp.concatenate(vjp(dy[:, :WIDTH]), axis=-1)


def read_output(y, gate_up, positions):
    del gate_up
    return jnp.sum(y[positions].astype(jnp.float32), axis=1)


def read_gradient(dx, gate_up, positions):
    del gate_up
    return mlp._take_tokens_bwd(positions, dx)[0]


@needs_compiler
@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "read", [read_gate, read_gate_grad, read_output, read_gradient]
)
def test_xla_reads_tiles_in_place(read):
    """Compiled for an H200, what reads the rows of a product makes no copy of them."""
    rows, tiles = 4096, 40
    sharding = NamedSharding(h200s(1, "data"), PartitionSpec())

    def array(*shape, dtype=jnp.bfloat16):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

    def temporary_bytes(y, tiles=None):
        def run(y, tiles, *operands):
            return read(y if tiles is None else from_tiles(y, tiles), *operands)

        positions = array(rows // TOP_K, TOP_K, dtype=jnp.int32)
        args = y, tiles, array(rows, 2 * WIDTH), positions
        compiled = jax.jit(run).lower(*args).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    numbers = (array(tiles, dtype=jnp.int32),) * 3
    given = Tiles(*numbers, array(rows, dtype=jnp.int32))
    more = temporary_bytes(array(tiles, 128, 2 * WIDTH), given)
    more -= temporary_bytes(array(rows, 2 * WIDTH))
    assert more <= 8 * rows  # a few bytes per row, which has 2048


ONLY_FLOATS = Recipe(where_slower="float")
IN_BFLOAT16 = Recipe(fwd=Gemm(reduce="bfloat16"))


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"lhs": X[None]}, ValueError, r"lhs \[M, K\], .* got \(1, 200, 96\)"),
        ({"rhs": W[:, 1:]}, ValueError, r"got \(200, 96\), \(5, 95, 50\), \(5,\)"),
        ({"group_sizes": jnp.array([200])}, ValueError, r"got .*, \(1,\)"),
        ({"group_sizes": jnp.ones(5)}, TypeError, "group_sizes is float32"),
        ({"group_sizes": [40] * 5}, TypeError, "group_sizes is a list; .* arrays"),
        ({"lhs": X.astype(jnp.int32)}, TypeError, "lhs is int32"),
        ({"recipe": ONLY_FLOATS}, ValueError, "takes a recipe .* got .*slower='float'"),
        ({"recipe": IN_BFLOAT16}, ValueError, r"own dtype; .* Gemm.reduce: .*'bfloat1"),
        ({"theta": -1.0}, ValueError, "at least 0; got -1.0"),
        ({"precision": "highest"}, ValueError, "precision=highest cannot be met"),
        ({"implementation": "mosaic"}, ValueError, "mosaic cannot do quantize: .* GPU"),
    ],
)
def test_unsupported_arguments_are_named(change, error, message):
    options = {"lhs": X, "rhs": W, "group_sizes": jnp.array(SIZES), **change}
    with pytest.raises(error, match=message):
        ragged_dot(**options)
