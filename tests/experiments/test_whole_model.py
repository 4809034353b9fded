"""The experiment on a whole model, at sizes for a CPU."""

import pytest

from experiments import result_files, whole_model

pytestmark = pytest.mark.usefixtures("standard_promotion")

SMALL = {
    **{"vocab_size": 64, "hidden_size": 128, "intermediate_size": 128},
    **{"num_layers": 1, "num_heads": 2, "num_kv_heads": 1, "max_seq_len": 128},
}
EXPERTS = {"head_dim": 64, "num_experts": 4, "top_k": 2}
exhaustive = pytest.mark.exhaustive


@pytest.fixture(autouse=True)
def _small(monkeypatch):
    for name, changes in ("llama-3-8b", {}), ("qwen3-30b-a3b", EXPERTS):
        sizes = whole_model.MODELS[name] | SMALL | changes
        monkeypatch.setitem(whole_model.MODELS, name, sizes)


@pytest.mark.parametrize(
    "options",
    [
        ["llama-3-8b", "--only=bf16, remat full, float32*"],
        pytest.param(["llama-3-8b", "--only=fallback*kept"], marks=exhaustive),
        pytest.param(
            ["qwen3-30b-a3b", "--only=block, remat none*", "--layers=2"],
            marks=exhaustive,
        ),
        pytest.param(
            ["llama-3-8b", "--only=block, remat none*", "--mesh=data=2", "--batch=2"],
            marks=exhaustive,
        ),
    ],
)
def test_rows(tmp_path, options):
    out = tmp_path / "out.json"
    whole_model.main([f"--out={out}", *options])
    (row,) = result_files.read(out)["rows"]
    figures = "peak_bytes", "ms", "tokens_per_s", "model_tflops", "loss"
    assert all(row[name] > 0 for name in figures)
    assert row["layers"] == (2 if "--layers=2" in options else 1)


def test_what_does_not_fit_does_not_run(monkeypatch):
    monkeypatch.setattr(whole_model.memory, "peak_bytes", lambda _: float("inf"))
    sizes = whole_model.MODELS["llama-3-8b"]
    (row,) = whole_model.rows([whole_model.Setting("bf16")], sizes, 1)
    assert "ms" not in row
