"""What the kernels' backends need of a machine and of blocks."""

import importlib.util
from collections.abc import Callable, Sequence

import jax

from fbq_jax.ops.op import Kernel, no_caveat

TRITON_SIDES = (32, 64, 128, 256)
MOSAIC_SIDES = (128, 256)


def nvidia_refusal(block_shape: Sequence[int] = ()) -> str | None:
    """Why no Triton kernel runs on this machine, or None if one does."""
    del block_shape
    backend = jax.default_backend()
    if backend != "gpu":
        return f"it needs a GPU, and JAX's default backend is {backend}"
    capability = _compute_capability()
    if capability is None or capability < 80:
        return "it needs an NVIDIA GPU of compute capability 8.0 or above"
    if importlib.util.find_spec("jax_triton") is None:
        return "jax-triton is missing: pip install 'fbq-jax[cuda]'"
    return None


def triton_refusal(block_shape: Sequence[int]) -> str | None:
    """Why no Triton kernel runs on this machine with such blocks."""
    return nvidia_refusal() or _sides_refusal(block_shape, TRITON_SIDES)


def mosaic_refusal(block_shape: Sequence[int]) -> str | None:
    """Why the Mosaic GEMM does not run on this machine with such blocks."""
    if reason := triton_refusal(block_shape):
        return reason
    if _compute_capability() != 90:
        return "it needs a Hopper GPU, of compute capability 9.0"
    return _sides_refusal(block_shape, MOSAIC_SIDES)


def triton_kernels(
    module: str,
    refusal: Callable[[Sequence[int]], str | None] = triton_refusal,
    caveat: Callable[[Sequence[int], int | None], str] = no_caveat,
) -> dict[str, Kernel]:
    """A Triton kernel, which serves the Mosaic backend too.

    Only the GEMM is written in Mosaic.
    """
    kernel = Kernel(module, refusal, caveat)
    return {"mosaic": kernel, "triton": kernel}


def _sides_refusal(block_shape: Sequence[int], sides: tuple[int, ...]) -> str | None:
    # Only the sides that do not fit: they are the cause that several ops share.
    others = sorted({side for side in block_shape if side not in sides})
    if not others:
        return None
    accepted = ", ".join(map(str, sides[:-1]))
    named = " and ".join(map(str, others))
    return f"its blocks have sides of {accepted} or {sides[-1]}, not {named}"


def _compute_capability() -> int | None:
    """The first GPU's compute capability, times ten; None if it is not NVIDIA's."""
    digits = str(getattr(jax.devices()[0], "compute_capability", "")).split(".")
    if len(digits) != 2 or not all(digit.isdecimal() for digit in digits):
        return None
    return 10 * int(digits[0]) + int(digits[1])
