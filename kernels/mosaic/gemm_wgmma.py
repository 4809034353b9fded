"""Products by WGMMA that start at zero, which Pallas does not offer.

``plgpu.wgmma`` adds a product to an accumulator.  Writing the zeros that an accumulator
starts with takes an instruction for every two elements, in every step.  The tensor
cores need no zeros: each WGMMA has a flag that says whether to add what its accumulator
holds.  Mosaic GPU always sets it.  Here it is cleared in the first WGMMA of a product,
and the compiler then drops the zeros that nobody reads.
"""

import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.experimental.mosaic.gpu as mgpu
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import llvm, nvvm

from fbq_jax.kernels.mosaic.gemm_problem import BLOCK

_THREADS = 128  # of a warpgroup
_CODES = plgpu.RefType(
    transforms=(plgpu.TilingTransform((8, BLOCK)), plgpu.SwizzleTransform(BLOCK))
)


def start_product(lhs: Any, rhs: Any, dtype: Any) -> Callable[[], jax.Array]:
    """Starts ``lhs @ rhs.T``; returns a function that waits for the product.

    Args:
      lhs: a reference to codes ``[64, 128]`` in shared memory.
      rhs: a reference to codes ``[n, 128]`` in shared memory.
      dtype: dtype of the product, int32 or float32.

    Warns:
      UserWarning: while it is lowered, if this version of JAX writes WGMMA in another
        way.  Then the accumulator is filled with zeros.
    """
    shape = lhs.shape[0], rhs.shape[0]
    product = plgpu.ShapeDtypeStruct(shape, dtype, layout=plgpu.Layout.WGMMA)

    @plgpu.inline_mgpu(arg_types=(_CODES, _CODES), return_type=product)
    def multiply(_: Any, lhs: Any, rhs: Any) -> Any:
        int32 = ir.IntegerType.get_signless(32)
        is_float = dtype == jnp.float32
        accumulator = mgpu.WGMMAAccumulator.zero(
            *shape,
            ir.F32Type.get() if is_float else int32,
            is_signed=None if is_float else True,
        )
        cleared = llvm.ConstantOp(int32, ir.IntegerAttr.get(int32, 0)).result
        operations = ir.InsertionPoint.current.block.operations
        before = len(operations)
        transposed = mgpu.memref_transpose(rhs, (1, 0, 3, 2))
        accumulator = mgpu.wgmma(accumulator, lhs, transposed, swizzle=BLOCK)
        _set_flag(list(operations)[before:], shape[0] * shape[1] // _THREADS, cleared)
        nvvm.wgmma_commit_group_sync_aligned()
        return accumulator.value

    in_flight = multiply(lhs, rhs)

    def wait() -> jax.Array:
        plgpu.wgmma_wait(0)
        return in_flight

    return wait


def _set_flag(operations: list[Any], registers: int, flag: Any) -> None:
    """Sets the flag of the first WGMMA, which has an accumulator in ``registers``.

    The inline assembly of a WGMMA has these operands: the registers, the descriptors of
    both factors, and the flag.  In its text, the registers count twice.
    """
    sources = (str(op.attributes.get("asm_string", "")) for op in operations)
    pairs = zip(operations, sources, strict=True)
    found = [pair for pair in pairs if "wgmma.mma_async" in pair[1]]
    position = registers + 2
    if not found or f"setp.ne.b32 p, ${registers + position}, 0;" not in found[0][1]:
        warnings.warn(
            f"jax {jax.__version__} writes WGMMA instructions in another way than "
            "fbq_jax knows: products of FP8 and of operands with scales of rows take "
            "more time",
            stacklevel=2,
        )
    else:
        found[0][0].operands[position] = flag
