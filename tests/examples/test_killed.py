"""A run that is killed at any moment continues without a human."""

import functools
import shutil
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from examples.llama import checkpoint, metrics, train, training
from tests.examples.test_checkpoint import assert_equal, train_state
from tests.marks import with_first_fast

ROOT = Path(__file__).parents[2]
SIZES = "--hidden=16 --ffn=32 --layers=2 --heads=2 --seq=16 --batch=4 --lr=0.01"
SIZES += " --accumulate=2"  # as in test_train.py, which compiles the same program
RUN = "--eval-every=3 --save-every=2 --steps=6"
# The audit events of Python functions that change files.
CHANGES = ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "shutil.rmtree")


class Watch:
    """Copies a folder whenever Python is about to change a file anywhere.

    SIGKILL leaves the files of a process as they are, so each copy is what a kill at
    that moment leaves.
    """

    def __init__(self) -> None:
        self._folder: Path | None = None
        self._copies: list[Path] = []
        self._seen: set[Any] = set()
        self._lock = threading.RLock()
        self._copying = False

    def __call__(self, event: str, _: Any) -> None:
        if self._folder is None or event not in CHANGES:
            return
        with self._lock:
            if not self._copying:
                self._copying = True
                try:
                    self._copy(self._folder)
                finally:
                    self._copying = False

    def _copy(self, folder: Path) -> None:
        files = sorted(folder.rglob("*"))
        state = tuple((file, *file.lstat()[6:9:2]) for file in files if file.exists())
        if state in self._seen or not folder.exists():
            return
        self._seen.add(state)
        copy = self._copies[0].parent / f"{folder.name}-{len(self._seen)}"
        with suppress(shutil.Error):  # TensorStore's threads delete their locks
            shutil.copytree(folder, copy)
        self._copies.append(copy)

    @contextmanager
    def during(self, folder: Path, copies: Path) -> Iterator[list[Path]]:
        """Yields the list of copies, which grows during the block."""
        copies.mkdir()
        self._copies, self._seen = [copies / "none"], set()
        self._folder = folder
        found: list[Path] = []
        try:
            yield found
        finally:
            self._folder = None
            found += self._copies[1:]


@functools.cache
def watch() -> Watch:
    """The process's only watch, because an audit hook is permanent."""
    hook = Watch()
    sys.addaudithook(hook)
    return hook


# Orbax deletes a checkpoint when there are two before.
@pytest.mark.exhaustive  # test_checkpoint.py damages files
@pytest.mark.parametrize("before", with_first_fast([0, 1, 2]))
def test_a_kill_during_a_save_loses_no_whole_checkpoint(
    tmp_path: Path, before: int
) -> None:
    folder = tmp_path / "checkpoints"
    for step in range(1, before + 1):
        checkpoint.save(folder, step, train_state(step))
    with watch().during(folder, tmp_path / "copies") as copies:
        checkpoint.save(folder, before + 1, train_state(before + 1))
    assert len(copies) > 10
    continued = set()
    for copy in copies:
        found = checkpoint.find(copy)
        continued.add((found.step, len(found.skipped)))
        if found.step is not None:
            state = checkpoint.read(copy, found.step, train_state(0))
            assert_equal(state, train_state(found.step))
        # The run takes the lost step again, and one more.
        for step in range((found.step or 0) + 1, before + 3):
            checkpoint.save(copy, step, train_state(step))
        left = sorted(path.name for path in copy.iterdir())
        assert left == [str(before + 1), str(before + 2)]
        assert checkpoint.find(copy) == (before + 2, [])
    last = before or None
    assert continued >= {(last, 0), (last, 1)}
    assert continued <= {(last, 0), (last, 1), (before + 1, 0)}


def options(text: Path, out: Path) -> list[str]:
    return [*SIZES.split(), *RUN.split(), f"--data={text}", f"--out={out}"]


def losses(out: Path, log: str = "metrics.jsonl") -> list[tuple[int, float]]:
    records = metrics.read(out / log)
    return [(record["step"], record["loss"]) for record in records]


@pytest.fixture(scope="module")
def whole_run(text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of an uninterrupted run."""
    out = tmp_path_factory.mktemp("runs") / "run"
    assert train.main(options(text, out)) == 0
    return out


def continue_killed(killed: Path, text: Path, whole: Path) -> None:
    """Continues as a job that is submitted again, and compares with a whole run."""
    logged = losses(killed)
    resume = ["--resume"] * (killed / "config.json").exists()
    assert train.main([*options(text, killed), *resume]) == 0
    assert losses(killed) == losses(whole)
    repeated = losses(killed, "metrics.repeated.jsonl")
    assert logged[len(logged) - len(repeated) :] == repeated
    left = {path.name for path in killed.iterdir()} - {"curves.part"}  # not drawn here
    assert left <= {path.name for path in whole.iterdir()} | {"metrics.repeated.jsonl"}


@pytest.mark.exhaustive
@pytest.mark.usefixtures("standard_promotion")
def test_a_kill_at_any_moment_needs_no_human(
    whole_run: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with watch().during(tmp_path / "run", tmp_path / "copies") as copies:
        assert train.main(options(text, tmp_path / "run")) == 0
    assert len(copies) > 50
    monkeypatch.setattr(training.plot, "draw_curves", lambda *_: None)
    for copy in copies:
        continue_killed(copy, text, whole_run)
