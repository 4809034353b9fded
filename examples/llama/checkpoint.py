"""Checkpoints: Orbax writes them, checksums say whether they can be trusted.

Orbax writes a checkpoint under a temporary name and renames it when it is whole. It
does not notice every byte that changes later on, and it reports a truncated file in
pages of text; so the files' SHA-256 sums are kept beside them (`sha256sum --check
SHA256SUMS` reads them too) and compared before anything is restored.
"""

import hashlib
from pathlib import Path
from typing import TypeVar

import orbax.checkpoint as ocp

from examples.llama.mesh import is_first, wait

T = TypeVar("T")

_SUMS = "SHA256SUMS"


class RestoreError(ValueError):
    """There is no checkpoint to restore, or it is damaged."""


def save(folder: Path, step: int, state: object) -> None:
    """Writes the checkpoint `folder/<step>` and keeps the one before it.

    Args:
        folder: Where the checkpoints of one run are.
        step: Its number, higher than those already there.
        state: A pytree of arrays.
    """
    with _manager(folder) as manager:
        manager.save(step, args=ocp.args.StandardSave(state))
    if is_first():  # of the processes, each of which has written its arrays' parts
        sums = folder / str(step) / _SUMS
        part = sums.with_suffix(".part")
        part.write_text(_checksums(sums.parent))
        part.replace(sums)
    wait("checkpoint")


def any_in(folder: Path) -> bool:
    """Whether `folder` holds a checkpoint; a run may stop before its first one."""
    if not folder.exists():
        return False
    with _manager(folder) as manager:
        return bool(manager.all_steps())


def restore(folder: Path, like: T) -> T:
    """Reads the latest checkpoint.

    Args:
        folder: Where the checkpoints of one run are.
        like: A pytree of arrays of the same structure, shapes and dtypes, on the
            devices where those restored should be; any mesh will do.

    Returns:
        The pytree that was saved.

    Raises:
        RestoreError: There is none, its files are not those that were written, or it
            is of another structure than `like`.
    """
    with _manager(folder) as manager:
        steps = sorted(manager.all_steps())
        if not steps:
            raise RestoreError(
                f"{folder} holds no checkpoint: the run stopped before its first one. "
                "Start again with another --out, or delete the run's folder."
            )
        latest = folder / str(steps[-1])
        sums = latest / _SUMS
        if not sums.exists() or sums.read_text() != _checksums(latest):
            remedy = (
                f"Delete it to continue from step {steps[-2]}."
                if len(steps) > 1
                else "It is the only one: start again with another --out."
            )
            raise RestoreError(
                f"the checkpoint {latest} is damaged: its files do not match their "
                f"checksums. {remedy}"
            )
        try:
            return manager.restore(steps[-1], args=ocp.args.StandardRestore(like))
        except ValueError as error:
            # The files are whole, so it is their structure.
            raise RestoreError(
                f"the checkpoint {latest} is of another model, or another version of "
                "this example: its arrays have other names or shapes. Start again with "
                "another --out, or go on with the version that wrote it."
            ) from error


def _manager(folder: Path) -> ocp.CheckpointManager:
    return ocp.CheckpointManager(
        folder.absolute(),
        options=ocp.CheckpointManagerOptions(
            max_to_keep=2, enable_async_checkpointing=False
        ),
    )


def _checksums(folder: Path) -> str:
    lines = []
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        if path.stem != _SUMS:
            with path.open("rb") as file:
                digest = hashlib.file_digest(file, "sha256").hexdigest()
            lines.append(f"{digest}  {path.relative_to(folder)}\n")
    return "".join(lines)
