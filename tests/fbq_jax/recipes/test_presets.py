"""Each named recipe against its published equations, in float64."""

import dataclasses
import functools
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


def near(rows, columns, *, bound=127.0, seed=None):
    """The values of codes with a scale per block; None for all rows or columns.

    Stochastic rounding draws the noise of a seed.
    """

    def values(x):
        block = rows or x.shape[0], columns or x.shape[1]
        noise = None if seed is None else oracle.noise(seed, x.shape)
        return oracle.quantize(x, block, noise, bound)[2]

    return values


def fp8(*block):
    return lambda x: oracle.quantize_float8(x, block)[2]


def in_shards(seed=None):
    """Four shards of the tokens, of which the last one is two tokens short."""

    def values(x):
        size = -(-len(x) // 4)
        seeds = [seed if seed is None else int(oracle.fold(seed, i)) for i in range(4)]
        parts = [x[i * size : (i + 1) * size] for i in range(4)]
        quantizers = [near(None, 1, bound=127.5, seed=seed) for seed in seeds]
        return np.concatenate([q(x) for q, x in zip(quantizers, parts, strict=True)])

    return values


noisy = functools.partial(near, seed=SEED)
x_noisy = functools.partial(near, seed=seed_of(KEY, 0))
aqt = functools.partial(near, bound=127.5)
TENSOR, ROW, COLUMN = near(None, None), near(1, None), near(None, 1)
BLOCK, BLOCK_32, OF_X, OF_W = near(128, 128), near(32, 32), near(32, 64), near(64, 32)
FLOAT = np.float64
OF_CODES = Gemm(lhs=None, rhs=None, keeps="codes")
VARIANTS = {
    "row_block_codes": dataclasses.replace(recipes.row_block, block=32, drhs=OF_CODES),
    "rowwise_dw_alone": dataclasses.replace(
        recipes.rowwise, fwd=FLOAT_GEMM, dlhs=FLOAT_GEMM
    ),
    "backward_of_codes": dataclasses.replace(
        recipes.block, block=(32, 64, 32), dlhs=OF_CODES, drhs=OF_CODES
    ),
}
FLOATS = FLOAT, FLOAT
ROW_FWD = near(1, 128), BLOCK
ROW_DX = noisy(1, 128), BLOCK
FP8_ROW = fp8(1, 128), fp8(128, 128)
AQT_FWD = aqt(1, None), aqt(None, 1)
AQT_DX = aqt(1, None, seed=SEED), aqt(1, None)
TENSOR_FWD, TENSOR_DX = (TENSOR, TENSOR), (noisy(None, None), TENSOR)
ROW_32 = near(1, 32)
# How X [M, K] and W [K, N] are quantized in Y, dY [M, N] and W in dX, X and dY in dW.
EQUATIONS = {
    "row_block_lhs": (ROW_FWD, ROW_DX, (x_noisy(128, 1), noisy(128, 128))),
    "fp8_row_block": (FP8_ROW, FP8_ROW, (fp8(128, 1), fp8(128, 1))),
    "jetfire": (
        (BLOCK_32, BLOCK_32),
        (noisy(32, 32), BLOCK_32),
        (BLOCK_32, noisy(32, 32)),
    ),
    "switchback_q": ((ROW, COLUMN), (ROW, ROW), FLOATS),
    "per_tensor": (TENSOR_FWD, TENSOR_DX, (TENSOR, noisy(None, None))),
    "rowwise": ((ROW, COLUMN), (ROW, ROW), (COLUMN, COLUMN)),
    "aqt_int8_local": (AQT_FWD, AQT_DX, (in_shards(), in_shards(SEED))),
    # Without quantization, dW or the backward pass may read the values of codes.
    "row_block_codes": ((ROW_32, BLOCK_32), (noisy(1, 32), BLOCK_32), (ROW_32, FLOAT)),
    "backward_of_codes": ((OF_X, OF_W), (FLOAT, OF_W), (OF_X, FLOAT)),
    "rowwise_dw_alone": (FLOATS, FLOATS, (COLUMN, COLUMN)),
    # The others have scales of other sizes, and GEMMs that are above, too.
    "block": (
        (BLOCK, BLOCK),
        (noisy(128, 128), BLOCK),
        (x_noisy(128, 128), noisy(128, 128)),
    ),
    "row_block": (ROW_FWD, ROW_DX, (x_noisy(128, 1), noisy(128, 1))),
    "fp8_row_block_lhs": (FP8_ROW, FP8_ROW, (fp8(128, 1), fp8(128, 128))),
    "switchback": ((ROW, TENSOR), (ROW, TENSOR), FLOATS),
    "switchback_m": ((ROW, TENSOR), (ROW, TENSOR), (ROW, FLOAT)),
    "per_tensor_bifurcated": (TENSOR_FWD, TENSOR_DX, (TENSOR, FLOAT)),
    "aqt_int8": (AQT_FWD, AQT_DX, FLOATS),
}


@pytest.mark.parametrize("name", with_first_fast(EQUATIONS, 10))
def test_equations(name):
    recipe = (recipes.NAMED | VARIANTS)[name]
    x, w, dy = (heavy(shape, i) for i, shape in enumerate([(M, K), (K, N), (M, N)]))
    got = product(x, w, dy, recipe=recipe, key=KEY)
    operands = [(x, w), (dy, w), (x, dy)]
    (x_fwd, w_fwd), (dy_dx, w_dx), (x_dw, dy_dw) = (
        [quantize(np.asarray(x)) for quantize, x in zip(*gemm, strict=True)]
        for gemm in zip(EQUATIONS[name], operands, strict=True)
    )
    want = x_fwd @ w_fwd, dy_dx @ w_dx.T, x_dw.T @ dy_dw
    for array, exact in zip(got, want, strict=True):
        assert oracle.relative(array, exact) <= 1e-5


def test_every_recipe_has_its_equations():
    # test_dot_general.py has those of the method and its variants.
    method = {"fallback", "fallback_rowwise_bwd"}
    assert set(recipes.NAMED) == method | EQUATIONS.keys() - VARIANTS.keys()
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
    in_order = recipe.fwd.scales[0] == "row_block"
    yield "yes" if recipe.batch_invariant else "if ordered" if in_order else "no"


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

    dot = functools.partial(dot_general, recipe=recipe, key=jax.random.key(0))

    def backward(x, w):
        return jax.vjp(lambda x, w: dot(x, w, MATMUL)[0], x, w)[1]

    x, w = (jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in ((640, 256), (256, 384)))
    leaves = jax.tree.leaves(jax.eval_shape(backward, x, w))

    def values(leaf):
        """Also of codes, which lie in words of four."""
        return leaf.size * (4 if leaf.dtype == jnp.int32 else 1)

    for operand, size in zip((x, w), SAVED.get(name, (1, 1)), strict=True):
        kept = [leaf for leaf in leaves if values(leaf) == operand.size]
        each = [leaf.size * leaf.dtype.itemsize // operand.size for leaf in kept]
        assert each == [size]
    scales = [leaf for leaf in leaves if values(leaf) not in (x.size, w.size)]
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
    gemms = {
        name: dataclasses.replace(gemm, lhs="nearest", rhs="nearest")
        for name, gemm in (("dlhs", recipe.dlhs), ("drhs", recipe.drhs))
        if not gemm.in_floats
    }
    return dataclasses.replace(recipe, **gemms)


def check_against_library(dot, recipe, operands):
    """The product and both gradients are those of another library's dot_general."""

    @jax.jit
    def run(x, w, dy):
        with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
            y, vjp = jax.vjp(lambda x, w: dot(x, w, MATMUL), x, w)
            return y, *vjp(dy)

    got, want = product(*operands, recipe=recipe), run(*operands)
    for array, expected in zip(got, want, strict=True):
        assert oracle.relative(array, expected) <= 1e-5


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", with_first_fast(["aqt_int8_local", "aqt_int8"]))
def test_aqt(name):
    """Matches AQT with nearest rounding; its noise differs from ours."""
    pytest.importorskip("aqt")
    from aqt.jax.v2 import config

    bits = {"drhs_bits": None}
    if name == "aqt_int8_local":
        shards = config.LocalAqt(contraction_axis_shard_count=4)
        bits = {"drhs_bits": 8, "drhs_local_aqt": shards}
    int8 = config.config_v4(**bits)
    config.set_stochastic_rounding(int8, False, False, "jax.uniform")

    def dot(*args):
        return config.set_context(int8, key=None, train_step=None)(*args)

    operands = heavy((72, K)), heavy((K, N), 1), heavy((72, N), 2)
    check_against_library(dot, nearest(recipes.NAMED[name]), operands)


@pytest.mark.filterwarnings("ignore")
def test_qwix():
    """Qwix quantizes each operand of each GEMM: ``rowwise`` with a bound of 127.5.

    The largest magnitudes here are positive, because Qwix's code for a negative one is
    -128.
    """
    pytest.importorskip("qwix")
    from qwix._src.core import dot_general_qt as qwix

    operands = (
        "lhs",
        "rhs",
        "dlhs_grad",
        "drhs_grad",
        "dlhs_residual",
        "drhs_residual",
    )
    int8 = {f"{name}_qtype": jnp.int8 for name in operands}
    config = qwix.DotGeneralQtConfig(**int8, use_original_residuals=True)
    dot = functools.partial(qwix.dot_general_qt, config=config)
    shapes = (M, K), (K, N), (M, N)
    arrays = [jnp.maximum(heavy(shape, i), -0.1) for i, shape in enumerate(shapes)]
    recipe = dataclasses.replace(recipes.rowwise, bound=127.5)
    check_against_library(dot, recipe, arrays)
