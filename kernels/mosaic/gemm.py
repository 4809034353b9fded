"""The INT8 GEMM with block scales and fallback: ``reference.matmul`` on Hopper."""

import jax
import jax.numpy as jnp
from jax.experimental.pallas import cdiv

from fbq_jax.kernels import tuning_table
from fbq_jax.kernels.mosaic.gemm_kernel import (
    BEYOND,
    FAR,
    RANGE,
    SIDE,
    STEPS,
    Config,
    build,
    lhs_spans,
)
from fbq_jax.kernels.reference import Quantized
from fbq_jax.kernels.triton.abs_sums import longest
from fbq_jax.kernels.triton.gemm_schedule import steps


def matmul(
    lhs: Quantized,
    residual: Quantized | None,
    rhs: Quantized,
    *,
    block_shape: tuple[int, int, int],
    dtype: jax.typing.DTypeLike,
    config: Config | None = None,
) -> jax.Array:
    """``reference.matmul``, for blocks whose sides are multiples of 128.

    Sizes that are no multiples of 128 are padded with zeros, in copies of the codes.
    """
    m, k, n = block_shape
    batch, rows, depth = lhs.codes.shape
    columns = rhs.codes.shape[1]
    sizes = [SIDE * cdiv(size, SIDE) for size in (rows, depth, columns)]
    padded_rows, padded_depth, padded_columns = sizes
    lhs_codes = [
        _pad(term.codes, padded_rows, padded_depth)
        for term in (lhs, residual)
        if term is not None
    ]
    rhs_codes = _pad(rhs.codes, padded_columns, padded_depth)
    lhs_scales = _spread(lhs.scales, (m, k), padded_rows, padded_depth)
    rhs_scales = _spread(rhs.scales, (n, k), padded_columns, padded_depth)
    if residual is None:
        beyond = ((0, 0), (0, 0), (0, BEYOND))
        lists: tuple[jax.Array, ...] = (jnp.pad(lhs_scales, beyond),)
        rhs_scales = jnp.pad(rhs_scales, beyond)
    else:
        used = _spread(residual.scales, (m, k), padded_rows, padded_depth)
        lists = steps(lhs_scales, used, unused=BEYOND, far=FAR)
    if config is None:
        config = choose_config((rows, columns, depth), fallback=residual is not None)
    if padded_columns // SIDE % config.cluster:
        config = config._replace(cluster=1)
    kernel = build(
        (batch, *sizes), residual is not None, jnp.dtype(dtype), config, _processors()
    )
    operands = [*lhs_codes, *lists, rhs_codes, rhs_scales]
    if jnp.dtype(dtype).itemsize == 2:
        by_lhs = lhs_spans(padded_rows, padded_columns, residual is not None)
        operands.append(_spans(lhs_codes[0] if by_lhs else rhs_codes))
    out = kernel(*operands)
    return out[:, :rows, :columns]


def choose_config(sizes: tuple[int, int, int], *, fallback: bool) -> Config:
    """The table's configuration for ``(M, N, K)``, or one that suits most shapes."""
    op = "mosaic.matmul.fallback" if fallback else "mosaic.matmul"
    return Config(**(tuning_table.lookup(op, sizes) or {"group": 8, "cluster": 2}))


def _processors() -> int:
    return jax.devices()[0].core_count


def _spans(codes: jax.Array) -> jax.Array:
    """The chunks whose sums stay in range, whatever the other operand's codes."""
    return RANGE // (STEPS * 128 * jnp.maximum(longest(codes), 1))


def _pad(codes: jax.Array, rows: int, columns: int) -> jax.Array:
    _, r, c = codes.shape
    return jnp.pad(codes, ((0, 0), (0, rows - r), (0, columns - c)))


def _spread(
    scales: jax.Array, block: tuple[int, int], rows: int, columns: int
) -> jax.Array:
    """One scale a block to one for each 128 x 128."""
    r, c = block
    scales = jnp.repeat(jnp.repeat(scales, r // SIDE, axis=1), c // SIDE, axis=2)
    return scales[:, : rows // SIDE, : columns // SIDE]
