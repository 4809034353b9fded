"""The GEMM of quantized matrices, alone and after the quantization of a few rows."""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import export

from fbq_jax.kernels import reference
from fbq_jax.kernels.reference import Criterion, Quantized
from fbq_jax.ops import dispatch
from fbq_jax.ops.backends import (
    float8_refusal,
    mosaic_gemm_refusal,
    tpu_refusal,
    triton_gemm_refusal,
    triton_kernels,
)
from fbq_jax.ops.op import OPS, Kernel, LocalOp, Op, no_float8, register
from fbq_jax.ops.quantization import VECTOR_GRANULARITY
from fbq_jax.ops.transformations import call
from fbq_jax.sharding import collectives
from fbq_jax.sharding.local_ops import Shard
from fbq_jax.sharding.rule_language import (
    UNSHARDED,
    AxisWords,
    ShardingRule,
    block_axis,
    layout_words,
    row_axes,
)

BlockShape = tuple[int, int, int]

# The most rows of lhs that GPUs multiply with the kernel for few rows.
_FEW_ROWS = 128
# The most rows that this kernel also quantizes.  Each of its programs does, which takes
# too long for more rows.
_FEW_ROWS_TO_QUANTIZE = 8


def matmul(
    lhs: Quantized,
    residual: Quantized | None,
    rhs: Quantized,
    *,
    block_shape: BlockShape,
    dtype: jax.typing.DTypeLike,
    reduce: str | None = None,
    seeds: jax.Array | None = None,
    implementation: str | None = None,
) -> jax.Array:
    """Multiplies ``lhs [B, M, K]``, plus its residual, with ``rhs [B, N, K]``.

    The operands may also be rowwise codes ``[B, G, R, K]`` for lhs, colwise codes
    ``[B, M, G, R]`` and ``[B, N, G, R]``, or the colwise parts ``[B, P, M, R]`` and
    ``[B, P, N, R]`` of ``quantize_vectors``, whose products are summed in float32.

    Args:
      lhs: codes int8 or float8_e4m3fn, and scales float32, one per block.
      residual: a second term of lhs, of the same shapes, or None.
      rhs: codes of the same dtype and scales float32, one per block.
      block_shape: ``(m, k, n)``, the size of a block along M, K and N.
      dtype: dtype of the output.
      reduce: ``"float32"``, ``"bfloat16"`` or ``"int8"``: the dtype in which devices
        exchange and sum partial products.  By default the dtype of the output.
      seeds: uint32 ``[B]``, the seeds of stochastic rounding with ``reduce="int8"``.
      implementation: as in ``dispatch.choose``.

    Returns:
      ``[B, M, N]`` or ``[B, G, R, N]`` in ``dtype``.

    Raises:
      ValueError: if ``reduce="int8"`` has no seeds, or another ``reduce`` has seeds.
    """
    if (reduce == "int8") != (seeds is not None):
        raise ValueError(
            "matmul takes seeds if and only if reduce='int8'; got "
            f"reduce={reduce!r} with{'out' if seeds is None else ''} seeds"
        )
    has_blocks = residual is not None or not _has_row_scales(rhs, block_shape)
    sides = block_shape if has_blocks else ()
    operands = lhs, residual, rhs, *(() if seeds is None else (seeds,))
    options = {"block_shape": block_shape, "dtype": jnp.dtype(dtype), "reduce": reduce}
    return call(MATMUL, operands, sides, options, implementation)


def quantizes_in_matmul(
    x: jax.Array,
    rhs: Quantized,
    *,
    block_shape: BlockShape,
    criterion: Criterion | None,
    implementation: str | None,
) -> bool:
    """Whether ``quantize_matmul`` is the faster way to multiply x.

    If so, the GEMM's implementation has a kernel for it, or is the reference.

    Args:
      x: as in ``quantize_matmul``.
      rhs: as in ``quantize_matmul``.
      block_shape: as in ``matmul``.
      criterion: of fallback.  The sums of ``"l1"`` and ``"l1_rel"`` need a kernel of
        their own.
      implementation: as in ``dispatch.choose``.
    """
    rows = math.prod(x.shape[1:-1])
    if (
        not _has_few_rows(rows, block_shape, _FEW_ROWS_TO_QUANTIZE)
        or _has_row_scales(rhs, block_shape)
        or rhs.codes.dtype != jnp.int8
        or criterion not in (None, "absmax")
    ):
        return False
    choice = dispatch.choose("matmul", block_shape, implementation=implementation)
    return choice.implementation in ("reference", *OPS["quantize_matmul"].kernels)


def quantize_matmul(
    x: jax.Array,
    theta: jax.Array,
    rhs: Quantized,
    *,
    block_shape: BlockShape,
    criterion: Criterion | None,
    dtype: jax.typing.DTypeLike,
    reduce: str | None = None,
    implementation: str | None = None,
) -> jax.Array:
    """Multiplies ``x [B, M, K]``, quantized to nearest, with ``rhs [B, N, K]``.

    The result is that of ``quantize_fallback`` and ``matmul``, bit for bit, for the
    operands that ``quantizes_in_matmul`` accepts.

    Args:
      x: bfloat16, float16 or float32; it may also be ``[B, G, R, K]``.
      theta: float32 ``[B]``, the thresholds, as in ``quantize_fallback``.
      rhs: as in ``matmul``.
      block_shape: as in ``matmul``; M is at most m, or m is 1.
      criterion: ``"absmax"``, or None for no fallback.
      dtype: dtype of the output.
      reduce: as in ``matmul``, except ``"int8"``.
      implementation: as in ``dispatch.choose``.

    Returns:
      ``[B, M, N]`` or ``[B, G, R, N]`` in ``dtype``.
    """
    options = {
        "block_shape": block_shape,
        "criterion": criterion,
        "dtype": jnp.dtype(dtype),
        "reduce": reduce,
    }
    return call(QUANTIZE_MATMUL, (x, theta, rhs), block_shape, options, implementation)


def _has_row_scales(rhs: Quantized, block_shape: BlockShape) -> bool:
    """Whether lhs and rhs, or their parts, have one scale per row."""
    return block_shape[0] == block_shape[2] == 1 and rhs.scales.shape[-1] == 1


def _has_parts(rhs: Quantized, block_shape: BlockShape) -> bool:
    """Whether the operands are parts ``[B, P, ..., R]`` with their own scales."""
    return block_shape[0] == block_shape[2] == 1 and rhs.scales.ndim == 4


def _has_few_rows(rows: int, block_shape: BlockShape, most: int = _FEW_ROWS) -> bool:
    """Whether lhs has few rows, all in one block or each with its own scales."""
    m = block_shape[0]
    most = most if m == 1 else min(m, most)
    return not export.is_symbolic_dim(rows) and rows <= most


def _matmul_rule(
    lhs: Quantized,
    residual: Quantized | None,
    rhs: Quantized,
    *seeds: jax.Array,
    block_shape: BlockShape,
    **_options: Any,
) -> ShardingRule:
    m, k, n = block_shape
    stack = "b"
    columns = block_axis("n", rhs.codes.shape[1], n)
    depth = block_axis("k", rhs.codes.shape[-1], k)
    if vectors := _has_row_scales(rhs, block_shape):
        side = VECTOR_GRANULARITY[1]
        depth = AxisWords(block_axis("k", rhs.codes.shape[-1], side).codes, UNSHARDED)
    contracted = depth.codes[0].strip(UNSHARDED)
    if _has_parts(rhs, block_shape):  # [B, P, N, R]
        stack, contracted = "b p", f"p{contracted}"
        rows = block_axis("i", lhs.codes.shape[2], 1)
        columns = block_axis("n", rhs.codes.shape[2], 1)
    elif rhs.codes.ndim == 4:  # [B, N, G, R]
        rows = block_axis("i", lhs.codes.shape[1], m)
        scales = UNSHARDED if vectors else f"g {depth.scales}"
        depth, contracted = AxisWords(f"g {depth.codes}", scales), f"g{contracted}"
    else:
        rows = row_axes(lhs.codes.shape, m)
    left, _ = layout_words(rows, depth, stack)
    right, _ = layout_words(columns, depth, stack)
    if rhs.sums is not None:
        right = right._replace(sums=right.scales)
    operands = left, None if residual is None else left, right, *("b" for _ in seeds)
    return ShardingRule(operands, f"b {rows.codes} {columns.codes}", contracted)


def _matmul_on_shard(
    run: LocalOp, shard: Shard, operands: tuple[Any, ...], options: dict[str, Any]
) -> jax.Array:
    """Multiplies this device's shards and sums the products of all devices."""
    lhs, residual, rhs, *seeds = operands
    dtype = options["dtype"]
    part = shard.run(
        functools.partial(_multiply, run, options["block_shape"]),
        (lhs, residual, rhs),
        dtype=_partial_dtype(shard, options),
    )
    if options["reduce"] != "int8":
        return collectives.sum_in_float(part, shard).astype(dtype)
    quantize = dataclasses.replace(
        run, op=OPS["quantize"], block_shape=collectives.BLOCK
    )
    return collectives.sum_in_int8(
        part, shard, seeds=seeds[0], quantize=quantize, dtype=dtype
    ).astype(dtype)


def _partial_dtype(shard: Shard, options: dict[str, Any]) -> Any:
    """The dtype of a device's partial product."""
    reduce = options["reduce"]
    if reduce and shard.assignment.axes_of(shard.rule.contracted):
        return jnp.dtype(collectives.PARTIAL_DTYPES[reduce])
    return options["dtype"]


def _multiply(
    run: LocalOp,
    block_shape: BlockShape,
    lhs: Quantized,
    residual: Quantized | None,
    rhs: Quantized,
    *,
    dtype: Any,
) -> jax.Array:
    """Multiplies matrices with merged rows, or sums the products of parts."""
    if _has_row_scales(rhs, block_shape):
        block_shape = (1, lhs.codes.shape[-1], 1)
    if _has_few_rows(lhs.codes.shape[1], block_shape):
        run = dataclasses.replace(run, op=_FEW_ROWS_MATMUL)
    if not _has_parts(rhs, block_shape):
        return run(lhs, residual, rhs, block_shape=block_shape, dtype=dtype)
    depth = lhs.codes.shape[-1]
    longest = reference.MAX_INT32_K
    is_long = jax.core.min_dim(depth, longest + 1) == longest + 1
    if run.implementation == "reference" and depth and not is_long:
        # XLA would put the quantization of all parts into each of P products.  Of parts
        # of one row it would make one loop, which LLVM takes minutes to compile.
        side = jax.core.min_dim(depth, longest)  # a symbolic depth may turn out long
        left, right = _parts_as_blocks(lhs, side), _parts_as_blocks(rhs, side)
        return run(left, residual, right, block_shape=(1, side, 1), dtype=dtype)
    # One after the other: all at once, the P products would need memory in float32.
    total = jnp.float32(0.0)
    for i in range(lhs.codes.shape[1]):
        left, right = jax.tree.map(lambda x, i=i: x[:, i], (lhs, rhs))
        total += run(left, residual, right, block_shape=block_shape, dtype=jnp.float32)
    return total.astype(dtype)


def _parts_as_blocks(x: Quantized, side: int) -> Quantized:
    """Parts ``[B, P, N, R]`` as rows ``[B, N, K]`` with blocks of ``side``."""
    batch, parts, rows, depth = x.codes.shape
    blocks = -(-depth // side)  # of each part
    codes = jnp.pad(x.codes, [(0, 0)] * 3 + [(0, blocks * side - depth)])
    codes = codes.swapaxes(1, 2).reshape(batch, rows, parts * blocks * side)
    scales = jnp.broadcast_to(x.scales.swapaxes(1, 2), (batch, rows, parts, blocks))
    return Quantized(codes, scales.reshape(batch, rows, parts * blocks))


def _quantize_matmul_rule(
    x: jax.Array, _theta: jax.Array, rhs: Quantized, **options: Any
) -> ShardingRule:
    """That of the product; blocks of x are not split between devices."""
    lhs = Quantized(x, rhs.scales)  # only the shape of codes counts
    rule = _matmul_rule(lhs, None, rhs, **options)
    left, _, right = rule.operands
    return rule._replace(operands=(left.codes, "b", right))


def _quantize_matmul_on_shard(
    run: LocalOp, shard: Shard, operands: tuple[Any, ...], options: dict[str, Any]
) -> jax.Array:
    """Quantizes and multiplies this device's shards, and sums the products."""
    part = shard.run(
        run,
        operands,
        block_shape=options["block_shape"],
        criterion=options["criterion"],
        dtype=_partial_dtype(shard, options),
    )
    return collectives.sum_in_float(part, shard).astype(options["dtype"])


_KERNELS = {
    name: Kernel(
        name,
        f"fbq_jax.kernels.{name}.gemm",
        refusal,
        blockless_module="fbq_jax.kernels.xla_gemm",
        float8_refusal=float8,
    )
    for name, refusal, float8 in (
        ("mosaic", mosaic_gemm_refusal, float8_refusal),
        ("triton", triton_gemm_refusal, float8_refusal),
        ("tpu", tpu_refusal, no_float8),
    )
}
MATMUL = Op(reference.matmul, _matmul_rule, _matmul_on_shard, kernels=_KERNELS)
register(MATMUL)
# On GPUs, another kernel for few rows: its time is that of reading rhs.
_FEW_ROWS_MATMUL = dataclasses.replace(
    MATMUL,
    kernels=_KERNELS
    | triton_kernels(
        "fbq_jax.kernels.triton.few_rows_gemm",
        triton_gemm_refusal,
        blockless_module="fbq_jax.kernels.xla_gemm",
        float8_refusal=float8_refusal,
    ),
)
QUANTIZE_MATMUL = Op(
    reference.quantize_matmul,
    _quantize_matmul_rule,
    _quantize_matmul_on_shard,
    kernels=triton_kernels(
        "fbq_jax.kernels.triton.few_rows_quantize_gemm", triton_gemm_refusal
    ),
)
register(QUANTIZE_MATMUL)
