"""``jnp.einsum`` of two operands as one quantized ``dot_general``.

``jnp.einsum`` may hand its operands to ``dot_general`` in either order, and a quantized
one takes the left operand for the activation.  Here the order is the caller's: the
first operand is the activation, the second the weight.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
from jax.sharding import NamedSharding, PartitionSpec

Label = str | int


class Subscripts(NamedTuple):
    """The label of each dimension.

    A letter; or, of those that an ellipsis stands for, -1 for the last, -2 for the one
    before and so on.
    """

    lhs: tuple[Label, ...]
    rhs: tuple[Label, ...]
    out: tuple[Label, ...]


def einsum(
    dot_general: Callable[..., jax.Array],
    subscripts: str,
    operands: Sequence[jax.Array],
    precision: Any,
    preferred_element_type: jax.typing.DTypeLike | None,
    out_sharding: NamedSharding | PartitionSpec | None,
) -> jax.Array:
    """``jnp.einsum(subscripts, *operands, ...)`` by one call of ``dot_general``.

    Args:
      dot_general: of the activation, the weight and the other arguments of
        ``lax.dot_general``.
      subscripts: as for ``jnp.einsum``, with ``...`` and without an output if need be.
      operands: the activation and the weight.
      precision: handed on.
      preferred_element_type: handed on.
      out_sharding: the output's sharding, over explicit mesh axes: a
        ``NamedSharding`` or a ``PartitionSpec``.

    Raises:
      ValueError: there are not two operands, or theirs is no product of matrices.
    """
    if not isinstance(subscripts, str) or len(operands) != 2:
        raise ValueError(
            "a quantized einsum takes a string of subscripts and two operands; got "
            f"{subscripts!r} and {len(operands)}"
        )
    lhs, rhs = operands
    labels = parse(subscripts, lhs.ndim, rhs.ndim)
    shared = [label for label in labels.lhs if label in labels.rhs]
    for label in shared:
        sizes = [
            x.shape[of.index(label)]
            for x, of in zip(operands, (labels.lhs, labels.rhs), strict=True)
        ]
        if sizes[0] != sizes[1]:
            raise ValueError(
                f"einsum {subscripts!r} of {lhs.shape} and {rhs.shape}: {_name(label)} "
                f"is {sizes[0]} long in one and {sizes[1]} in the other"
            )
    batch = [label for label in shared if label in labels.out]
    contracted = [label for label in shared if label not in labels.out]
    if not contracted:
        raise ValueError(
            f"einsum {subscripts!r} sums over nothing: it is no product of matrices"
        )
    free = [label for label in (*labels.lhs, *labels.rhs) if label not in shared]
    order = _find(labels.out, [*batch, *free])
    y = dot_general(
        lhs,
        rhs,
        (
            (_find(contracted, labels.lhs), _find(contracted, labels.rhs)),
            (_find(batch, labels.lhs), _find(batch, labels.rhs)),
        ),
        precision=precision,
        preferred_element_type=preferred_element_type,
        out_sharding=before_transposing(out_sharding, order),
    )
    return y.transpose(order)


def parse(subscripts: str, lhs_ndim: int, rhs_ndim: int) -> Subscripts:
    """The labels of two operands and of their product.

    Raises:
      ValueError: the subscripts are not those of two operands of so many dimensions;
        an operand's label is there twice (a diagonal), or is summed over in one
        operand alone.
    """

    def error(what: str) -> ValueError:
        return ValueError(f"einsum {subscripts!r}: {what}")

    inputs, arrow, output = subscripts.replace(" ", "").partition("->")
    terms = inputs.split(",")
    if len(terms) != 2:
        raise error(f"a quantized einsum takes two operands, not {len(terms)}")
    lhs, rhs = (
        _label(term, ndim, error)
        for term, ndim in zip(terms, (lhs_ndim, rhs_ndim), strict=True)
    )
    dots = sorted(label for label in {*lhs, *rhs} if isinstance(label, int))
    out: tuple[Label, ...]
    if arrow:
        before, ellipsis, after = output.partition("...")
        out = (*before, *(dots if ellipsis else ()), *after)
    else:
        out = (*dots, *sorted(label for label in {*lhs} ^ {*rhs} if label not in dots))
    if len(set(out)) < len(out) or not set(out) <= {*lhs, *rhs}:
        raise error(f"the output {output!r} takes labels of the operands, each once")
    for label in (*lhs, *rhs):
        if label not in out and (label in lhs) != (label in rhs):
            raise error(
                f"{_name(label)} is summed over in one operand alone, which is no "
                "product: sum before"
            )
    return Subscripts(lhs, rhs, out)


def _label(
    term: str, ndim: int, error: Callable[[str], ValueError]
) -> tuple[Label, ...]:
    """The labels of an operand's dimensions."""
    before, dots, after = term.partition("...")
    named = before + after
    if named and not (named.isascii() and named.isalpha()):
        raise error("labels are letters, beside one '...' an operand")
    if len(set(named)) < len(named):
        raise error(f"{term!r} has a label twice, and a product has no diagonals")
    rest = ndim - len(named)
    if rest < 0 or (rest and not dots):
        raise error(f"{term!r} does not fit an operand of {ndim} dimensions")
    return (*before, *range(-rest, 0), *after)


def before_transposing(
    sharding: NamedSharding | PartitionSpec | None, order: Sequence[int]
) -> NamedSharding | PartitionSpec | None:
    """The sharding of what has this one when it is transposed."""
    if sharding is None:
        return None
    spec = sharding.spec if isinstance(sharding, NamedSharding) else sharding
    axes: list[Any] = [None] * len(order)
    for axis, names in zip(order, spec, strict=False):
        axes[axis] = names
    before = PartitionSpec(*axes)
    if isinstance(sharding, NamedSharding):
        return NamedSharding(sharding.mesh, before)
    return before


def _find(labels: Sequence[Label], where: Sequence[Label]) -> tuple[int, ...]:
    return tuple(where.index(label) for label in labels)


def _name(label: Label) -> str:
    return f"label {label!r}" if isinstance(label, str) else "a dimension of '...'"
