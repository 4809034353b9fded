"""The file of MaxText's step times, without measuring any."""

import json
import subprocess

import pytest

from examples.maxtext import speed


def test_programs_of_earlier_runs_stay(tmp_path, monkeypatch):
    out, times = tmp_path / "speed.json", {"bf16": 3.0, "block": 2.0}

    def run(command, **_):
        ms = times.get(command[command.index("--run") + 1])
        output = f"a log\n{json.dumps({'ms': ms})}\n"
        return subprocess.CompletedProcess(command, int(ms is None), output)

    monkeypatch.setattr(speed.subprocess, "run", run)
    speed.main(["--out", str(out), "--programs", "bf16", "block"])
    assert json.loads(out.read_text()) == {"bf16": {"ms": 3.0}, "block": {"ms": 2.0}}
    del times["bf16"]
    times["block"] = 1.0
    with pytest.raises(SystemExit, match="1"):
        speed.main(["--out", str(out), "--programs", "bf16", "block"])
    assert json.loads(out.read_text()) == {"bf16": {"ms": 3.0}, "block": {"ms": 1.0}}
    speed.main(["--out", str(out), "--programs", "block"])
    assert list(json.loads(out.read_text())) == ["bf16", "block"]
    assert list(tmp_path.iterdir()) == [out]
