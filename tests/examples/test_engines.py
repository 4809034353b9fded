"""The arithmetic of serving engines, and what it is compared with."""

import dataclasses
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from examples.llama.config import Config
from examples.llama.experiments import engines
from examples.llama.model import Llama
from examples.llama.training import train
from tests.examples.small import random_params, small_config

X = np.random.default_rng(0).standard_normal((5, 256), np.float32)
W = np.random.default_rng(1).standard_normal((256, 8), np.float32)


def test_sglang_truncates_codes_of_groups_of_128() -> None:
    x = np.zeros((1, 128), np.float32)
    x[0, :3] = 127, 1.75, -1.75
    w = np.zeros((128, 2), np.float32)
    w[1, 0] = w[2, 1] = 1
    x16 = jnp.asarray(x, jnp.bfloat16)
    truncated = engines.sglang(x16, w, truncate=True)
    np.testing.assert_array_equal(truncated, [[1, -1]])
    rounded = engines.sglang(x16, w, truncate=False)
    np.testing.assert_array_equal(rounded, [[2, -2]])


def test_w8a16_rounds_weights_to_bfloat16() -> None:
    x = jnp.asarray(X, jnp.bfloat16)
    w = W.astype(jnp.bfloat16).astype(np.float32)
    expected = (np.asarray(x, np.float32) @ w).astype(jnp.bfloat16)
    found = np.asarray(engines.w8a16(x, W), np.float32)
    np.testing.assert_allclose(found, expected.astype(np.float32), rtol=2**-7)


def test_llama_cpp_quantizes_activations_as_gguf_does() -> None:
    gguf = pytest.importorskip("gguf", reason="quantizes them")
    kind = gguf.GGMLQuantizationType.Q8_0
    x = gguf.dequantize(gguf.quantize(X, kind), kind)
    np.testing.assert_allclose(engines.llama_cpp(X, W), x @ W, rtol=1e-5, atol=1e-5)


@pytest.mark.exhaustive
@pytest.mark.parametrize("changes", [{}, {"qkv_bias": True, "num_kv_heads": 1}])
def test_emulation_reaches_the_projections_only(changes: dict) -> None:
    config = small_config(dtype=jnp.float32, **changes)
    model, tokens = Llama(config), jnp.arange(12).reshape(1, 12)
    variables = {"params": random_params(config)}
    expected = model.apply(variables, tokens)
    reached = []

    def product(x: jax.Array, w: jax.Array) -> jax.Array:
        reached.append(w.shape)
        return x @ w

    with engines.emulate(product):
        found = model.apply(variables, tokens)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)
    assert len(reached) >= 4


def test_divergence_of_predictions() -> None:
    same = np.log(np.float32([[[0.5, 0.5]]]))
    other = np.log(np.float32([[[0.25, 0.75]]]))
    assert engines.divergence(same, same) == 0
    expected = 0.5 * np.log(2) + 0.5 * np.log(2 / 3)
    assert engines.divergence(same, other) == pytest.approx(expected)
    text = [np.asarray([[0, 1]])]
    assert engines.perplexity(other, text) == pytest.approx(4 / 3)


@pytest.mark.exhaustive
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_run_is_measured(tmp_path: Path, text: Path) -> None:
    config = Config(data=str(text), hidden=128, ffn=128, layers=1, heads=2, kv_heads=1)
    config = dataclasses.replace(config, seq=32, batch=2, steps=2)
    with jax.numpy_dtype_promotion("standard"):
        train(config, tmp_path / "run")
        found = engines.measure(tmp_path / "run", config)
    results = engines.describe(config, found)
    assert results["tokens"] == 8 * 2 * 32
    assert len(engines.markdown(results).splitlines()) == 2 + 6
    divergences = {
        name: row["divergence from bf16"]
        for name, row in found.items()
        if name != "bf16"
    }
    assert max(divergences, key=divergences.__getitem__) == "SGLang"
    assert min(divergences.values()) > 0
