"""The ops that run Triton kernels, with the options that choose these kernels."""

import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fbq_jax.kernels import packing
from fbq_jax.kernels.quantized import (
    Block,
    CodeDtype,
    Layout,
    Quantized,
    Term,
    Unquantized,
)
from fbq_jax.kernels.rounding import MatrixSeeds
from fbq_jax.kernels.sources import Gate, GateGrad, Matrix, Norm, Source
from tests.compile_tools import CompiledKernel, compile_kernels
from tests.kernels.quantize_cases import near, noisy

BLOCK_SHAPE = (128, 128, 128)
_LAYER = (8192, 4096, 4096)  # M, K, N
_FEW_ROWS = (8, 128)
_EXPERTS = 8
_BITS = 10  # of the arrays that fused layers save
_FIRST_FLOAT8 = 89  # compute capability times ten

Kernels = list[CompiledKernel]


class Case(NamedTuple):
    """An op with the options that choose its kernels.

    Attributes:
      what: the name of a test's case.
      compiled: returns the kernels for ``capability=``, the compute capability to
        compile for times ten; none if such GPUs cannot run the op.
    """

    what: str
    compiled: Callable[..., Kernels]


def cases() -> list[Case]:
    """Every op that runs Triton kernels on these GPUs, for a layer of 4096 channels.

    The kernels of a GEMM with fallback include the one that lists its steps.
    """
    return [
        *_gemm_cases(),
        *_few_rows_cases(),
        *_grouped_gemm_cases(),
        *_quantize_cases(),
        _threshold_case(),
    ]


def array(shape: tuple[int, ...], dtype: str) -> Any:
    """An array that exists in a trace only."""
    return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))


# GEMMs.


def compile_gemm(
    sizes: tuple[int, int, int],
    block_shape: tuple[int, int, int] = BLOCK_SHAPE,
    *,
    capability: int,
    fallback: bool = False,
    codes: CodeDtype = "int8",
) -> Kernels:
    """The kernels of a GEMM ``(M, N, K)`` with the default configuration.

    Args:
      sizes: ``(M, N, K)``.
      block_shape: ``(m, k, n)``.
      capability: the compute capability times ten.
      fallback: whether lhs has residuals.
      codes: the dtype of the codes.
    """
    from fbq_jax.kernels.triton import gemm, gemm_config

    if codes != "int8" and capability < _FIRST_FLOAT8:
        return []
    M, N, K = sizes
    m, k, n = block_shape
    lhs = _operand((1, M, K), (m, k), codes, fallback=fallback)
    config = gemm_config.default_config(sizes, block_shape, capability)
    rhs = _operand((1, N, K), (n, k), codes)
    return _compile_gemm(gemm.matmul, lhs, rhs, capability=capability, config=config)


def _operand(
    shape: tuple[int, int, int],
    block: Block,
    codes: CodeDtype = "int8",
    *,
    fallback: bool = False,
) -> Quantized:
    blocks = [-(-size // side) for size, side in zip(shape[1:], block, strict=True)]
    term = Term(array(shape, codes), array((shape[0], *blocks), "float32"))
    return Quantized(term, term if fallback else None, block)


def _compile_gemm(
    op: Callable[..., Any], *args: Any, capability: int, **options: Any
) -> Kernels:
    """The kernels of a function that takes the compute capability, too."""
    options |= {"sm": capability, "dtype": jnp.bfloat16}
    return compile_kernels(op, *args, capability=capability, **options)


def _gemm_cases() -> Iterator[Case]:
    M, K, N = _LAYER
    compiled = functools.partial(compile_gemm, (M, N, K))
    for side in (128, 256, 32):
        for fallback in (False, True):
            yield Case(
                f"GEMM, blocks of {side}" + (", fallback" if fallback else ""),
                functools.partial(compiled, (side, side, side), fallback=fallback),
            )
    for what, block_shape in (
        ("scales of lhs' rows", (1, 128, 128)),
        ("scales of both operands' rows", (1, 128, 1)),
    ):
        yield Case(f"GEMM, {what}", functools.partial(compiled, block_shape))
        yield Case(
            f"GEMM, {what}, FP8",
            functools.partial(compiled, block_shape, codes="float8_e4m3fn"),
        )


def _few_rows_cases() -> Iterator[Case]:
    from fbq_jax.kernels.triton import few_rows_gemm, few_rows_quantize_gemm

    _, K, N = _LAYER
    rhs = _operand((1, N, K), (128, 128))
    for rows in _FEW_ROWS:
        for fallback in (False, True):
            lhs = _operand((1, rows, K), (128, 128), fallback=fallback)
            yield Case(
                f"GEMM of {rows} rows" + (", fallback" if fallback else ""),
                functools.partial(_compile_gemm, few_rows_gemm.matmul, lhs, rhs),
            )
    rows = min(_FEW_ROWS)
    x, theta = array((1, rows, K), "bfloat16"), array((1,), "float32")
    lhs = Unquantized(x, theta, (128, 128), "absmax")
    yield Case(
        f"GEMM that quantizes {rows} rows, fallback",
        functools.partial(_compile_gemm, few_rows_quantize_gemm.matmul, lhs, rhs),
    )


def _grouped_gemm_cases() -> Iterator[Case]:
    """The layer's rows, shared out among ``_EXPERTS``."""
    from fbq_jax.kernels.triton import grouped_gemm

    M, K, N = _LAYER
    tiles, block = M // 128 + _EXPERTS, (128, 128)
    lhs = _operand((tiles, 128, K), block, fallback=True)
    groups = array((tiles,), "int32")
    rhs = _operand((_EXPERTS, N, K), block)
    yield Case(
        "GEMM of rows in groups, fallback",
        functools.partial(_compile_gemm, grouped_gemm.matmul, lhs, rhs, groups),
    )
    columns = (_operand((tiles, size, 128), block) for size in (K, N))
    yield Case(
        "GEMM with a contraction in groups",
        functools.partial(
            _compile_gemm, grouped_gemm.contract, *columns, groups, size=_EXPERTS
        ),
    )


# Quantization.


def matrix(shape: tuple[int, int, int], dtype: str) -> Matrix:
    """Matrices."""
    return Matrix(array(shape, dtype))


def tiles_of(count: int, shape: tuple[int, int], dtype: str) -> Matrix:
    """Tiles of 128 rows, of a matrix of this shape."""
    of_tiles = array((count,), "int32")
    return Matrix(array(shape, dtype), of_tiles, of_tiles, 128)


def norm(shape: tuple[int, int, int], dtype: str, bits: int = _BITS) -> Norm:
    """A norm of this shape."""
    scale = array((shape[0], shape[2]), "float32")
    return Norm(array(shape, dtype), scale, 1e-5, bits)


def gate(
    shape: tuple[int, int, int], dtype: str, bits: int = _BITS, *, grouped: bool = False
) -> Gate:
    """A gate with output of this shape; in groups, gate and up are not interleaved."""
    batch, rows, columns = shape
    counts = array((batch,), "int32") if grouped else None
    return Gate(array((batch, rows, 2 * columns), dtype), counts, bits, not grouped)


def gate_grad(
    shape: tuple[int, int, int], dtype: str, bits: int = _BITS, *, grouped: bool = False
) -> GateGrad:
    """The gradient of ``gate``."""
    batch, *rest = shape
    packed = jax.eval_shape(
        lambda: packing.quantize(jnp.zeros((batch, 2, *rest)), bits)
    )
    counts = array((batch,), "int32") if grouped else None
    return GateGrad(array(shape, dtype), packed, counts, bits, not grouped)


def compile_quantize(
    source: Source,
    rowwise: Layout | None,
    colwise: Layout | None,
    *,
    capability: int,
    **options: Any,
) -> Kernels:
    """The kernels that quantize a source."""
    from fbq_jax.kernels.triton.quantize import quantize

    batch = (source.shape[0],)
    seeds = MatrixSeeds(*[array(batch, "uint32")] * 3)
    theta = array(batch, "float32") if options.get("criterion") else None
    options |= {"rowwise": rowwise, "colwise": colwise}
    return compile_kernels(
        quantize, source, seeds, theta, capability=capability, **options
    )


def _quantize_cases() -> Iterator[Case]:
    M, K, _ = _LAYER
    shape, dtype, count = (1, M, K), "bfloat16", M // 128 + _EXPERTS
    x, tiled = matrix(shape, dtype), (count, 128, K)
    blocks = noisy(128, 128), noisy(128, 128)
    fallback = near(128, 128), noisy(128, 128)
    rows, in_blocks = noisy(1, 128), noisy(128, 128, sums=True)
    forward = near(1, 128), noisy(128, 1)
    table: list[tuple[str, Source, tuple[Layout, Layout], str | None]] = [
        ("blocks of 128", x, blocks, None),
        ("blocks of 32", x, (noisy(32, 32), noisy(32, 32)), None),
        ("blocks of 128, fallback", x, fallback, "absmax"),
        ("rows of blocks", x, (rows, noisy(128, 1)), None),
        ("rows of blocks, columns in blocks", x, (rows, in_blocks), None),
        ("rows and columns", x, (noisy(1, None), noisy(None, 1)), None),
        ("rows in groups", tiles_of(count, (M, K), dtype), fallback, "absmax"),
        ("norm", norm(shape, dtype), fallback, "absmax"),
        ("gate", gate(shape, dtype), fallback, "absmax"),
        ("gate's gradient", gate_grad(shape, dtype), blocks, None),
        ("norm, rows of blocks", norm(shape, dtype), forward, None),
        ("gate, rows of blocks", gate(shape, dtype), forward, None),
        (
            *("gate's gradient, rows of blocks", gate_grad(shape, dtype)),
            *((rows, in_blocks), None),
        ),
        ("gate in groups", gate(tiled, dtype, grouped=True), fallback, "absmax"),
        (
            *("gate's gradient in groups", gate_grad(tiled, dtype, grouped=True)),
            *(blocks, None),
        ),
    ]
    for what, source, layouts, criterion in table:
        compiled = functools.partial(
            compile_quantize, source, *layouts, criterion=criterion
        )
        yield Case(f"quantize {what}", compiled)


def _threshold_case() -> Case:
    from fbq_jax.kernels.triton import threshold

    blocks, scalar = array((1, 64 * 32), "float32"), array((1,), "int32")
    return Case(
        "threshold",
        functools.partial(
            compile_kernels,
            threshold.move_threshold,
            *(blocks, blocks, array((1,), "float32"), scalar, scalar),
            array((1,), "uint32"),
            target_rate=(0.1, 0.3),
            alpha=1.3,
        ),
    )
