"""The studies: the emulation matches the library at 8 bits, and errors shrink."""

import functools
import math
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from examples.llama.loss import cross_entropy
from examples.llama.model import Llama
from experiments import models
from experiments.studies import emulate, of_inputs, of_models
from experiments.studies.emulate import Bits
from experiments.studies.operands import PROJECTIONS, Operands
from experiments.studies.operands import operands as operands_of
from experiments.studies.subject import Subject, cosine_distance
from fbq_jax.kernels import reference
from fbq_jax.kernels.quantized import Layout, Quantized
from fbq_jax.kernels.sources import Matrix
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
    return Subject(MODEL, random_params(MODEL), list(tokens))


def of_operands(operands: Operands) -> Any:
    return SimpleNamespace(operands={"down": operands})


def test_emulation_has_the_librarys_values_at_8_bits(operands: Operands) -> None:
    x = operands.x[:1]
    quantize = functools.partial(
        reference.quantize,
        rowwise=Layout("nearest", BLOCK),
        colwise=None,
        criterion="absmax",
    )
    seeds, theta = jnp.zeros(1, jnp.uint32), jnp.full(1, 100.0)
    quantized, _, metric, _ = jax.jit(quantize)(Matrix(x), seeds, theta)
    values = [Quantized(term, None, BLOCK).dequantize() for term in quantized.terms]
    plain = emulate.quantize(x[0], 8)
    np.testing.assert_allclose(plain, values[0][0], atol=1e-5)
    rate = 1 / metric.size
    two_terms = emulate.quantize(x[0], 8, rate)
    np.testing.assert_allclose(two_terms, sum(values)[0], atol=1e-4)
    assert jnp.abs(two_terms - plain).max() > 0.1
    np.testing.assert_array_equal(emulate.quantize(x[0], emulate.FLOAT), x[0])


def test_error_falls_with_bits_and_with_fallback(operands: Operands) -> None:
    of = of_inputs.error(of_operands(operands))["down"]
    assert np.all(np.diff(of["plain"]) < 0)
    assert of["plain"][-1] < 1e-3
    shared = of_inputs.FALLBACK_BITS.index(8)
    assert of["fallback"][shared] < 0.5 * of["plain"][of_inputs.BITS.index(8)]


@pytest.mark.exhaustive
def test_output_error_falls_with_the_fallback_rate(
    operands: Operands, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(of_inputs, "CRITERIA", ("absmax", "l1"))
    of = of_inputs.criteria(of_operands(operands))["down"]
    for distances in of.values():
        assert np.all(np.diff(distances) < 1e-5)
        assert distances[-1] < 1e-4
        # A twentieth of 16 blocks is one block, the one with the outliers.
        assert distances[of_inputs.RATES.index(0.05)] < distances[0]


def test_map_shows_the_blocks_with_outliers(operands: Operands) -> None:
    for layer in of_inputs.blocks(of_operands(operands))["down"]:
        cells = np.array([list(map(int, line)) for line in layer])
        assert cells.shape == (4, 4)
        assert cells[1, 2] == 1
        assert 0.1 <= cells.mean() <= 0.3


@pytest.mark.exhaustive
def test_gradient_error_falls_with_bits(
    subject: Subject, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(of_models, "BITS", (4, 12))
    of = of_models.operands(subject)
    assert of.keys() == set(of_models.OPERANDS)
    for distances in of.values():
        assert distances[-1] < 1e-4
        assert distances[-1] < distances[0]


def test_fallback_applies_to_the_forward_product(operands: Operands) -> None:
    x, w, dy = operands.x[0], operands.w[0], operands.w[1]

    @jax.jit
    def products(x: jax.Array, how: Bits) -> tuple[jax.Array, jax.Array]:
        y, backward = jax.vjp(lambda w: emulate.dot_general(how)(x, w), w)
        return y, *backward(dy)

    exact, plain, fallback = (
        products(x, how) for how in (Bits(), Bits(x=8), Bits(x=8, rate=0.1))
    )
    assert cosine_distance(exact[0], fallback[0]) < cosine_distance(exact[0], plain[0])
    np.testing.assert_array_equal(fallback[1], plain[1])


@pytest.mark.exhaustive
def test_perplexity_is_close_with_small_blocks(
    subject: Subject, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(of_models, "BLOCK_SIDES", (32,))
    monkeypatch.setattr(of_models, "EVAL_BATCHES", 2)
    of = of_models.perplexity(subject)
    assert of["fallback"] == pytest.approx([of["float"]], rel=0.02)
    assert of["fallback"] != [of["float"]]


@pytest.mark.exhaustive
def test_recipes_are_close_to_floats(
    subject: Subject, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(of_models, "RECIPES", ("row_block_lhs", "per_tensor"))
    monkeypatch.setattr(of_models, "EVAL_BATCHES", 2)
    of = of_models.by_recipe(subject)
    exact = of[of_models.FLOAT]
    assert exact["gradient"] < 1e-12
    assert of["row_block_lhs"]["perplexity"] == pytest.approx(
        exact["perplexity"], rel=0.02
    )
    assert 0 < of["row_block_lhs"]["gradient"] < of["per_tensor"]["gradient"] < 0.1


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


@pytest.fixture(scope="module")
def params() -> Any:
    return random_params(PLANTED)


TOKENS = np.random.default_rng(1).integers(0, 32, (2, 17), np.int32)
PLANTED = small_config(intermediate_size=128, dtype=jnp.float32)


@jax.jit
def logits(params: Any) -> Any:
    return Llama(PLANTED).apply({"params": params}, TOKENS[:, :-1])


@pytest.mark.exhaustive
def test_recorded_operands_give_the_gradients_of_the_projections(params: Any) -> None:
    @jax.jit
    def gradient(params: Any) -> Any:
        return jax.grad(lambda p: cross_entropy(logits(p), TOKENS[:, 1:]))(params)

    grads = gradient(params)["layers"]
    for name, of in operands_of(PLANTED, params, TOKENS).items():
        grad = functools.reduce(lambda tree, key: tree[key], PROJECTIONS[name], grads)
        dw = jnp.einsum("lmk,lmn->lkn", of.x, of.dy)
        expected = grad["kernel"].reshape(dw.shape)
        np.testing.assert_allclose(dw, expected, rtol=1e-4, atol=1e-7)


@pytest.mark.exhaustive
def test_outliers_are_planted_and_change_nothing(params: Any) -> None:
    x = operands_of(PLANTED, params, TOKENS)["down"].x
    for largest in (58, 6559):
        planted = models.plant(params, x, largest)
        peaks = jnp.abs(operands_of(PLANTED, planted.params, TOKENS)["down"].x)
        of_channels = jnp.sort(peaks.max(axis=1), axis=1)
        highest = of_channels[:, -models.CHANNELS :]
        assert highest.min() > largest / math.sqrt(2) / 1.01
        assert highest.max() < largest * math.sqrt(2) * 1.01
        assert of_channels[:, : -models.CHANNELS].max() <= jnp.abs(x).max()
        np.testing.assert_array_equal(logits(planted.params), logits(params))
    # Nothing changes if all channels are larger already.
    assert models.plant(params, x, float(jnp.abs(x).min())).factors.max() == 1.0


@pytest.mark.exhaustive
def test_planted_gradients_grow_and_change_nothing(params: Any) -> None:
    dy = models.gradient_of_up(operands_of(PLANTED, params, TOKENS))
    planted = models.plant_gradients(params, dy, 64)
    of_planted = operands_of(PLANTED, planted.params, TOKENS)
    grown = jnp.abs(models.gradient_of_up(of_planted)).max(axis=1)
    expected = jnp.abs(dy).max(axis=1)
    layers = jnp.arange(len(dy))[:, None]
    expected = expected.at[layers, planted.channels].multiply(64)
    np.testing.assert_allclose(grown, expected, rtol=1e-6)
    np.testing.assert_array_equal(planted.factors, 1 / 64)
    np.testing.assert_array_equal(logits(planted.params), logits(params))
