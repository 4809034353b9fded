"""Files that are replaced at once."""

from pathlib import Path


def write(path: Path, text: str) -> None:
    """Writes a text file atomically: a reader sees the old content or the new one."""
    part = path.with_suffix(".part")
    part.write_text(text)
    part.replace(path)
