"""Files that are replaced at once."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO


def write(path: Path, content: str | bytes) -> None:
    """Writes a file: a reader sees the old content or the new one."""
    data = content.encode() if isinstance(content, str) else content
    write_by(path, lambda file: file.write(data))


def write_by(path: Path, write_to: Callable[[BinaryIO], object]) -> None:
    """`write` of what a function writes to a file."""
    part = path.with_suffix(".part")
    try:
        with part.open("wb") as file:
            write_to(file)
            file.flush()
            os.fsync(file.fileno())  # a rename can reach the disk before the content
        part.replace(path)
    except OSError as error:
        part.unlink(missing_ok=True)
        reason = error.strerror or str(error)  # some libraries give a text only
        raise OSError(error.errno, reason, str(path)) from error
