"""The block-scaled GEMM of INT8 and FP8 codes against XLA's bf16 GEMM."""

import dataclasses
import functools
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from fbq_jax import ops
from fbq_jax.bench import measure
from fbq_jax.bench.measure import Effort
from fbq_jax.bench.results import Row, row, with_ratios
from fbq_jax.kernels.quantized import CodeDtype, Layout, Quantized, Term
from fbq_jax.ops import dispatch
from fbq_jax.ops.dispatch import BACKENDS

BlockShape = tuple[int, int, int]
CodesAndBlock = tuple[CodeDtype, BlockShape]
Operands = tuple[Quantized, Quantized]

SHAPES = ((4096, 4096, 4096), (8192, 8192, 8192))
RATES = (0.0, 0.1, 0.2, 0.3)
BLOCK_SHAPE = (128, 128, 128)
# Codes and blocks by name: for Y and dX, and for dW, in recipes row_block and
# fp8_row_block.
_ROW_SCALES: dict[str, CodesAndBlock] = {
    "INT8, scales of rows": ("int8", (1, 128, 128)),
    "INT8, scales of rows and columns": ("int8", (1, 128, 1)),
    "FP8, scales of rows": ("float8_e4m3fn", (1, 128, 128)),
    "FP8, scales of rows and columns": ("float8_e4m3fn", (1, 128, 1)),
}
# The limits of the errors against the reference in float32, by the output's dtype:
# float32 sums in another order, which bfloat16 rounds.
_DTYPES = {"float32": jnp.float32, "bf16": jnp.bfloat16}
_INT8_LIMITS = {"float32": 1e-5, "bf16": 2e-3}
# Tensor cores keep about 14 bits of a sum of products of FP8 codes.
_FP8_LIMITS = {"float32": 1e-2, "bf16": 1e-2}


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
    """
    choice = dispatch.choose("matmul", BLOCK_SHAPE, implementation=implementation)
    for shape in shapes:
        yield from with_ratios(_rows(shape, rates, choice.implementation, effort))


def _rows(
    shape: tuple[int, ...], rates: Sequence[float], implementation: str, effort: Effort
) -> Iterator[Row]:
    M, N, K = shape

    def measured(gemm: Any, *args: Any, **labels: Any) -> Row:
        timing = measure.timing(gemm, *args, effort=effort)
        return row(timing, 2.0 * M * N * K, shape=shape, **labels)

    keys = jax.random.split(jax.random.key(0))
    a = jax.random.normal(keys[0], (M, K), jnp.bfloat16)
    b = jax.random.normal(keys[1], (N, K), jnp.bfloat16)
    dims = (((1,), (1,)), ((), ()))
    bf16 = jax.jit(functools.partial(lax.dot_general, dimension_numbers=dims))
    yield measured(bf16, a, b, what="bf16", implementation="xla")
    blocks: CodesAndBlock = ("int8", BLOCK_SHAPE)
    for what, rate, (codes, block_shape) in (
        *(("INT8", rate, blocks) for rate in rates),
        *((what, 0.0, by_rows) for what, by_rows in _ROW_SCALES.items()),
    ):
        try:
            dispatch.choose(
                "matmul", block_shape, codes=codes, implementation=implementation
            )
        except ValueError as error:
            print(f"without {what}: {error}", file=sys.stderr)
            continue
        args = operands(shape, rate, implementation, codes, block_shape)
        errors = _checked_errors(args, implementation, f"{what} at {shape}")
        residual = args[0].residual
        yield measured(
            jitted_matmul(jnp.bfloat16, implementation),
            *args,
            what=what,
            implementation=implementation,
            fallback=float(jnp.mean(residual.scales > 0.0)) if residual else 0.0,
            errors=errors,
        )


def operands(
    shape: tuple[int, ...],
    rate: float,
    implementation: str,
    codes: CodeDtype = "int8",
    block_shape: BlockShape = BLOCK_SHAPE,
) -> Operands:
    """Gaussian lhs, with a residual, and rhs for a GEMM.

    Args:
      shape: ``(M, N, K)``.
      rate: the share of lhs' blocks that fall back; there is no residual if it is 0.
      implementation: quantizes the operands.
      codes: their dtype.
      block_shape: ``(m, k, n)`` with a scale for ``m x k`` of lhs and ``n x k`` of rhs.
    """
    M, N, K = shape
    m, k, n = block_shape
    keys = jax.random.split(jax.random.key(1), 4)

    def quantized(key: jax.Array, rows: int, layout: Layout) -> Quantized:
        x = jax.random.normal(key, (1, rows, K), jnp.bfloat16)
        seed = jnp.zeros(1, jnp.uint32)
        found = ops.quantize(
            x,
            seed,
            rowwise=layout,
            colwise=None,
            dtype=codes,
            implementation=implementation,
        ).rowwise
        assert found is not None
        return found

    lhs = quantized(keys[0], M, Layout("nearest", (m, k)))
    # A layer's quantizers give the kernel in Mosaic the sums of the codes of rhs.
    sums = n > 1 and BACKENDS[implementation].reads_sums(codes, jnp.bfloat16)
    rhs = quantized(keys[2], N, Layout("nearest", (n, k), sums))
    if not rate:
        return lhs, rhs
    residual = quantized(keys[1], M, Layout("nearest", (m, k)))
    blocks = residual.scales.size
    falls_back = jnp.arange(blocks) < round(rate * blocks)
    falls_back = jax.random.permutation(keys[3], falls_back)
    scales = jnp.where(falls_back.reshape(residual.scales.shape), residual.scales, 0.0)
    return dataclasses.replace(lhs, residual=Term(residual.codes, scales)), rhs


@functools.cache
def jitted_matmul(dtype: Any, implementation: str) -> Any:
    """The jitted ``ops.matmul`` of such operands, with an output dtype."""
    return jax.jit(
        functools.partial(ops.matmul, dtype=dtype, implementation=implementation)
    )


def _checked_errors(args: Operands, implementation: str, what: str) -> dict[str, float]:
    """The errors of the outputs in both dtypes; raises if one is above its limit."""
    limits = _INT8_LIMITS if args[0].codes.dtype == jnp.int8 else _FP8_LIMITS
    outputs = [jitted_matmul(_DTYPES[name], implementation)(*args) for name in limits]
    exact = jitted_matmul(jnp.float32, "reference")(*args)
    exacts = [exact] * len(outputs)
    return measure.checked_errors(
        limits, outputs, exacts, f"{what} by {implementation}"
    )
