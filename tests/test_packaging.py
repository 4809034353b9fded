"""The library works from a clone, an editable install, a wheel and an sdist.

Nothing is downloaded: packages are built with the installed setuptools, and virtual
environments see the installed dependencies. So whether the declared dependencies are
enough is not tested here; ``make test`` in a new environment shows that.
"""

import os
import shutil
import subprocess
import sys
import tarfile
import venv
import zipfile
from importlib.metadata import version
from pathlib import Path, PurePosixPath

import jax
import pytest

import fbq_jax

pytestmark = pytest.mark.skipif(
    int(version("setuptools").partition(".")[0]) < 77, reason="needs setuptools 77"
)

ROOT = Path(__file__).parents[1]
# Without jax, which is not there when a package is built in isolation.
BUILD = """
import sys
sys.modules["jax"] = None
from setuptools import build_meta
for hook, folder in zip(sys.argv[1::2], sys.argv[2::2]):
    getattr(build_meta, hook)(folder)
"""
CHECK = """
import importlib, importlib.resources, runpy, sys
import fbq_jax, fbq_jax.kernels.reference
from fbq_jax.kernels import tuning_table

print(fbq_jax.__version__, fbq_jax.__file__)
assert tuning_table.path("NVIDIA H200").is_file()
table = importlib.resources.files("fbq_jax.bench") / "results/nvidia-h200.json"
bench = runpy.run_module("fbq_jax.bench.__main__", run_name="bench")
bench["main"](["table", str(table)])
for section in bench["SECTIONS"]:
    importlib.import_module(f"fbq_jax.bench.{section}")
assert "examples" not in sys.modules
sys.argv = ["fbq_jax.bench", "--help"]
runpy.run_module("fbq_jax.bench", run_name="__main__")
"""


def run(*command, cwd, **variables):
    hidden = ("PYTHONPATH", "PYTHONHOME", "XLA_FLAGS")
    kept = {name: os.environ[name] for name in os.environ if name not in hidden}
    result = subprocess.run(
        command, cwd=cwd, env=kept | variables, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def build(project, folders):
    """Runs hooks of setuptools, each with an output folder."""
    for folder in folders.values():
        folder.mkdir()
    arguments = [str(x) for hook_and_folder in folders.items() for x in hook_and_folder]
    run(sys.executable, "-c", BUILD, *arguments, cwd=project)


@pytest.fixture(scope="module")
def dist(tmp_path_factory):
    """A folder with an sdist, a wheel from a clone, from the sdist, and an editable."""
    dist = tmp_path_factory.mktemp("dist")
    clone = dist / "clone"
    ignored = shutil.ignore_patterns(".*", "__pycache__", "*.egg-info", "build", "runs")
    shutil.copytree(ROOT, clone, symlinks=True, ignore=ignored)
    build(
        clone,
        {
            "build_sdist": dist / "sdist",
            "build_wheel": dist / "wheel",
            "build_editable": dist / "editable",
        },
    )
    with tarfile.open(next((dist / "sdist").glob("*.tar.gz"))) as archive:
        archive.extractall(dist / "unpacked", filter="data")
    (unpacked,) = (dist / "unpacked").iterdir()
    build(unpacked, {"build_wheel": dist / "wheel_of_sdist"})
    return dist


@pytest.fixture(scope="module")
def make_environment(tmp_path_factory):
    """A function that makes a virtual environment, with one wheel of this library."""

    def make(wheels=None):
        folder = tmp_path_factory.mktemp("environment")
        venv.create(folder, symlinks=True)
        python = folder / "bin" / "python"
        if wheels is not None:
            wheel = next(wheels.glob("*.whl"))
            pip = (sys.executable, "-m", "pip", "--python", str(python), "--quiet")
            options = ("--no-deps", "--no-index", "--no-compile")
            run(*pip, "install", *options, str(wheel), cwd=folder)
        # After pip, which would take the library for installed if it were among them.
        site = next(folder.glob("lib/python*/site-packages"))
        dependencies = Path(jax.__file__).parents[1]
        (site / "dependencies.pth").write_text(f"{dependencies}\n")
        return str(python)

    return make


def files(folder, root):
    """The library's files under a folder, as paths below the root."""
    return {
        path.relative_to(root).as_posix()
        for path in folder.rglob("*")
        if path.suffix in (".py", ".json", ".typed")
    }


@pytest.mark.parametrize("folder", ["wheel", "wheel_of_sdist"])
def test_a_wheel_has_every_file_of_the_library_once(dist, folder):
    wheel = next((dist / folder).glob("*.whl"))
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if ".dist-info/" not in name]
    modules = {path for path in files(ROOT / "fbq_jax", ROOT) if "kernels/" not in path}
    kernels = {f"fbq_jax/{path}" for path in files(ROOT / "kernels", ROOT)}
    assert sorted(names) == sorted(modules | kernels)
    assert wheel.name.startswith(f"fbq_jax-{fbq_jax.__version__}-")


def test_the_sdist_has_no_tests_and_no_examples(dist):
    with tarfile.open(next((dist / "sdist").glob("*.tar.gz"))) as archive:
        names = {PurePosixPath(name).parts[1:2] for name in archive.getnames()}
    assert {part for parts in names for part in parts} == {
        "LICENSE",
        "MANIFEST.in",
        "PKG-INFO",
        "README.md",
        "fbq_jax",
        "fbq_jax.egg-info",
        "pyproject.toml",
        "setup.cfg",
    }


def check(python, location, cwd, **variables):
    """Runs ``CHECK`` and compares where the library was imported from."""
    out = run(python, "-c", CHECK, cwd=cwd, **variables)
    number, file = out.splitlines()[0].split(" ", 1)
    assert number == fbq_jax.__version__
    assert Path(file).resolve().is_relative_to(Path(location).resolve())
    assert "| INT8 | mosaic |" in out
    assert "usage: python -m fbq_jax.bench" in out


@pytest.mark.exhaustive
def test_a_clone_on_the_path(make_environment, tmp_path):
    check(make_environment(), ROOT, tmp_path, PYTHONPATH=str(ROOT))


@pytest.mark.exhaustive  # make installs the library like this
def test_an_editable_install(dist, make_environment, tmp_path):
    check(make_environment(dist / "editable"), dist / "clone", tmp_path)


@pytest.mark.exhaustive  # make package tries it, too
def test_an_installed_wheel(dist, make_environment, tmp_path):
    python = make_environment(dist / "wheel")
    check(python, Path(python).parents[1] / "lib", tmp_path)
    # A clone in the current folder comes before the wheel, and works.
    check(python, ROOT, ROOT)
