"""The block-scaled INT8 GEMM against XLA's bf16 GEMM."""

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

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
_BLOCK = 128
_BLOCK_SHAPE = (_BLOCK, _BLOCK, _BLOCK)
_FLOAT32_LIMIT = 1e-5  # float32 sums in another order
_BF16_LIMIT = 2e-3  # the same sums, rounded to bfloat16
_NT = (((1,), (1,)), ((), ()))

# (lhs, residual or None, rhs) -> output
_Int8Gemm = Callable[[Quantized, Quantized | None, Quantized], jax.Array]


def rows(
    shapes: Sequence[tuple[int, ...]],
    rates: Sequence[float] = RATES,
    *,
    implementation: str | None,
    effort: Effort,
) -> Iterator[Row]:
    """Measures each ``(M, N, K)`` in bf16, and in INT8 at each fallback rate.

    The operands are Gaussian; the blocks that fall back are random. Work counts the
    product's ``2 M N K`` operations without the residual's.

    Raises:
      WrongResultError: if a product differs from the reference.
    """
    choice = dispatch.choose("matmul", _BLOCK_SHAPE, implementation=implementation)
    gemms = _Gemms(
        jax.jit(functools.partial(lax.dot_general, dimension_numbers=_NT)),
        _int8_gemm(jnp.bfloat16, choice.implementation),
        _int8_gemm(jnp.float32, choice.implementation),
        _int8_gemm(jnp.float32, "reference"),
    )
    for shape in shapes:
        M, N, K = shape
        keys = jax.random.split(jax.random.key(0), 6)
        a = jax.random.normal(keys[0], (M, K), jnp.bfloat16)
        b = jax.random.normal(keys[1], (N, K), jnp.bfloat16)
        baseline = row(
            measure.timing(gemms.bf16, a, b, effort=effort),
            2.0 * M * N * K,
            what="bf16",
            implementation="xla",
            shape=shape,
        )
        yield baseline
        for rate in rates:
            yield _int8_row(
                gemms, baseline, keys[2:], rate, choice.implementation, effort
            )


class _Gemms(NamedTuple):
    """Jitted GEMMs of ``(M, K)`` and ``(N, K)``; the INT8 ones by output dtype."""

    bf16: Callable[[jax.Array, jax.Array], jax.Array]
    int8: _Int8Gemm
    int8_float32: _Int8Gemm
    reference: _Int8Gemm


def _int8_row(
    gemms: _Gemms,
    baseline: Row,
    keys: jax.Array,
    rate: float,
    implementation: str,
    effort: Effort,
) -> Row:
    M, N, K = baseline.shape
    lhs, residual = (_quantized(key, M, K, implementation) for key in keys[:2])
    falls_back = _flags(keys[3], residual.scales.shape, rate)
    scales = jnp.where(falls_back, residual.scales, 0.0)
    operands = (
        lhs,
        Quantized(residual.codes, scales) if rate else None,
        _quantized(keys[2], N, K, implementation),
    )
    errors = _check(gemms, operands, f"the GEMM of {M, N, K} by {implementation}")
    return row(
        measure.timing(gemms.int8, *operands, effort=effort),
        2.0 * M * N * K,
        baseline,
        what="INT8",
        implementation=implementation,
        shape=baseline.shape,
        fallback=float(jnp.mean(falls_back, dtype=jnp.float32)),
        errors=errors,
    )


def _int8_gemm(dtype: jax.typing.DTypeLike, implementation: str) -> _Int8Gemm:
    return jax.jit(
        functools.partial(
            ops.matmul,
            block_shape=_BLOCK_SHAPE,
            dtype=dtype,
            implementation=implementation,
        )
    )


def _check(
    gemms: _Gemms, operands: tuple[Quantized, Quantized | None, Quantized], what: str
) -> dict[str, float]:
    """The errors of the outputs in both dtypes; raises if one is above its limit."""
    exact = gemms.reference(*operands)
    errors = {}
    for name, gemm, limit in (
        ("float32", gemms.int8_float32, _FLOAT32_LIMIT),
        ("bf16", gemms.int8, _BF16_LIMIT),
    ):
        errors[name] = measure.relative_error(gemm(*operands), exact)
        measure.require(errors[name], limit, f"{what} with {name} output")
    return errors


def _quantized(
    key: jax.Array, rows: int, columns: int, implementation: str
) -> Quantized:
    quantized = ops.quantize(
        jax.random.normal(key, (1, rows, columns), jnp.bfloat16),
        jnp.zeros(1, jnp.uint32),
        block=(_BLOCK, _BLOCK),
        rowwise="nearest",
        colwise=None,
        implementation=implementation,
    ).rowwise
    assert quantized is not None
    return quantized


def _flags(key: jax.Array, shape: tuple[int, ...], rate: float) -> jax.Array:
    """Random booleans; a share ``rate`` of them is True."""
    blocks = math.prod(shape)
    flags = jnp.arange(blocks) < round(rate * blocks)
    return jax.random.permutation(key, flags).reshape(shape)
