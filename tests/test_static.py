"""The linter and the type checker pass."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def run(*command: str, cwd: Path) -> None:
    result = subprocess.run(
        [sys.executable, "-m", *command], cwd=cwd, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stdout + result.stderr


def test_ruff():
    run("ruff", "check", ".", cwd=ROOT)
    run("ruff", "format", "--check", ".", cwd=ROOT)


def test_types():
    run("mypy", "-p", "fbq_jax", "-p", "examples", cwd=ROOT)
