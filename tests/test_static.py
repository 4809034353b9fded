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


def test_types(tmp_path):
    """On the packages as they are installed: ``kernels`` inside ``fbq_jax``."""
    package = tmp_path / "fbq_jax"
    package.mkdir()
    for path in (ROOT / "fbq_jax").iterdir():
        (package / path.name).symlink_to(path)
    (package / "kernels").symlink_to(ROOT / "kernels")
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    config = ["--config-file", str(ROOT / "pyproject.toml")]
    cache = ["--cache-dir", str(ROOT / ".mypy_cache")]
    run("mypy", *config, *cache, "-p", "fbq_jax", "-p", "examples", cwd=tmp_path)
