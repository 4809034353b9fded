"""The programs to copy from resume bit for bit and export what they trained."""

import re
import subprocess
import sys

import jax.numpy as jnp
import pytest
from jax import export

from examples.quickstart import linen, nnx
from tests.marks import with_first_fast

pytestmark = pytest.mark.usefixtures("standard_promotion")


@pytest.mark.parametrize("program", with_first_fast([linen, nnx]))
def test_a_resumed_run_continues_and_its_export_computes_the_task(
    program, tmp_path, capsys, monkeypatch
):
    monkeypatch.setattr(program, "CHANNELS", 128)
    program.main([str(tmp_path / "whole"), "--steps", "60"])
    whole = capsys.readouterr().out.splitlines()
    for steps in ("30", "60"):
        program.main([str(tmp_path / "parts"), "--steps", steps])
    parts = capsys.readouterr().out.splitlines()
    # Both log the first step, the 51st and the last one.
    assert len(whole) == 3
    assert parts[-2:] == whole[-2:]
    x, y = program.batch(60)
    serve = export.deserialize((tmp_path / "parts/model.bin").read_bytes())
    loss = jnp.mean((serve.call(x) - y) ** 2)
    trained = float(re.search(r"loss (\S+)", parts[-1])[1])
    assert loss == pytest.approx(trained, rel=0.05)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["linen", "nnx"])
def test_new_processes_resume_and_train_in_float(name, tmp_path):
    def run(folder, *options):
        program = [sys.executable, "-m", f"examples.quickstart.{name}"]
        result = subprocess.run(
            [*program, tmp_path / folder, *options], capture_output=True, text=True
        )
        assert result.returncode == 0, result.stderr
        return result.stdout

    assert run("int8", "--steps", "2").startswith("step 1 ")
    assert run("int8", "--steps", "3").startswith("step 3 ")
    assert run("float", "--steps", "1", "--float").startswith("step 1 ")
    sizes = [(tmp_path / x / "model.bin").stat().st_size for x in ("int8", "float")]
    assert sizes[0] < 0.3 * sizes[1]
