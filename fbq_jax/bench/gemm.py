"""The block-scaled INT8 GEMM against XLA's bf16 GEMM."""

import functools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from fbq_jax import ops
from fbq_jax.bench import measure
from fbq_jax.bench.measure import Effort
from fbq_jax.bench.results import Row, row, with_ratios
from fbq_jax.kernels.reference import Quantized
from fbq_jax.ops import dispatch

SHAPES = ((4096, 4096, 4096), (8192, 8192, 8192))
RATES = (0.0, 0.1, 0.2, 0.3)
BLOCK_SHAPE = (128, 128, 128)
# The outputs to check and the limits of their errors: float32 sums in another order,
# and the same sums rounded to bfloat16.
_OUTPUTS = (("float32", jnp.float32, 1e-5), ("bf16", jnp.bfloat16, 2e-3))
_NT = (((1,), (1,)), ((), ()))

Operands = tuple[Quantized, Quantized | None, Quantized]


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
    choice = dispatch.choose("matmul", BLOCK_SHAPE, implementation=implementation)
    for shape in shapes:
        yield from with_ratios(_rows(shape, rates, choice.implementation, effort))


def _rows(
    shape: tuple[int, ...], rates: Sequence[float], implementation: str, effort: Effort
) -> Iterator[Row]:
    M, N, K = shape
    keys = jax.random.split(jax.random.key(0))
    a = jax.random.normal(keys[0], (M, K), jnp.bfloat16)
    b = jax.random.normal(keys[1], (N, K), jnp.bfloat16)
    gemm = jax.jit(functools.partial(lax.dot_general, dimension_numbers=_NT))
    timing = measure.timing(gemm, a, b, effort=effort)
    work = 2.0 * M * N * K
    yield row(timing, work, what="bf16", implementation="xla", shape=shape)
    int8 = jitted_matmul(jnp.bfloat16, implementation)
    for rate in rates:
        args = operands(shape, rate, implementation)
        errors = _checked_errors(args, implementation, f"the GEMM of {shape}")
        _, residual, _ = args
        yield row(
            measure.timing(int8, *args, effort=effort),
            work,
            what="INT8",
            implementation=implementation,
            shape=shape,
            fallback=float(jnp.mean(residual.scales > 0.0)) if residual else 0.0,
            errors=errors,
        )


def operands(shape: tuple[int, ...], rate: float, implementation: str) -> Operands:
    """Random lhs, its residual and rhs for an INT8 GEMM.

    Args:
      shape: ``(M, N, K)``.
      rate: the share of lhs' blocks that fall back; there is no residual if it is 0.
      implementation: quantizes the operands.
    """
    M, N, K = shape
    keys = jax.random.split(jax.random.key(1), 4)
    lhs, residual = (_quantized(key, M, K, implementation) for key in keys[:2])
    # The quantizers of a layer tell the kernel in Mosaic the sums of the codes of rhs.
    sums = ("rowwise",) if implementation == "mosaic" else ()
    rhs = _quantized(keys[2], N, K, implementation, sums)
    if not rate:
        return lhs, None, rhs
    blocks = math.prod(residual.scales.shape)
    falls_back = jnp.arange(blocks) < round(rate * blocks)
    falls_back = jax.random.permutation(keys[3], falls_back)
    scales = jnp.where(falls_back.reshape(residual.scales.shape), residual.scales, 0.0)
    return lhs, Quantized(residual.codes, scales), rhs


def jitted_matmul(dtype: Any, implementation: str) -> Any:
    """The jitted ``ops.matmul`` of such operands, with an output dtype."""
    return measure.jitted(
        ops.matmul,
        block_shape=BLOCK_SHAPE,
        dtype=dtype,
        implementation=implementation,
    )


def _checked_errors(args: Operands, implementation: str, what: str) -> dict[str, float]:
    """The errors of the outputs in both dtypes; raises if one is above its limit."""
    exact = jitted_matmul(jnp.float32, "reference")(*args)
    errors = {}
    for name, dtype, limit in _OUTPUTS:
        output = jitted_matmul(dtype, implementation)(*args)
        errors[name] = measure.relative_error(output, exact)
        by = f"{what} by {implementation} with {name} output"
        measure.require(errors[name], limit, by)
    return errors


def _quantized(
    key: jax.Array,
    rows: int,
    columns: int,
    implementation: str,
    sums: tuple[str, ...] = (),
) -> Quantized:
    quantized = ops.quantize(
        jax.random.normal(key, (1, rows, columns), jnp.bfloat16),
        jnp.zeros(1, jnp.uint32),
        block=BLOCK_SHAPE[:2],
        rowwise="nearest",
        colwise=None,
        sums=sums,
        implementation=implementation,
    ).rowwise
    assert quantized is not None
    return quantized
