"""The tuning table, and the command that writes it."""

import json
import types

import jax
import jax.numpy as jnp
import pytest

from fbq_jax import tune
from fbq_jax.bench import measure
from fbq_jax.kernels import reference, tuning_table
from fbq_jax.kernels.mosaic import gemm as mosaic
from fbq_jax.kernels.quantized import Quantized, Term
from fbq_jax.kernels.triton import gemm as triton
from fbq_jax.ops import dispatch

CONFIGS = {"mosaic": mosaic.Config, "triton": triton.Config}


@pytest.mark.parametrize("file", sorted(tuning_table.DIRECTORY.glob("*.json")), ids=str)
def test_shipped_tables_hold_valid_configurations(file):
    content = json.loads(file.read_text())
    assert tuning_table.path(content["device"]) == file
    for op, entries in content["entries"].items():
        for bucket, options in entries.items():
            CONFIGS[op.partition(".")[0]](**options)
            assert (
                tuning_table.bucket([int(size) for size in bucket.split("x")]) == bucket
            )


def test_kernel_reads_the_table_or_falls_back_to_a_rule(monkeypatch):
    found = {"mosaic.matmul": {"8192x4096x4096": {"group": 4}}}
    monkeypatch.setattr(tuning_table, "_entries", lambda _: found)
    monkeypatch.setattr(mosaic, "_num_sms", lambda: 132)
    term = Term(jnp.ones((1, 1, 1), jnp.int8), jnp.ones((1, 1, 1)))
    rhs = Quantized(term, None, (128, 128))
    for residual, config in (None, mosaic.Config(group=4)), (term, mosaic.Config()):
        lhs = Quantized(term, residual, (128, 128))
        sizes = 8000, 4096, 5000
        problem = mosaic.make_problem(lhs, rhs, 1, sizes, jnp.bfloat16, None)
        assert problem.config == config


@pytest.mark.exhaustive
def test_writes_the_fastest_and_keeps_other_entries(monkeypatch, tmp_path, capsys):
    def dot(*operands):
        return reference.matmul(*operands, dtype=jnp.bfloat16)

    times = iter([3.0, 1.0, 2.0, 4.0] * 2)
    choice = dispatch.Choice("", "reference", "for the test", "reference")
    monkeypatch.setattr(dispatch, "choose_for", lambda *_: choice)
    monkeypatch.setattr(tune, "_matmul", lambda *_: dot)
    monkeypatch.setattr(
        measure, "timing", lambda *_, **__: types.SimpleNamespace(ms=next(times))
    )
    out = tmp_path / "table.json"
    out.write_text('{"entries": {"mosaic.matmul": {"1x1x1": {"group": 1}}}}')
    options = ["--implementation", "mosaic", "--sizes", "256,128,300"]
    assert tune.main([*options, "--out", str(out)]) == 0
    content = json.loads(out.read_text())
    fastest = tune.candidates("mosaic")[1]
    assert content["device"] == jax.devices()[0].device_kind
    assert content["entries"] == {
        "mosaic.matmul": {"1x1x1": {"group": 1}, "256x128x256": fastest},
        "mosaic.matmul.fallback": {"256x128x256": fastest},
    }
    assert [path.name for path in tmp_path.iterdir()] == ["table.json"]
    assert "mosaic.matmul.fallback 256x128x300" in capsys.readouterr().out


def test_reports_that_no_kernel_runs_without_a_gpu(tmp_path, capsys):
    assert tune.main(["--out", str(tmp_path / "table.json")]) == 2
    printed = capsys.readouterr()
    assert "left out: implementation=mosaic cannot do matmul" in printed.out
    assert "no kernel to tune runs here" in printed.err
    assert not list(tmp_path.iterdir())


def test_folders_of_the_table_are_made(monkeypatch, tmp_path, capsys):
    out = tmp_path / "new" / "folder" / "table.json"
    monkeypatch.setattr(tune, "_available", lambda _: iter(["triton"]))
    monkeypatch.setattr(tune, "tune", lambda *_, **__: ({"num_warps": 4}, 1.0))
    assert tune.main(["--out", str(out), "--sizes", "256,256,256"]) == 0
    assert out.exists()
    assert f"wrote {out}" in capsys.readouterr().out


@pytest.mark.parametrize("content", ["{}", "[", "[]", '{"entries": []}'])
def test_refuses_to_overwrite_a_file_that_is_no_table(content, tmp_path, capsys):
    out = tmp_path / "table.json"
    out.write_text(content)
    with pytest.raises(SystemExit):
        tune.main(["--out", str(out)])
    assert "table.json is not a table of configurations" in capsys.readouterr().err
    assert out.read_text() == content


@pytest.mark.parametrize("sizes", ["1,2", "a,b,c", "0,1,1"])
def test_invalid_sizes_are_reported(sizes, capsys):
    with pytest.raises(SystemExit):
        tune.main(["--sizes", sizes])
    assert f"takes 3 positive integers M,N,K; got {sizes!r}" in capsys.readouterr().err
