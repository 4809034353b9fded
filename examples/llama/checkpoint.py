"""Checkpoints: written by Orbax and verified by checksums.

Orbax does not detect every later change of a byte, and it reports a truncated file in
pages of text. `save` therefore stores the SHA-256 sums of the files beside them. A
checkpoint is whole once they exist and match; `sha256sum --check` also reads them.
"""

import hashlib
import logging
import shutil
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple, TypeVar

import orbax.checkpoint as ocp

from examples.llama import atomic, mesh
from examples.llama.errors import UserError

T = TypeVar("T")

_SUMS = "SHA256SUMS"


class Found(NamedTuple):
    """The number of the newest whole checkpoint, and why newer ones are not whole."""

    step: int | None
    skipped: list[str]


def save(folder: Path, step: int, state: object) -> None:
    """Writes the checkpoint `folder/<step>`, a pytree, and keeps the one before it.

    Checkpoints from `step` on are deleted first: `find` skipped them. Once the new one
    has its checksums, all others but the newest that has some are deleted.
    """
    sums = folder / str(step) / _SUMS
    try:
        for later in _steps(folder):
            if mesh.is_first() and later >= step:
                shutil.rmtree(folder / str(later))
        mesh.wait("checkpoint cleared")
        with _manager(folder) as manager:
            manager.save(step, args=ocp.args.StandardSave(state))
        if mesh.is_first():  # every process has written its shards
            atomic.write(sums, _checksums(sums.parent))
            steps = _steps(folder)
            complete = [step for step in steps if (folder / str(step) / _SUMS).exists()]
            for old in set(steps).difference(complete[-2:]):
                shutil.rmtree(folder / str(old))
    except (OSError, ValueError) as error:  # TensorStore raises ValueError
        reason = str(error).partition(" [tensorstore_spec=")[0]
        raise UserError(
            f"the checkpoint {sums.parent} cannot be written: {reason}. Make room, or "
            "make the folder writable, and continue with --resume"
        ) from error
    mesh.wait("checkpoint")


def find(folder: Path) -> Found:
    """Finds the newest checkpoint that is whole.

    If none is whole and one has changed since it was written, raises UserError.
    """
    skipped: list[str] = []
    changed = False
    for step in reversed(_steps(folder)):
        if (problem := _problem(folder / str(step))) is None:
            return Found(step, skipped)
        skipped.append(problem)
        changed |= (folder / str(step) / _SUMS).exists()
    if changed:
        problems = "; ".join(skipped)
        raise UserError(f"{folder} holds no checkpoint that is whole: {problems}")
    return Found(None, skipped)


def restore(folder: Path, like: T) -> T:
    """Reads the newest checkpoint, as `read`; if it is not whole, raises UserError."""
    step, skipped = find(folder)
    if skipped:
        raise UserError(f"{skipped[0]}. --resume writes it again.")
    if step is None:
        raise UserError(f"{folder} holds no checkpoint")
    return read(folder, step, like)


def read(folder: Path, step: int, like: T) -> T:
    """Reads the checkpoint `folder/<step>`, which is whole.

    ``like`` is a pytree of arrays with the structure, shapes and dtypes of the
    checkpoint, and the shardings to restore it with, on any mesh.
    """
    try:
        with _manager(folder) as manager:
            return manager.restore(step, args=ocp.args.StandardRestore(like))
    except ValueError as error:
        raise UserError(
            f"the checkpoint {folder / str(step)} belongs to another model or to "
            "another version of this example, with other arrays: set another --out"
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
        problem = "is damaged: its files do not match their checksums"
    except FileNotFoundError:
        problem = f"is incomplete: its writing was interrupted before {_SUMS}"
    except OSError as error:
        problem = f"is damaged: it cannot be read ({error})"
    return f"the checkpoint {checkpoint} {problem}"


def _checksums(folder: Path) -> str:
    lines = ""
    for path in sorted(folder.rglob("*")):
        if path.is_file() and path.stem != _SUMS:
            with path.open("rb") as file:
                digest = hashlib.file_digest(file, "sha256").hexdigest()
            lines += f"{digest}  {path.relative_to(folder)}\n"
    return lines


@contextmanager
def _manager(folder: Path) -> Iterator[ocp.CheckpointManager]:
    """Orbax's manager, without its logs, which repeat errors that it raises in pages.

    After an error, other writes fail in TensorStore's threads or in tasks that nobody
    awaits. These report at any later time, so they stay silent.
    """
    hook, sys.unraisablehook = sys.unraisablehook, lambda _: None
    loggers = [logging.getLogger(name) for name in ("absl", "asyncio")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL)
    options = ocp.CheckpointManagerOptions(enable_async_checkpointing=False)
    try:
        with ocp.CheckpointManager(folder.absolute(), options=options) as manager:
            yield manager
    except BaseException:
        never_awaited = "coroutine .* was never awaited"
        warnings.filterwarnings("ignore", never_awaited, RuntimeWarning)
        raise
    sys.unraisablehook = hook
    for logger, level in zip(loggers, levels, strict=True):
        logger.setLevel(level)
