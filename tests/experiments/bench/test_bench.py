"""The Llama's benchmarks, at sizes that a CPU can multiply."""

import dataclasses
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from examples.llama import mesh
from examples.llama.step import TrainState
from experiments.bench import (
    accumulation,
    block,
    harness,
    invariant,
    memory,
    parity,
    profile,
    scaling,
    train,
)
from fbq_jax import recipes
from fbq_jax.bench import measure
from tests.fbq_jax.bench.tools import OPTIONS, check_rates, float_backward
from tests.marks import rows_with_first_fast


@pytest.fixture
def few_recipes(monkeypatch):
    few = {"bf16": None, "fallback": float_backward(recipes.fallback)}
    monkeypatch.setattr(harness, "recipes", lambda: few)


@pytest.mark.exhaustive
@pytest.mark.usefixtures("standard_promotion", "few_recipes")
def test_block(monkeypatch):
    monkeypatch.setattr(block, "REMATS", (("bf16", "full"),))
    shape = 256, 384, 256
    measured = list(block.rows([shape], **OPTIONS))
    # Two query heads share keys and values; the vocabulary is one token.
    weights = 256 * 256 * 3 + 256 * 384 * 3 + 256
    check_rates(measured, lambda _: 6 * 256 * (weights + 128 * 256))
    bf16, row, full = measured
    assert [row.what for row in measured] == ["bf16", "fallback", "bf16, remat full"]
    assert max(full.errors.values()) < 0.01
    assert bf16.errors["dx"] == 0.0 < row.errors["dx"]
    assert bf16.fallback is None
    assert 0.05 < row.fallback < 0.5
    assert full.saved_bytes < row.saved_bytes < 0.62 * bf16.saved_bytes
    assert min(row.peak_bytes, row.compile_s) > 0


@pytest.mark.usefixtures("few_recipes")
def test_profile(monkeypatch):
    program = types.SimpleNamespace(implementation="xla", step=None, operands=())
    monkeypatch.setattr(block, "prepare", lambda *_: program)
    kernels = [("a", 5.0), ("b", 3.0), ("a", 1.0), ("c", 0.01)]
    monkeypatch.setattr(measure, "kernels", lambda *_: kernels)
    rows = list(profile.rows([(256, 384, 512)], **OPTIONS))
    names = ["all kernels", "a", "b", "shorter ones"]
    assert [row.what.rpartition(": ")[2] for row in rows] == 2 * names
    assert [row.ms for row in rows[4:]] == pytest.approx([9.01, 6.0, 3.0, 0.01])
    assert sum(row.rate for row in rows[5:]) == pytest.approx(100.0)


@pytest.mark.usefixtures("standard_promotion")
@pytest.mark.parametrize(
    ("section", "sizes", "steps", "compared"),
    rows_with_first_fast(
        [
            # test_block covers the recipes
            (train, (128, 256, 1, 2), 1, {"other": None}),
            (accumulation, (128, 256, 1, 2, 3), 3, {"block": recipes.block}),
        ]
    ),
)
def test_whole_steps(section, sizes, steps, compared, monkeypatch):
    monkeypatch.setattr(harness, "recipes", lambda: {"bf16": None, **compared})
    monkeypatch.setattr(harness, "VOCABULARY", 256)
    measured = list(section.rows([sizes], **OPTIONS))
    weights = 128 * 128 * 4 + 128 * 256 * 3 + 256 * 128
    check_rates(measured, lambda _: steps * 6 * 2 * 128 * (weights + 128 * 128))
    names = ["bf16", *compared]
    names += ["block, codes kept"] * ("block" in compared)
    assert [row.what for row in measured] == names
    assert {row.shape for row in measured} == {sizes}
    assert measured[0].ratio == 1.0
    if "other" in compared:
        for row in measured:
            assert row.errors == {"loss": 0.0, "grad_norm": 0.0}
            assert row.peak_bytes > 0


@pytest.mark.exhaustive
@pytest.mark.usefixtures("standard_promotion")
def test_invariant_models(monkeypatch):
    monkeypatch.setattr(harness, "VOCABULARY", 256)
    monkeypatch.setattr(invariant, "RECIPES", ("rowwise",))
    rows = list(invariant.rows([(128, 256, 1, 2)], **OPTIONS))
    names = "bf16", "rowwise", "rowwise, invariant"
    assert [(row.what, row.data) for row in rows] == [
        (name, phase) for name in names for phase in ("training", "decoding")
    ]
    # The head counts, and the keys of a query: 128 in training, 64 in decoding.
    weights = 128 * 128 * 4 + 128 * 256 * 3 + 256 * 128
    check_rates(rows[::2], lambda _: 6 * 2 * 128 * (weights + 128 * 128))
    check_rates(rows[1::2], lambda _: 2 * 8 * (weights + 64 * 128))


@pytest.fixture
def tiny_steps(monkeypatch):
    """A model of one weight, on five devices of which four are used."""

    @jax.jit
    def step(state, tokens):
        loss = jnp.mean(tokens.astype(jnp.float32)) + state.params
        new = dataclasses.replace(state, params=state.params + 0.25)
        return new, {"loss": loss}

    def trainer(config, dot_general, *, learns=False, keeps_codes=False):
        state = TrainState(jnp.int32(0), jnp.float32(1.0), {}, {}, ())
        assert dot_general is None
        assert not keeps_codes
        assert learns == (config.max_seq_len == parity.SEQUENCE)
        assert config.saved_bits is None
        return jax.device_put(state, mesh.shardings(state)), step

    monkeypatch.setattr(harness, "trainer", trainer)
    monkeypatch.setattr(jax, "device_count", lambda: 5)


@pytest.mark.usefixtures("tiny_steps")
def test_scaling(monkeypatch):
    monkeypatch.setattr(scaling, "RECIPES", {"bf16": None})
    monkeypatch.setattr(scaling, "REDUCES", {"bf16, again": None})
    rows = list(scaling.rows([(128, 256, 1, 2)], **OPTIONS))
    names, again = ["bf16", "bf16, unrolled"], ["bf16", "bf16, again", "bf16, unrolled"]
    of_meshes = {"one device": names, "data=4": again, "fsdp=4": again}
    of_meshes |= {"data=2": names, "fsdp=2": names}
    assert [(row.mesh, row.what) for row in rows] == [
        (mesh, name) for mesh, names in of_meshes.items() for name in names
    ]
    for row in rows:
        devices = int(row.mesh[-1]) if "=" in row.mesh else 1
        alone = rows["unrolled" in row.what]
        assert row.shape == (128, 256, 1, 2 * devices)
        assert row.tokens_s == pytest.approx(2 * devices * 128 / row.ms * 1e3)
        assert row.efficiency == pytest.approx(alone.ms / row.ms)


def test_gradients_are_summed_in_the_dtype_of_the_name():
    for name, recipe in scaling.REDUCES.items():
        assert name == f"fallback, sums in {recipe.drhs.reduce}"


@pytest.mark.usefixtures("tiny_steps")
def test_parity(monkeypatch):
    monkeypatch.setattr(parity, "RECIPES", {"float32": (None, jnp.float32)})
    rows = list(parity.rows([(128, 256, 1, 8)], **OPTIONS))
    assert [row.mesh for row in rows] == ["one device", "fsdp=2", "data=2,fsdp=2"]
    for row in rows:
        assert row.errors["one device"] < 1e-6
        assert row.errors["repeat"] == 0.0
    assert rows[0].errors["nudged"] < 1e-6
    assert "nudged" not in rows[1].errors


@pytest.mark.usefixtures("tiny_steps")
def test_the_largest_difference_of_nudged_losses_is_reported(monkeypatch):
    monkeypatch.setattr(parity, "RECIPES", {"float32": (None, jnp.float32)})
    monkeypatch.setattr(jax, "device_count", lambda: 1)

    def move_the_last(state, seed):
        moved = state.params - 0.5 * (seed == parity.NUDGES - 1)
        return dataclasses.replace(state, params=moved)

    monkeypatch.setattr(parity, "_nudged", move_the_last)
    (row,) = parity.rows([(128, 256, 1, 8)], **OPTIONS)
    shape = (parity.STEPS, 1, 8, parity.SEQUENCE + 1)
    tokens = parity.random_walks(parity.VOCABULARY, shape)
    losses = tokens.mean(axis=(1, 2, 3)) + 1.0 + 0.25 * np.arange(parity.STEPS)
    assert row.errors["nudged"] == pytest.approx(0.5 / losses.min(), rel=1e-3)


def test_nudges_are_one_ulp():
    weights = np.float32([[1.5, -3.0, 1e-3, 0.0], [7.5, 1e9, -6.5, 2.5]])
    state = TrainState(jnp.int32(0), {"w": weights}, {}, {}, ())
    one, other = (parity._nudged(state, seed).params["w"] for seed in range(2))
    for nudged in (one, other):
        up, down = (np.nextafter(weights, np.float32(s * np.inf)) for s in (1, -1))
        assert np.all((nudged == up) | (nudged == down))
    assert np.any(one != other)


def test_saved_bytes():
    w = jnp.ones((64, 32), jnp.bfloat16)
    x = jnp.ones((4, 16, 64), jnp.bfloat16)

    def saved(function):
        return memory.saved_bytes(function, w, x)

    # Per row of x, up to a few bytes of bookkeeping for each output.
    assert saved(lambda w, x: x @ w) == pytest.approx(16 * 64 * 2, abs=32)
    assert saved(lambda w, x: jnp.sin(x) @ w) == pytest.approx(16 * 64 * 4, abs=32)
