"""Checkpoints: written by Orbax and verified by checksums.

Orbax writes a checkpoint under a temporary name and renames it when it is complete. It
does not detect every later change of a byte, and it reports a truncated file in pages
of text. `save` therefore stores the SHA-256 sums of the files beside them. A checkpoint
is whole once they exist and match. `sha256sum --check SHA256SUMS` also reads them.
"""

import functools
import hashlib
import inspect
import logging
import shutil
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import orbax.checkpoint as ocp

from examples.llama import atomic
from examples.llama.mesh import is_first, wait

T = TypeVar("T")

_SUMS = "SHA256SUMS"


class RestoreError(ValueError):
    """There is no checkpoint to restore, or it is damaged."""


class SaveError(RuntimeError):
    """A checkpoint cannot be written."""


class Found(NamedTuple):
    """What `find` found.

    Attributes:
        step: The number of the newest checkpoint that is whole; None without one.
        skipped: Why each newer checkpoint is not whole, newest first.
    """

    step: int | None
    skipped: list[str]


def save(folder: Path, step: int, state: object) -> None:
    """Writes the checkpoint `folder/<step>` and keeps the one before it.

    Checkpoints from `step` on are deleted first: `find` skipped them. Once the new one
    has its checksums, all others but the newest that has some are deleted.

    Args:
        folder: The folder of a run's checkpoints.
        step: The number of the checkpoint, higher than that of every whole one.
        state: A pytree of arrays.

    Raises:
        SaveError: A file cannot be written. Checkpoints before `step` are unchanged.
    """
    try:
        if is_first():
            for later in _steps(folder):
                if later >= step:
                    shutil.rmtree(folder / str(later))
        wait("checkpoint cleared")
        with _no_logs(), _manager(folder) as manager:
            manager.save(step, args=ocp.args.StandardSave(state))
        if is_first():  # every process has written its shards
            sums = folder / str(step) / _SUMS
            atomic.write(sums, _checksums(sums.parent))
            _delete_old(folder)
    except (OSError, ValueError) as error:  # TensorStore raises ValueError
        reason = str(error).partition(" [tensorstore_spec=")[0]
        raise SaveError(
            f"the checkpoint {folder / str(step)} cannot be written: {reason}. Make "
            "room, or make the folder writable, and continue with --resume"
        ) from error
    wait("checkpoint")


def _delete_old(folder: Path) -> None:
    """Deletes all checkpoints but the newest two that have checksums."""
    steps = _steps(folder)
    complete = [step for step in steps if (folder / str(step) / _SUMS).exists()]
    for step in set(steps).difference(complete[-2:]):
        shutil.rmtree(folder / str(step))


def find(folder: Path) -> Found:
    """Finds the newest checkpoint that is whole.

    A checkpoint without checksums is incomplete: its writing was interrupted.

    Raises:
        RestoreError: No checkpoint is whole, and at least one has changed since it was
            written.
    """
    skipped: list[str] = []
    changed = False
    for step in reversed(_steps(folder)):
        problem = _problem(folder / str(step))
        if problem is None:
            return Found(step, skipped)
        skipped.append(problem)
        changed |= (folder / str(step) / _SUMS).exists()
    if changed:
        raise RestoreError(
            f"{folder} holds no checkpoint that is whole: {'; '.join(skipped)}. Repair "
            "the files, or start again with another --out."
        )
    return Found(None, skipped)


def restore(folder: Path, like: T) -> T:
    """Reads the newest checkpoint.

    Args:
        folder: The folder of a run's checkpoints.
        like: A pytree of arrays with the structure, shapes and dtypes of the
            checkpoint, and the shardings to restore it with. The mesh need not be the
            one that the checkpoint was saved from.

    Returns:
        The pytree that was saved.

    Raises:
        RestoreError: There is no checkpoint, its files have changed, or its structure
            differs from `like`.
    """
    if not (steps := _steps(folder)):
        raise RestoreError(f"{folder} holds no checkpoint")
    if problem := _problem(folder / str(steps[-1])):
        raise RestoreError(f"{problem}. --resume writes it again.")
    return read(folder, steps[-1], like)


def read(folder: Path, step: int, like: T) -> T:
    """Reads the checkpoint `folder/<step>`, which `find` found to be whole.

    Args:
        folder: The folder of a run's checkpoints.
        step: The number of the checkpoint.
        like: As in `restore`.

    Returns:
        The pytree that was saved.

    Raises:
        RestoreError: The structure of the checkpoint differs from `like`.
    """
    try:
        with _no_logs(), _manager(folder) as manager:
            return manager.restore(step, args=ocp.args.StandardRestore(like))
    except ValueError as error:
        # The files are intact, so the structure differs.
        raise RestoreError(
            f"the checkpoint {folder / str(step)} belongs to another model or to "
            "another version of this example: its arrays have other names or shapes. "
            "Start again with another --out, or continue with the version that wrote "
            "it."
        ) from error


def _steps(folder: Path) -> list[int]:
    """The numbers of the checkpoints that Orbax has renamed, in order."""
    names = [path.name for path in folder.glob("*") if path.is_dir()]
    return sorted(int(name) for name in names if name.isdecimal())


def _problem(checkpoint: Path) -> str | None:
    """Why a checkpoint is not whole; None if it is."""
    try:
        sums = (checkpoint / _SUMS).read_bytes()
        if sums == _checksums(checkpoint).encode():
            return None
    except FileNotFoundError:
        return (
            f"the checkpoint {checkpoint} is incomplete: it has no {_SUMS}, because "
            "its writing was interrupted"
        )
    except OSError as error:
        return f"the checkpoint {checkpoint} is damaged: it cannot be read ({error})"
    return (
        f"the checkpoint {checkpoint} is damaged: its files do not match their "
        "checksums"
    )


@contextmanager
def _no_logs() -> Iterator[None]:
    """Silences Orbax, which reports an error that it raises in pages as well.

    After an error, other writes fail in TensorStore's threads, whose event loop is
    closed by then, or in tasks that nobody awaits. These report at any later time, so
    they stay silent.
    """
    never_awaited = "coroutine .* was never awaited"
    hook = sys.unraisablehook
    levels = {name: logging.getLogger(name).level for name in ("absl", "asyncio")}
    for name in levels:
        logging.getLogger(name).setLevel(logging.CRITICAL)
    sys.unraisablehook = functools.partial(_hide_asynchronous, hook)
    try:
        yield
    except BaseException:
        warnings.filterwarnings("ignore", never_awaited, RuntimeWarning)
        raise
    sys.unraisablehook = hook
    for name, level in levels.items():
        logging.getLogger(name).setLevel(level)


def _hide_asynchronous(hook: Callable[[Any], object], unraisable: Any) -> None:
    late = str(unraisable.exc_value) == "Event loop is closed"
    if not late and not inspect.iscoroutine(unraisable.object):
        hook(unraisable)


def _manager(folder: Path) -> ocp.CheckpointManager:
    return ocp.CheckpointManager(
        folder.absolute(),
        options=ocp.CheckpointManagerOptions(enable_async_checkpointing=False),
    )


def _checksums(folder: Path) -> str:
    lines = []
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        if path.stem != _SUMS:
            with path.open("rb") as file:
                digest = hashlib.file_digest(file, "sha256").hexdigest()
            lines.append(f"{digest}  {path.relative_to(folder)}\n")
    return "".join(lines)
