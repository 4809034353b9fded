"""A run that is killed at any moment continues without a human."""

import shutil
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from examples.llama import checkpoint, metrics, train, training

SIZES = "--hidden=16 --ffn=32 --layers=2 --heads=2 --seq=16 --batch=4 --lr=0.01"
SIZES += " --accumulate=2"  # as in test_train.py, which compiles the same program
SAVE_EVERY = 2
RUN = f"--eval-every=3 --save-every={SAVE_EVERY} --steps=6"
# The audit events of Python functions that change files.
CHANGES = ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "shutil.rmtree")


@contextmanager
def copies_of(folder: Path, copies: Path) -> Iterator[list[Path]]:
    """Copies a folder whenever Python is about to change a file anywhere.

    SIGKILL leaves the files of a process as they are, so each copy is what a kill at
    that moment leaves.
    """
    copies.mkdir()
    found: list[Path] = []
    seen: set[Any] = set()
    lock, running = threading.RLock(), ["watches"]

    def copy(event: str, _: Any) -> None:
        if event not in CHANGES or not running or not folder.exists():
            return
        with lock:
            if len(running) > 1:  # of this copy
                return
            running.append("copies")
            files = sorted(folder.rglob("*"))
            states = (tuple(file.lstat()[6:9:2]) for file in files if file.exists())
            if (state := (*files, *states)) not in seen:
                seen.add(state)
                found.append(copies / str(len(seen)))
                with suppress(shutil.Error):  # TensorStore's threads delete their locks
                    shutil.copytree(folder, found[-1])
            del running[1:]

    sys.addaudithook(copy)  # for good; it does nothing after the block
    try:
        yield found
    finally:
        with lock:
            running.clear()


def options(text: Path, out: Path) -> list[str]:
    return [*SIZES.split(), *RUN.split(), f"--data={text}", f"--out={out}"]


def losses(out: Path, log: str = "metrics.jsonl") -> list[tuple[int, float]]:
    records = metrics.read(out / log)
    return [(record["step"], record["loss"]) for record in records]


def continue_killed(killed: Path, text: Path, whole: Path) -> None:
    """Continues as a job that is submitted again, and compares with a whole run."""
    logged = losses(killed)
    found = checkpoint.find(killed / "checkpoints")
    assert found.step is not None or logged == [] or logged[-1][0] <= SAVE_EVERY
    assert found.step is None or logged[-1][0] <= found.step + SAVE_EVERY
    resume = ["--resume"] * (killed / "config.json").exists()
    assert train.main([*options(text, killed), *resume]) == 0
    assert losses(killed) == losses(whole)
    kept, expected = (
        {path.name for path in (out / "checkpoints").iterdir()}
        for out in (killed, whole)
    )
    assert kept >= expected  # a run that was complete deletes no more
    repeated = losses(killed, "metrics.repeated.jsonl")
    assert logged[len(logged) - len(repeated) :] == repeated
    left = {path.name for path in killed.iterdir()} - {"curves.part"}  # not drawn here
    assert left <= {path.name for path in whole.iterdir()} | {"metrics.repeated.jsonl"}


@pytest.mark.exhaustive  # test_checkpoint.py damages files
@pytest.mark.usefixtures("standard_promotion")
def test_a_kill_at_any_moment_needs_no_human_and_loses_no_whole_checkpoint(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = tmp_path / "whole"
    assert train.main(options(text, whole)) == 0
    with copies_of(tmp_path / "run", tmp_path / "copies") as copies:
        assert train.main(options(text, tmp_path / "run")) == 0
    assert len(copies) > 50
    monkeypatch.setattr(training.plot, "draw_curves", lambda *_: None)
    for copy in copies:
        continue_killed(copy, text, whole)
