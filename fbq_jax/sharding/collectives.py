"""How devices sum their parts of a product whose contraction is cut over them.

In floats that is XLA's own collective.  In INT8, which is for gradients, each device
quantizes its part in blocks with stochastic rounding, keeps its own share and sends
every other device's, as codes and scales; the shares are then summed in float32.  So a
value costs a byte, and a block four more.  Devices whose parts are summed draw noise of
their own, another for each axis of the mesh that is summed over by itself, and the sum
is unbiased.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from fbq_jax.kernels.reference import Block, Quantized, dequantize
from fbq_jax.kernels.rounding import fold
from fbq_jax.sharding.assignment import Axes, Shards, parse

BLOCK: Block = (128, 128)
# What a device's part is in, by ``Gemm.reduce``.
DTYPES = {"float32": jnp.float32, "bfloat16": jnp.bfloat16, "int8": jnp.float32}


def in_floats(part: jax.Array, axes: Axes, shards: Shards) -> jax.Array:
    """The sum of parts, of which each device gets what the result's sharding gives it.

    Args:
      part: this device's, in the dtype to sum in.
      axes: of the product.
      shards: which of them are cut, and which of the result's share the sum.
    """
    scatter = functools.partial(lax.psum_scatter, tiled=True)
    part, left = _scattered(part, axes, shards, scatter)
    return lax.psum(part, left) if left else part


def in_int8(
    part: jax.Array,
    axes: Axes,
    shards: Shards,
    *,
    seeds: jax.Array,
    quantize: Callable[..., Any],
    dtype: Any,
) -> jax.Array:
    """The same in INT8; what is whole on each device is gathered from shares.

    Args:
      part: this device's, float32 ``[B, M, N]``.
      axes: of the product.
      shards: as above.
      seeds: uint32 ``[B]``, of the noise.
      quantize: as ``reference.quantize``.
      dtype: of the result, in which shares are gathered.
    """
    if not (summed := shards.names(axes.contracted)):
        return part
    seed = fold(seeds[0], lax.axis_index(summed))
    scatter = functools.partial(_scatter_codes, seed, quantize, shards)
    part, left = _scattered(part, axes, shards, scatter)
    if not left:
        return part
    rows = part.shape[1]
    part = jnp.pad(part, ((0, 0), (0, -rows % shards.count(left)), (0, 0)))
    share = scatter(part, left, scatter_dimension=1).astype(dtype)
    return lax.all_gather(share, left, axis=1, tiled=True)[:, :rows]


def _scattered(
    part: jax.Array, axes: Axes, shards: Shards, scatter: Callable[..., jax.Array]
) -> tuple[jax.Array, tuple[str, ...]]:
    """The sum over the axes of the mesh that share it, and those that are left."""
    left = set(shards.names(axes.contracted))
    for axis, (letter, _) in enumerate(parse(axes.results)):
        if names := shards.scattered.get(letter):
            part = scatter(part, names, scatter_dimension=axis)
            left.difference_update(names)
    return part, tuple(sorted(left))


def _scatter_codes(
    seed: jax.Array,
    quantize: Callable[..., Any],
    shards: Shards,
    part: jax.Array,
    names: tuple[str, ...],
    *,
    scatter_dimension: int,
) -> jax.Array:
    """As ``lax.psum_scatter``, in INT8; the seed is this device's."""
    axis, shape, number = scatter_dimension, part.shape, shards.count(names)
    cut = (*shape[:axis], number, shape[axis] // number, *shape[axis + 1 :])
    shares = jnp.moveaxis(part.reshape(cut), axis, 0)  # [number, b, ., .]
    matrices = shares.reshape(-1, *shares.shape[2:])
    # An axis of the mesh is summed over once: its place numbers the stage.
    stage = tuple(shards.sizes).index(names[0])
    each = fold(fold(seed, stage), jnp.arange(len(matrices)))
    codes = quantize(
        matrices, each, block=BLOCK, rowwise="stochastic", colwise=None
    ).rowwise

    def exchange(x: jax.Array) -> jax.Array:
        x = x.reshape(number, -1, *x.shape[1:])
        return lax.all_to_all(x, names, split_axis=0, concat_axis=0, tiled=True)

    values = dequantize(Quantized(*map(exchange, codes)), BLOCK)  # [number, b, ., .]
    return jnp.sum(values, axis=0)
