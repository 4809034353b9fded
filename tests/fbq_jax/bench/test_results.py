"""The results file, its tables and its picture."""

import dataclasses
import json
import sys

import jax
import pytest

from fbq_jax.bench import results
from fbq_jax.bench.__main__ import main
from tests.fbq_jax.bench.tools import some_rows


def test_a_section_is_replaced_and_the_others_stay(tmp_path):
    path = tmp_path / "bench.json"
    for name, what in (("linear", "a"), ("gemm", "b"), ("linear", "c")):
        results.merge(path, name, results.section(some_rows(what), quick=False))
    sections = results.load(path)
    assert list(sections) == ["linear", "gemm"]
    assert [row.what for row in sections["gemm"]["rows"]] == ["bf16", "b"]
    assert sections["linear"]["rows"] == some_rows("c")
    assert sections["gemm"]["versions"]["jax"] == jax.__version__
    assert list(tmp_path.iterdir()) == [path]


def test_renamed_sections_keep_their_keys_in_the_file(tmp_path):
    path = tmp_path / "bench.json"
    for name in ("parity", "scaling", "train"):
        results.merge(path, name, results.section(some_rows(), quick=False))
    assert list(json.loads(path.read_text())) == ["losses", "scale", "train"]
    assert list(results.load(path)) == ["parity", "scaling", "train"]


def test_table(tmp_path, capsys):
    path = tmp_path / "bench.json"
    results.merge(path, "gemm", results.section(some_rows(), quick=True))
    assert main(["table", str(path)]) == 0
    caption, _, head, rule, _, row = capsys.readouterr().out.splitlines()
    assert "on cpu" in caption
    assert "quick" in caption
    assert head == (
        "| name | backend | M, N, K | fallback rate | ms | TFLOP/s "
        "| speedup vs bf16 | in bursts | error |"
    )
    assert rule.count("---") == head.count("|") - 1
    assert row == (
        "| INT8 | mosaic | 1, 2, 3 | 20.0% | 1.000 | 4 | 2.00 | 1.25 | y 1.0e-03 |"
    )


def test_sections_of_other_versions_have_tables(tmp_path, capsys):
    path = tmp_path / "bench.json"
    results.merge(path, "quantize", results.section(some_rows(), quick=False))
    assert main(["table", str(path)]) == 0
    assert "**quantize**, on cpu" in capsys.readouterr().out


def test_a_file_that_has_no_table_is_named(tmp_path, capsys):
    assert main(["table", str(tmp_path / "none.json")]) == 2
    assert "No such file" in capsys.readouterr().err


def test_picture(tmp_path, capsys):
    path, picture = tmp_path / "bench.json", tmp_path / "picture.png"
    command = ["picture", str(path), str(picture)]
    assert main(command) == 2
    rows = [dataclasses.replace(row, shape=(16, 32, 32)) for row in some_rows()]
    results.merge(path, "gemm", results.section(rows, quick=False))
    assert main(command) == 2
    assert "has no section map" in capsys.readouterr().err
    results.merge(path, "map", results.section(rows, quick=False))
    assert main(["picture", str(path), str(tmp_path / "picture.what")]) == 2
    assert "cannot write" in capsys.readouterr().err
    assert main(command) == 0
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_a_picture_without_matplotlib_says_what_to_install(monkeypatch, capsys):
    monkeypatch.delitem(sys.modules, "fbq_jax.bench.picture", raising=False)
    for name in ("matplotlib", "matplotlib.colors", "matplotlib.figure"):
        monkeypatch.setitem(sys.modules, name, None)
    assert main(["picture", "some.json", "some.png"]) == 2
    message = "matplotlib is missing: pip install 'fbq-jax[examples]'"
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("text", ['{"answer": 42}', '{"gemm": {"rows": [1]}}', "["])
def test_other_files_are_refused(text, tmp_path):
    path = tmp_path / "other.json"
    path.write_text(text)
    with pytest.raises(results.ResultsError, match="does not hold benchmark results"):
        results.load(path)
