"""The experiment on a whole model, at sizes for a CPU."""

import pytest

from experiments import result_files, whole_model

pytestmark = pytest.mark.usefixtures("standard_promotion")

SIZES = whole_model.LLAMA_3_8B | {
    **{"vocab_size": 64, "hidden_size": 128, "intermediate_size": 128},
    **{"num_layers": 1, "num_heads": 2, "num_kv_heads": 1, "max_seq_len": 128},
}
RUN = {"ms", "tokens_per_s", "model_tflops", "loss"}


@pytest.mark.parametrize(
    ("options", "runs"),
    [
        (["--only=bf16, remat full*", "--memory"], False),
        pytest.param(["--only=fallback*kept"], True, marks=pytest.mark.exhaustive),
    ],
)
def test_rows(tmp_path, options, runs):
    out = tmp_path / "out.json"
    whole_model.main([f"--out={out}", *options], SIZES)
    rows = result_files.read(out)["rows"]
    assert rows
    for row in rows:
        assert row["peak_bytes"] > 0
        assert (row.keys() >= RUN) == runs


def test_what_does_not_fit_does_not_run(monkeypatch):
    monkeypatch.setattr(whole_model.memory, "peak_bytes", lambda _: float("inf"))
    setting = whole_model.Setting("bf16")
    (row,) = whole_model.rows([setting], SIZES, 1, runs=True)
    assert "ms" not in row
