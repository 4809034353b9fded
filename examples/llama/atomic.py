"""Files that are replaced at once."""

import os
from pathlib import Path


def write(path: Path, content: str | bytes) -> None:
    """Writes a file: a reader sees the old content or the new one."""
    part = path.with_suffix(".part")
    try:
        with part.open("wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())  # a rename can reach the disk before the content
        part.replace(path)
    except OSError as error:
        part.unlink(missing_ok=True)
        raise OSError(error.errno, error.strerror, str(path)) from error
