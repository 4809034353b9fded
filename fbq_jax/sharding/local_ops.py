"""What each device does of an op, and what the devices tell each other.

Operands are cut between blocks, whose codes and scales depend on nothing else, and each
device is told where its shard lies, so that it draws the noise that one device alone
would draw there.  So N devices give the codes and scales of one, bit for bit, without a
word between them, but for these:

- scales of whole rows or columns are agreed on, as the maxima of the shards' maxima,
  and so are those of an operand's blocks that several devices hold parts of;
- a product whose contraction is cut is summed over the devices in its own dtype, or as
  ``Gemm.reduce`` says; each device gets the part of the sum that the result's sharding
  gives it.

What a device needs of a product's operands and does not have, it fetches as codes.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from fbq_jax.kernels.reference import AmaxReduce, Layouts, Quantized
from fbq_jax.kernels.rounding import ROW_GROUP, GlobalOffset
from fbq_jax.sharding import collectives
from fbq_jax.sharding import op_rules as axes_module
from fbq_jax.sharding.assignment import Axes, Shards, pairs, parse
from fbq_jax.sharding.partitioning import partitioned
from fbq_jax.sharding.split_block_scales import quantize_shared

# Of the ops that draw noise: the columns of what they round, given the operand's.
_NOISE_COLUMNS: dict[str, Callable[[int], int]] = {
    "quantize": lambda c: c,
    "quantize_vectors": lambda c: c,
    "quantize_fallback": lambda c: c,
    "rms_norm_quantize": lambda c: c,
    "silu_gate_quantize": lambda c: c // 2,
    "silu_gate_grad_quantize": lambda c: 2 * c,
}


def sharded(
    op: str,
    function: Callable[..., Any],
    options: Mapping[str, Any],
    quantize: Callable[..., Any] | None,
) -> Callable[..., Any]:
    """An op that is cut over the mesh of its operands.

    Args:
      op: one of ``fbq_jax.ops.dispatch.OPS``.
      function: computes it on one device, of matrices ``[B, R, C]``, with ``options``.
      options: the op's own.
      quantize: the op of that name on one device, for a sum in INT8.

    Returns:
      The op of matrices ``[B, R, C]`` or ``[B, G, R, C]``, of G times R rows; by
      columns their codes are ``[B, C, G, R]``.  Or, of ``quantize_vectors`` and what
      contracts its codes, in parts ``[B, P, R, C]``.
    """
    axes_of = functools.partial(getattr(axes_module, op), **options)
    local = functools.partial(_local, op, function, options, quantize)
    return partitioned(op, axes_of, local)


def _local(
    op: str,
    function: Callable[..., Any],
    options: Mapping[str, Any],
    quantize: Callable[..., Any] | None,
    axes: Axes,
    shards: Shards,
) -> Callable[..., Any]:
    """The op of one device's shards.  Kernels see rows that are two axes as one."""

    def local(*operands: Any) -> Any:
        matrices = jax.tree.map(_merge_rows, axes.operands, operands)
        groups = _groups(axes.operands, operands)
        run, placed = function, dict(options)
        if op in _NOISE_COLUMNS:
            height, width = operands[0].shape[-2:]
            width = _NOISE_COLUMNS[op](width)
            placed["global_offset"] = _global_offset(shards, groups, height, width)
        if op == "quantize_vectors":
            rows, columns = ("gij",) * 2 if options["per_tensor"] else ("j", "gi")
            joins = (_join(shards.names(letters)) for letters in (rows, columns))
            placed["amax_reduce"] = AmaxReduce(*joins)
            if operands[1].ndim == 2:
                run = functools.partial(_quantize_parts, function)
        if op == "matmul":
            lhs, residual, rhs, *seeds = matrices
            matrices = lhs, residual, rhs
            if axes_module.one_scale_a_row(rhs, options["block_shape"]):
                placed["block_shape"] = (1, lhs.codes.shape[-1], 1)
            if axes_module.in_parts(rhs, options["block_shape"]):
                run = functools.partial(_sum_parts, function)
            summed_in = placed.pop("reduce")
            if summed_in and shards.names(axes.contracted):
                placed["dtype"] = jnp.dtype(collectives.DTYPES[summed_in])
        if shards.inside:
            run = functools.partial(quantize_shared, shards)
        results = run(*matrices, **placed)
        split = functools.partial(_split_rows, groups)
        results = jax.tree.map(split, axes.results, results)
        if op == "matmul":
            dtype, add = options["dtype"], collectives.in_floats
            if options["reduce"] == "int8":
                how = {"seeds": seeds[0], "quantize": quantize, "dtype": dtype}
                add = functools.partial(collectives.in_int8, **how)
            results = add(results, axes, shards).astype(dtype)
        return results

    return local


def _quantize_parts(
    quantize: Callable[..., Layouts], x: jax.Array, seeds: jax.Array, **options: Any
) -> Layouts:
    """``quantize_vectors`` of parts ``[B, P, R, C]``, as of more matrices."""
    stack = x.shape[:2]
    merged = x.reshape(seeds.size, *x.shape[2:])
    layouts = quantize(merged, seeds.reshape(-1), **options)
    return jax.tree.map(lambda y: y.reshape(*stack, *y.shape[1:]), layouts)


def _sum_parts(
    multiply: Callable[..., jax.Array],
    lhs: Quantized,
    residual: None,
    rhs: Quantized,
    *,
    dtype: Any,
    **options: Any,
) -> jax.Array:
    """The sum of the products of parts ``[B, P, M, R]`` and ``[B, P, N, R]``.

    One after the other: at once they would take the bytes of as many sums in float32.
    """
    total = jnp.float32(0.0)
    for i in range(lhs.codes.shape[1]):
        left, right = jax.tree.map(lambda x, i=i: x[:, i], (lhs, rhs))
        total += multiply(left, residual, right, dtype=jnp.float32, **options)
    return total.astype(dtype)


def sharded_ragged(
    op: str, function: Callable[..., Any], options: Mapping[str, Any]
) -> Callable[..., Any]:
    """A ragged op that is cut over its groups, its tiles, and the matrices' axes.

    A device multiplies the tiles whose groups it has.

    Args:
      op: ``"ragged_matmul"`` or ``"ragged_contraction"``.
      function: computes it on one device, with ``options``.
      options: the op's own.
    """
    axes_of = functools.partial(getattr(axes_module, op), **options)
    return partitioned(op, axes_of, functools.partial(_local_ragged, function, options))


def _local_ragged(
    function: Callable[..., Any],
    options: Mapping[str, Any],
    axes: Axes,
    shards: Shards,
) -> Callable[..., Any]:
    """A ragged op of one device's shards."""

    def local(*operands: Any) -> Any:
        *matrices, groups = operands
        placed = dict(options)
        if "size" in placed:
            size = placed["size"] = options["size"] // shards.number("g")
        else:
            size = len(matrices[-1].codes)
        here = groups - jnp.int32(size) * shards.place("g").astype(jnp.int32)
        return collectives.in_floats(function(*matrices, here, **placed), axes, shards)

    return local


def _letters(words: str) -> str:
    return "".join(letter for letter, _ in parse(words))


def _merge_rows(words: str, x: jax.Array) -> jax.Array:
    """The axis "g" and the one after it as one."""
    at = _letters(words).find("g")
    if at < 0:
        return x
    return x.reshape(*x.shape[:at], x.shape[at] * x.shape[at + 1], *x.shape[at + 2 :])


def _split_rows(groups: int, words: str, x: jax.Array) -> jax.Array:
    """The reverse of ``_merge_rows``."""
    at = _letters(words).find("g")
    if at < 0:
        return x
    return x.reshape(*x.shape[:at], groups, x.shape[at] // groups, *x.shape[at + 1 :])


def _groups(words: tuple[Any, ...], operands: tuple[Any, ...]) -> int:
    """The size of the axis "g"."""
    for of, x in pairs(words, operands):
        if "g" in of:
            return x.shape[_letters(of).find("g")]
    return 1


def _global_offset(
    shards: Shards, groups: int, rows: int, columns: int
) -> GlobalOffset | None:
    """Where a shard, of so many groups of rows, lies in the whole matrix."""
    if not shards.names("gij"):
        return None
    merged = jnp.arange(0, groups * rows, ROW_GROUP, jnp.uint32)
    group = shards.place("g") * groups + merged // rows
    row = shards.place("i") * rows + merged % rows
    column = shards.place("j") * columns
    return GlobalOffset(group * (rows * shards.number("i")) + row, column[None])


def _join(names: tuple[str, ...]) -> Callable[[jax.Array], jax.Array]:
    """The maximum over devices of what is not negative: of its bits, NaN's last."""

    def join(amax: jax.Array) -> jax.Array:
        if not names:
            return amax
        bits = lax.pmax(lax.bitcast_convert_type(amax, jnp.int32), names)
        return lax.bitcast_convert_type(bits, jnp.float32)

    return join
