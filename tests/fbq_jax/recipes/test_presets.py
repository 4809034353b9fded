"""Each named recipe against its published equations, in float64."""

import dataclasses
import functools
import importlib
import types
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from examples.llama.config import RECIPES
from fbq_jax import FLOAT_GEMM, Gemm, dot_general, recipes
from tests import oracle
from tests.fbq_jax.core.test_dot_general import MATMUL, product, seed_of
from tests.kernels.quantize_cases import heavy
from tests.marks import with_first_fast

M, K, N = 70, 48, 40
KEY = jax.random.key(9)
SEED = seed_of(KEY, 2)  # for the noise of dY


def quantize(x, axis, bound=127.0, noise=0.0):
    """Quantizes with one scale along an axis, or one scale for axis None."""
    amax = np.abs(x).max(axis=axis, keepdims=True)
    v = np.clip(x * (np.float32(bound) / amax), -127, 127)
    return np.rint(v + noise) * (amax.astype(np.float64) / bound)


def jetfire(x, w, dy, side=32):
    x, w = (oracle.quantize(matrix, (side, side))[2] for matrix in (x, w))
    dy = oracle.quantize(dy, (side, side), oracle.noise(SEED, dy.shape))[2]
    return x @ w, dy @ w.T, x.T @ dy


def switchback(x, w, dy):
    y = quantize(x, 1) @ quantize(w, None)
    return y, quantize(dy, 1) @ quantize(w, None).T, x.T @ np.float64(dy)


def switchback_m(x, w, dy):
    return *switchback(x, w, dy)[:2], quantize(x, 1).T @ dy


def switchback_q(x, w, dy):
    """W has a scale per output channel; in dX, one per input channel."""
    y = quantize(x, 1) @ quantize(w, 0)
    return y, quantize(dy, 1) @ quantize(w, 1).T, x.T @ np.float64(dy)


def per_tensor(x, w, dy):
    x, w = quantize(x, None), quantize(w, None)
    dy = quantize(dy, None, noise=oracle.noise(SEED, dy.shape))
    return x @ w, dy @ w.T, x.T @ dy


def per_tensor_bifurcated(x, w, dy):
    return *per_tensor(x, w, dy)[:2], quantize(x, None).T @ dy


def rowwise(x, w, dy):
    dw = quantize(x, 0).T @ quantize(dy, 0)
    return *switchback_q(x, w, dy)[:2], dw


def aqt_int8(x, w, dy):
    y = quantize(x, 1, 127.5) @ quantize(w, 0, 127.5)
    dy_codes = quantize(dy, 1, 127.5, oracle.noise(SEED, dy.shape))
    return y, dy_codes @ quantize(w, 1, 127.5).T, x.T @ np.float64(dy)


def aqt_int8_local(x, w, dy):
    """Four shards, of which the last one is two tokens short."""
    size, dw = -(-len(x) // 4), 0.0
    for i in range(4):
        part = slice(i * size, (i + 1) * size)
        noise = oracle.noise(int(oracle.fold(SEED, i)), dy[part].shape)
        dw += quantize(x[part], 0, 127.5).T @ quantize(dy[part], 0, 127.5, noise)
    return *aqt_int8(x, w, dy)[:2], dw


def row_block(x, w, dy, side=128):
    """W has square blocks; a token of X or dY, or a channel in dW, its own scales."""
    y = oracle.quantize(x, (1, side))[2] @ oracle.quantize(w, (side, side))[2]
    noise = oracle.noise(SEED, dy.shape)
    dx = oracle.quantize(dy, (1, side), noise)[2]
    dx = dx @ oracle.quantize(w, (side, side))[2].T
    x_noise = oracle.noise(seed_of(KEY, 0), x.shape)
    dw = oracle.quantize(x, (side, 1), x_noise)[2].T
    return y, dx, dw @ oracle.quantize(dy, (side, 1), noise)[2]


def row_block_lhs(x, w, dy):
    """Of dW's operands only X has a scale for each channel."""
    y, dx, _ = row_block(x, w, dy)
    x_noise = oracle.noise(seed_of(KEY, 0), x.shape)
    noise = oracle.noise(SEED, dy.shape)
    values = oracle.quantize(dy, (128, 128), noise)[2]
    return y, dx, oracle.quantize(x, (128, 1), x_noise)[2].T @ values


def block(x, w, dy):
    noise = oracle.noise(SEED, dy.shape)
    x_noise = oracle.noise(seed_of(KEY, 0), x.shape)
    side = (128, 128)
    w, dy = oracle.quantize(w, side)[2], oracle.quantize(dy, side, noise)[2]
    y = oracle.quantize(x, side)[2] @ w
    return y, dy @ w.T, oracle.quantize(x, side, x_noise)[2].T @ dy


def row_block_codes(x, w, dy):
    """An unquantized dW that reads the values of forward codes."""
    values = oracle.quantize(x, (1, 32))[2]
    return *row_block(x, w, dy, 32)[:2], values.T @ dy


def fp8_row_block(x, w, dy, side=128):
    """The blocks of ``row_block``, in E4M3."""

    def values(matrix, block):
        return oracle.quantize_float8(matrix, block)[2]

    y = values(x, (1, side)) @ values(w, (side, side))
    dx = values(dy, (1, side)) @ values(w, (side, side)).T
    return y, dx, values(x, (side, 1)).T @ values(dy, (side, 1))


def fp8_row_block_lhs(x, w, dy):
    """Of dW's operands only X has a scale for each channel."""
    values = [
        oracle.quantize_float8(matrix, block)[2]
        for matrix, block in ((x, (128, 1)), (dy, (128, 128)))
    ]
    return *fp8_row_block(x, w, dy)[:2], values[0].T @ values[1]


def rowwise_dw_alone(x, w, dy):
    x64, w64, dy64 = (np.float64(matrix) for matrix in (x, w, dy))
    return x64 @ w64, dy64 @ w64.T, rowwise(x, w, dy)[2]


def backward_of_codes(x, w, dy):
    """An unquantized backward pass that reads the values of forward codes."""
    x, w = (oracle.quantize(matrix, (32, 64))[2] for matrix in (x, w.T))
    return x @ w.T, dy @ w, x.T @ dy


OF_CODES = Gemm(lhs=None, rhs=None, keeps="codes")
VARIANTS = {
    "jetfire_64": dataclasses.replace(recipes.jetfire, block=64),
    "row_block_32": dataclasses.replace(recipes.row_block, block=32),
    "row_block_codes": dataclasses.replace(recipes.row_block, block=32, drhs=OF_CODES),
    "fp8_row_block_32": dataclasses.replace(recipes.fp8_row_block, block=32),
    "rowwise_dw_alone": dataclasses.replace(
        recipes.rowwise, fwd=FLOAT_GEMM, dlhs=FLOAT_GEMM
    ),
    "backward_of_codes": dataclasses.replace(
        recipes.block, block=(32, 64, 32), dlhs=OF_CODES, drhs=OF_CODES
    ),
}
EQUATIONS = [
    block,
    jetfire,
    functools.partial(jetfire, side=64),
    switchback,
    switchback_m,
    switchback_q,
    per_tensor,
    per_tensor_bifurcated,
    rowwise,
    aqt_int8,
    aqt_int8_local,
    row_block,
    functools.partial(row_block, side=32),
    row_block_lhs,
    row_block_codes,
    fp8_row_block,
    functools.partial(fp8_row_block, side=32),
    fp8_row_block_lhs,
    rowwise_dw_alone,
    backward_of_codes,
]


def name_of(equations):
    if isinstance(equations, functools.partial):
        return f"{equations.func.__name__}_{equations.keywords['side']}"
    return equations.__name__


# Other sizes of block, and GEMMs of which another recipe has the equations.
SLOW = {
    "jetfire_64",
    "aqt_int8",
    "row_block",
    "row_block_32",
    "fp8_row_block_32",
    "fp8_row_block_lhs",
    "block",
    "switchback",
    "switchback_m",
    "per_tensor_bifurcated",
}


@pytest.mark.parametrize(
    "equations",
    [
        pytest.param(e, marks=[pytest.mark.exhaustive] * (name_of(e) in SLOW))
        for e in EQUATIONS
    ],
    ids=name_of,
)
def test_equations(equations):
    recipe = (recipes.NAMED | VARIANTS)[name_of(equations)]
    operands = heavy((M, K), 0), heavy((K, N), 1), heavy((M, N), 2)
    got = product(*operands, recipe=recipe, key=KEY)
    want = equations(*map(np.asarray, operands))
    for array, exact in zip(got, want, strict=True):
        assert oracle.relative(array, exact) <= 1e-5


def test_every_recipe_has_its_equations():
    # test_dot_general.py has those of the method and its variants.
    method = {"fallback", "fallback_rowwise_bwd"}
    assert set(recipes.NAMED) == method | set(map(name_of, EQUATIONS)) - set(VARIANTS)
    assert list(RECIPES) == ["bf16", *recipes.NAMED, "fp8_delayed", "fp8_current"]


def cells(name, recipe):
    """A row of the table in docs/methods/recipes.md."""
    yield f"`{name}`"
    for gemm in (recipe.fwd, recipe.dlhs, recipe.drhs):
        for side, quantizer in zip(("lhs", "rhs"), gemm.quantizers, strict=True):
            kept = (gemm, side) in ((recipe.dlhs, "rhs"), (recipe.drhs, "lhs"))
            if quantizer is None:
                yield "codes of Y" if kept and gemm.keeps == "codes" else "float"
                continue
            words = [quantizer.scales]
            if quantizer.scales == "row_block":
                words = [f"1x{recipe.lhs_block[1]}"]
            if quantizer.scales == "block":
                words = ["{}x{}".format(*recipe.lhs_block)]
            if quantizer.shards > 1:
                words.append(f"of {quantizer.shards} shards")
            if recipe.bound != 127.0:
                words.append(f"/{recipe.bound}")
            if recipe.codes != "int8":
                words.append("FP8")
            if quantizer.rounding == "stochastic":
                words.append("stochastic")
            if gemm is recipe.fwd and side == "lhs" and recipe.criterion is not None:
                words.append("+ residual")
            yield " ".join(words)


def test_the_table_in_the_documents():
    table = (Path(__file__).parents[3] / "docs/methods/recipes.md").read_text()
    rows = [line for line in table.splitlines() if line.startswith("| `")]
    want = [" | ".join(cells(*named)) for named in recipes.NAMED.items()]
    assert rows == [f"| {row} |" for row in want]


# Saved bytes per value of X and of W, for operands in bfloat16.
SAVED = {
    "switchback": (2, 1),
    "switchback_q": (2, 1),
    "aqt_int8": (2, 1),
    "rowwise_dw_alone": (1, 2),
}


@pytest.mark.parametrize("name", [*recipes.NAMED, "rowwise_dw_alone"])
def test_only_unquantized_gemms_save_unquantized_operands(name):
    recipe = (recipes.NAMED | VARIANTS)[name]

    dot = functools.partial(dot_general, recipe=recipe)

    def backward(x, w):
        return jax.vjp(lambda x, w: dot(x, w, MATMUL)[0], x, w)[1]

    x, w = (jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in ((640, 256), (256, 384)))
    leaves = jax.tree.leaves(jax.eval_shape(backward, x, w))
    for operand, size in zip((x, w), SAVED.get(name, (1, 1)), strict=True):
        kept = [leaf for leaf in leaves if leaf.size == operand.size]
        assert [leaf.dtype.itemsize for leaf in kept] == [size]
    scales = [leaf for leaf in leaves if leaf.size not in (x.size, w.size)]
    assert sum(leaf.size for leaf in scales) < 3000


@pytest.mark.parametrize("name", with_first_fast(["aqt_int8_local", "per_tensor"]))
def test_each_matrix_of_a_stack_has_its_own_scales_and_shards(name):
    x, w, dy = (
        jnp.stack([heavy(shape, i), 64.0 * heavy(shape, i)])
        for i, shape in enumerate([(M, K), (K, N), (M, N)])
    )
    dims = (((2,), (1,)), ((0,), (0,)))
    for array in product(x, w, dy, dims, nearest(recipes.NAMED[name])):
        np.testing.assert_array_equal(array[1], 4096.0 * array[0])


def nearest(recipe):
    """The recipe without stochastic rounding."""

    def rounded(gemm):
        return (
            gemm
            if gemm.in_floats
            else dataclasses.replace(gemm, lhs="nearest", rhs="nearest")
        )

    dlhs, drhs = rounded(recipe.dlhs), rounded(recipe.drhs)
    return dataclasses.replace(recipe, dlhs=dlhs, drhs=drhs)


@pytest.mark.parametrize("name", ["switchback", "switchback_m", "aqt_int8_local"])
def test_dtypes(name):
    """Operands of different dtypes behave as in JAX's dot_general."""

    def backward(x, w):
        dot = functools.partial(dot_general, recipe=recipes.NAMED[name])
        y, vjp = jax.vjp(lambda x, w: dot(x, w, MATMUL, None, jnp.float32)[0], x, w)
        return vjp(y)

    x, w = jnp.zeros((M, K), jnp.bfloat16), jnp.zeros((K, N))
    dx, dw = jax.eval_shape(backward, x, w)
    assert (dx.dtype, dw.dtype) == (jnp.bfloat16, jnp.float32)


@pytest.mark.parametrize("name", ["switchback_m", "per_tensor", "aqt_int8_local"])
@pytest.mark.parametrize("sizes", [(0, 4, 4), (4, 0, 4), (4, 4, 0)])
def test_empty_operands(name, sizes):
    m, k, n = sizes
    x, w, dy = (
        jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((m, k), (k, n), (m, n))
    )
    recipe = recipes.NAMED[name]
    got = jax.eval_shape(functools.partial(product, recipe=recipe), x, w, dy)
    assert list(got) == [dy, x, w]


@pytest.fixture
def run_other():
    """Computes the product and both gradients by another library's dot_general."""

    def run(dot_general, x, w, dy):
        with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
            y, vjp = jax.vjp(dot_general, x, w)
            return y, *vjp(dy)

    return run


def library(name: str) -> types.ModuleType:
    pytest.importorskip(name.partition(".")[0])
    return importlib.import_module(name)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", with_first_fast(["aqt_int8_local", "aqt_int8"]))
def test_aqt(name, run_other):
    """Matches AQT with nearest rounding; its noise differs from ours."""
    config = library("aqt.jax.v2.config")
    bits = {"drhs_bits": None}
    if name == "aqt_int8_local":
        shards = config.LocalAqt(contraction_axis_shard_count=4)
        bits = {"drhs_bits": 8, "drhs_local_aqt": shards}
    int8 = config.config_v4(**bits)
    config.set_stochastic_rounding(int8, False, False, "jax.uniform")

    @jax.jit
    def aqt(x, w, dy):
        dot = config.set_context(int8, key=None, train_step=None)
        return run_other(lambda x, w: dot(x, w, MATMUL), x, w, dy)

    operands = heavy((72, K)), heavy((K, N), 1), heavy((72, N), 2)
    recipe = nearest(recipes.NAMED[name])
    for got, want in zip(
        product(*operands, recipe=recipe), aqt(*operands), strict=True
    ):
        assert oracle.relative(got, want) <= 1e-5


@pytest.mark.filterwarnings("ignore")
def test_qwix(run_other):
    """Qwix quantizes each operand of each GEMM: ``rowwise`` with a bound of 127.5.

    The largest magnitudes here are positive, because Qwix's code for a negative one is
    -128.
    """
    qwix = library("qwix._src.core.dot_general_qt")
    config = qwix.DotGeneralQtConfig(
        lhs_qtype=jnp.int8,
        rhs_qtype=jnp.int8,
        dlhs_grad_qtype=jnp.int8,
        drhs_grad_qtype=jnp.int8,
        dlhs_residual_qtype=jnp.int8,
        drhs_residual_qtype=jnp.int8,
        use_original_residuals=True,
    )

    @jax.jit
    def run_qwix(x, w, dy):
        dot = functools.partial(qwix.dot_general_qt, config=config)
        return run_other(lambda x, w: dot(x, w, MATMUL), x, w, dy)

    operands = [
        jnp.maximum(heavy(shape, i), -0.1)
        for i, shape in enumerate([(M, K), (K, N), (M, N)])
    ]
    recipe = dataclasses.replace(recipes.rowwise, bound=127.5)
    for got, want in zip(
        product(*operands, recipe=recipe), run_qwix(*operands), strict=True
    ):
        assert oracle.relative(got, want) <= 1e-5


def lowered_in_shards(tokens, shards):
    """The gradients of a layer whose dW has shards of the tokens."""
    drhs = Gemm(scales="row", rhs="stochastic", shards=shards)
    recipe = dataclasses.replace(recipes.rowwise, drhs=drhs)

    def grads(x, w, dy, key):
        dot = functools.partial(dot_general, recipe=recipe, key=key)
        _, vjp = jax.vjp(lambda x, w: dot(x, w, MATMUL)[0], x, w)
        return vjp(dy)

    x, w, dy = jnp.ones((tokens, 64)), jnp.ones((64, 32)), jnp.ones((tokens, 32))
    return jax.jit(grads).lower(x, w, dy, jax.random.key(0))


@pytest.mark.parametrize("tokens", with_first_fast([3, 1, 8]))
def test_more_shards_than_tokens_are_no_larger_program(tokens):
    """A product per shard, fused with both quantizations, compiled for minutes."""
    few, many = (
        len(lowered_in_shards(tokens, shards).as_text().splitlines())
        for shards in (8, 64)
    )
    assert many == few


@pytest.mark.exhaustive  # core/test_program_size.py has a fast one
def test_shards_share_one_product_in_the_compiled_program():
    texts = [lowered_in_shards(64, n).compile().as_text() for n in (2, 8)]
    few, many = (text.count(" = ") for text in texts)
    assert many < 1.1 * few
