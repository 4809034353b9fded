"""JAX's own checks of what a program computes inside."""

import contextlib
from collections.abc import Iterator

import jax


@contextlib.contextmanager
def debugging(*flags: str) -> Iterator[None]:
    """Runs operation by operation, with flags such as ``"jax_debug_nans"`` set."""
    before = {flag: getattr(jax.config, flag) for flag in flags}
    with jax.disable_jit():
        for flag in flags:
            jax.config.update(flag, True)
        try:
            yield
        finally:
            for flag, value in before.items():
                jax.config.update(flag, value)
