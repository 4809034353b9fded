"""The error that ends a program of this example with one line."""

import io
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path


class UserError(ValueError):
    """What was asked for is not possible; the message says why and what to do."""


def exit_status(action: Callable[[], object]) -> int:
    """Runs a program's action; prints an expected error as one line on stderr.

    Returns 0, 1 after such an error, or 130 after Ctrl-C.
    """
    try:
        action()
    except KeyboardInterrupt:
        return 130
    except (UserError, OSError) as error:  # OSError names its file
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Makes an OSError in the block a UserError that names a file or a folder."""
    try:
        yield
    except OSError as error:
        raise UserError(
            f"{path} cannot be written: {error.strerror}. Make room, or make the "
            "folder writable, and start again; a run continues with --resume"
        ) from error


def replace_unprintable() -> None:
    """Makes characters that standard output cannot encode question marks."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")
