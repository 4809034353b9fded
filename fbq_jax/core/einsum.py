"""``jnp.einsum`` of two operands as one quantized ``dot_general``.

``jnp.einsum`` may swap its operands before it calls ``dot_general``, and a quantized
``dot_general`` takes its left operand for the activation.  This einsum keeps the order
of the caller: the first operand is the activation, the second one the weight.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from fbq_jax.core.arguments import check_arrays, output_dtype

Label = str | int


class Subscripts(NamedTuple):
    """The label of each dimension of the operands and the output.

    A label is a letter; or, for a dimension of the ellipsis, a number: -1 for the last,
    -2 for the one before, and so on.
    """

    lhs: tuple[Label, ...]
    rhs: tuple[Label, ...]
    out: tuple[Label, ...]


class QuantizedEinsum:
    """A callable with the signature of ``jnp.einsum``.

    Attributes:
      dot_general: takes the arguments of ``lax.dot_general``; its lhs is the
        activation.  Each subclass defines it.
    """

    dot_general: Any

    def __call__(
        self,
        subscripts: str,
        /,
        *operands: jax.Array,
        precision: Any = None,
        preferred_element_type: jax.typing.DTypeLike | None = None,
        out_sharding: Any = None,
    ) -> jax.Array:
        """``jnp.einsum(subscripts, *operands, ...)`` by one ``dot_general``.

        A dimension that only one operand has, and not the output, is summed first, and
        a dimension of size 1 is broadcast.  So are dimensions of an ellipsis that the
        output lacks.  If nothing else is summed over, it is an outer product: of
        matrices with one column and one row, which ``dot_general`` multiplies.  If one
        operand has batch dimensions only, it scales the other, element by element.
        That is no matrix product, and is computed in float, without ``dot_general`` and
        its state.

        Args:
          subscripts: as in ``jnp.einsum``; may have ``...`` and may omit the output.
          *operands: the activation and the weight.
          precision: passed to ``dot_general``.
          preferred_element_type: passed to ``dot_general``.
          out_sharding: the output's sharding over explicit mesh axes.

        Raises:
          TypeError: an operand is not an array, or has another dtype than bfloat16,
            float16 and float32.
          ValueError: there are not two operands, a label occurs twice in one operand
            (a diagonal), or the subscripts do not fit the operands.
        """
        if not isinstance(subscripts, str) or len(operands) != 2:
            raise ValueError(
                "a quantized einsum takes a string of subscripts and two operands; got "
                f"{subscripts!r} and {len(operands)}"
            )
        lhs, rhs = operands
        check_arrays(lhs=lhs, rhs=rhs)
        labels = parse(subscripts, lhs.ndim, rhs.ndim)
        _check_sizes(subscripts, lhs, rhs, labels)
        x, w, labels = _sum_unshared(*_without_broadcasts(lhs, rhs, labels))
        shared = [label for label in labels.lhs if label in labels.rhs]
        batch = [label for label in shared if label in labels.out]
        contracted = [label for label in shared if label not in labels.out]
        if len(batch) == min(len(labels.lhs), len(labels.rhs)):
            return _scale(subscripts, lhs, rhs, preferred_element_type, out_sharding)
        free = [label for label in (*labels.lhs, *labels.rhs) if label not in shared]
        order = _find(labels.out, [*batch, *free])
        dimension_numbers = tuple(
            (_find(group, labels.lhs), _find(group, labels.rhs))
            for group in (contracted, batch)
        )
        y = self.dot_general(
            x,
            w,
            dimension_numbers,
            precision=precision,
            preferred_element_type=preferred_element_type,
            out_sharding=before_transposing(out_sharding, order),
        )
        return y.transpose(order)


def parse(subscripts: str, lhs_ndim: int, rhs_ndim: int) -> Subscripts:
    """Parses the subscripts of two operands.

    Args:
      subscripts: as in ``jnp.einsum``.
      lhs_ndim: the number of dimensions of lhs.
      rhs_ndim: the number of dimensions of rhs.

    Raises:
      ValueError: the subscripts do not fit two operands with these dimensions, or a
        label occurs twice in one operand (a diagonal).
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
    ellipsis = sorted(label for label in {*lhs, *rhs} if isinstance(label, int))
    out: tuple[Label, ...]
    if arrow:
        before, dots, after = output.partition("...")
        out = (*before, *(ellipsis if dots else ()), *after)
    else:
        letters = (label for label in {*lhs} ^ {*rhs} if isinstance(label, str))
        out = (*ellipsis, *sorted(letters))
    if len(set(out)) < len(out) or not set(out) <= {*lhs, *rhs}:
        raise error(f"the output {output!r} takes labels of the operands, once each")
    return Subscripts(lhs, rhs, out)


def _check_sizes(
    subscripts: str, lhs: jax.Array, rhs: jax.Array, labels: Subscripts
) -> None:
    """Raises ValueError if a label has two sizes, neither of which is 1."""
    sizes = dict(zip(labels.lhs, lhs.shape, strict=True))
    for label, size in zip(labels.rhs, rhs.shape, strict=True):
        if sizes.get(label, size) != size and 1 not in (size, sizes[label]):
            raise ValueError(
                f"einsum {subscripts!r} of {lhs.shape} and {rhs.shape}: "
                f"{_name(label)} has size {sizes[label]} in one and {size} in the other"
            )


def _without_broadcasts(
    lhs: jax.Array, rhs: jax.Array, labels: Subscripts
) -> tuple[jax.Array, jax.Array, Subscripts]:
    """Drops each dimension of size 1 whose label has another size in the other one."""
    sizes = (
        dict(zip(labels.lhs, lhs.shape, strict=True)),
        dict(zip(labels.rhs, rhs.shape, strict=True)),
    )

    def dropped(
        x: jax.Array, own: dict[Label, int], other: dict[Label, int]
    ) -> tuple[jax.Array, tuple[Label, ...]]:
        kept = tuple(k for k, size in own.items() if size != 1 or other.get(k, 1) == 1)
        axes = tuple(i for i, label in enumerate(own) if label not in kept)
        return (jnp.squeeze(x, axes) if axes else x), kept

    x, lhs_labels = dropped(lhs, sizes[0], sizes[1])
    w, rhs_labels = dropped(rhs, sizes[1], sizes[0])
    return x, w, Subscripts(lhs_labels, rhs_labels, labels.out)


def _scale(
    subscripts: str, lhs: jax.Array, rhs: jax.Array, preferred: Any, sharding: Any
) -> jax.Array:
    """``jnp.einsum`` in float, of the dtypes that a quantized dot takes."""
    dtype = output_dtype(lhs, rhs, None, preferred)
    common = jnp.promote_types(lhs.dtype, rhs.dtype)
    operands = lhs.astype(common), rhs.astype(common)
    return jnp.einsum(subscripts, *operands, out_sharding=sharding).astype(dtype)


def _sum_unshared(
    lhs: jax.Array, rhs: jax.Array, labels: Subscripts
) -> tuple[jax.Array, jax.Array, Subscripts]:
    """Sums each operand over the labels that nothing else has."""

    def summed(
        x: jax.Array, own: tuple[Label, ...], other: tuple[Label, ...]
    ) -> tuple[jax.Array, tuple[Label, ...]]:
        kept = tuple(label for label in own if label in (*other, *labels.out))
        axes = tuple(i for i, label in enumerate(own) if label not in kept)
        return (jnp.sum(x, axes) if axes else x), kept

    x, lhs_labels = summed(lhs, labels.lhs, labels.rhs)
    w, rhs_labels = summed(rhs, labels.rhs, labels.lhs)
    return x, w, Subscripts(lhs_labels, rhs_labels, labels.out)


def _label(
    term: str, ndim: int, error: Callable[[str], ValueError]
) -> tuple[Label, ...]:
    """The labels of an operand's dimensions."""
    before, dots, after = term.partition("...")
    named = before + after
    if {*named} & {*".->"}:
        raise error("labels are letters, and each operand takes one '...' at most")
    if len(set(named)) < len(named):
        raise error(f"{term!r} has a label twice, and a matrix product has no diagonal")
    rest = ndim - len(named)
    if rest < 0 or (rest and not dots):
        raise error(f"{term!r} does not fit an operand of {ndim} dimensions")
    return (*before, *range(-rest, 0), *after)


def before_transposing(sharding: Any, order: Sequence[int]) -> Any:
    """The sharding of an array whose transpose by ``order`` has this sharding."""
    if sharding is None:
        return None
    if isinstance(sharding, NamedSharding):
        spec = before_transposing(sharding.spec, order)
        return NamedSharding(sharding.mesh, spec)
    axes: list[Any] = [None] * len(order)
    for axis, names in zip(order, sharding, strict=False):
        axes[axis] = names
    return PartitionSpec(*axes)


def _find(labels: Sequence[Label], where: Sequence[Label]) -> tuple[int, ...]:
    return tuple(where.index(label) for label in labels)


def _name(label: Label) -> str:
    return f"label {label!r}" if isinstance(label, str) else "a dimension of '...'"
