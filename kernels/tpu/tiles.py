"""What kernels on TPUs share: their memory, tiles of a matrix and codes."""

import functools
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from fbq_jax.kernels import rounding

LANES = 128  # of a vector
VMEM_LIMIT = 64 * 2**20  # bytes; there are at least 96 MiB from v5e on


def compiler_params(
    *dimensions: Literal["parallel", "arbitrary"],
) -> pltpu.CompilerParams:
    """The parameters of a kernel whose grid has these dimensions."""
    return pltpu.CompilerParams(
        dimension_semantics=dimensions, vmem_limit_bytes=VMEM_LIMIT
    )


def aligned(index: jax.Array, size: int) -> Any:
    """The ``index``-th slice of this size; the compiler knows that it is aligned."""
    return pl.ds(pl.multiple_of(index * size, size), size)


def not_fused(results: dict[str, jax.Array]) -> dict[str, jax.Array]:
    """The results of a kernel with several; XLA fuses nothing into it.

    In a scan XLA would let the kernel write one of them into the stack of all layers,
    and its compiler crashes (libtpu 0.0.52).
    """
    return lax.optimization_barrier(results)


def with_known_dtype(x: jax.Array) -> jax.Array:
    """Casts float16, which the vector units do not have, to float32."""
    return x.astype(jnp.float32) if x.dtype == jnp.float16 else x


def load(
    x: Any, columns: Any, first: tuple[jax.Array, jax.Array], shape: tuple[int, int]
) -> jax.Array:
    """Columns of a tile in float32, 0 beyond the matrix.

    Args:
      x: a reference to the tile.
      columns: a slice of them, of static size, which begins inside the matrix; one that
        begins beyond it may hold anything.
      first: the row and the column of the matrix where the slice begins.
      shape: rows and columns of the matrix.
    """
    values: jax.Array = x[:, columns].astype(jnp.float32)
    for axis, (start, size) in enumerate(zip(first, shape, strict=True)):
        if size % values.shape[axis]:
            index = start + lax.broadcasted_iota(jnp.int32, values.shape, axis)
            values = jnp.where(index < size, values, 0.0)
    return values


def noise_factors(
    shape: tuple[int, ...],
    seeds: rounding.Seeds,
    global_offset: rounding.GlobalOffset | None,
) -> rounding.NoiseFactors:
    """The factors of the noise of each matrix of a stack ``[B, R, C]``."""
    draw = functools.partial(
        rounding.noise_factors,
        rows=shape[1],
        columns=shape[2],
        global_offset=global_offset,
    )
    return jax.vmap(draw)(rounding.fold_seeds(seeds))


def vector_specs(rows: int, columns: int) -> tuple[Any, Any]:
    """Of arrays ``[B, R, 1]`` and ``[B, 1, C]``, the part of a tile of a grid."""
    return (
        pl.BlockSpec((None, rows, 1), lambda b, i, _: (b, i, 0)),
        pl.BlockSpec((None, 1, columns), lambda b, _, j: (b, 0, j)),
    )


def load_noise(factors: rounding.NoiseFactors, columns: Any) -> jax.Array:
    """The noise of columns of a tile, from references to its factors."""
    row, column, shift = factors
    return rounding.noise_of(
        rounding.NoiseFactors(row[...], column[:, columns], shift[...])
    )


def to_int8(codes: jax.Array) -> jax.Array:
    """Codes in float32 as INT8; TPUs convert to INT32 first."""
    return codes.astype(jnp.int32).astype(jnp.int8)
