"""Which implementation of an op runs here, and why.

An op has one signature, that of ``fbq_jax.kernels.reference`` or ``fused_reference``,
and several implementations:

========= =======================================================================
mosaic    for Hopper: the GEMM in Pallas Mosaic GPU, the rest as in triton
triton    for NVIDIA GPUs from Ampere on, through jax-triton
reference anywhere: the definition
========= =======================================================================

Where every row of lhs and of rhs has one scale, the first two leave the product to
XLA's own INT8 GEMM.  Ragged products have the reference only.

The first that can serve a call does.  ``implementation=``, or else
``FBQ_IMPLEMENTATION`` in the environment (read when a function is traced), asks for
one; a call that it cannot serve says why.
"""

import functools
import importlib.util
import os
import warnings
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any, NamedTuple

import jax

from fbq_jax.kernels import (
    fused_reference,
    grouped_reference,
    packing,
    reference,
    xla_gemm,
)

ENVIRONMENT_VARIABLE = "FBQ_IMPLEMENTATION"
FUSED_OPS = (
    "rms_norm_quantize",
    "silu_gate_quantize",
    "silu_gate_grad_quantize",
)
OPS = (
    "quantize",
    "quantize_vectors",
    "quantize_fallback",
    "block_metric",
    "matmul",
    *FUSED_OPS,
)
WITHOUT_KERNELS = ("ragged_matmul", "ragged_contraction")
IMPLEMENTATIONS = ("mosaic", "triton", "reference")
_SIDES = (32, 64, 128, 256)


class Choice(NamedTuple):
    """The implementation of an op that runs here, and the reason in words."""

    op: str
    implementation: str
    reason: str


def choose(
    op: str,
    sides: Sequence[int],
    *,
    width: int | None = None,
    implementation: str | None = None,
) -> Choice:
    """Chooses the implementation of an op for JAX's default backend.

    Args:
      op: one of ``OPS`` or ``WITHOUT_KERNELS``.
      sides: of the blocks; none where a scale is of a whole row or column.
      width: of ``FUSED_OPS``, the length of the rows of what is packed; None for one
        that fits.
      implementation: the one to take; by default what ``FBQ_IMPLEMENTATION`` says, or
        the first that can serve the call.

    Raises:
      ValueError: if there is no op or no implementation of that name, or it cannot
        serve the call.

    >>> choose("matmul", (128, 128, 128), implementation="reference").reason
    'implementation= asks for it'
    """
    ops = (*OPS, *WITHOUT_KERNELS)
    if op not in ops:
        raise ValueError(f"{op!r} is not an op; there are: {', '.join(ops)}")
    source = "implementation"
    if implementation is None and (asked := os.environ.get(ENVIRONMENT_VARIABLE)):
        source, implementation = ENVIRONMENT_VARIABLE, asked
    if implementation is not None:
        if implementation not in IMPLEMENTATIONS:
            raise ValueError(
                f"{source}={implementation!r} is not an implementation; "
                f"there are: {', '.join(IMPLEMENTATIONS)}"
            )
        if reason := _refusal(implementation, op, sides):
            raise ValueError(f"{source}={implementation} cannot do {op}: {reason}")
        reason = f"{source}= asks for it"
        return Choice(
            op, implementation, reason + _passes(implementation, op, sides, width)
        )
    refusals = []
    for name in IMPLEMENTATIONS:
        reason = _refusal(name, op, sides)
        if reason is None:
            break
        refusals.append(f"not {name}: {reason}")
    reason = "; ".join(refusals) or "the first choice on this GPU"
    return Choice(op, name, reason + _passes(name, op, sides, width))


def _refusal(implementation: str, op: str, sides: Sequence[int]) -> str | None:
    """Why an implementation cannot serve a call, or None if it can."""
    if implementation == "reference":
        return None
    if op in WITHOUT_KERNELS:
        return "it has no kernel for this op"
    backend = jax.default_backend()
    if backend != "gpu":
        return f"it needs a GPU, and JAX's default backend is {backend}"
    capability = _capability()
    if capability is None or capability < 80:
        return "it needs an NVIDIA GPU of compute capability 8.0 or above"
    if importlib.util.find_spec("jax_triton") is None:
        return "jax-triton is missing: pip install 'fbq-jax[cuda]'"
    if not all(side in _SIDES for side in sides):
        return f"its blocks have sides of {_SIDES}, not {tuple(sides)}"
    if implementation == "mosaic" and op == "matmul":
        if capability != 90:
            return "it needs a Hopper GPU, of compute capability 9.0"
        if not all(side % 128 == 0 for side in sides):
            return f"its blocks have sides of 128 or 256, not {tuple(sides)}"
    return None


def _passes(
    implementation: str, op: str, sides: Sequence[int], width: int | None
) -> str:
    """What a reason adds where a kernel does not do all of an op in one pass."""
    group = packing.GROUP
    if implementation == "reference" or op not in FUSED_OPS:
        return ""
    if sides[1] == group and (width is None or width % group == 0):
        return ""
    return (
        f"; not in one pass, but by its definition and a kernel that quantizes: one "
        f"pass takes blocks {group} wide and rows of whole blocks, not blocks "
        f"{sides[1]} wide" + ("" if width is None else f" and rows of {width}")
    )


def _capability() -> int | None:
    """The first GPU's compute capability, times ten; None if it is not NVIDIA's."""
    digits = str(getattr(jax.devices()[0], "compute_capability", "")).split(".")
    if len(digits) != 2 or not all(digit.isdecimal() for digit in digits):
        return None
    return 10 * int(digits[0]) + int(digits[1])


def function_of(choice: Choice, sides: Sequence[int]) -> Callable[..., Any]:
    """The function of a choice.  Only modules that are used are imported."""
    module: ModuleType
    if choice.implementation == "reference":
        return definition(choice.op)
    if choice.op in FUSED_OPS:
        from fbq_jax.kernels.triton import fused as module
    elif choice.op == "quantize_vectors":
        from fbq_jax.kernels.triton import quantize_vectors as module
    elif choice.op != "matmul":
        from fbq_jax.kernels.triton import quantize as module
    elif not sides:
        module = xla_gemm
    elif choice.implementation == "mosaic":
        from fbq_jax.kernels.mosaic import gemm as module
    else:
        from fbq_jax.kernels.triton import gemm as module
    return getattr(module, choice.op)


def definition(op: str) -> Callable[..., Any]:
    """The function in ``fbq_jax.kernels`` that defines an op."""
    module = fused_reference if op in FUSED_OPS else reference
    return getattr(grouped_reference if op in WITHOUT_KERNELS else module, op)


@functools.cache
def warn_of_reference(choice: Choice) -> None:
    """Says once where a GPU runs the slow definition, unless that was asked for."""
    slow = choice.implementation == "reference" and jax.default_backend() == "gpu"
    if slow and "asks for it" not in choice.reason:
        warnings.warn(
            f"{choice.op} runs by its definition in jax.numpy on this GPU, many times "
            f"slower than by a kernel: {choice.reason}",
            stacklevel=2,
        )
