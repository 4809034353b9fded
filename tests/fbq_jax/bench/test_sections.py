"""The library's benchmarks, at sizes that a CPU multiplies with the reference."""

import importlib.util
import types

import pytest
from jax import lax

from fbq_jax import ops, recipes
from fbq_jax.bench import (
    gemm,
    grouped,
    layers,
    linear,
    matmuls,
    measure,
    moe,
    serve,
)
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
def test_linear(monkeypatch):
    others = ("block", *linear._OTHERS)
    named = {
        name: float_backward(recipes.NAMED[name]) for name in (*layers.RECIPES, *others)
    }
    monkeypatch.setattr(layers, "recipes", types.SimpleNamespace(NAMED=named))
    monkeypatch.setattr(matmuls, "recipes", types.SimpleNamespace(NAMED=named))
    monkeypatch.setattr(matmuls, "TIMED", ("block",))
    monkeypatch.setattr(layers, "installed_int8_libraries", lambda _: [])
    measured = list(linear.rows([(256, 640, 128)], **OPTIONS))
    rows = {row.what: row for row in measured}
    check_rates(measured, lambda _: 6 * 256 * 640 * 128)
    assert list(rows) == [
        "bf16",
        "Flax Fp8DotGeneral",
        *others,
        "block, nnx",
        "fallback, nnx",
    ]
    bf16 = rows["bf16"]
    for name, row in rows.items():
        assert set(row.errors) == {"y", "dx", "dw"}, name
        assert all(0.0 < error < 0.2 for error in row.errors.values())
        assert row.compile_s > 0.0
        assert row.ratio == pytest.approx(bf16.ms / row.ms)
        fallback = pytest.approx(0.2) if "fallback" in name else None
        assert row.fallback == fallback
    assert bf16.errors["dw"] < 0.01 < rows["block"].errors["dw"]


@pytest.mark.exhaustive
def test_moe():
    tokens, width, hidden, _, top_k = shape = (300, 128, 256, 3, 2)
    measured = list(moe.rows([shape], **OPTIONS))
    check_rates(measured, lambda _: 18 * tokens * top_k * width * hidden)
    bf16, *others = measured
    assert bf16.what.startswith("bf16, ")
    assert bf16.errors == {"y": 0.0, "dx": 0.0, "dw": 0.0}
    codes = "", ", codes kept", ", codes kept and written"
    names = [name + more for name in matmuls.TIMED for more in codes]
    assert [row.what for row in others] == names
    for row in others:
        is_fallback = "fallback" in row.what
        assert (row.fallback is not None) == is_fallback
        assert not is_fallback or 0.05 <= row.fallback <= 0.5
        assert row.ratio == pytest.approx(bf16.ms / row.ms)
        assert all(1e-3 < error < 0.2 for error in row.errors.values())


@pytest.mark.exhaustive
def test_grouped():
    M, K, N, _ = shape = (301, 128, 256, 3)
    measured = list(grouped.rows([shape], **OPTIONS))
    check_rates(measured, lambda row: (2 if row.layer else 6) * M * K * N)
    bf16, *others = measured
    assert bf16.what.startswith("bf16, ")
    assert [row.what for row in others if row.errors] == [*grouped._RECIPES]
    assert [(row.what, row.layer) for row in others if not row.errors] == [
        (f"{name}, codes", product)
        for name in grouped._RECIPES
        for product in ("Y", "dX", "dW")
    ]
    for row in others:
        assert row.ratio == pytest.approx(row.rate / bf16.rate)
        assert all(1e-3 < error < 0.1 for error in row.errors.values())


@pytest.mark.exhaustive
def test_serve(monkeypatch):
    monkeypatch.setattr(serve, "DEPTH", 2)
    monkeypatch.setattr(serve, "_TOKENS", 2)
    shapes = (1, 128, 384), (200, 128, 384)
    measured = list(serve.rows(shapes, **OPTIONS))
    weights = 2 * 128 * (192 + 128 + 3 * 384)
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


def test_libraries_that_are_not_installed_are_named(capsys):
    found = dict(matmuls.installed_int8_libraries())
    err = capsys.readouterr().err
    for package, name in (("qwix", "Qwix INT8"), ("aqt", "AQT INT8")):
        installed = importlib.util.find_spec(package) is not None
        assert (name in found) == installed
        assert (f"without {package}: " in err) != installed


def test_a_wrong_gemm_is_refused(monkeypatch):
    choose, matmul, operands = dispatch.choose, ops.matmul, gemm.operands

    def choose_spoilt(op, sides, *, implementation, **options):
        if implementation in (None, "spoilt"):
            return dispatch.Choice(op, "spoilt", "for the test", "spoilt")
        return choose(op, sides, implementation=implementation, **options)

    def matmul_spoilt(*args, implementation, **options):
        out = matmul(*args, implementation="reference", **options)
        return out if implementation == "reference" else out.at[0, 0, 0].add(1)

    monkeypatch.setattr(dispatch, "choose", choose_spoilt)
    monkeypatch.setattr(ops, "matmul", matmul_spoilt)
    monkeypatch.setattr(
        gemm, "operands", lambda *args: operands(*args[:2], "reference", *args[3:])
    )
    rows = gemm.rows([(128, 128, 128)], [0.0], implementation=None, effort=EFFORT)
    with pytest.raises(
        measure.WrongResultError, match=r"^float32 of INT8 at .* by spoilt is wrong"
    ):
        list(rows)


def test_a_wrong_flax_layer_is_refused(monkeypatch):
    def dot(x, w, dims, **_):
        return lax.dot_general(x, lax.stop_gradient(w), dims)

    wrong = layers.linen_stack("mine", "xla", 1, dot_general=dot)
    monkeypatch.setattr(linear, "_stacks", lambda _: [wrong])
    with pytest.raises(measure.WrongResultError, match=r"dw of mine at"):
        list(linear.rows([(16, 8, 4)], **OPTIONS))


def test_a_nan_is_wrong():
    with pytest.raises(measure.WrongResultError, match=r"its error is nan"):
        measure.require(float("nan"), 1e-5, "it")
