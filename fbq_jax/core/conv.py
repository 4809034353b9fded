"""A convolution as one quantized ``dot_general``: its windows times its kernel.

The windows are copies made by slices, exact in every dtype; a NaN reaches the windows
that hold it and no other.  One value is in ``prod(kernel) / prod(strides)`` of them.
Where windows lie side by side that is once: of patches there is one copy, and of 1x1
they are the activation itself, reshaped.  Where they overlap, a 3x3 convolution makes
of its input an array of nine times the size, and so does the backward pass of the
input's gradient, whose parts are then summed in the input's dtype.

For the gradient of the kernel the codes of the windows are kept, which is nine bytes a
value for that 3x3.  Codes of the activation would not do in their stead: the values of
a block share a scale, and each place that a pixel has in a window puts it into a block
with other pixels.  ``nn.remat(nn.Conv)`` keeps the activation in floats instead, and
makes windows and codes once more.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from fbq_jax.core.dimension_numbers import DimensionNumbers
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
    """``lax.conv_general_dilated(lhs, rhs, ...)`` by one call of ``dot_general``.

    The left operand is ``[N, *places, *kernel_size, C]``, of which the last axes are
    contracted; the right one is the kernel as it lies.

    Args:
      dot_general: of the activation, the weight and the other arguments of
        ``lax.dot_general``.
      lhs: the activation.
      rhs: the kernel.
      window_strides: as for ``lax.conv_general_dilated``, like all that follow.
      padding: with zeros.
      lhs_dilation: zeros between the activation's values.
      rhs_dilation: steps between a window's values.
      dimension_numbers: any.
      feature_group_count: the groups are batch dimensions of the product, each with
        codes and scales of its own.
      batch_group_count: 1.
      precision: handed on.
      preferred_element_type: handed on.
      out_sharding: the output's sharding, over explicit mesh axes; of one group.

    Raises:
      TypeError: ``lax.conv_general_dilated``'s own, where shapes do not fit.
      ValueError: likewise; or the batch is in groups, no window fits into the padded
        input, or the output of several feature groups is asked for with a sharding.
    """
    if batch_group_count != 1:
        raise ValueError(
            "a quantized convolution takes batch_group_count=1; got "
            f"{batch_group_count}"
        )
    groups = feature_group_count
    if groups != 1 and out_sharding is not None:
        raise ValueError(
            "a quantized convolution takes out_sharding where feature_group_count is "
            f"1; got {groups} and {out_sharding}"
        )

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
        feature_group_count=groups,
    )
    shapes = (jax.ShapeDtypeStruct(x.shape, jnp.float32) for x in (lhs, rhs))
    out = jax.eval_shape(float_conv, *shapes)
    places = [out.shape[axis] for axis in out_spec[2:]]
    sizes = [rhs.shape[axis] for axis in rhs_spec[2:]]
    if 0 in places:
        raise ValueError(
            f"no window of {tuple(sizes)} fits an input of {lhs.shape} with padding "
            f"{padding!r}: the output would have the shape {out.shape}"
        )
    x = _windows(
        lhs.transpose(lhs_spec[0], *lhs_spec[2:], lhs_spec[1]),
        places,
        sizes,
        window_strides,
        padding,
        (1,) * len(places) if lhs_dilation is None else lhs_dilation,
        (1,) * len(places) if rhs_dilation is None else rhs_dilation,
    )

    within = tuple(range(len(places) + 1, x.ndim))
    of_kernel = (*rhs_spec[2:], rhs_spec[1])
    dims: DimensionNumbers = (within, of_kernel), ((), ())
    if groups != 1:
        channels, features = x.ndim - 1, rhs_spec[0]
        x, rhs = _split(x, channels, groups), _split(rhs, features, groups)
        within = (*within[:-1], channels + 1)
        of_kernel = tuple(axis + (axis > features) for axis in of_kernel)
        dims = (within, of_kernel), ((channels,), (features,))
    order = _order(out_spec)
    y = dot_general(
        x,
        rhs,
        dims,
        precision=precision,
        preferred_element_type=preferred_element_type,
        out_sharding=before_transposing(out_sharding, order),
    )
    if groups != 1:
        y = jnp.moveaxis(y, 0, -2)
        y = y.reshape(*y.shape[:-2], out.shape[out_spec[1]])
    return y.transpose(order)


def _windows(
    x: jax.Array,
    places: Sequence[int],
    sizes: Sequence[int],
    strides: Sequence[int],
    padding: str | Sequence[tuple[int, int]],
    dilation: Sequence[int],
    steps: Sequence[int],
) -> jax.Array:
    """Of ``[N, ..., C]`` the windows ``[N, *places, *sizes, C]``."""
    if isinstance(padding, str):
        reaches = [(n - 1) * step + 1 for n, step in zip(sizes, steps, strict=True)]
        padding = lax.padtype_to_pads(x.shape[1:-1], reaches, strides, padding)
    around = [
        (low, high, n - 1) for (low, high), n in zip(padding, dilation, strict=True)
    ]
    x = lax.pad(x, jnp.zeros((), x.dtype), [(0, 0, 0), *around, (0, 0, 0)])
    rank = len(places)
    along = list(enumerate(zip(places, sizes, strides, steps, strict=True), start=1))
    for axis, (count, size, stride, step) in reversed(along):
        if stride == size and step == 1:
            x = lax.slice_in_dim(x, 0, count * size, axis=axis)
            x = x.reshape(*x.shape[:axis], count, size, *x.shape[axis + 1 :])
            x = jnp.moveaxis(x, axis + 1, rank + 1)
        else:
            starts = range(0, size * step, step)
            reach = (count - 1) * stride + 1
            x = jnp.stack(
                [lax.slice_in_dim(x, i, i + reach, stride, axis) for i in starts],
                rank + 1,
            )
    return x


def _split(x: jax.Array, axis: int, groups: int) -> jax.Array:
    size = x.shape[axis] // groups
    return x.reshape(*x.shape[:axis], groups, size, *x.shape[axis + 1 :])


def _order(out_spec: Sequence[int]) -> tuple[int, ...]:
    """For each of the output's axes the one of ``[N, ..., C]`` that it is."""
    batch, channels, *inner = out_spec
    order = [batch, *inner, channels]
    return tuple(order.index(axis) for axis in range(len(order)))
