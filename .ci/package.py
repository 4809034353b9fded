"""Builds the wheel and the sdist into dist/, and tries both in a new environment.

First without extras, then with each of them. Large extras are only resolved: whether
their packages have versions that fit together, for this Python and machine.
"""

import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
DIST = ROOT / "dist"
# Gigabytes.
LARGE = {"cuda", "torch"}
# What installs these, and then needs them.
ELSEWHERE = {
    "test": "make test",
    "docs": "make docs",
    "tpu": "make test-tpu",
    "models": ".ci/run",
    "maxtext": ".ci/run",
}
# What pip says of a package that has no version for this Python or this machine.
NOT_HERE = (
    "requires a different Python",
    "Requires-Python",
    "No matching distribution",
)
# Compiling all modules takes longer than importing those that are used.
PIP_INSTALL = ("-m", "pip", "install", "--quiet", "--no-compile")
START = time.monotonic()


def say(text: str) -> None:
    """Prints a line with the seconds since the start."""
    print(f"{time.monotonic() - START:4.0f} s  {text}", flush=True)


def make_environment(folder: Path) -> str:
    """Makes a virtual environment; returns its Python."""
    venv.create(folder, with_pip=True)
    return str(folder / "bin" / "python")


def run(*command: str) -> None:
    """Runs a command outside of the clone; only its errors are shown."""
    done = subprocess.run(command, cwd=DIST, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{' '.join(command)} failed:\n{done.stdout}{done.stderr}")


def install_extra(python: str, *arguments: str) -> str | None:
    """Installs packages; returns the reason if they cannot be installed here."""
    command = (python, *PIP_INSTALL, *arguments)
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode == 0:
        return None
    if any(text in done.stderr for text in NOT_HERE):
        return done.stderr.strip().splitlines()[-1]
    sys.exit(f"{' '.join(command)} failed:\n{done.stderr}")


def try_extra(python: str, wheel: Path, extra: str) -> str:
    """Installs an extra, or resolves it, and says what came out."""
    if extra in ELSEWHERE:
        return f"not tried here: {ELSEWHERE[extra]} installs it"
    options = ["--dry-run"] if extra in LARGE else []
    arguments = "--only-binary=:all:", *options, f"{wheel}[{extra}]"
    if reason := install_extra(python, *arguments):
        return f"skipped, it cannot be installed on this Python or machine: {reason}"
    if extra in LARGE:
        return "its versions fit together; not installed, because it is large"
    run(python, str(ROOT / ".ci" / "smoke.py"), extra)
    return "works"


def main() -> None:
    """Builds and tries the packages."""
    shutil.rmtree(DIST, ignore_errors=True)
    DIST.mkdir()
    with tempfile.TemporaryDirectory() as scratch:
        python = make_environment(Path(scratch))
        run(python, *PIP_INSTALL, "build", "twine")
        run(python, "-m", "build", "--outdir", str(DIST), str(ROOT))
        (wheel,), (sdist,) = DIST.glob("*.whl"), DIST.glob("*.tar.gz")
        run(python, "-m", "twine", "check", "--strict", str(wheel), str(sdist))
        say(f"built {wheel.name} and {sdist.name}")

    with tempfile.TemporaryDirectory() as scratch:
        python = make_environment(Path(scratch))
        for file, options in (sdist, ()), (wheel, ("--force-reinstall", "--no-deps")):
            run(python, *PIP_INSTALL, *options, str(file))
            run(python, str(ROOT / ".ci" / "smoke.py"))
            say(f"{file.name} works without extras")
        project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
        for extra in project["optional-dependencies"]:
            say(f"{extra}: {try_extra(python, wheel, extra)}")


if __name__ == "__main__":
    main()
