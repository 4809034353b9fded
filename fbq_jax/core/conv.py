"""A convolution as one quantized ``dot_general``: its windows times its kernel.

Slices copy the windows, exactly in every dtype.  A NaN reaches only the windows that
contain it.  Each value is in ``prod(kernel) / prod(strides)`` windows.  Without overlap
this is one window: patches are one copy of the input, and 1x1 windows are the input
itself, reshaped.  With overlap the windows are larger than the input, nine times for a
3x3 kernel.  So are their gradients in the backward pass, whose overlapping parts are
summed in the dtype of the input.

The gradient of the kernel needs the codes of the windows, nine bytes per value for that
3x3 kernel.  Codes of the activation are not enough: the values of a block share a
scale, and a pixel shares its block with other pixels at each position in a window.
``nn.remat(nn.Conv)`` saves the unquantized activation instead, and recomputes windows
and codes.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from fbq_jax.core.arguments import DimensionNumbers, check_arrays
from fbq_jax.core.einsum import before_transposing


def conv_general_dilated(
    dot_general: Callable[..., jax.Array],
    lhs: jax.Array,
    rhs: jax.Array,
    window_strides: Sequence[int],
    padding: str | Sequence[tuple[int, int]],
    lhs_dilation: Sequence[int] | None = None,
    rhs_dilation: Sequence[int] | None = None,
    dimension_numbers: Any = None,
    feature_group_count: int = 1,
    batch_group_count: int = 1,
    precision: Any = None,
    preferred_element_type: jax.typing.DTypeLike | None = None,
    out_sharding: NamedSharding | PartitionSpec | None = None,
) -> jax.Array:
    """Computes ``lax.conv_general_dilated(lhs, rhs, ...)`` by one ``dot_general``.

    The left operand of the product is ``[N, *positions, *kernel_size, C]``, contracted
    over the last axes; the right one is the kernel in its own layout.

    Args:
      dot_general: takes the arguments of ``lax.dot_general``; its lhs is the
        activation.
      lhs: the activation.
      rhs: the kernel.
      window_strides: the step between windows, for each spatial dimension.
      padding: ``"SAME"``, ``"VALID"``, ``"SAME_LOWER"`` or pairs (low, high); pads with
        zeros.
      lhs_dilation: the step between the activation's values; zeros lie between them.
      rhs_dilation: the step between the values of a window.
      dimension_numbers: as in ``lax.conv_general_dilated``.
      feature_group_count: the number of feature groups.  Groups are batch dimensions of
        the product, each with its own codes and scales.
      batch_group_count: 1.
      precision: passed to ``dot_general``.
      preferred_element_type: passed to ``dot_general``.
      out_sharding: the output's sharding over explicit mesh axes, for one group only.

    Raises:
      TypeError: an operand is not an array, or the shapes do not fit, as in
        ``lax.conv_general_dilated``.
      ValueError: the shapes do not fit, as in ``lax.conv_general_dilated``; or
        ``batch_group_count`` is not 1, no window fits the padded input, or
        ``out_sharding`` is set and there are several feature groups.
    """
    check_arrays(lhs=lhs, rhs=rhs)
    _check_groups(feature_group_count, batch_group_count, out_sharding)
    lhs_spec, rhs_spec, out_spec = lax.conv_dimension_numbers(
        lhs.shape, rhs.shape, dimension_numbers
    )
    float_conv = functools.partial(
        lax.conv_general_dilated,
        window_strides=window_strides,
        padding=padding,
        lhs_dilation=lhs_dilation,
        rhs_dilation=rhs_dilation,
        dimension_numbers=dimension_numbers,
        feature_group_count=feature_group_count,
    )
    shapes = (jax.ShapeDtypeStruct(x.shape, jnp.float32) for x in (lhs, rhs))
    out = jax.eval_shape(float_conv, *shapes)
    positions = [out.shape[axis] for axis in out_spec[2:]]
    sizes = [rhs.shape[axis] for axis in rhs_spec[2:]]
    if 0 in positions:
        raise ValueError(
            f"no window of {tuple(sizes)} fits an input of {lhs.shape} with padding "
            f"{padding!r}: the output would have the shape {out.shape}"
        )
    ones = (1,) * len(positions)
    dilations = [ones if d is None else d for d in (lhs_dilation, rhs_dilation)]
    x = lhs.transpose(lhs_spec[0], *lhs_spec[2:], lhs_spec[1])
    windows = _windows(x, positions, sizes, window_strides, padding, *dilations)
    operands = _split_groups(windows, rhs, rhs_spec, feature_group_count)
    order = tuple(np.argsort([out_spec[0], *out_spec[2:], out_spec[1]]))
    y = dot_general(
        *operands,
        precision=precision,
        preferred_element_type=preferred_element_type,
        out_sharding=before_transposing(out_sharding, order),
    )
    if feature_group_count != 1:
        y = jnp.moveaxis(y, 0, -2)
        y = y.reshape(*y.shape[:-2], out.shape[out_spec[1]])
    return y.transpose(order)


def _check_groups(
    feature_groups: int,
    batch_groups: int,
    out_sharding: NamedSharding | PartitionSpec | None,
) -> None:
    if batch_groups != 1:
        raise ValueError(
            f"a quantized convolution takes batch_group_count=1; got {batch_groups}"
        )
    if feature_groups != 1 and out_sharding is not None:
        raise ValueError(
            "a quantized convolution takes out_sharding only if feature_group_count is "
            f"1; got {feature_groups} and {out_sharding}"
        )


def _split_groups(
    windows: jax.Array, kernel: jax.Array, rhs_spec: Sequence[int], groups: int
) -> tuple[jax.Array, jax.Array, DimensionNumbers]:
    """The operands and dimension numbers of the product, with groups as batches."""
    rank = len(rhs_spec) - 2
    lhs_contract = tuple(range(rank + 1, windows.ndim))
    rhs_contract = (*rhs_spec[2:], rhs_spec[1])
    if groups == 1:
        return windows, kernel, ((lhs_contract, rhs_contract), ((), ()))
    channels, features = windows.ndim - 1, rhs_spec[0]
    lhs_contract = (*lhs_contract[:-1], channels + 1)
    rhs_contract = tuple(axis + (axis > features) for axis in rhs_contract)
    return (
        _split(windows, channels, groups),
        _split(kernel, features, groups),
        ((lhs_contract, rhs_contract), ((channels,), (features,))),
    )


def _windows(
    x: jax.Array,
    positions: Sequence[int],
    sizes: Sequence[int],
    strides: Sequence[int],
    padding: str | Sequence[tuple[int, int]],
    lhs_dilation: Sequence[int],
    rhs_dilation: Sequence[int],
) -> jax.Array:
    """The windows ``[N, *positions, *sizes, C]`` of ``[N, ..., C]``."""
    if isinstance(padding, str):
        spans = [(n - 1) * d + 1 for n, d in zip(sizes, rhs_dilation, strict=True)]
        padding = lax.padtype_to_pads(x.shape[1:-1], spans, strides, padding)
    around = [
        (low, high, d - 1) for (low, high), d in zip(padding, lhs_dilation, strict=True)
    ]
    x = lax.pad(x, jnp.zeros((), x.dtype), [(0, 0, 0), *around, (0, 0, 0)])
    rank = len(positions)
    dims = list(enumerate(zip(positions, sizes, strides, rhs_dilation, strict=True), 1))
    for axis, (count, size, stride, step) in reversed(dims):
        if stride == size and step == 1:  # adjacent windows: a reshape
            x = lax.slice_in_dim(x, 0, count * size, axis=axis)
            x = x.reshape(*x.shape[:axis], count, size, *x.shape[axis + 1 :])
            x = jnp.moveaxis(x, axis + 1, rank + 1)
        else:
            starts = range(0, size * step, step)
            length = (count - 1) * stride + 1
            x = jnp.stack(
                [lax.slice_in_dim(x, i, i + length, stride, axis) for i in starts],
                rank + 1,
            )
    return x


def _split(x: jax.Array, axis: int, groups: int) -> jax.Array:
    """Splits an axis into groups."""
    size = x.shape[axis] // groups
    return x.reshape(*x.shape[:axis], groups, size, *x.shape[axis + 1 :])
