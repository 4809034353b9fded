"""The library's benchmarks, at sizes that a CPU multiplies with the reference."""

import importlib.util
import itertools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from fbq_jax import ops, recipes
from fbq_jax.bench import (
    baselines,
    data,
    gemm,
    grouped,
    layers,
    linear,
    matmuls,
    measure,
    memory,
    moe,
    moe_scaling,
    quantize,
    serve,
)
from fbq_jax.bench import recipes as bench_recipes
from fbq_jax.ops import dispatch
from tests.fbq_jax.bench.tools import EFFORT, OPTIONS, check_rates, float_backward


@pytest.mark.exhaustive
def test_gemm():
    shape = (256, 128, 512)
    rows = list(gemm.rows([shape], [0.25, 0.5], **OPTIONS))
    check_rates(rows, lambda _: 2 * 256 * 128 * 512)
    bf16, *int8 = rows[:-4]
    assert [row.what for row in rows[-4:]] == [
        f"{codes}, scales of rows{both}"
        for codes in ("INT8", "FP8")
        for both in ("", " and columns")
    ]
    assert (bf16.what, bf16.implementation) == ("bf16", "xla")
    assert (bf16.ratio, bf16.burst_ratio) == (1.0, 1.0)
    for row, rate in zip(int8, [0.25, 0.5], strict=True):
        assert (row.shape, row.fallback) == (shape, rate)
        assert row.ratio == pytest.approx(bf16.ms / row.ms)
        assert row.burst_ratio == pytest.approx(bf16.burst_ms / row.burst_ms)


@pytest.mark.exhaustive
def test_quantize():
    shape = (500, 1024)
    copy, *rows = quantize.rows([shape], [0.0, 0.5], (64, 256), **OPTIONS)
    assert copy.rate == pytest.approx(4 * 64 * 256 / copy.ms / 1e9)
    elements, blocks = 500 * 1024, 4 * 8
    stored = {
        "nearest": lambda _: 2 * elements + 8 * blocks,
        "stochastic": lambda _: 2 * elements + 8 * blocks,
        "row_block": lambda _: 2 * elements + 4 * (500 * 8 + 1024 * 4),
        "row_block, FP8": lambda _: 2 * elements + 4 * (500 * 8 + 1024 * 4),
        "fallback": lambda row: (2 + row.fallback) * elements + 16 * blocks,
    }
    padded = 512 * 1024
    transformed = {"row_block, Hadamard": 4 * padded // 128, "row, Hadamard": 4 * 1024}
    check_rates(
        rows,
        lambda row: (
            3 * padded + transformed[row.what]
            if row.what in transformed
            else 2 * elements + stored[row.what](row)
        ),
    )
    assert [row.fallback for row in rows[:-2]] == [None] * 6
    assert [row.fallback for row in rows[-2:]] == [0.0, pytest.approx(0.5, 0.1)]
    assert all(row.ratio == pytest.approx(row.rate / copy.rate) for row in rows)


@pytest.mark.exhaustive
@pytest.mark.filterwarnings("ignore:Implicit conversion of an array:DeprecationWarning")
def test_linear(monkeypatch):
    others = ("block", *linear._OTHERS)
    named = {
        name: float_backward(recipes.NAMED[name]) for name in (*layers.RECIPES, *others)
    }
    monkeypatch.setattr(layers, "recipes", types.SimpleNamespace(NAMED=named))
    monkeypatch.setattr(matmuls, "recipes", types.SimpleNamespace(NAMED=named))
    monkeypatch.setattr(matmuls, "TIMED", ("block",))
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        # AQT and Qwix, where they are installed, promote.
        measured = list(linear.rows([(256, 640, 128)], **OPTIONS))
    rows = {(row.what, row.layer): row for row in measured}
    check_rates(measured, lambda _: 6 * 256 * 640 * 128)
    assert list(rows)[: len(others) + 7] == [
        ("bf16", "nn.Dense"),
        ("Flax Fp8DotGeneral", "nn.Dense"),
        *((name, "nn.Dense") for name in others),
        ("block, nnx", "nnx.Linear"),
        ("fallback, nnx", "nnx.Linear"),
        ("bf16", "core"),
        ("block", "core"),
        ("Flax Fp8DotGeneral", "core"),
    ]
    for name, row in rows.items():
        assert set(row.errors) == {"y", "dx", "dw"}, name
        assert all(0.0 < error < 0.2 for error in row.errors.values())
        assert row.compile_s > 0.0
        fallback = pytest.approx(0.2) if "fallback" in row.what else None
        if row.what == "fallback_hadamard":
            fallback = pytest.approx(0.5)
        assert row.fallback == fallback
    for layer in ("nn.Dense", "core"):
        bf16, block = rows["bf16", layer], rows["block", layer]
        assert bf16.errors["dw"] < 0.01 < block.errors["dw"]
        assert block.ratio == pytest.approx(bf16.ms / block.ms)


@pytest.mark.exhaustive
def test_recipes(monkeypatch):
    names = ("block", "fallback")
    named = {name: float_backward(recipes.NAMED[name]) for name in names}
    monkeypatch.setattr(recipes, "NAMED", named)
    monkeypatch.setattr(bench_recipes, "OUTLIERS", {"up to 6559": (6559.0, 256)})
    shape = 256, 512, 128
    rows = {(row.what, row.data): row for row in bench_recipes.rows([shape], **OPTIONS)}
    check_rates(rows.values(), lambda _: 6 * 256 * 512 * 128)
    names = ["bf16", *named, "fp8_delayed", "fp8_current", "llm_int8"]
    assert list(rows) == [(n, x) for n in names for x in ("Gaussian", "up to 6559")]
    token = {name: rows[name, "up to 6559"].errors["token"] for name in names}
    # Outliers cost precision in the other tokens of their block.
    assert token["bf16"] < 0.003
    assert token["block"] > 3 * token["fallback"] > 0.01
    assert max(rows["bf16", "Gaussian"].errors.values()) < 0.003
    assert rows["block", "Gaussian"].saved_bytes == pytest.approx(512, rel=0.05)
    assert rows["bf16", "Gaussian"].saved_bytes == pytest.approx(1024, abs=1)
    assert rows["block", "Gaussian"].ratio == pytest.approx(
        rows["bf16", "Gaussian"].ms / rows["block", "Gaussian"].ms
    )


@pytest.mark.exhaustive
def test_grouped():
    M, K, N, E = shape = (500, 256, 384, 3)
    measured = list(grouped.rows([shape], **OPTIONS))
    check_rates(measured, lambda row: (6 if "," in row.layer else 2) * M * K * N)
    int8 = {"Y": [0.0, 0.2], "dX": [None], "dW": [None]}
    for product, load in itertools.product(int8, grouped.loads(M, E)):
        rows = [row for row in measured if (row.layer, row.data) == (product, load)]
        found = [(row.what, row.fallback) for row in rows if "ragged" not in row.what]
        assert found == [("dense bf16", None), *(("INT8", r) for r in int8[product])]
        assert rows[-1].ratio == pytest.approx(rows[0].ms / rows[-1].ms)
        assert 0.0 < rows[-1].errors[product.lower()] < 3e-3
    layer = [row for row in measured if (row.layer, row.data) == ("Y, dX, dW", "Zipf")]
    assert [row.what for row in layer] == ["dense bf16", "block", "fallback"]
    assert layer[1].fallback is None
    assert 0.1 <= layer[2].fallback <= 0.3
    assert 3e-3 < layer[1].errors["dw"] < 0.1


@pytest.mark.exhaustive
def test_moe():
    tokens, width, hidden, _, top_k = shape = (300, 128, 256, 3, 2)
    measured = list(moe.rows([shape], **OPTIONS))
    check_rates(measured, lambda _: 18 * tokens * top_k * width * hidden)
    bf16, block, fallback = measured
    assert bf16.what.startswith("bf16, ")
    assert (block.what, fallback.what) == ("block", "fallback")
    assert block.fallback is None
    assert 0.05 <= fallback.fallback <= 0.5
    assert fallback.ratio == pytest.approx(bf16.ms / fallback.ms)
    assert bf16.errors == {"y": 0.0, "dx": 0.0, "dw": 0.0}
    assert all(1e-3 < error < 0.2 for error in fallback.errors.values())


@pytest.mark.exhaustive
def test_moe_scaling(monkeypatch):
    monkeypatch.setattr(jax, "device_count", lambda: 2)
    tokens, width, hidden, _, top_k = shape = (256, 64, 64, 4, 2)
    measured = list(moe_scaling.rows([shape], **OPTIONS))
    check_rates(measured, lambda row: 18 * row.shape[0] * top_k * width * hidden)
    rows = [(row.what, row.mesh, row.shape[0]) for row in measured]
    assert rows == [
        (name, f"expert={number}", tokens * number)
        for name in ("block", "fallback")
        for number in (1, 2)
    ]
    for one, two in (measured[:2], measured[2:]):
        assert (one.efficiency, one.errors) == (1.0, {})
        assert two.efficiency == pytest.approx(two.tokens_s / (2 * one.tokens_s))
        # Each device has its own experts, and they quantize as one device does.
        assert max(two.errors.values()) < 1e-3


@pytest.mark.parametrize(("M", "E"), [(500, 3), (32768, 128)])
def test_loads_share_out_all_rows(M, E):
    sizes = grouped.loads(M, E)
    assert all((x.sum(), len(x), x.min() >= 0) == (M, E, True) for x in sizes.values())
    assert np.ptp(sizes["balanced"]) < E
    assert sizes["Zipf"].max() > 2 * sizes["Zipf"].min() > 0
    assert np.count_nonzero(sizes["one hot"]) == 1


@pytest.mark.exhaustive
def test_serve():
    shapes = (1, 128, 384), (200, 128, 384)
    measured = list(serve.rows(shapes, **OPTIONS))
    weights = 4 * 128 * (192 + 128 + 3 * 384)
    check_rates(measured, lambda row: 2 * row.shape[0] * weights)
    names = ["bf16", "block", "fallback"]
    assert [(row.shape, row.what) for row in measured] == [
        (shape, name) for shape in shapes for name in names
    ]
    for bf16, block, fallback in (measured[:3], measured[3:]):
        assert block.fallback is None
        assert 0.05 <= fallback.fallback <= 0.5
        assert fallback.ratio == pytest.approx(bf16.ms / fallback.ms)
        assert bf16.errors["y"] == 0.0
        assert 1e-3 < fallback.errors["y"] < 0.1


def test_swiglu_has_the_requested_outliers():
    x = data.swiglu(jax.random.key(0), (512, 1024), 606.0, 256).astype(jnp.float32)
    assert float(jnp.max(jnp.abs(x))) == float(jnp.bfloat16(606.0))
    outliers = jnp.abs(x) >= 20.0
    assert 0 < int(jnp.sum(outliers)) < 1e-3 * x.size
    assert set(np.flatnonzero(outliers.any(0)) % 256) == {0}


def test_saved_bytes():
    w = jnp.ones((64, 32), jnp.bfloat16)
    x = jnp.ones((4, 16, 64), jnp.bfloat16)

    def saved(function):
        return memory.saved_bytes(function, w, x)

    # Per row of x, up to a few bytes of bookkeeping for each output.
    assert saved(lambda w, x: x @ w) == pytest.approx(16 * 64 * 2, abs=32)
    assert saved(lambda w, x: jnp.sin(x) @ w) == pytest.approx(16 * 64 * 4, abs=32)


def test_timed_recipes():
    x = data.activation(jax.random.key(0), (640, 1024))
    timed = {matmul.name: matmul for matmul in matmuls.timed(x, "reference")}
    assert tuple(timed) == matmuls.TIMED
    assert timed["fallback"].fallback == pytest.approx(0.2, 0.1)
    assert timed["block"].fallback is None


def test_libraries_that_are_not_installed_are_named(capsys):
    found = {matmul.name for matmul in baselines.installed_int8_libraries()}
    err = capsys.readouterr().err
    for package, name in (("qwix", "Qwix INT8"), ("aqt", "AQT INT8")):
        installed = importlib.util.find_spec(package) is not None
        assert (name in found) == installed
        assert (f"without {package}_int8: " in err) != installed


@pytest.fixture
def spoil(monkeypatch):
    """Adds 1 to one value of an op's output where the implementation is not given."""

    def spoil_op(spoilt_op):
        choose = dispatch.choose

        def choose_spoilt(op, sides, *, implementation, **options):
            if implementation in (None, "spoilt"):
                return dispatch.Choice(op, "spoilt", "for the test", "spoilt")
            return choose(op, sides, implementation=implementation, **options)

        monkeypatch.setattr(dispatch, "choose", choose_spoilt)
        for name in (
            "matmul",
            *(op for op in dispatch.OPS if op.startswith("quantize")),
        ):
            replacement = with_reference(getattr(ops, name), name == spoilt_op)
            monkeypatch.setattr(ops, name, replacement)

    def with_reference(op, is_spoilt):
        def replacement(*args, implementation, **options):
            out = op(*args, implementation="reference", **options)
            if implementation == "reference" or not is_spoilt:
                return out
            leaves, tree = jax.tree.flatten(out)
            leaves[0] = leaves[0].at[0, 0, 0].add(1)
            return jax.tree.unflatten(tree, leaves)

        return replacement

    return spoil_op


def test_a_wrong_gemm_is_refused(spoil):
    spoil("matmul")
    rows = gemm.rows([(128, 128, 128)], [0.0], implementation=None, effort=EFFORT)
    with pytest.raises(
        measure.WrongResultError, match="by spoilt with float32 output is"
    ):
        list(rows)


def test_wrong_codes_are_refused(spoil):
    spoil("quantize_fallback")
    rows = quantize.rows(
        [(128, 128)], [0.0], (8, 8), implementation=None, effort=EFFORT
    )
    with pytest.raises(measure.WrongResultError, match=r"fallback .* by spoilt is"):
        list(rows)


def test_a_wrong_layer_is_refused(monkeypatch):
    wrong = baselines.bf16()._replace(
        name="mine", reference=lambda x, w, *_: x @ (1.01 * w)
    )
    monkeypatch.setattr(baselines, "bf16", lambda: wrong)
    monkeypatch.setattr(baselines, "installed_int8_libraries", list)
    monkeypatch.setattr(matmuls, "timed", lambda *_: [])
    monkeypatch.setattr(linear, "_stacks", lambda _: [layers.bf16(1)])
    with pytest.raises(measure.WrongResultError, match=r"y of mine by xla is wrong"):
        list(linear.rows([(16, 8, 4)], **OPTIONS))


def test_a_wrong_flax_layer_is_refused(monkeypatch):
    def dot(x, w, dims, **_):
        return lax.dot_general(x, lax.stop_gradient(w), dims)

    wrong = layers.LinenStack("mine", "xla", 1, dot_general=dot)
    monkeypatch.setattr(linear, "_stacks", lambda _: [wrong])
    with pytest.raises(measure.WrongResultError, match=r"dw of mine in nn.Dense at"):
        list(linear.rows([(16, 8, 4)], **OPTIONS))


def test_a_nan_is_wrong():
    with pytest.raises(measure.WrongResultError, match=r"its error is nan"):
        measure.require(float("nan"), 1e-5, "it")
