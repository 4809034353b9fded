"""Checkpoints: written by Orbax and verified by checksums.

Orbax writes a checkpoint under a temporary name and renames it when it is complete. It
does not detect every later change of a byte, and it reports a truncated file in pages
of text. `save` therefore stores the SHA-256 sums of the files beside them, and
`restore` compares the sums first. `sha256sum --check SHA256SUMS` also reads them.
"""

import hashlib
from pathlib import Path
from typing import TypeVar

import orbax.checkpoint as ocp

from examples.llama import atomic
from examples.llama.mesh import is_first, wait

T = TypeVar("T")

_SUMS = "SHA256SUMS"


class RestoreError(ValueError):
    """There is no checkpoint to restore, or it is damaged."""


def save(folder: Path, step: int, state: object) -> None:
    """Writes the checkpoint `folder/<step>` and keeps the one before it.

    Args:
        folder: The folder of a run's checkpoints.
        step: The number of the checkpoint, higher than all existing ones.
        state: A pytree of arrays.
    """
    with _manager(folder) as manager:
        manager.save(step, args=ocp.args.StandardSave(state))
    if is_first():  # every process has written its shards
        sums = folder / str(step) / _SUMS
        atomic.write(sums, _checksums(sums.parent))
    wait("checkpoint")


def any_in(folder: Path) -> bool:
    """Whether `folder` holds a checkpoint; a run can stop before its first one."""
    if not folder.exists():
        return False
    with _manager(folder) as manager:
        return bool(manager.all_steps())


def restore(folder: Path, like: T) -> T:
    """Reads the latest checkpoint.

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
            # The files are intact, so the structure differs.
            raise RestoreError(
                f"the checkpoint {latest} belongs to another model or to another "
                "version of this example: its arrays have other names or shapes. Start "
                "again with another --out, or continue with the version that wrote it."
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
