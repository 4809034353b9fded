"""A forward pass in which the bits of a token's results depend on its sequence alone.

Training, prefill and decoding with a cache then give a token the same log-probability
at any batch. The quantized products of a batch-invariant recipe have this property, and
here is the rest of the model, in two forms:

- Pallas kernels with tiles of fixed shapes, for sums and transcendental functions. They
  are interpreted on CPUs, where XLA merges them with nothing (`_interpret`).
- Ordinary operations with `exact` between them, so that each of them rounds once.

Backward passes are those of the ordinary functions.
"""

import functools
from collections.abc import Callable
from dataclasses import replace
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
from fbq_jax import FallbackDot, recipes

_Function = Callable[..., jax.Array]
_TILE = 4096  # values of a tile of rows
_LOWEST = -1e30  # the maximum of no values, which is finite


def supports(dot_general: Any) -> bool:
    """Whether a model with this ``dot_general`` can be invariant."""
    is_quantized = isinstance(dot_general, FallbackDot)
    return is_quantized and _in_order(dot_general).recipe.batch_invariant


def checked(dot_general: Any) -> FallbackDot:
    """Returns the ``dot_general`` of an invariant model, which sums in one order.

    Raises UserError if a model with this ``dot_general`` cannot be invariant.
    """
    if not supports(dot_general):
        names = (n for n, r in recipes.NAMED.items() if supports(FallbackDot(r)))
        raise UserError(f"invariant takes a batch-invariant recipe: {', '.join(names)}")
    if mesh.shards("heads") > 1 and dot_general.recipe.fwd.reduce != "int32":
        raise UserError(
            "invariant takes --reduce int32 over several devices of the axis tensor: "
            "sums of their products in floats depend on the number of devices"
        )
    return _in_order(dot_general)


def _in_order(dot_general: FallbackDot) -> FallbackDot:
    recipe, fwd = dot_general.recipe, dot_general.recipe.fwd
    fwd = replace(fwd, ordered=fwd.splits_contraction)
    return replace(dot_general, recipe=replace(recipe, fwd=fwd))


def like(ordinary: _Function, invariant: _Function) -> _Function:
    """Returns ``invariant`` with the backward pass of ``ordinary``."""
    function = jax.custom_vjp(invariant)

    def forward(*operands: Any) -> tuple[jax.Array, Any]:
        return invariant(*operands), jax.vjp(ordinary, *operands)[1]

    function.defvjp(forward, lambda backward, grad: backward(grad))
    return function


def exact(x: jax.Array, dtype: Any = None) -> jax.Array:
    """Returns ``x`` in float32, rounded to a dtype, by default its own.

    A compiler may skip the rounding to bfloat16 before a cast to float32, or contract a
    product and a sum to one rounding. Neither crosses these operations.
    """

    def invariant(x: jax.Array) -> jax.Array:
        wide = x.astype(jnp.float32)
        if (dtype or x.dtype) == jnp.bfloat16:
            return lax.reduce_precision(wide, exponent_bits=8, mantissa_bits=7)
        return lax.clamp(-jnp.abs(wide), wide, jnp.abs(wide))

    return like(lambda x: x.astype(jnp.float32), invariant)(x)


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
    epsilon: float, ordinary: _Function, x: jax.Array, scale: jax.Array
) -> jax.Array:
    """The RMS norm of the last axis, and the dtype, of ``ordinary(x, scale)``."""
    columns, dtype = x.shape[-1], jax.eval_shape(ordinary, x, scale).dtype

    def norm(x: jax.Array, scale: jax.Array) -> jax.Array:
        mean = jnp.sum(x * x, axis=1, keepdims=True) / columns
        return x * (lax.rsqrt(mean + epsilon) * scale)

    def run(x: jax.Array, scale: jax.Array) -> jax.Array:
        rows = x.reshape(-1, 1, columns)
        return _by_rows(norm, (columns, dtype), rows, scale[None]).reshape(x.shape)

    names: mesh.Names = (*("batch", None, "heads")[: x.ndim - 1], None)
    return like(ordinary, mesh.on_shards(run, [names, (None,)], names))(x, scale)


def pointwise(
    function: _Function,
    x: jax.Array,
    ordinary: _Function | None = None,
    count: int = 1,
) -> jax.Array:
    """Applies a function to ``count`` parts of ``x`` [B, S, count * C], in float32.

    The backward pass is that of ``ordinary``, by default of the function.
    """

    def run(x: jax.Array) -> jax.Array:
        *batch, _, columns = x.shape
        rows = x.reshape(-1, count, columns)
        return _by_rows(function, (columns, x.dtype), rows).reshape(*batch, columns)

    names = ("batch", None, None, "mlp"), ("batch", None, "mlp")
    invariant = mesh.on_shards(run, names[:1], names[1])
    return like(
        lambda x: (ordinary or function)(*jnp.split(x, count, axis=-1)),
        lambda x: invariant(x.reshape(*x.shape[:2], count, -1)),
    )(x)


def log_probabilities(logits: jax.Array, tokens: jax.Array) -> jax.Array:
    """The log-probabilities, float32 [B, S], of tokens, int [B, S].

    Their bits depend on the logits of each position, float32 [B, S, V], alone.
    """
    size = logits.shape[-1]

    def sum_exponentials(x: jax.Array) -> jax.Array:
        exists = lax.broadcasted_iota(jnp.int32, x.shape, 1) < size
        x = jnp.where(exists, x, -jnp.inf)
        highest = jnp.max(x, axis=1, keepdims=True)
        total = jnp.sum(jnp.exp(x - highest), axis=1, keepdims=True)
        return jnp.log(total) + highest

    def run(logits: jax.Array) -> jax.Array:
        y = _by_rows(sum_exponentials, (1, jnp.float32), logits.reshape(-1, 1, size))
        return y.reshape(logits.shape[:2])

    invariant = mesh.on_shards(run, [("batch", None, None)], ("batch", None))
    ordinary = functools.partial(jax.nn.logsumexp, axis=-1)
    normalizers = like(ordinary, invariant)(logits)
    chosen = jnp.take_along_axis(logits, tokens[..., None], axis=-1)[..., 0]
    return exact(chosen) - exact(normalizers)


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
    """`attention.attend`, by an online softmax over tiles of keys in ascending order.

    In every call, a query has the same row of a tile: its position modulo the tile.
    """
    seq, heads, head_dim = q.shape[1:]
    group, side = heads // k.shape[2], 32 if jax.default_backend() == "cpu" else 64
    width, scale = max(16, pl.next_power_of_2(head_dim)), scale or head_dim**-0.5

    def kernel(
        start_ref: Any, q_ref: Any, k_ref: Any, v_ref: Any, out_ref: Any
    ) -> None:
        tile, q = start_ref[0] // side + pl.program_id(2), q_ref[:]
        iota = functools.partial(lax.broadcasted_iota, jnp.int32, (side, side))
        queries = tile * side + iota(0)

        def add_keys(i: Any, sums: Any) -> Any:
            highest, total, out = sums
            keys = i * side + iota(1)
            k, v = (_load(ref, q.shape, i * side) for ref in (k_ref, v_ref))
            scores = _dot(q, k.T) * scale
            if softcap is not None:
                scores = softcap * jnp.tanh(scores / softcap)
            distance = queries - keys
            seen = (distance >= 0) & (distance < (window or k_ref.shape[0]))
            scores = jnp.where(seen, scores, -jnp.inf)
            new = jnp.maximum(highest, jnp.max(scores, axis=1, keepdims=True))
            p, decay = jnp.exp(scores - new), jnp.exp(highest - new)
            total = total * decay + jnp.sum(p, axis=1, keepdims=True)
            return new, total, out * decay + _dot(p.astype(v.dtype), v)

        # The first key that the first query of the tile sees.
        first = 0 if window is None else jnp.maximum(tile * side - window + 1, 0)
        zeros = jnp.zeros((side, 1), jnp.float32)
        sums = zeros + _LOWEST, zeros, jnp.zeros(q.shape, jnp.float32)
        _, total, out = lax.fori_loop(first // side, tile + 1, add_keys, sums)
        out_ref[:] = (out / total).astype(out_ref.dtype)

    def run(start: jax.Array, q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        # Queries from any position on may reach into one more tile.
        tiles = pl.cdiv(seq + (0 if is_whole else side - 1), side)
        place = (0, start[0] % side, 0, 0)
        placed = jnp.zeros((len(q), tiles * side, q.shape[2], width), q.dtype)
        placed = lax.dynamic_update_slice(placed, q, place)
        tile = pl.BlockSpec((None, side, None, width), lambda b, h, i: (b, i, h, 0))
        keys = pl.BlockSpec(
            (None, k.shape[1], None, head_dim), lambda b, h, _: (b, 0, h // group, 0)
        )
        y = _call(
            kernel,
            jax.ShapeDtypeStruct(placed.shape, q.dtype),
            *(4, start, placed, k, v),
            grid=(len(q), q.shape[2], tiles),
            in_specs=[pl.BlockSpec((1,), lambda *_: (0,)), tile, keys, keys],
            out_specs=tile,
        )
        return lax.dynamic_slice(y, place, q.shape)

    names: mesh.Names = ("batch", None, "heads", None)
    if mesh.spec(q.shape, names) != mesh.spec(k.shape, names):
        names = "batch", None, None, None  # devices do not divide the heads of keys
    is_whole = start is None

    def from_position(start: Any, *qkv: jax.Array) -> jax.Array:
        start = jnp.reshape(jnp.int32(start), 1)
        y = mesh.on_shards(run, [(None,), names, names, names], names)(start, *qkv)
        return y.reshape(*q.shape[:2], -1)

    if start is not None:  # decoding has no backward pass
        return from_position(start, q, k, v)
    ordinary = functools.partial(
        attention.attend, scale=scale, window=window, softcap=softcap
    )
    return like(ordinary, functools.partial(from_position, 0))(q, k, v)


def _dot(x: jax.Array, y: jax.Array) -> jax.Array:
    precision = lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    return jnp.dot(x, y, precision=precision, preferred_element_type=jnp.float32)


def _tile(ref: Any, shape: tuple[int, ...], first: Any = 0) -> tuple[Any, jax.Array]:
    """Rows from the first on, and columns from 0 on; and which values exist."""
    row, column = (lax.broadcasted_iota(jnp.int32, shape, axis) for axis in range(2))
    row += first
    return ref.at[row, column], (row < ref.shape[0]) & (column < ref.shape[1])


def _load(ref: Any, shape: tuple[int, ...], first: Any = 0) -> jax.Array:
    """A tile of `_tile`, with zeros in place of values that do not exist."""
    view, exists = _tile(ref, shape, first)
    y: jax.Array = triton.load(view, mask=exists, other=0)
    return y


def _by_rows(
    function: _Function, out: tuple[int, Any], x: jax.Array, *shared: jax.Array
) -> jax.Array:
    """Applies a function to tiles of rows, in float32.

    Args:
        function: Takes the n parts of each row, and the shared rows.
        out: The columns and the dtype of its results.
        x: Rows [M, n, C], which the tiles fill to a power of two, with zeros.
        shared: Rows [1, C], for all tiles.
    """
    size, count, columns = x.shape
    width = max(128, pl.next_power_of_2(columns))
    rows = max(1, _TILE // width)

    def kernel(*refs: Any) -> None:
        parts = (_load(ref, (ref.shape[0], width)) for ref in refs[:-1])
        y = function(*(part.astype(jnp.float32) for part in parts)).astype(out[1])
        view, exists = _tile(refs[-1], y.shape)
        triton.store(view, y, mask=exists)

    x = jnp.pad(x, ((0, -size % rows), (0, 0), (0, 0)))
    tiles = [
        pl.BlockSpec((rows, None, columns), lambda i, n=n: (i, n, 0))
        for n in range(count)
    ]
    return _call(
        kernel,
        jax.ShapeDtypeStruct((len(x), out[0]), out[1]),
        min(32, max(4, rows * width // 1024)),
        *(*[x] * count, *shared),
        grid=(len(x) // rows,),
        in_specs=tiles + [pl.BlockSpec(y.shape, lambda _: (0, 0)) for y in shared],
        out_specs=pl.BlockSpec((rows, out[0]), lambda i: (i, 0)),
    )[:size]


def _call(
    kernel: Any, out: Any, warps: int, *operands: jax.Array, **specs: Any
) -> jax.Array:
    """Calls a kernel with a grid and the specs of its blocks."""
    backend = jax.default_backend()
    if backend == "cpu":
        return _interpret(kernel, out, *operands, **specs)
    if backend != "gpu":
        raise UserError(f"invariant takes a CPU or an NVIDIA GPU, got a {backend}")
    settings = triton.CompilerParams(num_warps=warps, num_stages=2)
    run = pl.pallas_call(kernel, out, compiler_params=settings, **specs)
    y: jax.Array = jax.jit(run)(*operands)
    return y


def _interpret(
    kernel: Any,
    out: Any,
    *operands: jax.Array,
    grid: tuple[int, ...],
    in_specs: list[Any],
    out_specs: Any,
) -> jax.Array:
    """Calls a kernel on a CPU, for one index of the grid's first axis at a time.

    All calls are one program, which XLA compiles apart from its caller. If the
    interpreter looped over all of the grid, each turn would copy all operands.
    """
    shape = out_specs.block_shape[0] or 1, *out.shape[1:]
    run = pl.pallas_call(
        kernel,
        jax.ShapeDtypeStruct(shape, out.dtype),
        grid=(1, *grid[1:]),
        in_specs=in_specs,
        out_specs=out_specs,
        interpret=True,
    )

    def run_one(i: jax.Array) -> jax.Array:
        parts = []
        for x, spec in zip(operands, in_specs, strict=True):
            block, *_ = spec.index_map(i, *[0] * (len(grid) - 1))
            size = spec.block_shape[0] or 1
            parts.append(lax.dynamic_slice_in_dim(x, block * size, size))
        y: jax.Array = set_xla_metadata(jax.jit(run)(*parts), inlineable="false")
        # XLA would convert all of a bfloat16 array in order to store a part of it.
        return lax.bitcast_convert_type(y, jnp.uint16) if is_16_bit else y

    is_16_bit = out.dtype == jnp.bfloat16
    y = lax.map(run_one, jnp.arange(grid[0])).reshape(out.shape)
    return lax.bitcast_convert_type(y, out.dtype) if is_16_bit else y
