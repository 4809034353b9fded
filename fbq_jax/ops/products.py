"""The op that multiplies quantized matrices: ``matmul``."""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import export

from fbq_jax.kernels.quantized import (
    CodeDtype,
    Layout,
    Layouts,
    Quantized,
    Term,
    Unquantized,
    product_block,
)
from fbq_jax.kernels.sources import Matrix
from fbq_jax.ops import dispatch
from fbq_jax.ops.dispatch import BACKENDS, Backend, Request
from fbq_jax.ops.op import LocalOp, Op, call, register
from fbq_jax.ops.problems import lead_of, map_problems
from fbq_jax.ops.quantization import QUANTIZE, VECTOR_GRANULARITY
from fbq_jax.sharding.local_ops import Shard
from fbq_jax.sharding.rule_language import (
    UNSHARDED,
    UNSHARDED_AXIS,
    AxisWords,
    ShardingRule,
    block_axis,
    row_axes,
)

BlockShape = tuple[int | None, int | None, int | None]


def matmul(
    lhs: Quantized | Unquantized,
    rhs: Quantized,
    groups: jax.Array | None = None,
    *,
    dtype: jax.typing.DTypeLike,
    reduce: str | None = None,
    seeds: jax.Array | None = None,
    ordered: bool = False,
    implementation: str | None = None,
) -> jax.Array:
    """Multiplies ``lhs [B, M, K]`` with ``rhs [B, N, K]``; see ``reference.matmul``.

    The operands may also be rowwise codes ``[B, G, R, K]`` for lhs, colwise codes
    ``[B, M, G, R]`` and ``[B, N, G, R]``, or colwise shards ``[B, P, M, R]`` and
    ``[B, P, N, R]`` of ``quantize``, whose products are summed in float32.

    Args:
      lhs: the left operand, which ``matmul`` quantizes if ``quantizes_lhs`` says so.
      rhs: the right operand, of one term.
      groups: int32, the matrix of ``rhs [G, N, K]`` for each tile ``[T, m, K]`` of lhs,
        in ascending order; None if each matrix has its own.
      dtype: the dtype of the output.
      reduce: ``"float32"``, ``"bfloat16"``, ``"int32"`` or ``"int8"``: the dtype in
        which devices exchange and sum partial products.  By default the dtype of the
        output.
      seeds: uint32 ``[B]``, the seeds of stochastic rounding with ``reduce="int8"``.
      ordered: whether the products of K blocks are added one after the other, as the
        reference does, for any number of rows.  Groups of rows take no such order.
      implementation: as in ``dispatch.choose``.

    Returns:
      ``[B, M, N]``, ``[B, G, R, N]`` or ``[T, m, N]`` in ``dtype``.

    Raises:
      ValueError: the operands do not fit each other, or ``reduce="int8"`` has no seeds,
        or another ``reduce`` has seeds; or ``reduce="int32"`` has operands with several
        scales along the contraction, or a longer one than int32 can sum.
    """
    if (reduce == "int8") != (seeds is not None):
        raise ValueError(
            "matmul takes seeds if and only if reduce='int8'; got "
            f"reduce={reduce!r} with{'out' if seeds is None else ''} seeds"
        )
    if reduce == "int32":
        _check_int32(lhs, rhs)
    options = {"dtype": jnp.dtype(dtype), "reduce": reduce, "ordered": ordered}
    y: jax.Array = call(MATMUL, (lhs, rhs, groups, seeds), options, implementation)
    return y


def _check_int32(lhs: Quantized | Unquantized, rhs: Quantized) -> None:
    """Raises ValueError if int32 cannot hold the sum of all products of codes."""
    if product_block(lhs, rhs)[1] is not None or _has_parts(rhs):
        raise ValueError(
            "reduce='int32' takes operands with one scale along the contraction; got "
            f"scales {rhs.scales.shape} of codes {rhs.shape}"
        )
    depth = math.prod(rhs.shape[2:])
    longest = BACKENDS["reference"].max_part_depth
    if not export.is_symbolic_dim(depth) and longest and depth > longest:
        raise ValueError(
            f"reduce='int32' sums up to {longest} products exactly, and this "
            f"contraction has {depth}: leave Gemm.reduce at None, or take 'float32'"
        )


def quantizes_lhs(
    rows: int, lhs: Unquantized, rhs: Quantized, implementation: str | None
) -> bool:
    """Whether ``matmul`` is faster if it quantizes so many rows of lhs itself."""
    choice = dispatch.choose_for(product_request(lhs, rhs), implementation)
    return BACKENDS[choice.implementation].quantizes_lhs(rows, lhs, rhs)


def reads_sums(
    block: BlockShape,
    dtypes: tuple[Any, ...],
    codes: CodeDtype,
    implementation: str | None,
) -> bool:
    """Whether the GEMM reads ``Quantized.sums`` of rhs, for one of these dtypes."""
    request = Request("matmul", Request.sides_of(block), codes)
    choice = dispatch.choose_for(request, implementation)
    return BACKENDS[choice.implementation].reads_sums(codes, *dtypes)


def _codes(rhs: Quantized) -> CodeDtype:
    return "int8" if rhs.codes.dtype == jnp.int8 else "float8_e4m3fn"


def product_request(
    lhs: Quantized | Unquantized,
    rhs: Quantized,
    groups: jax.Array | None = None,
    *_: Any,
    op: str = "matmul",
    **_options: Any,
) -> Request:
    """What a product asks of a backend."""
    sides = Request.sides_of(product_block(lhs, rhs))
    return Request(op, sides, _codes(rhs), grouped=groups is not None)


def operand_words(
    operand: Quantized, rows: AxisWords, columns: AxisWords, stack: str
) -> Quantized:
    """Joins the words of an operand's axes into the words of its arrays."""
    codes, scales = (
        f"{stack} {row} {column}" for row, column in zip(rows, columns, strict=True)
    )
    term: Any = Term
    main = term(codes, scales, None if operand.sums is None else scales)
    residual = None if operand.residual is None else term(codes, scales)
    return Quantized(main, residual, operand.block)


def _has_parts(rhs: Quantized) -> bool:
    """Whether the operands are shards ``[B, P, ..., R]`` with their own scales."""
    return rhs.block[1] is None and rhs.scales.ndim == 4


def _rule(
    lhs: Quantized | Unquantized,
    rhs: Quantized,
    groups: jax.Array | None,
    seeds: jax.Array | None,
    **_options: Any,
) -> ShardingRule:
    if groups is not None:
        assert isinstance(lhs, Quantized)
        return _groups_rule(lhs, rhs, groups)
    m, k, n = product_block(lhs, rhs)
    stack = "b"
    shape = lhs.values.shape if isinstance(lhs, Unquantized) else lhs.shape
    columns = block_axis("n", rhs.shape[1], n or 1)
    depth = block_axis("k", rhs.shape[-1], k or VECTOR_GRANULARITY[1])
    if k is None:
        depth = AxisWords(depth.codes, UNSHARDED)
    contracted = depth.codes[0].strip(UNSHARDED)
    if _has_parts(rhs):  # [B, P, N, R]
        stack, contracted = "b p", f"p{contracted}"
        rows = block_axis("i", shape[2], 1)
        columns = block_axis("n", rhs.shape[2], 1)
    elif len(rhs.shape) == 4:  # [B, N, G, R]
        rows = block_axis("i", shape[1], m or 1)
        scales = UNSHARDED if k is None else f"g {depth.scales}"
        depth, contracted = AxisWords(f"g {depth.codes}", scales), f"g{contracted}"
    else:
        rows = row_axes(shape, m or 1)
    right = operand_words(rhs, columns, depth, stack)
    left: Any
    if isinstance(lhs, Unquantized):  # its blocks are not split between devices
        values: Any = f"{stack} {rows.codes} {depth.codes}"
        left = Unquantized(values, stack, lhs.block, lhs.criterion)  # type: ignore[arg-type]
    else:
        left = operand_words(lhs, rows, depth, stack)
    operands = left, right, None, None if seeds is None else "b"
    return ShardingRule(operands, f"b {rows.codes} {columns.codes}", contracted)


def _groups_rule(lhs: Quantized, rhs: Quantized, groups: jax.Array) -> ShardingRule:
    _, k, n = product_block(lhs, rhs)
    columns = block_axis("n", rhs.shape[-2], n or 1)
    depth, lead = block_axis("k", rhs.shape[-1], k or 1), lead_of(groups)
    left = operand_words(lhs, UNSHARDED_AXIS, depth, f"{lead}t")
    right = operand_words(rhs, columns, depth, f"{lead[:2]}e")
    contracted = f"{depth.codes[0].strip(UNSHARDED)}e"
    operands = left, right, f"{lead}t", None
    return ShardingRule(operands, f"{lead}t . {columns.codes}", contracted)


def _on_shard(
    run: LocalOp, shard: Shard, operands: tuple[Any, ...], options: dict[str, Any]
) -> jax.Array:
    """Multiplies this device's shards and sums the products of all devices."""
    lhs, rhs, groups, seeds = operands
    dtype = options["dtype"]
    if groups is not None:
        return _groups_on_shard(run, shard, lhs, rhs, groups, dtype)
    if shard.is_sharded(shard.rule.contracted):
        if options["ordered"]:
            raise ValueError(
                "Gemm(ordered=True) adds the products of blocks one after the other, "
                "and here devices share the contraction: shard other axes, or take a "
                "recipe with a scale per row and Gemm(reduce='int32')"
            )
        if options["reduce"] == "int32":
            return _sum_in_int32(run.backend, shard, lhs, rhs, dtype)
    part = shard.run(
        functools.partial(_multiply, run, ordered=options["ordered"]),
        (lhs, rhs),
        dtype=shard.partial_dtype(options["reduce"], dtype),
    )
    if options["reduce"] != "int8":
        return shard.sum(part).astype(dtype)

    def quantize(x: jax.Array, seeds: jax.Array, block: tuple[int, int]) -> Quantized:
        layout, request = Layout("stochastic", block), Request("quantize", block)
        local = LocalOp(QUANTIZE, run.backend, run.backend.kernel(request))
        layouts: Layouts = local(Matrix(x), seeds, None, rowwise=layout, colwise=None)
        assert layouts.rowwise is not None
        return layouts.rowwise

    return shard.sum_in_int8(part, seeds, quantize, dtype).astype(dtype)


def _sum_in_int32(
    backend: Backend, shard: Shard, lhs: Quantized, rhs: Quantized, dtype: Any
) -> jax.Array:
    """Sums the products of codes of all devices, and scales the sum as one device."""

    def multiply(lhs: Quantized, rhs: Quantized) -> jax.Array:
        return backend.multiply_codes(lhs.codes, rhs.codes)

    total = shard.sum(shard.run(multiply, (lhs, rhs))).astype(jnp.float32)
    of_rows, of_columns = (
        shard.scatter(x.scales, words.scales)
        for x, words in zip((lhs, rhs), shard.rule.operands, strict=False)
    )
    of_columns = jnp.expand_dims(of_columns[..., 0], tuple(range(1, total.ndim - 1)))
    return backend.scale_product(total, of_rows * of_columns, dtype)


def _multiply(
    run: LocalOp,
    lhs: Quantized | Unquantized,
    rhs: Quantized,
    *,
    dtype: Any,
    ordered: bool,
) -> jax.Array:
    """Multiplies matrices with merged rows, or sums the products of parts."""
    if isinstance(lhs, Unquantized) or not _has_parts(rhs):
        return run(lhs, rhs, dtype=dtype, ordered=ordered)
    depth, longest = lhs.shape[-1], run.backend.max_part_depth
    if longest and depth and jax.core.min_dim(depth, longest + 1) != longest + 1:
        # XLA would put the quantization of all parts into each of P products.  Of parts
        # of one row it would make one loop, which LLVM takes minutes to compile.
        side = jax.core.min_dim(depth, longest)  # a symbolic depth may turn out long
        lhs, rhs = _parts_as_blocks(lhs, side), _parts_as_blocks(rhs, side)
        return run(lhs, rhs, dtype=dtype)
    # One after the other: all at once, the P products would need memory in float32.
    total = jnp.float32(0.0)
    for i in range(lhs.shape[1]):
        left, right = jax.tree.map(lambda x, i=i: x[:, i], (lhs, rhs))
        total += run(left, right, dtype=jnp.float32)
    return total.astype(dtype)


def _parts_as_blocks(x: Quantized, side: int) -> Quantized:
    """Parts ``[B, P, N, R]`` as rows ``[B, N, K]`` with blocks of ``side``."""
    batch, parts, rows, depth = x.shape
    blocks = -(-depth // side)  # of each part
    codes = jnp.pad(x.codes, [(0, 0)] * 3 + [(0, blocks * side - depth)])
    codes = codes.swapaxes(1, 2).reshape(batch, rows, parts * blocks * side)
    scales = jnp.broadcast_to(x.scales.swapaxes(1, 2), (batch, rows, parts, blocks))
    term = Term(codes, scales.reshape(batch, rows, parts * blocks))
    return Quantized(term, None, (1, side))


def _groups_on_shard(
    run: LocalOp,
    shard: Shard,
    lhs: Quantized,
    rhs: Quantized,
    groups: jax.Array,
    dtype: Any,
) -> jax.Array:
    """Multiplies the tiles of this device's groups; other tiles give zeros."""
    size = rhs.shape[-3]
    groups = local_groups(groups, size, shard)

    def multiply(lhs: Quantized, groups: jax.Array, rhs: Quantized) -> jax.Array:
        return run(lhs, rhs, groups, dtype=dtype)

    part = map_problems(multiply, (lhs, groups), rhs)
    if shard.is_sharded("e"):
        is_local = (groups >= 0) & (groups < size)
        part = jnp.where(is_local[..., None, None], part, jnp.zeros_like(part))
    return shard.sum(part)


def local_groups(groups: jax.Array, size: int, shard: Shard) -> jax.Array:
    """Group indices relative to the first of the ``size`` groups on this device."""
    index = shard.shard_index("e").astype(jnp.int32)
    return groups - jnp.int32(size) * index


MATMUL = register(
    Op(
        "matmul",
        product_request,
        _rule,
        _on_shard,
        stacks=lambda lhs, rhs, groups, seeds: groups is None,  # noqa: ARG005
    )
)
