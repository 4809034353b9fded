"""A forward pass in which the bits of a token's results depend on its sequence alone.

Training, prefill and decoding with a cache then give a token the same log-probability
at any batch. The quantized products of a batch-invariant recipe have this property, and
here is the rest of the model, in two forms:

- Pallas kernels with tiles of fixed shapes, for sums and transcendental functions. They
  are interpreted on CPUs, where XLA merges them with nothing (`_call`).
- Ordinary operations with `exact` between them, so that each of them rounds once.

Backward passes are those of the ordinary functions.
"""

import functools
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
from fbq_jax import FallbackDot, recipes

_Function = Callable[..., jax.Array]
_Names = tuple[str | None, ...]
_TILE = 4096  # values of a tile of rows
_LOWEST = -1e30  # the maximum of no values, which is finite


def check(dot_general: Any) -> None:
    """Raises UserError if a model with this ``dot_general`` cannot be invariant."""
    if isinstance(dot_general, FallbackDot) and dot_general.recipe.batch_invariant:
        return
    accepted = (name for name, r in recipes.NAMED.items() if r.batch_invariant)
    raise UserError(f"invariant takes a batch-invariant recipe: {', '.join(accepted)}")


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
    x: jax.Array, scale: jax.Array, epsilon: float, dtype: Any, ordinary: _Function
) -> jax.Array:
    """The RMS norm of the last axis in a dtype; ``ordinary`` takes x and the scale."""
    columns = x.shape[-1]

    def norm(x: jax.Array, scale: jax.Array) -> jax.Array:
        mean = jnp.sum(x * x, axis=1, keepdims=True) / columns
        return x * (lax.rsqrt(mean + epsilon) * scale)

    def run(x: jax.Array, scale: jax.Array) -> jax.Array:
        out = jax.ShapeDtypeStruct((columns,), dtype)
        return _by_rows(norm, out, x.reshape(-1, 1, columns), scale).reshape(x.shape)

    names: _Names = (*("batch", None, "heads")[: x.ndim - 1], None)
    return like(ordinary, _on_shards(run, [names, (None,)], names))(x, scale)


def pointwise(
    function: _Function, x: jax.Array, count: int, ordinary: _Function
) -> jax.Array:
    """Applies a function to ``count`` parts of ``x`` [B, S, count * C], in float32."""

    def run(x: jax.Array) -> jax.Array:
        *batch, _, columns = x.shape
        out = jax.ShapeDtypeStruct((columns,), x.dtype)
        y = _by_rows(function, out, x.reshape(-1, count, columns))
        return y.reshape(*batch, columns)

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

    def sum_exponentials(x: jax.Array) -> jax.Array:
        highest = jnp.max(x, axis=1, keepdims=True)
        total = jnp.sum(jnp.exp(x - highest), axis=1, keepdims=True)
        return jnp.log(total) + highest

    def run(logits: jax.Array) -> jax.Array:
        rows = logits.reshape(-1, 1, logits.shape[-1])
        out = jax.ShapeDtypeStruct((1,), jnp.float32)
        y = _by_rows(sum_exponentials, out, rows, fill=-jnp.inf)
        return y.reshape(logits.shape[:2])

    invariant = _on_shards(run, [("batch", None, None)], ("batch", None))
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
            k, v = (_load_keys(ref, i * side, q.shape) for ref in (k_ref, v_ref))
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

        first = 0
        if window is not None:
            first = jnp.maximum(tile * side - window + 1, 0) // side
        zeros = jnp.zeros((side, 1), jnp.float32)
        sums = zeros + _LOWEST, zeros, jnp.zeros(q.shape, jnp.float32)
        _, total, out = lax.fori_loop(first, tile + 1, add_keys, sums)
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
            (len(q), q.shape[2], tiles),
            [pl.BlockSpec((1,), lambda *_: (0,)), tile, keys, keys],
            tile,
            *(4, start, placed, k, v),
        )
        return lax.dynamic_slice(y, place, q.shape)

    names: _Names = ("batch", None, "heads", None)
    if mesh.spec(q.shape, names) != mesh.spec(k.shape, names):
        names = "batch", None, None, None  # devices do not divide the heads of keys
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
    return like(ordinary, functools.partial(from_position, 0))(q, k, v)


def _dot(x: jax.Array, y: jax.Array) -> jax.Array:
    precision = lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    return jnp.dot(x, y, precision=precision, preferred_element_type=jnp.float32)


def _load_keys(ref: Any, first: Any, shape: tuple[int, int]) -> jax.Array:
    """A tile of keys or values, with zeros beyond their heads and the last of them."""
    row, column = (lax.broadcasted_iota(jnp.int32, shape, axis) for axis in range(2))
    exists = (first + row < ref.shape[0]) & (column < ref.shape[1])
    view = ref.at[pl.ds(first, shape[0]), pl.ds(0, shape[1])]
    return triton.load(view, mask=exists, other=0)


def _by_rows(
    function: _Function,
    out: jax.ShapeDtypeStruct,
    x: jax.Array,
    shared: jax.Array | None = None,
    fill: float = 0.0,
) -> jax.Array:
    """Applies a function, which returns rows ``out``, to tiles of rows in float32.

    The function takes the n parts of rows of ``x`` [M, n, C], filled to a power of two,
    and the row ``shared`` [C].
    """
    size, count, columns = x.shape
    width = max(128, pl.next_power_of_2(columns))
    rows = max(1, _TILE // width)

    def kernel(*refs: Any) -> None:
        operands = []
        for ref in refs[:-1]:
            view, exists = _columns(ref, columns, width)
            part = triton.load(view, mask=exists, other=fill)
            operands.append(part.astype(jnp.float32))
        y = function(*operands).astype(out.dtype)
        view, exists = _columns(refs[-1], *out.shape, y.shape[1])
        triton.store(view, y, mask=exists)

    x = jnp.pad(x, ((0, -size % rows), (0, 0), (0, 0)))
    specs = [
        pl.BlockSpec((rows, None, columns), lambda i, n=n: (i, n, 0))
        for n in range(count)
    ]
    operands = [x] * count
    if shared is not None:
        specs.append(pl.BlockSpec((1, columns), lambda _: (0, 0)))
        operands.append(shared[None])
    outs = jax.ShapeDtypeStruct((len(x), *out.shape), out.dtype)
    tile = pl.BlockSpec((rows, *out.shape), lambda i: (i, 0))
    warps = min(32, max(4, rows * width // 1024))
    return _call(kernel, outs, (len(x) // rows,), specs, tile, warps, *operands)[:size]


def _columns(ref: Any, columns: int, width: int) -> tuple[Any, jax.Array]:
    """The columns of a tile of rows, and which of them exist."""
    column = lax.broadcasted_iota(jnp.int32, (ref.shape[0], width), 1)
    return ref.at[:, pl.ds(0, width)], column < columns


def _call(
    kernel: Callable[..., None],
    out: jax.ShapeDtypeStruct,
    grid: tuple[int, ...],
    in_specs: Sequence[pl.BlockSpec],
    out_specs: pl.BlockSpec,
    warps: int,
    *operands: jax.Array,
) -> jax.Array:
    """Calls a kernel."""
    backend = jax.default_backend()
    if backend == "cpu":
        return _interpret(kernel, out, grid, in_specs, out_specs, *operands)
    if backend != "gpu":
        raise UserError(f"invariant takes a CPU or an NVIDIA GPU, got a {backend}")
    run = pl.pallas_call(
        kernel,
        out,
        grid=grid,
        in_specs=in_specs,
        out_specs=out_specs,
        compiler_params=triton.CompilerParams(num_warps=warps, num_stages=2),
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
        out = mesh.spec(jax.eval_shape(run, *operands).shape, out_names)
        run_shard = jax.shard_map(run, in_specs=specs, out_specs=out, check_vma=False)
        return run_shard(*operands)

    return call
