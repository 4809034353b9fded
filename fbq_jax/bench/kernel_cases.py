"""The ops that run Triton kernels, with the options that choose these kernels."""

import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fbq_jax.bench.compiler import CompiledKernel, compile_kernels
from fbq_jax.kernels import packing
from fbq_jax.kernels.grouped_reference import GroupedRows
from fbq_jax.kernels.reference import Quantized

BLOCK_SHAPE = (128, 128, 128)
_LAYER = (8192, 4096, 4096)  # M, K, N
_EXPERTS = 8
_BITS = 10  # of the arrays that fused layers save

Kernels = list[CompiledKernel]


class Case(NamedTuple):
    """An op with the options that choose its kernels.

    Attributes:
      what: the name in the table.
      compiled: returns the kernels for ``capability=``, the compute capability to
        compile for times ten.
    """

    what: str
    compiled: Callable[..., Kernels]


def cases() -> list[Case]:
    """Every op that runs Triton kernels on these GPUs, for a layer of 4096 channels.

    The kernels of a GEMM with fallback include the one that lists its steps.
    """
    return [
        *_gemm_cases(),
        *_quantize_cases(),
        *_grouped_cases(),
        *_fused_cases(),
        _threshold_case(),
    ]


def compile_gemm(
    sizes: tuple[int, int, int],
    block_shape: tuple[int, int, int] = BLOCK_SHAPE,
    *,
    capability: int,
    fallback: bool,
) -> Kernels:
    """The kernels of a GEMM ``(M, N, K)`` with the default configuration."""
    from fbq_jax.kernels.triton import gemm, gemm_config

    M, N, K = sizes
    m, k, n = block_shape
    lhs, rhs = _operand((M, K), (m, k)), _operand((N, K), (n, k))
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


def _operand(shape: tuple[int, int], block: tuple[int, int]) -> Quantized:
    blocks = [-(-size // side) for size, side in zip(shape, block, strict=True)]
    return Quantized(_array((1, *shape), "int8"), _array((1, *blocks), "float32"))


def _array(shape: tuple[int, ...], dtype: str) -> Any:
    return jax.ShapeDtypeStruct(shape, dtype)


def _gemm_cases() -> Iterator[Case]:
    M, K, N = _LAYER
    for side in (128, 256, 32):
        for fallback in (False, True):
            yield Case(
                f"GEMM, blocks of {side}" + (", fallback" if fallback else ""),
                functools.partial(
                    compile_gemm, (M, N, K), (side, side, side), fallback=fallback
                ),
            )


def _quantize_cases() -> Iterator[Case]:
    from fbq_jax.kernels.triton import quantize, quantize_vectors

    x, theta, seeds = _inputs()
    both = {"rowwise": "stochastic", "colwise": "stochastic"}
    fallback = {"criterion": "absmax", "colwise": "stochastic"}
    for side in (128, 32):
        what = f"quantize, blocks of {side}"
        yield _case(what, quantize.quantize, x, seeds, block=(side, side), **both)
    yield _case(
        "quantize with fallback, blocks of 128",
        quantize.quantize_fallback,
        *(x, theta, seeds),
        block=(128, 128),
        **fallback,
    )
    yield _case(
        "quantize by rows and columns",
        quantize_vectors.quantize_vectors,
        *(x, seeds),
        **both,
    )


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
        criterion="absmax",
        colwise="stochastic",
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
    _, rows, columns = x.shape
    forward = {"criterion": "absmax", "colwise": "stochastic"}
    backward = {"rowwise": "stochastic", "colwise": "stochastic"}
    shared = {"bits": _BITS, "block": (128, 128)}
    factor = jax.eval_shape(lambda: packing.quantize(jnp.zeros(x.shape), _BITS))
    yield _case(
        "norm and quantize",
        fused.rms_norm_quantize,
        *(x, _array((1, columns), "float32"), theta, seeds),
        epsilon=1e-5,
        **shared,
        **forward,
    )
    yield _case(
        "gate and quantize",
        fused.silu_gate_quantize,
        *(_array((1, rows, 2 * columns), "bfloat16"), theta, seeds),
        **shared,
        **forward,
    )
    yield _case(
        "gate's gradient and quantize",
        fused.silu_gate_grad_quantize,
        *(x, factor, factor, seeds),
        **shared,
        **backward,
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
