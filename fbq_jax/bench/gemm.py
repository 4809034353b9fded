"""The block-scaled INT8 GEMM beside XLA's bf16 one."""

import functools
import math
from collections.abc import Callable, Iterator, Sequence

import jax
import jax.numpy as jnp
from jax import lax

from fbq_jax import ops
from fbq_jax.bench import measure
from fbq_jax.bench.measure import Effort
from fbq_jax.bench.results import Row, row
from fbq_jax.kernels.reference import Quantized
from fbq_jax.ops import dispatch

SHAPES = ((4096, 4096, 4096), (8192, 8192, 8192))
RATES = (0.0, 0.1, 0.2, 0.3)
_SIDE = 128
_BLOCKS = (_SIDE, _SIDE, _SIDE)
_LIMIT = 1e-5  # float32 sums in another order
_BF16_LIMIT = 2e-3  # the same, rounded to bfloat16
_NT = (((1,), (1,)), ((), ()))


def rows(
    shapes: Sequence[tuple[int, ...]],
    rates: Sequence[float] = RATES,
    *,
    implementation: str | None,
    effort: Effort,
) -> Iterator[Row]:
    """Measures each ``(M, N, K)``: bf16, and INT8 at each fallback rate.

    Codes are those of Gaussian data, and blocks fall back at random.  The work counted
    is that of the product, ``2 M N K``, without the residual's.

    Raises:
      WrongResultError: if a product differs from the definition's.
    """
    choice = dispatch.choose("matmul", _BLOCKS, implementation=implementation)
    by = choice.implementation
    bf16 = jax.jit(functools.partial(lax.dot_general, dimension_numbers=_NT))
    int8 = _matmul(jnp.bfloat16, by)
    checked, definition = (_matmul(jnp.float32, name) for name in (by, "reference"))
    for shape in shapes:
        M, N, K = shape
        keys = jax.random.split(jax.random.key(0), 6)
        a = jax.random.normal(keys[0], (M, K), jnp.bfloat16)
        b = jax.random.normal(keys[1], (N, K), jnp.bfloat16)
        baseline = row(
            measure.timing(bf16, a, b, effort=effort),
            2.0 * M * N * K,
            what="bf16",
            implementation="xla",
            shape=shape,
        )
        yield baseline
        lhs, residual = (_codes(key, M, K, by) for key in keys[2:4])
        rhs = _codes(keys[4], N, K, by)
        for rate in rates:
            taken = _flags(keys[5], residual.scales.shape, rate)
            scales = jnp.where(taken, residual.scales, 0.0)
            term = Quantized(residual.codes, scales) if rate else None
            exact = definition(lhs, term, rhs)
            errors = {
                "float32": measure.relative_error(checked(lhs, term, rhs), exact),
                "bf16": measure.relative_error(int8(lhs, term, rhs), exact),
            }
            for name, limit in (("float32", _LIMIT), ("bf16", _BF16_LIMIT)):
                what = f"the GEMM of {shape} by {by} with {name} output"
                measure.require(errors[name], limit, what)
            yield row(
                measure.timing(int8, lhs, term, rhs, effort=effort),
                2.0 * M * N * K,
                baseline,
                what="INT8",
                implementation=by,
                shape=shape,
                fallback=float(jnp.mean(taken, dtype=jnp.float32)),
                errors=errors,
            )


def _matmul(dtype: jax.typing.DTypeLike, by: str) -> Callable[..., jax.Array]:
    return jax.jit(
        functools.partial(
            ops.matmul, block_shape=_BLOCKS, dtype=dtype, implementation=by
        )
    )


def _codes(key: jax.Array, rows: int, columns: int, by: str) -> Quantized:
    codes = ops.quantize(
        jax.random.normal(key, (1, rows, columns), jnp.bfloat16),
        jnp.zeros(1, jnp.uint32),
        block=(_SIDE, _SIDE),
        rowwise="nearest",
        colwise=None,
        implementation=by,
    ).rowwise
    assert codes is not None
    return codes


def _flags(key: jax.Array, shape: tuple[int, ...], rate: float) -> jax.Array:
    """Random flags, of which a share ``rate`` is True."""
    blocks = math.prod(shape)
    flags = jnp.arange(blocks) < round(rate * blocks)
    return jax.random.permutation(key, flags).reshape(shape)
