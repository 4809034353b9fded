"""Support for other frameworks; each module is imported only when it is used."""

import contextlib
from collections.abc import Iterator


@contextlib.contextmanager
def needs(package: str, *, extra: str) -> Iterator[None]:
    """A context for imports of an optional package.

    Args:
      package: the name by which it is imported.
      extra: the extra of fbq-jax that installs it.

    Raises:
      ModuleNotFoundError: it is not installed; the message says how to install it.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != package:
            raise
        raise ModuleNotFoundError(
            f"{package} is missing: pip install 'fbq-jax[{extra}]'", name=error.name
        ) from error
