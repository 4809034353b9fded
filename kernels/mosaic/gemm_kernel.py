"""The kernel of the block-scaled GEMM: persistent and warp-specialized.

Each thread block computes output tiles of 128 rows, one after the other, as
``gemm_scheduler`` assigns them.  Tiles of 192 columns take the least time per column.
Tiles of 128 columns, in a second region of the output, share out the work of the last
round more evenly.  The producer, one warp, copies tiles of codes, and scales of their
rows, into the stages of a pipeline in shared memory, by TMA (``gemm_producer``).  Two
consumer warpgroups multiply 64 rows each by WGMMA, INT8 to INT32 or FP8 to float32, in
turns (``gemm_products``, ``gemm_wgmma``), scale the products and add them up in float32
(``gemm_promotion``), and store the tile (``gemm_consumer``).

A residual adds no branch to the loop: its blocks are additional steps in the list.

No product is in flight between two iterations of a loop, because then ptxas would
serialize all products.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
from jax import lax

from fbq_jax.kernels.mosaic.gemm_consumer import consume
from fbq_jax.kernels.mosaic.gemm_problem import (
    CONSUMERS,
    Buffers,
    Operands,
    Problem,
    buffer_types,
)
from fbq_jax.kernels.mosaic.gemm_producer import produce
from fbq_jax.kernels.mosaic.gemm_scheduler import Scheduler

# Three threads, one from each warpgroup, have 512 registers in total.
_PRODUCER_REGISTERS, _CONSUMER_REGISTERS = 40, 232
# JAX lowers the kernel in two thirds of the time that the default takes, to the same
# main loop.  The bias of running sums is subtracted by an FMA, so fewer outputs in 16
# bits differ from rounded sums in float32.
_COMPILER_PARAMS = plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane)


@functools.cache
def build(problem: Problem) -> Callable[[Operands], jax.Array]:
    """Builds the kernel: a function that maps ``Operands`` to ``[B, M, N]``."""

    def kernel(operands: Operands, out: Any, buffers: Buffers) -> None:
        warpgroup = lax.axis_index("warpgroup")
        schedulers = Scheduler.for_this_block(problem, operands)

        @pl.when(warpgroup == CONSUMERS)
        def _produce() -> None:
            plgpu.set_max_registers(_PRODUCER_REGISTERS, action="decrease")
            copy = functools.partial(produce, schedulers, buffers)
            plgpu.warp_map(lambda warp: pl.when(warp == 0)(copy))

        @pl.when(warpgroup < CONSUMERS)
        def _consume() -> None:
            plgpu.set_max_registers(_CONSUMER_REGISTERS, action="increase")
            consume(schedulers, buffers, out, warpgroup)

    shape = problem.batch, problem.M, problem.N
    return plgpu.kernel(
        kernel,
        out_type=jax.ShapeDtypeStruct(shape, problem.dtype),
        scratch_types=[buffer_types(problem)],
        grid=(problem.num_sms * problem.num_parts,),
        grid_names=("thread_block",),
        num_threads=CONSUMERS + 1,
        thread_name="warpgroup",
        compiler_params=_COMPILER_PARAMS,
    )
