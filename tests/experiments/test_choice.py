"""The experiments on recipes that the library chooses, at sizes for a CPU."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from examples.llama.model_config import LlamaConfig
from experiments import choice, result_files
from experiments.bench import harness
from fbq_jax import FallbackDot, recipes

pytestmark = pytest.mark.usefixtures("standard_promotion")
TOKENS = jax.random.randint(jax.random.key(0), (2, 17), 0, 64)


@pytest.fixture
def layers(monkeypatch):
    """A model of two layers, the second of which gets outliers, and its parameters."""
    monkeypatch.setattr(choice, "PLANTED", (1,))
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64}
    heads = {"num_layers": 2, "num_heads": 2, "num_kv_heads": 2, "max_seq_len": 16}
    model = choice.SeparateLayers(LlamaConfig(**sizes, **heads, dtype=jnp.float32))
    return model, model.init(jax.random.key(1), TOKENS)["params"]


def test_planted_outliers_change_no_loss(layers):
    model, params = layers
    planted = choice.plant(params)
    before, after = (model.apply({"params": p}, TOKENS) for p in (params, planted))
    np.testing.assert_allclose(before, after, rtol=1e-6)
    changed = jax.tree.map(lambda a, b: bool(jnp.any(a != b)), params, planted)
    assert not any(jax.tree.leaves({**changed, "layer_1": {}}))
    assert changed["layer_1"]["mlp"]["down"]["kernel"]


@pytest.mark.exhaustive
def test_training_moves_the_state(layers):
    model, params = layers
    model = choice.SeparateLayers(model.config, FallbackDot(recipes.fallback))
    trained, state, speed = choice.train(model, params, [TOKENS] * 4, optax.sgd(0.1))
    loss = jax.jit(lambda p: model.apply({"params": p, "fallback": state}, TOKENS))
    assert loss(trained) < loss(params)
    assert speed > 0


@pytest.mark.exhaustive
def test_speed(monkeypatch):
    monkeypatch.setattr(choice, "MODELS", ((128, 128, 1, 1),))
    monkeypatch.setattr(harness, "VOCABULARY", 64)
    (row,) = choice.speed()
    assert row["predicted_ms"] is None  # without a GPU
    assert len(row["report"]["layers"]) == 4


@pytest.mark.exhaustive
def test_pretraining(monkeypatch, tmp_path):
    small = {"hidden": 32, "ffn": 64, "layers": 1, "heads": 1, "kv_heads": 1}
    small |= {"seq": 16, "batch": 2, "accumulate": 1, "steps": 2, "eval_every": 2}
    monkeypatch.setattr(choice, "SIZES", {"small": small, "as small": small})
    monkeypatch.setattr(choice, "CANDIDATES", ("block",))
    (tmp_path / "text").write_bytes(bytes(range(1, 256)) * 20)
    out = tmp_path / "out.json"
    choice.main(
        ["pretraining", f"--data={tmp_path / 'text'}", f"--out={out}", "--seeds=0"]
    )
    rows = result_files.read(out)["rows"]
    recipes = ["bf16", "block", "auto"]
    assert [row["recipe"] for row in rows] == recipes * 2
    assert [row["rules"] for row in rows[:2]] == ["bf16", "block"]
    assert rows[2]["rules"] != "auto"  # those that were chosen
    assert all(row["val_loss"]["2"] > 0 for row in rows)
