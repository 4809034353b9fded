"""The ops that run Triton kernels, with the options that choose these kernels."""

import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fbq_jax.bench.compiler import CompiledKernel, compile_kernels
from fbq_jax.kernels import packing
from fbq_jax.kernels.grouped_reference import GroupedRows
from fbq_jax.kernels.reference import CodeDtype, Quantized

BLOCK_SHAPE = (128, 128, 128)
_LAYER = (8192, 4096, 4096)  # M, K, N
_FEW_ROWS = (8, 128)
_EXPERTS = 8
_BITS = 10  # of the arrays that fused layers save
_FIRST_FLOAT8 = 89  # compute capability times ten
_FALLBACK = {"criterion": "absmax", "colwise": "stochastic"}
_BOTH = {"rowwise": "stochastic", "colwise": "stochastic"}
_FUSED = {"bits": _BITS, "block": (128, 128)}

Kernels = list[CompiledKernel]


class Case(NamedTuple):
    """An op with the options that choose its kernels.

    Attributes:
      what: the name in the table.
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
        *_quantize_cases(),
        *_row_block_cases(),
        *_vector_cases(),
        *_grouped_cases(),
        *_fused_cases(),
        _threshold_case(),
    ]


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
    lhs, rhs = _operand((M, K), (m, k), codes), _operand((N, K), (n, k), codes)
    return compile_kernels(
        gemm.matmul,
        lhs,
        lhs if fallback else None,
        rhs,
        capability=capability,
        block_shape=block_shape,
        dtype=jnp.bfloat16,
        sm=capability,
        config=gemm_config.default_config(sizes, block_shape, capability),
    )


def _operand(
    shape: tuple[int, int], block: tuple[int, int], codes: CodeDtype = "int8"
) -> Quantized:
    blocks = [-(-size // side) for size, side in zip(shape, block, strict=True)]
    return Quantized(_array((1, *shape), codes), _array((1, *blocks), "float32"))


def _array(shape: tuple[int, ...], dtype: str) -> Any:
    return jax.ShapeDtypeStruct(shape, dtype)


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
    rhs = _operand((N, K), (128, 128))
    for rows in _FEW_ROWS:
        lhs = _operand((rows, K), (128, 128))
        for residual in (None, lhs):
            yield _gemm_case(
                f"GEMM of {rows} rows" + (", fallback" if residual else ""),
                few_rows_gemm.matmul,
                *(lhs, residual, rhs),
                block_shape=BLOCK_SHAPE,
            )
    rows = min(_FEW_ROWS)
    yield _gemm_case(
        f"GEMM that quantizes {rows} rows, fallback",
        few_rows_quantize_gemm.quantize_matmul,
        *(_array((1, rows, K), "bfloat16"), _array((1,), "float32"), rhs),
        block_shape=BLOCK_SHAPE,
        criterion="absmax",
    )


def _quantize_cases() -> Iterator[Case]:
    from fbq_jax.kernels.triton import quantize

    x, theta, seeds = _inputs()
    for side in (128, 32):
        what = f"quantize, blocks of {side}"
        yield _case(what, quantize.quantize, x, seeds, block=(side, side), **_BOTH)
    yield _case(
        "quantize with fallback, blocks of 128",
        quantize.quantize_fallback,
        *(x, theta, seeds),
        block=(128, 128),
        **_FALLBACK,
    )


def _row_block_cases() -> Iterator[Case]:
    from fbq_jax.kernels.triton import quantize_row_blocks

    x, _, seeds = _inputs()
    for what, options in (
        ("", _BOTH),
        (", columns in blocks", {**_BOTH, "colwise_in_blocks": True}),
    ):
        yield _case(
            f"quantize in row blocks{what}",
            quantize_row_blocks.quantize_row_blocks,
            *(x, seeds),
            block=(128, 128),
            **options,
        )


def _vector_cases() -> Iterator[Case]:
    from fbq_jax.kernels.triton import quantize_vectors

    x, _, seeds = _inputs()
    op = quantize_vectors.quantize_vectors
    yield _case("quantize by rows and columns", op, x, seeds, **_BOTH)


def _grouped_cases() -> Iterator[Case]:
    """The layer's rows, shared out among ``_EXPERTS``."""
    from fbq_jax.kernels.triton import grouped_gemm, quantize

    M, K, N = _LAYER
    m, k, n = BLOCK_SHAPE
    tiles = M // m + _EXPERTS
    groups, theta = _array((tiles,), "int32"), _array((tiles,), "float32")
    rows = GroupedRows(_array((M, K), "bfloat16"), groups, groups)

    def operand(*shape: int) -> Quantized:
        scales = shape[0], *(size // 128 for size in shape[1:])
        return Quantized(_array(shape, "int8"), _array(scales, "float32"))

    yield _case(
        "quantize rows in groups with fallback",
        quantize.ragged_quantize_fallback,
        *(rows, theta, _array((tiles,), "uint32")),
        block=(m, k),
        **_FALLBACK,
    )
    lhs = operand(tiles, m, K)
    yield _gemm_case(
        "GEMM of rows in groups, fallback",
        grouped_gemm.ragged_matmul,
        *(lhs, lhs, operand(_EXPERTS, N, K), groups),
        block_shape=BLOCK_SHAPE,
    )
    yield _gemm_case(
        "GEMM with a contraction in groups",
        grouped_gemm.ragged_contraction,
        *(operand(tiles, K, m), operand(tiles, N, m), groups),
        size=_EXPERTS,
        block_shape=(k, m, n),
    )


def _gemm_case(what: str, op: Callable[..., Any], *args: Any, **options: Any) -> Case:
    """The case of a function that takes the compute capability, too."""

    def compiled(*, capability: int) -> Kernels:
        return compile_kernels(
            op,
            *args,
            capability=capability,
            sm=capability,
            dtype=jnp.bfloat16,
            **options,
        )

    return Case(what, compiled)


def _fused_cases() -> Iterator[Case]:
    from fbq_jax.kernels.triton import fused

    x, theta, seeds = _inputs()
    yield _case(
        "norm and quantize",
        fused.rms_norm_quantize,
        *(x, _array((1, x.shape[2]), "float32"), theta, seeds),
        epsilon=1e-5,
        **_FUSED,
        **_FALLBACK,
    )
    yield from _gate_cases("", x, theta, seeds)
    yield from _fused_row_block_cases()
    m, tiles = BLOCK_SHAPE[0], _LAYER[0] // BLOCK_SHAPE[0] + _EXPERTS
    yield from _gate_cases(
        " of rows in groups",
        _array((tiles, m, x.shape[2]), "bfloat16"),
        *(_array((tiles,), dtype) for dtype in ("float32", "uint32", "int32")),
        interleaved=False,
    )


def _gate_cases(
    what: str, y: Any, theta: Any, *seeds_and_counts: Any, **options: Any
) -> Iterator[Case]:
    """A gate with output y, and its gradient."""
    from fbq_jax.kernels.triton import fused

    batch, rows, columns = y.shape
    factor = jax.eval_shape(lambda: packing.quantize(jnp.zeros(y.shape), _BITS))
    yield _case(
        f"gate and quantize{what}",
        fused.silu_gate_quantize,
        _array((batch, rows, 2 * columns), "bfloat16"),
        *(theta, *seeds_and_counts),
        **_FUSED,
        **_FALLBACK,
        **options,
    )
    yield _case(
        f"gate's gradient and quantize{what}",
        fused.silu_gate_grad_quantize,
        *(y, factor, factor, *seeds_and_counts),
        **_FUSED,
        **_BOTH,
        **options,
    )


def _fused_row_block_cases() -> Iterator[Case]:
    """Those of ``row_block_lhs``."""
    from fbq_jax.kernels.triton import fused

    x, _, seeds = _inputs()
    batch, rows, columns = x.shape
    forward = _FUSED | _BOTH | {"rowwise": "nearest"}
    yield _case(
        "norm and quantize in row blocks",
        fused.rms_norm_quantize_row_blocks,
        *(x, _array((batch, columns), "float32"), seeds),
        epsilon=1e-5,
        **forward,
    )
    yield _case(
        "gate and quantize in row blocks",
        fused.silu_gate_quantize_row_blocks,
        *(_array((batch, rows, 2 * columns), "bfloat16"), seeds),
        **forward,
    )
    factor = jax.eval_shape(lambda: packing.quantize(jnp.zeros(x.shape), _BITS))
    yield _case(
        "gate's gradient and quantize in row blocks",
        fused.silu_gate_grad_quantize_row_blocks,
        *(x, factor, factor, seeds),
        colwise_in_blocks=True,
        sums=("colwise",),
        **_FUSED,
        **_BOTH,
    )


def _threshold_case() -> Case:
    from fbq_jax.kernels.triton import threshold

    blocks, scalar = _array((1, 64 * 32), "float32"), _array((1,), "int32")
    return _case(
        "threshold",
        threshold.move_threshold,
        *(blocks, blocks, _array((1,), "float32"), scalar, scalar),
        _array((1,), "uint32"),
        target_rate=(0.1, 0.3),
        alpha=1.3,
    )


def _inputs() -> tuple[Any, Any, Any]:
    """X of the layer, a threshold and seeds."""
    M, K, _ = _LAYER
    return (
        _array((1, M, K), "bfloat16"),
        _array((1,), "float32"),
        _array((1,), "uint32"),
    )


def _case(what: str, op: Callable[..., Any], *args: Any, **options: Any) -> Case:
    return Case(what, functools.partial(compile_kernels, op, *args, **options))
