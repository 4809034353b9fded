"""The command for public models; ``test_public_models.py`` runs it on one."""

import json
from pathlib import Path

import pytest

from fbq_jax.bench import models
from fbq_jax.bench.__main__ import main

COMMITTED = Path(models.__file__).with_name("results") / "models.json"


def test_table_prints_the_file(capsys):
    assert main(["table", str(COMMITTED)]) == 0
    assert "| GPT-2 | transformers 4." in capsys.readouterr().out


def test_an_error_of_qwix_is_in_its_row():
    rows = models.load(COMMITTED)["models"]
    rows = {"GPT-2": rows["GPT-2"] | {"qwix": {"error": "ValueError: no"}}}
    assert "| `ValueError: no` |  |\n" in models.markdown({"models": rows})


def test_nothing_is_written_where_nothing_can_be(tmp_path, capsys, monkeypatch):
    public_models = pytest.importorskip("fbq_jax.bench.public_models")
    monkeypatch.setattr(public_models, "MODELS", {})
    path = tmp_path / "models.json"
    assert main(["models", "--out", str(path)]) == 2
    assert "no package with models is installed: pip" in capsys.readouterr().err
    assert not path.exists()
    assert main(["models", "--out", str(tmp_path / "no" / "models.json")]) == 2
    assert "there is no folder" in capsys.readouterr().err
    path.write_text(json.dumps({"layers": []}))
    assert main(["models", "--out", str(path)]) == 2
    assert "holds something else: choose another file" in capsys.readouterr().err
    assert json.loads(path.read_text()) == {"layers": []}
