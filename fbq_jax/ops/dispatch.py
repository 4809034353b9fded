"""Chooses the implementation of an op, and gives the reason for the choice.

========= ==================================================================
mosaic    NVIDIA Hopper: the GEMM in Pallas Mosaic GPU, the rest as in triton
triton    NVIDIA GPUs from Ampere on, through jax-triton
reference any device: the definition in ``jax.numpy``
========= ==================================================================

A GEMM whose operands have one scale per row has no blocks; ``mosaic`` and ``triton``
use XLA's own INT8 GEMM for it.  Ragged products have only the reference.

The first implementation in the table that supports a call is used.  The argument
``implementation``, or else the environment variable ``FBQ_IMPLEMENTATION`` (read when a
function is traced), overrides this.  If the requested implementation does not support
the call, an error says why.
"""

import os
import warnings
from collections.abc import Sequence
from typing import NamedTuple

import jax

from fbq_jax.ops.op import OPS, Op
from fbq_jax.sharding.layer_names import current_layer

ENVIRONMENT_VARIABLE = "FBQ_IMPLEMENTATION"
IMPLEMENTATIONS = ("mosaic", "triton", "reference")
_ASKED = "asks for it"
_warned_reasons: set[str] = set()


class Choice(NamedTuple):
    """The implementation chosen for an op.

    Attributes:
      op: the op's name.
      implementation: the name of the implementation.
      reason: the reason for the choice, as text.
      backend: what computes the op in this implementation: ``"mosaic"``, ``"triton"``,
        ``"xla"`` or ``"reference"``.
    """

    op: str
    implementation: str
    reason: str
    backend: str


def choose(
    op: str,
    sides: Sequence[int],
    *,
    width: int | None = None,
    implementation: str | None = None,
) -> Choice:
    """Chooses the implementation of an op for JAX's default backend.

    Args:
      op: the name of a function in ``fbq_jax.ops``.
      sides: the shape of a block, ``(rows, columns)``, or ``(m, k, n)`` for a GEMM;
        empty if each row or column has one scale.
      width: the row length of the arrays that a fused op packs; None if every length
        will do.
      implementation: the implementation to use.  By default the one that
        ``FBQ_IMPLEMENTATION`` names, or else the first that supports the call.

    Raises:
      ValueError: if no op or no implementation has that name, or if the implementation
        does not support the call.

    >>> choose("matmul", (128, 128, 128), implementation="reference").reason
    'implementation= asks for it'
    """
    if op not in OPS:
        raise ValueError(f"{op!r} is not an op; there are: {', '.join(OPS)}")
    source = "implementation"
    if implementation is None and (asked := os.environ.get(ENVIRONMENT_VARIABLE)):
        source, implementation = ENVIRONMENT_VARIABLE, asked
    if implementation is None:
        return _first_choice(OPS[op], sides, width)
    check_name(implementation, source)
    if reason := _refusal(implementation, OPS[op], sides):
        raise ValueError(f"{source}={implementation} cannot do {op}: {reason}")
    return _choice(OPS[op], implementation, sides, width, f"{source}= {_ASKED}")


def check_name(implementation: str | None, source: str = "implementation") -> None:
    """Raises ValueError unless an implementation has this name, or it is None."""
    if implementation is not None and implementation not in IMPLEMENTATIONS:
        raise ValueError(
            f"{source}={implementation!r} is not an implementation; "
            f"there are: {', '.join(IMPLEMENTATIONS)}"
        )


def _first_choice(op: Op, sides: Sequence[int], width: int | None) -> Choice:
    """The first implementation that supports a call."""
    refusals = []
    for name in IMPLEMENTATIONS:
        reason = _refusal(name, op, sides)
        if reason is None:
            break
        refusals.append(f"not {name}: {reason}")
    reason = "; ".join(refusals) or "the first choice on this GPU"
    return _choice(op, name, sides, width, reason)


def _refusal(implementation: str, op: Op, sides: Sequence[int]) -> str | None:
    """The reason why an implementation does not support a call, or None."""
    if implementation == "reference":
        return None
    if implementation not in op.kernels:
        return "it has no kernel for this op"
    return op.kernels[implementation].refusal(sides)


def _choice(
    op: Op, name: str, sides: Sequence[int], width: int | None, reason: str
) -> Choice:
    """A choice, whose reason includes the kernel's caveat."""
    if name != "reference":
        reason += op.kernels[name].caveat(sides, width)
    return Choice(op.name, name, reason, op.backend(name, sides))


def warn_of_reference(choice: Choice, sides: Sequence[int]) -> None:
    """Warns if a GPU runs the slow reference, unless the caller asked for it.

    Each reason is reported once.  The warning names the first layer, and every op that
    the reason applies to.
    """
    slow = choice.implementation == "reference" and jax.default_backend() == "gpu"
    if not slow or _ASKED in choice.reason or choice.reason in _warned_reasons:
        return
    _warned_reasons.add(choice.reason)
    affected = (
        op.name
        for op in OPS.values()
        if _first_choice(op, sides, None).reason == choice.reason
    )
    layer = current_layer()
    warnings.warn(
        f"{layer + ': ' if layer else ''}{', '.join(affected)} run as jax.numpy code, "
        f"many times slower on this GPU than a kernel: {choice.reason}",
        stacklevel=2,
    )
