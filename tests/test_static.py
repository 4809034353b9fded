"""The linter, the formatter and the type checker pass."""

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
