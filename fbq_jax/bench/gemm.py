"""The block-scaled GEMM of INT8 and FP8 codes against XLA's bf16 GEMM."""

import dataclasses
import functools
import math
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from fbq_jax import ops
from fbq_jax.bench import matmuls, measure
from fbq_jax.bench.measure import Effort
from fbq_jax.bench.results import Row, row, with_ratios
from fbq_jax.kernels.quantized import CodeDtype, Layout, Quantized, Term
from fbq_jax.ops import dispatch
from fbq_jax.ops.backends import BACKENDS

BlockShape = tuple[int, int, int]

SHAPES = ((4096, 4096, 4096), (8192, 8192, 8192))
RATES = (0.0, 0.1, 0.2, 0.3)
BLOCK_SHAPE = (128, 128, 128)
# Other scales, by name: for Y and dX, and for dW, in recipes row_block and
# fp8_row_block.
_ROW_SCALES: dict[str, tuple[CodeDtype, BlockShape]] = {
    "INT8, scales of rows": ("int8", (1, 128, 128)),
    "INT8, scales of rows and columns": ("int8", (1, 128, 1)),
    "FP8, scales of rows": ("float8_e4m3fn", (1, 128, 128)),
    "FP8, scales of rows and columns": ("float8_e4m3fn", (1, 128, 1)),
}
# The outputs to check and the limits of their errors: float32 sums in another order,
# and the same sums rounded to bfloat16.
_OUTPUTS = (("float32", jnp.float32, 1e-5), ("bf16", jnp.bfloat16, 2e-3))
_NT = (((1,), (1,)), ((), ()))

Operands = tuple[Quantized, Quantized]


def rows(
    shapes: Sequence[tuple[int, ...]],
    rates: Sequence[float] = RATES,
    *,
    implementation: str | None,
    effort: Effort,
) -> Iterator[Row]:
    """Measures each ``(M, N, K)`` in bf16, in INT8 and in FP8.

    INT8 comes at each fallback rate; both come with scales of single rows.  On a GPU
    without FP8 tensor cores, there is no FP8.

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
    for what, args in _cases(shape, rates, implementation):
        product = jitted_matmul(jnp.bfloat16, implementation)
        residual = args[0].residual
        yield row(
            measure.timing(product, *args, effort=effort),
            work,
            what=what,
            implementation=implementation,
            shape=shape,
            fallback=float(jnp.mean(residual.scales > 0.0)) if residual else 0.0,
            errors=_checked_errors(args, implementation, shape),
        )


def _cases(
    shape: tuple[int, ...], rates: Sequence[float], implementation: str
) -> Iterator[tuple[str, Operands]]:
    """The name and the operands of each product of codes."""
    for rate in rates:
        yield "INT8", operands(shape, rate, implementation)
    M, N, K = shape
    keys = jax.random.split(jax.random.key(1), 4)
    for what, (codes, block_shape) in _ROW_SCALES.items():
        try:
            dispatch.choose(
                "matmul", block_shape, codes=codes, implementation=implementation
            )
        except ValueError as error:
            print(f"without {what}: {error}", file=sys.stderr)
            continue
        lhs, rhs = (
            _quantized(key, size, K, implementation, codes, **options)
            for key, size, options in (
                (keys[0], M, {"of_rows": True}),
                (keys[2], N, {"of_rows": block_shape[2] == 1, "is_rhs": True}),
            )
        )
        yield what, (lhs, rhs)


def operands(shape: tuple[int, ...], rate: float, implementation: str) -> Operands:
    """Random lhs, with a residual, and rhs for an INT8 GEMM.

    Args:
      shape: ``(M, N, K)``.
      rate: the share of lhs' blocks that fall back; there is no residual if it is 0.
      implementation: quantizes the operands.
    """
    M, N, K = shape
    keys = jax.random.split(jax.random.key(1), 4)
    lhs, residual = (_quantized(key, M, K, implementation) for key in keys[:2])
    rhs = _quantized(keys[2], N, K, implementation, is_rhs=True)
    if not rate:
        return lhs, rhs
    blocks = math.prod(residual.scales.shape)
    falls_back = jnp.arange(blocks) < round(rate * blocks)
    falls_back = jax.random.permutation(keys[3], falls_back)
    scales = jnp.where(falls_back.reshape(residual.scales.shape), residual.scales, 0.0)
    term = Term(residual.codes, scales)
    return dataclasses.replace(lhs, residual=term), rhs


@functools.cache
def jitted_matmul(dtype: Any, implementation: str) -> Any:
    """The jitted ``ops.matmul`` of such operands, with an output dtype."""
    return jax.jit(
        functools.partial(ops.matmul, dtype=dtype, implementation=implementation)
    )


def _checked_errors(
    args: Operands, implementation: str, shape: tuple[int, ...]
) -> dict[str, float]:
    """The errors of the outputs in both dtypes; raises if one is above its limit."""
    exact = jitted_matmul(jnp.float32, "reference")(*args)
    is_int8 = args[0].codes.dtype == jnp.int8
    errors = {}
    for name, dtype, limit in _OUTPUTS:
        output = jitted_matmul(dtype, implementation)(*args)
        errors[name] = measure.relative_error(output, exact)
        measure.require(
            errors[name],
            limit if is_int8 else matmuls.FLOAT8_REFERENCE_LIMIT,
            f"the GEMM of {shape} with blocks {args[0].block} and {args[1].block} by "
            f"{implementation} with {name} output",
        )
    return errors


def _quantized(
    key: jax.Array,
    rows: int,
    columns: int,
    implementation: str,
    codes: CodeDtype = "int8",
    *,
    of_rows: bool = False,
    is_rhs: bool = False,
) -> Quantized:
    """Gaussian codes with scales of blocks, or of single rows of blocks."""
    x = jax.random.normal(key, (1, rows, columns), jnp.bfloat16)
    # A layer's quantizers give the kernel in Mosaic the sums of the codes of rhs.
    backend = BACKENDS[implementation]
    sums = is_rhs and not of_rows and backend.reads_sums(codes, jnp.bfloat16)
    m, k, _ = BLOCK_SHAPE
    quantized = ops.quantize(
        x,
        jnp.zeros(1, jnp.uint32),
        rowwise=Layout("nearest", (1 if of_rows else m, k), sums),
        colwise=None,
        dtype=codes,
        implementation=implementation,
    ).rowwise
    assert quantized is not None
    return quantized
