"""The benchmark of a training step, at sizes that a CPU computes with the reference."""

import dataclasses
import importlib.util
import types
from contextlib import nullcontext

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from fbq_jax import FallbackDot, recipes
from fbq_jax.bench import compare, layers, matmuls, measure, step
from fbq_jax.bench.compare import Program
from fbq_jax.bench.measure import NoKernelsError, RunningStep, WrongResultError
from tests.fbq_jax.bench.tools import EFFORT, OPTIONS, check_rates, float_backward
from tests.marks import rows_with_first_fast

DEPTH = 2
SHAPE = (256, 256, 256)  # 4 blocks in each activation
SMALL = (16, 8, 4)
NAMED = {name: float_backward(recipes.NAMED[name]) for name in layers.RECIPES}


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
        "block, codes kept": "reference",
        "fallback, codes kept": "reference",
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


@pytest.mark.skipif(jax.default_backend() == "gpu", reason="kernels can be timed")
def test_there_are_no_kernels_without_cupti():
    with pytest.raises(NoKernelsError, match="cannot be measured on a cpu"):
        measure.kernels(RunningStep(lambda state: (state, state), jnp.ones(1)))


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


def test_results_are_compared_after_the_settling_steps():
    step = lambda state: (state + 1, (state + 1,))  # noqa: E731
    programs = [Program("it", "xla", step, lambda: jnp.float32(0), 0.0)]
    comparison = compare.Comparison((8,), 1e9, (), {"y": 0.0}, settling_steps=4)
    for exact in (4.0, 3.0):
        settled = dataclasses.replace(comparison, exact=(jnp.float32(exact),))
        with pytest.raises(WrongResultError) if exact == 3.0 else nullcontext():
            (row,) = settled.rows(programs, EFFORT)
            assert (row.errors, row.fallback) == ({"y": 0.0}, None)


@pytest.mark.parametrize(
    ("step", "last", "refused"),
    [
        (0.0, [0.2, 0.09], True),
        (0.0, [0.31, 0.2], True),
        (0.0, [float("nan")], True),
        (0.0625, [], False),  # A rate may leave the range for single steps.
        (0.01, [], True),
    ],
)
def test_each_layers_rate_must_be_in_the_range(step, last, refused):
    rates = lambda rate: last or [rate, 0.2]  # noqa: E731
    program = Program("it", "xla", None, None, 0.0, rates, (0.1, 0.3))
    running = RunningStep(lambda rate: (rate + step, None), 0.0)
    message = r"^it has .* range of 10\.0% to 30\.0%"
    with pytest.raises(WrongResultError, match=message) if refused else nullcontext():
        compare.require_rates(program, running, "it")
    assert refused or running.state == 0.125


def test_slow_libraries_take_the_first_shape(monkeypatch):
    monkeypatch.setattr(
        layers, "installed_int8_libraries", lambda _: [stack("slow"), stack("slower")]
    )
    monkeypatch.setattr(step, "_stacks", lambda *_: [layers.bf16(DEPTH)])
    measured = list(step.rows([SMALL, (8, 4, 4)], DEPTH, **OPTIONS))
    assert [(row.what, row.shape) for row in measured] == [
        ("bf16", SMALL),
        ("slow", SMALL),
        ("slower", SMALL),
        ("bf16", (8, 4, 4)),
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
        programs = {
            stack.name: stack.program(
                layers.products_step, lambda: [jnp.eye(32)], x, x, key
            )
            for stack in stacks
        }
    assert set(programs) == {"AQT INT8", "Qwix INT8"}
    for program in programs.values():
        _, (y, dx, _) = program.step(program.start(), x, x, key)
        assert 0.0 < measure.relative_error(y, x) < 0.02
        assert 0.0 < measure.relative_error(dx, x) < 0.02
