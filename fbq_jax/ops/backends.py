"""The machines and block shapes that each backend supports."""

import importlib.util
from collections.abc import Callable, Sequence
from typing import Any

import jax

from fbq_jax.ops.op import Kernel

# The lowest version that the kernel is tested with; ``plgpu.kernel`` of 0.9 differs.
MOSAIC_JAX = (0, 10, 2)
TRITON_SIDES = (32, 64, 128, 256)
MOSAIC_SIDES = TPU_SIDES = (128, 256)


def nvidia_refusal(block_shape: Sequence[int] = ()) -> str | None:
    """The reason why Triton kernels cannot run on this machine, or None if they can."""
    del block_shape  # Some kernels have no blocks.
    backend = jax.default_backend()
    if backend != "gpu":
        return f"it needs a GPU, and JAX's default backend is {backend}"
    capability = _compute_capability()
    if capability is None or capability < 80:
        return "it needs an NVIDIA GPU of compute capability 8.0 or above"
    if importlib.util.find_spec("triton") is None:
        return "Triton is missing: pip install 'fbq-jax[cuda]'"
    return None


def triton_refusal(block_shape: Sequence[int]) -> str | None:
    """The same for Triton kernels with blocks of this shape."""
    return nvidia_refusal() or _sides_refusal(block_shape, TRITON_SIDES)


def mosaic_refusal(block_shape: Sequence[int]) -> str | None:
    """The same for Mosaic kernels with blocks of this shape."""
    if reason := triton_refusal(block_shape):
        return reason
    if _compute_capability() != 90:
        return "it needs a Hopper GPU, of compute capability 9.0"
    if jax.__version_info__ < MOSAIC_JAX:
        return f"it needs jax {'.'.join(map(str, MOSAIC_JAX))} or later"
    return _sides_refusal(block_shape, MOSAIC_SIDES)


def triton_gemm_refusal(block_shape: Sequence[int]) -> str | None:
    """The same for the Triton GEMM with blocks ``(m, k, n)``, or without blocks."""
    return triton_refusal(_without_rows(block_shape))


def mosaic_gemm_refusal(block_shape: Sequence[int]) -> str | None:
    """The same for the Mosaic GEMM with blocks ``(m, k, n)``, or without blocks."""
    return mosaic_refusal(_without_rows(block_shape))


def float8_refusal() -> str | None:
    """The reason why a kernel for NVIDIA GPUs has no FP8 codes, or None if it has."""
    if (_compute_capability() or 0) >= 89:
        return None
    return "FP8 codes need a GPU of compute capability 8.9 or above"


def _without_rows(block_shape: Sequence[int]) -> Sequence[int]:
    """The sides of blocks, without the sides of single rows that have scales."""
    return [side for axis, side in enumerate(block_shape) if axis == 1 or side != 1]


def tpu_refusal(block_shape: Sequence[int]) -> str | None:
    """The same for TPU kernels with blocks of this shape, or without blocks."""
    backend = jax.default_backend()
    if backend != "tpu":
        return f"it needs a TPU, and JAX's default backend is {backend}"
    return _sides_refusal(block_shape, TPU_SIDES)


def triton_kernels(
    module: str,
    refusal: Callable[[Sequence[int]], str | None] = triton_refusal,
    **fields: Any,
) -> dict[str, Kernel]:
    """A Triton kernel for both GPU backends: only the GEMM is written in Mosaic."""
    kernel = Kernel("triton", module, refusal, **fields)
    return {"mosaic": kernel, "triton": kernel}


def _sides_refusal(block_shape: Sequence[int], sides: tuple[int, ...]) -> str | None:
    # Naming only the sides that do not fit gives ops with the same cause one warning.
    others = sorted({side for side in block_shape if side not in sides})
    if not others:
        return None
    accepted = ", ".join(map(str, sides[:-1]))
    named = " and ".join(map(str, others))
    return f"its blocks have sides of {accepted} or {sides[-1]}, not {named}"


def _compute_capability() -> int | None:
    """The first GPU's compute capability times ten; None for another vendor's GPU."""
    digits = str(getattr(jax.devices()[0], "compute_capability", "")).split(".")
    if len(digits) != 2 or not all(digit.isdecimal() for digit in digits):
        return None
    return 10 * int(digits[0]) + int(digits[1])
