"""The library works from a clone, a wheel and an sdist.

Nothing is downloaded: packages are built with the installed setuptools.  ``make``
installs the library as an editable, and ``make package`` a wheel with its dependencies.
"""

import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from importlib.metadata import version
from pathlib import Path, PurePosixPath

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

print(fbq_jax.__file__)
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
    """A folder with an sdist, and wheels from a clone and from the sdist."""
    dist = tmp_path_factory.mktemp("dist")
    clone = dist / "clone"
    ignored = shutil.ignore_patterns(".*", "__pycache__", "*.egg-info", "build", "runs")
    shutil.copytree(ROOT, clone, symlinks=True, ignore=ignored)
    build(clone, {"build_sdist": dist / "sdist", "build_wheel": dist / "wheel"})
    with tarfile.open(next((dist / "sdist").glob("*.tar.gz"))) as archive:
        archive.extractall(dist / "unpacked", filter="data")
    (unpacked,) = (dist / "unpacked").iterdir()
    build(unpacked, {"build_wheel": dist / "wheel_of_sdist"})
    return dist


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
    parts = {part for parts in names for part in parts}
    project = {"LICENSE", "MANIFEST.in", "README.md", "pyproject.toml", "fbq_jax"}
    assert parts == project | {"PKG-INFO", "setup.cfg", "fbq_jax.egg-info"}


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", ["clone", "wheel"])
def test_it_works(dist, kind, tmp_path):
    location = ROOT
    if kind == "wheel":
        location = tmp_path / "unpacked"
        with zipfile.ZipFile(next((dist / "wheel").glob("*.whl"))) as archive:
            archive.extractall(location)
    out = run(sys.executable, "-c", CHECK, cwd=tmp_path, PYTHONPATH=str(location))
    file = out.splitlines()[0]
    assert Path(file).resolve().is_relative_to(location.resolve())
    assert "| INT8 | mosaic |" in out
    assert "usage: python -m fbq_jax.bench" in out
