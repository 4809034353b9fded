"""The benchmark of a training step, at sizes that a CPU computes with the reference."""

import dataclasses
import importlib.util
import types

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from fbq_jax import FallbackDot, recipes
from fbq_jax.bench import layers, matmuls, measure, report, results, step
from fbq_jax.bench.measure import NoKernelsError, RunningStep, WrongResultError
from tests.fbq_jax.bench.tools import EFFORT, OPTIONS, check_rates, float_backward
from tests.marks import rows_with_first_fast

DEPTH = 2
SHAPE = (256, 256, 256)  # 4 blocks in each activation
SMALL = (16, 8, 4)
NAMED = {name: float_backward(recipes.NAMED[name]) for name in layers.RECIPES}


FIRST_CALLS = {"1": 1.5, "12": 2.25}


@pytest.fixture(autouse=True)
def first_calls(monkeypatch):
    """Measures no first calls, and returns the function that does."""
    measure_first_calls = step._first_calls
    monkeypatch.setattr(step, "_first_calls", lambda *_: FIRST_CALLS)
    return measure_first_calls


def stack(name, dot=None):
    """A stack of ``nn.Dense`` with a ``dot_general``."""
    return layers.linen_stack(name, "xla", DEPTH, dot_general=dot)


def measured(monkeypatch, shape, *stacks):
    """The rows of bf16 and other stacks."""
    all_stacks = [layers.bf16(DEPTH), *stacks]
    monkeypatch.setattr(step, "_stacks", lambda *_: all_stacks)
    monkeypatch.setattr(layers, "installed_int8_libraries", lambda _: [])
    return list(step.rows([shape], DEPTH, **OPTIONS))


@pytest.mark.exhaustive
def test_rows(monkeypatch):
    monkeypatch.setattr(layers, "recipes", types.SimpleNamespace(NAMED=NAMED))
    monkeypatch.setattr(matmuls, "TIMED", layers.RECIPES)
    stacks = step._stacks(DEPTH, "reference")[1:]
    rows = measured(monkeypatch, SHAPE, *stacks)
    # The first layer has no dX.
    check_rates(rows, lambda _: 2 * 256**3 * (3 * DEPTH - 1))
    assert {row.what: row.implementation for row in rows} == {
        "bf16": "xla",
        "Flax Fp8DotGeneral": "xla",
        "block": "reference",
        "fallback": "reference",
        "fallback, nnx": "reference",
    }
    bf16, *others = rows
    for row in others:
        assert row.shape == SHAPE
        assert row.ratio == pytest.approx(bf16.ms / row.ms)
        assert row.errors["loss"] < 0.1
        assert 0.01 < row.errors["update"] < 0.3
        assert row.compile_s > 0.0
        is_fallback = "fallback" in row.what
        assert row.fallback == (pytest.approx(0.25) if is_fallback else None)


def test_kernels_and_the_gap(monkeypatch):
    kernels = [("a", 1.0), ("b", 2.0), ("a", 0.5)]
    monkeypatch.setattr(measure, "kernels", lambda *_: kernels)
    (row,) = measured(monkeypatch, SMALL)
    assert (row.launches, row.kernels_ms) == (3 / DEPTH, 3.5)
    assert row.gap_ms == pytest.approx(row.ms - 3.5)
    section = results.section([row], quick=False)
    *_, head, _, cells = report.markdown({"step": section | {"rows": [row]}}).split(
        "\n"
    )
    table = dict(zip(head.split(" | "), cells.split(" | "), strict=True))
    assert (table["launches/layer"], table["kernels, ms"]) == ("1.5", "3.500")
    assert table["gap, ms"] == f"{row.gap_ms:.3f}"


def test_first_calls_are_measured_in_new_processes(first_calls, monkeypatch):
    programs = []
    monkeypatch.setattr(
        step, "_in_new_process", lambda text: programs.append(text) or len(programs)
    )
    measured = first_calls(layers.bf16(DEPTH), SMALL, "reference")
    assert measured == {"1": 1, "12": 2}
    assert [eval(text.split("print")[1], vars(step)) > 0.0 for text in programs]


def test_a_new_process_prints_its_result():
    program = "import os; print('text', os.environ.get('JAX_COMPILATION_CACHE_DIR', 3))"
    assert step._in_new_process(program) == 3.0
    with pytest.raises(RuntimeError, match=r"failed: 1 / 0\n(.*\n)*ZeroDivision"):
        step._in_new_process("1 / 0")


def test_the_first_shape_has_first_calls(monkeypatch):
    (row,) = measured(monkeypatch, SMALL)
    assert row.first_calls_s == FIRST_CALLS
    section = results.section([row], quick=False)
    assert "| 1.5, 2.2 |" in report.markdown({"step": section | {"rows": [row]}})


@pytest.mark.skipif(jax.default_backend() == "gpu", reason="kernels can be timed")
def test_there_are_no_kernels_without_cupti(monkeypatch):
    (row,) = measured(monkeypatch, SMALL)
    assert row.launches is row.kernels_ms is row.gap_ms is None
    with pytest.raises(NoKernelsError, match="cannot be measured on a cpu"):
        measure.kernels(RunningStep(lambda state: (state, state), jnp.ones(1)))


def test_conditionals_are_counted(monkeypatch):
    def dot(x, w, *_, **__):
        return lax.cond(x[0, 0] > 99, lambda x, w: 2 * (x @ w), jnp.matmul, x, w)

    bf16, row = measured(monkeypatch, SMALL, stack("branching", dot))
    assert bf16.conditionals == 0
    assert row.conditionals >= DEPTH


@pytest.mark.parametrize(
    ("result", "dot"),
    rows_with_first_fast(
        [
            ("loss", lambda x, w, dims, **_: 1.5 * lax.dot_general(x, w, dims)),
            (
                "update",
                lambda x, w, dims, **_: lax.dot_general(x, lax.stop_gradient(w), dims),
            ),
        ]
    ),
)
def test_a_wrong_step_is_refused(result, dot, monkeypatch):
    with pytest.raises(WrongResultError, match=rf"^{result} of mine at .* is wrong"):
        measured(monkeypatch, SHAPE, stack("mine", dot))


@pytest.mark.exhaustive  # others test the range of the rates
def test_a_threshold_that_has_not_settled_is_refused(monkeypatch):
    recipe = dataclasses.replace(NAMED["fallback"], start=1e20)
    unsettled = layers.linen_stack(
        "far", "reference", DEPTH, recipe=recipe, dot_general=FallbackDot(recipe)
    )
    with pytest.raises(
        WrongResultError, match=r"far at .* rates from 0\.0% to 0\.0%, out"
    ):
        measured(monkeypatch, SHAPE, unsettled)


@pytest.mark.parametrize("rates", [[0.2, 0.09], [0.31, 0.2], [float("nan")]])
def test_each_layers_rate_must_be_in_the_range(rates):
    def checked_rate(rates):
        stack = types.SimpleNamespace(recipe=recipes.fallback, rates=lambda _: rates)
        return layers.checked_rate(stack, None, "it")

    assert checked_rate([0.1, 0.3]) == pytest.approx(0.2)
    with pytest.raises(WrongResultError, match=r"outside the recipe's range of 10\.0%"):
        checked_rate(rates)


def test_a_rate_may_leave_the_range_for_single_steps():
    stack = types.SimpleNamespace(recipe=recipes.fallback, rates=lambda rate: [rate])
    running = RunningStep(lambda rate: (rate + 0.0625, None), 0.0)
    assert step._settled_rate(stack, running, "it") == 0.125
    running = RunningStep(lambda rate: (rate + 0.01, None), 0.0)
    with pytest.raises(WrongResultError, match=r"^it has layers with fallback rates"):
        step._settled_rate(stack, running, "it")


def test_slow_libraries_take_the_first_shape(monkeypatch):
    monkeypatch.setattr(step, "_stacks", lambda *_: ["bf16"])
    monkeypatch.setattr(layers, "installed_int8_libraries", lambda _: ["slow"])
    monkeypatch.setattr(step, "compile_stack", lambda stack, shape, _: (stack, shape))
    monkeypatch.setattr(step, "_rows", lambda *args: (args[0], args[2]))
    monkeypatch.setattr(step, "with_ratios", lambda rows: [rows])
    assert list(step.rows([SMALL, SHAPE], DEPTH, **OPTIONS)) == [
        (SMALL, [("bf16", ("bf16", SMALL)), ("slow", ("slow", SMALL))]),
        (SHAPE, [("bf16", ("bf16", SHAPE))]),
    ]


@pytest.mark.exhaustive
@pytest.mark.skipif(
    not all(map(importlib.util.find_spec, ("aqt", "qwix"))), reason="they are missing"
)
@pytest.mark.filterwarnings("ignore:Implicit conversion of an array:DeprecationWarning")
def test_the_libraries_multiply_in_nn_dense():
    x = jax.random.normal(jax.random.key(0), (64, 32), jnp.bfloat16)
    key = jax.random.key(1)
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        stacks = list(layers.installed_int8_libraries(1))
        states = [stack.start([jnp.eye(32)]) for stack in stacks]
        results = {
            stack.name: stack.compile_products(state, x, x, key).step(state, x, x, key)
            for stack, state in zip(stacks, states, strict=True)
        }
    assert set(results) == {"AQT INT8", "Qwix INT8"}
    for _, (y, dx, _) in results.values():
        assert 0.0 < measure.relative_error(y, x) < 0.02
        assert 0.0 < measure.relative_error(dx, x) < 0.02


def test_a_running_step_goes_on_from_its_state():
    running = RunningStep(lambda state, by: (state + by, -state), 1, 10)
    assert [running(), running()] == [-1, -11]
    assert running.state == 21
    measure.running_timing(running, effort=EFFORT)
    assert running.state > 41
