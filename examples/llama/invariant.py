"""A forward pass whose results for a token do not depend on what is beside it.

Training, prefill and decoding with a cache give a token's log-probability the same bits
at any batch. The quantized products of a batch-invariant recipe have this property.
Here is the rest of the model, in two forms:

- Pallas kernels with tiles of fixed shapes, for sums and transcendental functions. On
  CPUs they are interpreted, and XLA merges them with nothing (``_call``).
- Ordinary operations between which `exact` stands, where every operation rounds once.

Backward passes are those of the ordinary functions.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton
from jax.experimental.xla_metadata import set_xla_metadata

from examples.llama import attention, mesh
from examples.llama.errors import UserError
from examples.llama.rotary import Tables
from fbq_jax import FallbackDot

_Function = Callable[..., jax.Array]
_Names = tuple[str | None, ...]
_ROWS, _COLUMNS = 16, 128  # of the tiles of elementwise functions
_TILE = 4096  # values of the tiles of norms, which hold whole rows
_BATCH: _Names = ("batch", None, "heads", None)
_LOWEST = -1e30  # a finite maximum of no scores


def check(dot_general: Any) -> None:
    """Raises UserError if a model with this ``dot_general`` cannot be invariant."""
    recipe = dot_general.recipe if isinstance(dot_general, FallbackDot) else None
    if recipe is None or not recipe.batch_invariant:
        raise UserError("invariant takes a batch-invariant recipe, such as rowwise")


def like(ordinary: _Function, invariant: _Function) -> _Function:
    """Returns ``invariant`` with the backward pass of ``ordinary``."""
    function = jax.custom_vjp(invariant)

    def forward(*operands: Any) -> tuple[jax.Array, Any]:
        return invariant(*operands), jax.vjp(ordinary, *operands)[1]

    function.defvjp(forward, lambda backward, grad: backward(grad))
    return function


def exact(x: jax.Array, dtype: Any = None) -> jax.Array:
    """Returns ``x`` in float32, rounded to a dtype (that of ``x``).

    A compiler may skip the rounding to bfloat16 before a cast to float32, or contract a
    product and a sum to one rounding. Neither crosses these operations.
    """

    def ordinary(x: jax.Array) -> jax.Array:
        return x.astype(jnp.float32)

    def invariant(x: jax.Array) -> jax.Array:
        wide = x.astype(jnp.float32)
        if (dtype or x.dtype) == jnp.bfloat16:
            return lax.reduce_precision(wide, exponent_bits=8, mantissa_bits=7)
        return lax.clamp(-jnp.abs(wide), wide, jnp.abs(wide))

    return like(ordinary, invariant)(x)


def scale(x: jax.Array, factor: jax.Array) -> jax.Array:
    """``x`` in the dtype of a factor, times the factor."""
    product = exact(x, factor.dtype) * factor.astype(jnp.float32)
    return exact(product, factor.dtype).astype(factor.dtype)


def add(x: jax.Array, y: jax.Array) -> jax.Array:
    """``x + y`` of arrays of one dtype."""
    return exact(exact(x) + exact(y), x.dtype).astype(x.dtype)


def rotate(x: jax.Array, tables: Tables) -> jax.Array:
    """`rotary.rotate`."""
    cos, sin = tables
    first, second = jnp.split(exact(x), 2, axis=-1)
    rotated = [
        exact(first * cos) - exact(second * sin),
        exact(second * cos) + exact(first * sin),
    ]
    return exact(jnp.concatenate(rotated, axis=-1), x.dtype).astype(x.dtype)


def rms_norm(
    x: jax.Array, scale: jax.Array, epsilon: float, dtype: Any, ordinary: _Function
) -> jax.Array:
    """The RMS norm of the last axis, rounded to a dtype; ``ordinary`` is its like."""
    columns = x.shape[-1]
    width = pl.next_power_of_2(columns)
    rows = max(1, _TILE // width)

    def kernel(x_ref: Any, scale_ref: Any, out_ref: Any) -> None:
        x = x_ref[:].astype(jnp.float32)
        mean = jnp.sum(x * x, axis=1, keepdims=True) / columns
        y = x * (lax.rsqrt(mean + epsilon) * scale_ref[:])
        out_ref[:] = y.astype(out_ref.dtype)

    def run(x: jax.Array, scale: jax.Array) -> jax.Array:
        padded = _pad(x.reshape(-1, columns), rows, width)
        tile = pl.BlockSpec((rows, width), lambda i: (i, 0))
        one = pl.BlockSpec((1, width), lambda _: (0, 0))
        out = jax.ShapeDtypeStruct(padded.shape, dtype)
        grid = (len(padded) // rows,)
        y = _call(kernel, out, grid, [tile, one], tile, padded, _pad(scale, 1, width))
        return y[: x.size // columns, :columns].reshape(x.shape)

    names: _Names = (*_BATCH[: x.ndim - 1], None)
    invariant = _on_shards(run, [names, (None, None)], names)
    return like(ordinary, lambda x, scale: invariant(x, scale[None]))(x, scale)


def pointwise(
    function: _Function, x: jax.Array, count: int, ordinary: _Function
) -> jax.Array:
    """Applies a function to ``count`` parts of ``x`` [B, S, count * C], in float32."""

    def kernel(*refs: Any) -> None:
        y = function(*(ref[:].astype(jnp.float32) for ref in refs[:-1]))
        refs[-1][:] = y.astype(refs[-1].dtype)

    def run(x: jax.Array) -> jax.Array:
        *batch, _, columns = x.shape
        size = math.prod(batch)
        parts = x.reshape(size, count, columns)
        missing = (0, -size % _ROWS), (0, 0), (0, -columns % _COLUMNS)
        parts = jnp.pad(parts, missing)
        grid = len(parts) // _ROWS, parts.shape[2] // _COLUMNS
        specs = [
            pl.BlockSpec((_ROWS, None, _COLUMNS), lambda i, j, n=n: (i, n, j))
            for n in range(count)
        ]
        out = jax.ShapeDtypeStruct((len(parts), parts.shape[2]), x.dtype)
        tile = pl.BlockSpec((_ROWS, _COLUMNS), lambda i, j: (i, j))
        y = _call(kernel, out, grid, specs, tile, *[parts] * count)
        return y[:size, :columns].reshape(*batch, columns)

    names = ("batch", None, None, "mlp"), ("batch", None, "mlp")
    invariant = _on_shards(run, names[:1], names[1])
    return like(
        lambda x: ordinary(*jnp.split(x, count, axis=-1)),
        lambda x: invariant(x.reshape(*x.shape[:2], count, -1)),
    )(x)


def log_probabilities(logits: jax.Array, tokens: jax.Array) -> jax.Array:
    """The log-probabilities, float32 [B, S], of tokens, int [B, S].

    Their bits depend on the logits of each position, float32 [B, S, V], alone.
    """

    def ordinary(logits: jax.Array, tokens: jax.Array) -> jax.Array:
        chosen = jnp.take_along_axis(logits, tokens[..., None], axis=-1)[..., 0]
        return chosen - jax.nn.logsumexp(logits, axis=-1)

    def kernel(logits_ref: Any, tokens_ref: Any, out_ref: Any) -> None:
        tokens = tokens_ref[:]

        def add_columns(i: Any, sums: Any) -> Any:
            highest, total, chosen = sums
            x = logits_ref[:, pl.ds(i * _COLUMNS, _COLUMNS)]
            column = i * _COLUMNS + lax.broadcasted_iota(jnp.int32, x.shape, 1)
            new = jnp.maximum(highest, jnp.max(x, axis=1))
            total = total * jnp.exp(highest - new)
            total += jnp.sum(jnp.exp(x - new[:, None]), axis=1)
            is_token = column == tokens[:, None]
            return new, total, chosen + jnp.sum(jnp.where(is_token, x, 0.0), axis=1)

        zeros = jnp.zeros((_ROWS,), jnp.float32)
        count = logits_ref.shape[1] // _COLUMNS
        start = zeros + _LOWEST, zeros, zeros
        highest, total, chosen = lax.fori_loop(0, count, add_columns, start)
        out_ref[:] = (chosen - highest) - jnp.log(total)

    def run(logits: jax.Array, tokens: jax.Array) -> jax.Array:
        rows = logits.reshape(-1, logits.shape[-1])
        rows = _pad(rows, _ROWS, _COLUMNS, -jnp.inf)
        flat = jnp.pad(tokens.reshape(-1), (0, len(rows) - tokens.size))
        row = pl.BlockSpec((_ROWS, rows.shape[1]), lambda i: (i, 0))
        one = pl.BlockSpec((_ROWS,), lambda i: (i,))
        out = jax.ShapeDtypeStruct(flat.shape, jnp.float32)
        y = _call(kernel, out, (len(flat) // _ROWS,), [row, one], one, rows, flat)
        return y[: tokens.size].reshape(tokens.shape)

    names: list[_Names] = [("batch", None, None), ("batch", None)]
    invariant = _on_shards(run, names, names[1])
    return like(ordinary, invariant)(logits, tokens.astype(jnp.int32))


def attend(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    start: jax.Array | None = None,
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
) -> jax.Array:
    """`attention.attend`, an online softmax over tiles of keys in ascending order.

    A query has the same place in a tile of queries, by its position, in every call.
    """
    *_, seq, heads, head_dim = q.shape
    group, side = heads // k.shape[2], _attention_side()
    scale = scale or head_dim**-0.5

    def kernel(start_ref: Any, q_ref: Any, k_ref: Any, v_ref: Any, out_ref: Any) -> None:
        tile = start_ref[0] // side + pl.program_id(2)
        q = q_ref[:]
        queries = tile * side + lax.broadcasted_iota(jnp.int32, (side, side), 0)

        def add_keys(i: Any, sums: Any) -> Any:
            highest, total, out = sums
            k, v = (ref[pl.ds(i * side, side), :] for ref in (k_ref, v_ref))
            scores = _dot(q, k.T) * scale
            if softcap is not None:
                scores = softcap * jnp.tanh(scores / softcap)
            keys = i * side + lax.broadcasted_iota(jnp.int32, (side, side), 1)
            seen = queries >= keys
            if window is not None:
                seen &= queries - keys < window
            scores = jnp.where(seen, scores, -jnp.inf)
            new = jnp.maximum(highest, jnp.max(scores, axis=1))
            p, decay = jnp.exp(scores - new[:, None]), jnp.exp(highest - new)
            total = total * decay + jnp.sum(p, axis=1)
            return new, total, out * decay[:, None] + _dot(p.astype(v.dtype), v)

        first = 0 if window is None else jnp.maximum(tile * side - window + 1, 0) // side
        zeros = jnp.zeros((side,), jnp.float32)
        sums = zeros + _LOWEST, zeros, jnp.zeros(q.shape, jnp.float32)
        _, total, out = lax.fori_loop(first, tile + 1, add_keys, sums)
        out_ref[:] = (out / total[:, None]).astype(out_ref.dtype)

    def run(start: jax.Array, q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        width = max(16, pl.next_power_of_2(head_dim))
        # Queries from any position on may reach into one more tile.
        tiles = -(-(seq + (0 if is_whole else side - 1)) // side)
        q, k, v = (jnp.pad(x, [(0, 0)] * 3 + [(0, width - head_dim)]) for x in (q, k, v))
        k, v = (jnp.pad(x, _after(1, -x.shape[1] % side)) for x in (k, v))
        padded = jnp.zeros((len(q), tiles * side, *q.shape[2:]), q.dtype)
        padded = lax.dynamic_update_slice_in_dim(padded, q, start[0] % side, axis=1)
        tile = pl.BlockSpec((None, side, None, width), lambda b, h, i: (b, i, h, 0))
        all_keys = pl.BlockSpec(
            (None, k.shape[1], None, width), lambda b, h, i: (b, 0, h // group, 0)
        )
        one = pl.BlockSpec((1,), lambda *_: (0,))
        specs, grid = [one, tile, all_keys, all_keys], (len(q), q.shape[2], tiles)
        out = jax.ShapeDtypeStruct(padded.shape, q.dtype)
        y = _call(kernel, out, grid, specs, tile, start, padded, k, v)
        y = lax.dynamic_slice_in_dim(y, start[0] % side, seq, axis=1)
        return y[..., :head_dim]

    names = _BATCH
    if mesh.spec(q.shape, names) != mesh.spec(k.shape, names):
        names = ("batch", None, None, None)  # devices do not divide the heads of keys
    is_whole = start is None


    def from_position(start: Any, *qkv: jax.Array) -> jax.Array:
        start = jnp.reshape(jnp.int32(start), 1)
        y = _on_shards(run, [(None,), names, names, names], names)(start, *qkv)
        return y.reshape(*q.shape[:2], -1)

    if start is not None:  # decoding has no backward pass
        return from_position(start, q, k, v)
    ordinary = functools.partial(
        attention.attend, scale=scale, window=window, softcap=softcap
    )
    return like(ordinary, lambda *qkv: from_position(0, *qkv))(q, k, v)


def _attention_side() -> int:
    """The queries and the keys of a tile of attention."""
    return 32 if jax.default_backend() == "cpu" else 64


def _dot(x: jax.Array, y: jax.Array) -> jax.Array:
    precision = lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    return jnp.dot(x, y, precision=precision, preferred_element_type=jnp.float32)


def _after(axis: int, count: int) -> list[tuple[int, int]]:
    """The padding of an array of four axes by so many zeros at the end of one."""
    return [(0, count if i == axis else 0) for i in range(4)]


def _pad(x: jax.Array, rows: int, columns: int, value: float = 0) -> jax.Array:
    """Pads a matrix to multiples of a tile."""
    missing = [(0, -n % side) for n, side in zip(x.shape, (rows, columns), strict=True)]
    return jnp.pad(x, missing, constant_values=value)


def _call(
    kernel: Callable[..., None],
    out: jax.ShapeDtypeStruct,
    grid: tuple[int, ...],
    in_specs: Sequence[pl.BlockSpec],
    out_specs: pl.BlockSpec,
    *operands: jax.Array,
) -> jax.Array:
    """Calls a kernel, which XLA for CPUs compiles apart from its caller."""
    if jax.default_backend() == "cpu":
        return _interpret(kernel, out, grid, in_specs, out_specs, *operands)
    run = pl.pallas_call(
        kernel,
        out,
        grid=grid,
        in_specs=in_specs,
        out_specs=out_specs,
        compiler_params=triton.CompilerParams(num_warps=4),
    )
    y: jax.Array = jax.jit(run)(*operands)
    return y


def _interpret(
    kernel: Callable[..., None],
    out: jax.ShapeDtypeStruct,
    grid: tuple[int, ...],
    in_specs: Sequence[pl.BlockSpec],
    out_specs: pl.BlockSpec,
    *operands: jax.Array,
) -> jax.Array:
    """Calls a kernel on a CPU, for one index of the grid's first axis at a time.

    Every call is the same program, which XLA compiles by itself. In one call for all of
    the grid, the interpreter's loop would copy each operand in each turn.
    """
    *specs, out_spec = *in_specs, out_specs
    run = pl.pallas_call(
        kernel,
        jax.ShapeDtypeStruct((_rows(out_spec), *out.shape[1:]), out.dtype),
        grid=(1, *grid[1:]),
        in_specs=specs,
        out_specs=out_spec,
        interpret=True,
    )

    def run_one(i: jax.Array) -> jax.Array:
        # Indices of blocks grow with the grid's first axis on an operand's first axis.
        index = i, *[0] * (len(grid) - 1)
        parts = [
            lax.dynamic_slice_in_dim(x, spec.index_map(*index)[0] * n, n)
            for x, spec in zip(operands, specs, strict=True)
            for n in [_rows(spec)]
        ]
        y: jax.Array = set_xla_metadata(jax.jit(run)(*parts), inlineable="false")
        # XLA would convert all of a bfloat16 array in order to store a part of it.
        return lax.bitcast_convert_type(y, jnp.uint16) if is_16_bit else y

    is_16_bit = out.dtype == jnp.bfloat16
    y = lax.map(run_one, jnp.arange(grid[0])).reshape(out.shape)
    return lax.bitcast_convert_type(y, out.dtype) if is_16_bit else y


def _rows(spec: pl.BlockSpec) -> int:
    """The size of a block's first axis."""
    assert spec.block_shape is not None
    size = spec.block_shape[0]
    assert size is None or isinstance(size, int)
    return size or 1


def _on_shards(run: Any, in_names: Sequence[_Names], out_names: _Names) -> _Function:
    """Runs a function on each device's part of arrays with logical axes."""

    def call(*operands: jax.Array) -> jax.Array:
        if jax.sharding.get_abstract_mesh().empty:
            return run(*operands)
        specs = tuple(map(mesh.spec, (x.shape for x in operands), in_names))
        shape = jax.eval_shape(run, *operands).shape
        return jax.shard_map(
            run, in_specs=specs, out_specs=mesh.spec(shape, out_names), check_vma=False
        )(*operands)

    return call
