"""JAX's own checks of what a program computes inside."""

import contextlib
from collections.abc import Iterator

import jax


@contextlib.contextmanager
def debugging(flag: str) -> Iterator[None]:
    """Runs operation by operation, with a flag such as ``"jax_debug_nans"`` set."""
    before = getattr(jax.config, flag)
    with jax.disable_jit():
        jax.config.update(flag, True)
        try:
            yield
        finally:
            jax.config.update(flag, before)
