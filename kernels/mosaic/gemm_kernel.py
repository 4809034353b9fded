"""The kernel of the block-scaled INT8 GEMM, for Hopper's tensor cores.

A persistent kernel: each thread block computes tiles of 128 x 128 of the output, one
after the other.  Its last warpgroup copies tiles of codes into a ring of buffers in
shared memory (TMA); two warpgroups each multiply 64 rows (WGMMA, INT8 to INT32) and
*promote* the products: take them as float32, scale them and add them up.

Promotion is what the kernel's speed, and its power, hang on: instructions for every
element and every 128 elements of K.  Hence:

- Steps are taken in chunks, with two INT32 accumulators in turns: while one is
  promoted, the product for the other is in flight.  (A product may not be in flight
  from one pass of a loop to the next: ptxas would serialize them all.)
- Accumulators are not reset from step to step.  With ``P`` their running sums, the sum
  of ``s_t * (P_t - P_{t-2})`` equals that of ``(s_t - s_{t+2}) * P_t``.
- Nothing is converted.  Accumulators start at the bits of the float ``START``, and
  while ``|P| <= 2**22`` their bits are those of ``START + P``.  They are reset, and
  what ``START`` added to the output is subtracted, after a *span* of chunks, short
  enough for the codes of one operand.  One FMA an element and a step is left.

A step's scale then multiplies the rounding error of all sums at its time: an output is
off by about half the product of the two operands' scales of that step, as if one code
of rhs, or of lhs' residual, were off by a fraction of one.  That is less than rounding
to 16 bits, with two exceptions, whose steps have accumulators of their own, reset and
converted.  An outlier's step, its scale ``FAR`` above the others', would drown rows
that share its block; such steps come last.  And a float32 output would show it.

Blocks that fell back are more steps of the same loop, from a list of them.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

SIDE = 128  # of a tile, and of a block
_WARPGROUPS = 2  # that multiply, each half the rows of a tile
_ROWS = SIDE // _WARPGROUPS
_CHUNK = 4  # steps of the unrolled loop
_AHEAD = _CHUNK + 2  # steps whose scales a chunk needs
BEYOND = _AHEAD  # steps beyond the last whose scales are loaded
START = 1.5 * 2.0**23
START_BITS = 0x4B400000
FAR = 16.0  # times the usual scale
RANGE = 2**22  # from START, in which floats are the integers and bits count them
STEPS = _CHUNK // 2  # that a chunk adds to an accumulator
# Of 512 registers that a thread of each warpgroup has together.
_PRODUCER_REGISTERS, _CONSUMER_REGISTERS = 40, 232


class Config(NamedTuple):
    """How the kernel runs; every choice computes the same.

    Attributes:
      group: tiles along N that are computed side by side, for the L2 cache.
      cluster: thread blocks, 1 or 2, neighbours along N, that share lhs' tiles; 1 where
        the number of tiles along N is odd.
    """

    group: int
    cluster: int


@functools.cache
def build(
    sizes: tuple[int, int, int, int],
    fallback: bool,
    dtype: jnp.dtype,
    config: Config,
    processors: int,
) -> Any:
    """The kernel for operands of given sizes.

    It takes lhs' codes int8 ``[B, M, K]`` and, with fallback, the residual's; then,
    without fallback, lhs' scales float32 ``[B, M/128, K/128 + BEYOND]``, or with it
    what ``steps`` lists with ``BEYOND`` unused entries and blocks ``FAR`` from others
    last; then rhs' codes ``[B, N, K]`` and scales ``[B, N/128, K/128]``, ``BEYOND``
    longer without fallback; then, for an output of 16 bits, the spans int32
    ``[B, M/128]`` or ``[B, N/128]``, in chunks, as ``lhs_spans`` says.  What is beyond
    is loaded and not used.  It returns ``[B, M, N]``.

    Args:
      sizes: ``(B, M, K, N)``, all but B multiples of 128.
      fallback: whether there is a residual.
      dtype: of the output, of 2 or 4 bytes.
      config: how to run.
      processors: multiprocessors of the GPU.
    """
    batch, rows, depth, columns = sizes
    group, cluster = config
    # As many buffers as fit into shared memory beside the output's.
    ring = 6 if dtype.itemsize == 2 else 5
    running = dtype.itemsize == 2  # sums, across steps
    tile_rows, tile_columns = rows // SIDE, columns // SIDE
    tiles = batch * tile_rows * tile_columns // cluster
    clusters = processors // cluster

    def kernel(*refs: Any) -> None:
        *operands, out, lhs_ring, rhs_ring, out_buffer, full, empty = refs
        if running:
            *operands, spans = operands
        if fallback:
            main, residual, source, lhs_scale, count, near, rhs, rhs_scale = operands
        else:
            main, lhs_scale, rhs, rhs_scale = operands
        warpgroup = lax.axis_index("warpgroup")
        first, neighbour = lax.axis_index("cluster"), lax.axis_index("block")
        multicast: Any = {"collective_axes": "block"} if cluster > 1 else {}

        def tile(index: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
            """Batch, row and column of a tile of this thread block."""
            per_matrix = jnp.int32(tile_rows * tile_columns // cluster)
            index = jnp.minimum(first + index * clusters, tiles - 1)
            grid = (tile_rows, tile_columns // cluster)
            i, j = plgpu.planar_snake(lax.rem(index, per_matrix), grid, 1, group)
            return lax.div(index, per_matrix), i, j * cluster + neighbour

        def counts(b: jax.Array, i: jax.Array) -> tuple[jax.Array, jax.Array]:
            """How many steps have scales near each other, and how many there are."""
            every = jnp.int32(depth // SIDE)
            return (near[b, i], count[b, i]) if fallback else (every, every)

        mine = lax.div(tiles - first + clusters - 1, jnp.int32(clusters))

        def after(slot: jax.Array) -> jax.Array:
            return jnp.where(slot + 1 == ring, 0, slot + 1)

        @pl.when(warpgroup == _WARPGROUPS)
        def _produce() -> None:
            plgpu.set_max_registers(_PRODUCER_REGISTERS, action="decrease")

            def produce(n: jax.Array, slot: jax.Array) -> jax.Array:
                b, i, j = tile(n)

                def copy(step: jax.Array, slot: jax.Array) -> jax.Array:
                    at = source[b, i, step] if fallback else 2 * step
                    k = pl.ds(lax.div(at, jnp.int32(2)) * SIDE, SIDE)
                    plgpu.barrier_wait(empty.at[slot])
                    plgpu.copy_gmem_to_smem(
                        rhs.at[b, pl.ds(j * SIDE, SIDE), k],
                        rhs_ring.at[slot],
                        full.at[slot],
                    )

                    def copy_lhs(term: Any) -> None:
                        plgpu.copy_gmem_to_smem(
                            term.at[b, pl.ds(i * SIDE, SIDE), k],
                            lhs_ring.at[slot],
                            full.at[slot],
                            **multicast,
                        )

                    if fallback:
                        is_residual = lax.rem(at, jnp.int32(2)) == 1
                        pl.when(is_residual)(lambda: copy_lhs(residual))
                        pl.when(~is_residual)(lambda: copy_lhs(main))
                    else:
                        copy_lhs(main)
                    return after(slot)

                return lax.fori_loop(0, counts(b, i)[1], copy, slot)

            lax.fori_loop(0, mine, produce, jnp.int32(0))
            for slot in range(ring):
                plgpu.barrier_wait(empty.at[slot])

        @pl.when(warpgroup < _WARPGROUPS)
        def _multiply() -> None:
            plgpu.set_max_registers(_CONSUMER_REGISTERS, action="increase")
            my_rows = pl.ds(warpgroup * _ROWS, _ROWS)
            for slot in range(ring):
                plgpu.barrier_arrive(empty.at[slot])

            product = plgpu.ACC((_ROWS, SIDE), jnp.int32)

            def scale(place: Any, step: int | jax.Array) -> jax.Array:
                """Of a step's product.  Those beyond the last step are not used."""
                b, i, j, *_ = place
                k = lax.div(source[b, i, step], jnp.int32(2)) if fallback else step
                return lhs_scale[b, i, step] * rhs_scale[b, j, k]

            def start(n: jax.Array) -> Any:
                """A tile's place, counts and span, and the first steps' scales."""
                b, i, j = tile(n)
                by_lhs = lhs_spans(rows, columns, fallback)
                span = spans[b, i if by_lhs else j] if running else None
                place = b, i, j, *counts(b, i), span
                return place, [scale(place, step) for step in range(_AHEAD)]

            def add(
                products: Any,
                slot: Any,
                acc: Any,
                weights: Any,
                to_float: Any,
                load: Any,
            ) -> Any:
                """Adds a step for each weight: the next slot, acc, what ``load`` gives.

                ``load`` is called where products hide its latency.
                """
                slots = [slot]
                for _ in weights:
                    slots.append(after(slots[-1]))

                def issue(n: int) -> None:
                    plgpu.barrier_wait(full.at[slots[n]])
                    plgpu.wgmma(
                        products[n % 2],
                        lhs_ring.at[slots[n], my_rows],
                        rhs_ring.at[slots[n]].transpose((1, 0)),
                    )

                issue(0)
                for n, weight in enumerate(weights):
                    pending = int(n + 1 < len(weights))
                    if pending:
                        issue(n + 1)
                    if n == 0:
                        loaded = load()
                    value = plgpu.wgmma_accumulator_load(
                        products[n % 2], wait_n=pending
                    )
                    plgpu.barrier_arrive(empty.at[slots[n]])
                    acc += to_float(value) * weight
                return slots[-1], acc, loaded

            def add_chunk(
                products: Any, place: Any, step: Any, last: Any, carry: Any
            ) -> Any:
                """Adds steps to running sums, the last chunk all of its last ones."""
                slot, acc, scales = carry
                kept = scales[_CHUNK:]

                def load() -> list[jax.Array]:
                    """The scales that the next chunk needs beside ``kept``."""
                    later = step + _AHEAD
                    return [scale(place, later + ahead) for ahead in range(_CHUNK)]

                following = [
                    *scales[2:_CHUNK],
                    *(jnp.where(last, 0.0, s) for s in kept),
                ]
                pairs = zip(scales[:_CHUNK], following, strict=True)
                weights = [weight - next_weight for weight, next_weight in pairs]
                slot, acc, loaded = add(products, slot, acc, weights, _bits, load)
                return slot, acc, [*kept, *loaded]

            def add_span(place: Any, first: Any, chunks: Any, carry: Any) -> Any:
                """Adds chunks in two accumulators whose bits are those of floats."""
                _, _, (scale_0, scale_1, *_) = carry

                def scope(*products: Any) -> Any:
                    def chunk(n: jax.Array, carry: Any) -> Any:
                        step, last = first + n * _CHUNK, n + 1 == chunks
                        return add_chunk(products, place, step, last, carry)

                    for accumulator in products:
                        _start(accumulator)
                    return lax.fori_loop(0, chunks, chunk, carry)

                slot, acc, scales = pl.run_scoped(scope, product, product)
                # The weights of an accumulator's steps add up to the first one's scale.
                return slot, acc - START * scale_0 - START * scale_1, scales

            def add_few(size: int, place: Any, step: Any, carry: Any) -> Any:
                """Adds one or two steps in accumulators that start at 0."""
                slot, acc, scales = carry

                def load() -> list[jax.Array]:
                    later = step + _AHEAD
                    return [scale(place, later + ahead) for ahead in range(size)]

                def scope(*products: Any) -> Any:
                    return add(products, slot, acc, scales[:size], _convert, load)

                slot, acc, loaded = pl.run_scoped(scope, *[product] * size)
                return slot, acc, [*scales[size:], *loaded]

            def multiply(n: jax.Array, carry: Any) -> Any:
                slot, (place, scales) = carry
                b, i, j, running_steps, all_steps, span = place
                zero = jnp.zeros((_ROWS, SIDE), jnp.float32)
                carry = slot, plgpu.layout_cast(zero, plgpu.Layout.WGMMA), scales
                done = jnp.int32(0)
                if running:
                    chunks = lax.div(running_steps, jnp.int32(_CHUNK))

                    def add_next_span(n: jax.Array, carry: Any) -> Any:
                        before = n * span
                        left = jnp.minimum(chunks - before, span)
                        return add_span(place, before * _CHUNK, left, carry)

                    spans_here = pl.cdiv(chunks, span)
                    carry = lax.fori_loop(0, spans_here, add_next_span, carry)
                    done = chunks * _CHUNK

                def add_pair(n: jax.Array, carry: Any) -> Any:
                    return add_few(2, place, done + 2 * n, carry)

                pairs = lax.div(all_steps - done, jnp.int32(2))
                carry = lax.fori_loop(0, pairs, add_pair, carry)
                add_last = functools.partial(add_few, 1, place, all_steps - 1)
                odd = lax.rem(all_steps - done, jnp.int32(2)) == 1
                carry = lax.cond(odd, add_last, lambda carry: carry, carry)
                slot, acc, _ = carry
                following = start(n + 1)  # loads whose latency the rest hides
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                out_buffer[warpgroup] = acc.astype(dtype)
                plgpu.commit_smem()
                rows = pl.ds(i * SIDE + warpgroup * _ROWS, _ROWS)
                plgpu.copy_smem_to_gmem(
                    out_buffer.at[warpgroup], out.at[b, rows, pl.ds(j * SIDE, SIDE)]
                )
                return slot, following

            lax.fori_loop(0, mine, multiply, (jnp.int32(0), start(jnp.int32(0))))
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    arrivals: Any = {"num_arrivals": _WARPGROUPS, "num_barriers": ring}
    codes = plgpu.SMEM((ring, SIDE, SIDE), jnp.int8, transforms=_swizzle(1))
    return plgpu.kernel(
        kernel,
        out_type=jax.ShapeDtypeStruct((batch, rows, columns), dtype),
        scratch_types=[
            codes,
            codes,
            plgpu.SMEM(
                (_WARPGROUPS, _ROWS, SIDE), dtype, transforms=_swizzle(dtype.itemsize)
            ),
            plgpu.Barrier(num_arrivals=2, num_barriers=ring),
            plgpu.ClusterBarrier(collective_axes=("block",), **arrivals)
            if cluster > 1
            else plgpu.Barrier(**arrivals),
        ],
        grid=(clusters,),
        grid_names=("cluster",),
        cluster=(cluster,),
        cluster_names=("block",),
        num_threads=_WARPGROUPS + 1,
        thread_name="warpgroup",
    )


def lhs_spans(rows: int, columns: int, fallback: bool) -> bool:
    """Whether lhs' codes bound the sums: the smaller operand, or that of one term."""
    return rows < columns and not fallback


def _start(accumulator: Any) -> None:
    start = jnp.full((_ROWS, SIDE), START_BITS, jnp.int32)
    accumulator[...] = plgpu.layout_cast(start, plgpu.Layout.WGMMA)


def _bits(value: jax.Array) -> jax.Array:
    """Of an accumulator that started at ``START``: START more than its sum."""
    return lax.bitcast_convert_type(value, jnp.float32)


def _convert(value: jax.Array) -> jax.Array:
    return value.astype(jnp.float32)


def _swizzle(itemsize: int) -> tuple[Any, ...]:
    """The layout in shared memory that TMA and WGMMA agree on: rows of 128 bytes."""
    return (
        plgpu.TilingTransform((8, 128 // itemsize)),
        plgpu.SwizzleTransform(128),
    )
