"""The studies: the emulation matches the library at 8 bits, and errors shrink."""

import functools
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from examples.llama.experiments.probe import Operands
from examples.llama.experiments.studies import (
    blocks,
    by_recipe,
    criteria,
    emulate,
    error,
    gradients,
    perplexity,
    start,
)
from examples.llama.experiments.studies.subject import Subject, cosine_distance
from fbq_jax import Recipe
from fbq_jax.core.qtensor import QTensor
from fbq_jax.kernels import reference
from tests.examples.small import random_params, small_config

BLOCK = (128, 128)
MODEL = small_config(dtype=jnp.float32)


@pytest.fixture(scope="module")
def operands() -> Operands:
    """Operands of two layers; X has outliers in one of its 4 x 4 blocks."""
    keys = jax.random.split(jax.random.key(0), 2)
    x = jax.random.normal(keys[0], (2, 512, 512)).at[:, 130, 300].set(500.0)
    return Operands(
        x, jax.random.normal(keys[1], (2, 512, 64)), jnp.zeros((2, 512, 64))
    )


@pytest.fixture(scope="module")
def subject() -> Subject:
    tokens = np.random.default_rng(0).integers(0, 32, (8, 2, 33), np.int32)
    return Subject("trained", MODEL, random_params(MODEL), list(tokens))


def of_operands(operands: Operands) -> Any:
    return SimpleNamespace(operands={"down": operands})


def test_emulation_has_the_librarys_values_at_8_bits(operands: Operands) -> None:
    x = operands.x[:1]
    options = {"block": BLOCK, "criterion": "absmax", "colwise": None}
    quantize = jax.jit(functools.partial(reference.quantize_fallback, **options))
    seeds = jnp.zeros(1, jnp.uint32)
    main, residual, metric, _ = quantize(x, jnp.full(1, 100.0), seeds)
    values = [QTensor(codes, None, BLOCK).dequantize() for codes in (main, residual)]
    plain = emulate.quantize(x[0], 8)
    np.testing.assert_allclose(plain, values[0][0], atol=1e-5)
    rate = 1 / metric.size
    two_terms = emulate.fall_back(x[0], 8, rate)
    np.testing.assert_allclose(two_terms, sum(values)[0], atol=1e-4)
    assert jnp.abs(two_terms - plain).max() > 0.1
    np.testing.assert_array_equal(emulate.quantize(x[0], emulate.FLOAT), x[0])


def test_error_falls_with_bits_and_with_fallback(operands: Operands) -> None:
    of = error.study(of_operands(operands))["down"]
    assert np.all(np.diff(of["plain"]) < 0)
    assert of["plain"][-1] < 1e-3
    shared = error.FALLBACK.index(8)
    assert of["fallback"][shared] < 0.5 * of["plain"][error.PLAIN.index(8)]


@pytest.mark.exhaustive
def test_output_error_falls_with_the_fallback_rate(
    operands: Operands, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(criteria, "CRITERIA", ("absmax", "l1"))
    of = criteria.study(of_operands(operands))["down"]
    for distances in of.values():
        assert np.all(np.diff(distances) < 1e-5)
        assert distances[-1] < 1e-4
        # A twentieth of 16 blocks is one block, the one with the outliers.
        assert distances[criteria.RATES.index(0.05)] < distances[0]


def test_map_shows_the_blocks_with_outliers(operands: Operands) -> None:
    for layer in blocks.study(of_operands(operands))["down"]:
        cells = np.array([list(map(int, line)) for line in layer])
        assert cells.shape == (4, 4)
        assert cells[1, 2] == 1
        assert 0.1 <= cells.mean() <= 0.3


@pytest.mark.exhaustive
def test_gradient_error_falls_with_bits(
    subject: Subject, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gradients, "BITS", (4, 12))
    of = gradients.operands(subject)
    assert of.keys() == set(gradients.OPERANDS)
    for distances in of.values():
        assert distances[-1] < 1e-4
        assert distances[-1] < distances[0]


def test_fallback_applies_to_the_requested_products(operands: Operands) -> None:
    x, w, dy = operands.x[0], operands.w[0], operands.w[1]

    @jax.jit
    def products(x: jax.Array, how: emulate.Bits) -> tuple[jax.Array, jax.Array]:
        y, backward = jax.vjp(lambda w: emulate.dot_general(how)(x, w), w)
        return y, *backward(dy)

    exact = products(x, emulate.bits())
    forward, backward = (
        [
            float(cosine_distance(*pair))
            for pair in zip(exact, products(x, how), strict=True)
        ]
        for how in (emulate.bits(x=8, forward=0.1), emulate.bits(x=8, backward=0.1))
    )
    assert forward[0] < backward[0]
    assert forward[1] > backward[1]


@pytest.mark.exhaustive
def test_perplexity_is_close_with_small_blocks(
    subject: Subject, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(perplexity, "BLOCK_SIDES", ())
    monkeypatch.setattr(perplexity, "EVAL_BATCHES", 2)
    exact = perplexity.study(subject)["float"]
    quantized = perplexity.with_recipe(subject, Recipe(block=32))
    assert quantized == pytest.approx(exact, rel=0.02)
    assert quantized != exact


@pytest.mark.exhaustive
def test_recipes_are_close_to_floats(
    subject: Subject, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(by_recipe, "RECIPES", ("row_block_lhs", "per_tensor"))
    monkeypatch.setattr(perplexity, "EVAL_BATCHES", 2)
    of = by_recipe.study(subject)
    exact = of[by_recipe.FLOAT]
    assert exact["gradient"] < 1e-12
    assert of["row_block_lhs"]["perplexity"] == pytest.approx(
        exact["perplexity"], rel=0.02
    )
    assert 0 < of["row_block_lhs"]["gradient"] < of["per_tensor"]["gradient"] < 0.1


@pytest.mark.exhaustive
def test_threshold_reaches_its_range_from_a_wrong_start(
    operands: Operands, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(start, "operands", lambda *_: {"down": operands})
    subject: Any = SimpleNamespace(config=None, params=None, text=[np.zeros(1)] * 24)
    of = start.study(subject)
    assert of["first_batch"]["theta"][0] == 1.0
    low, high = Recipe().target_rate
    for name, values in of.items():
        assert low <= values["rate"][-1] <= high, name
    assert of["0.01"]["rate"][0] == 1.0
    assert of["1000.0"]["rate"][0] == 0.0


def test_cosine_distance_treats_a_tree_as_one_vector() -> None:
    a = {"x": jnp.array([3.0, 0.0]), "y": jnp.array([[4.0]])}
    b = {"x": jnp.array([3.0, 0.0]), "y": jnp.array([[0.0]])}
    assert float(cosine_distance(a, a)) == 0.0
    assert float(cosine_distance(a, b)) == pytest.approx(1 - 9 / (5 * 3))
    assert float(cosine_distance(a, jax.tree.map(jnp.zeros_like, a))) == 1.0
    # The result is precise where 1 - cosine would round to 0 in float32.
    near = a | {"y": jnp.array([[4.0 + 2**-13]])}
    expected = (3 * 2**-13 / 25) ** 2 / 2
    assert float(cosine_distance(a, near)) == pytest.approx(expected, rel=1e-2)
