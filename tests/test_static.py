"""The linter, the formatter and the type checker pass; no text depends on a locale."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize(
    "command",
    [
        "ruff check .",
        "ruff format --check .",
        # By package: as files, the kernels would be found twice, behind a link.
        # mypy keeps its cache in the clone, so that the next run is short.
        pytest.param(
            "mypy -p fbq_jax -p examples -p experiments -p docs",
            marks=pytest.mark.exhaustive,
        ),
    ],
)
def test_static_checks(command):
    result = subprocess.run(
        [sys.executable, "-m", *command.split()],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.parametrize("folder", ["examples", "experiments", "fbq_jax", "kernels"])
def test_text_files_are_read_alike_in_every_locale(folder):
    for file in (ROOT / folder).rglob("*.py"):
        for call in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if not isinstance(call, ast.Call):
                continue
            name = getattr(call.func, "attr", getattr(call.func, "id", None))
            arguments = [x.value for x in call.args if isinstance(x, ast.Constant)]
            is_binary = any("b" in str(argument) for argument in arguments)
            if name in ("read_text", "write_text") or (
                name == "open" and not is_binary
            ):
                given = {keyword.arg for keyword in call.keywords}
                assert "encoding" in given, f"{file}:{call.lineno}"
