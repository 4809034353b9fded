"""Calls of Triton kernels from JAX.

JAX lowers the calls of a program one after the other, and compiles the kernel of each.
So that kernels compile at the same time, other threads start when the calls are traced.

jax-triton's custom call has an interface that XLA leaves out of CUDA graphs.  jaxlib
has the same call in the newer, typed interface, which XLA puts into them.  A training
step is then one graph, and the host does not hold up small layers.
"""

import dataclasses
import functools
import math
import os
from collections.abc import Hashable, Mapping, Sequence
from concurrent import futures
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import triton
from jax.extend.core import Primitive
from jax.extend.mlir import ir
from jax.interpreters import mlir

from fbq_jax.kernels.reference import Block, CodeDtype
from fbq_jax.kernels.rounding import Rounding, Seeds
from fbq_jax.kernels.triton.outputs import BlockOutputs

_TYPED_CUSTOM_CALL = "triton_kernel_call_ffi"
_TYPED_INTERFACE = 4  # XLA's number of the version

_call_p = Primitive("triton_kernel")
_call_p.multiple_results = True


def launch(
    kernel: triton.JITFunction,
    *args: jax.Array | int,
    outputs: Sequence[jax.ShapeDtypeStruct],
    grid: tuple[int, ...],
    num_warps: int = 4,
    num_stages: int = 1,
    in_place: Mapping[int, int] = MappingProxyType({}),
    **constants: Any,
) -> tuple[jax.Array, ...]:
    """Runs ``kernel(*args, *outputs, **constants)`` on a grid of programs.

    The compiler does not fuse a product and a sum into an FMA; a kernel that wants an
    FMA calls ``tl.fma``.

    Args:
      kernel: the kernel.
      *args: the inputs of the kernel.
      outputs: shapes and dtypes of the outputs, whose memory is not initialized.
      grid: the number of programs along each axis.
      num_warps: the number of warps per program.
      num_stages: the depth of the pipeline of loads.
      in_place: by the position of an input, that of the output that takes its memory.
      **constants: the ``tl.constexpr`` arguments of the kernel.

    Returns:
      The outputs.
    """
    call = Call(
        kernel,
        tuple(arg if isinstance(arg, int) else None for arg in args),
        tuple(outputs),
        grid,
        num_warps,
        num_stages,
        tuple(in_place.items()),
        tuple(sorted(constants.items())),
    )
    arrays = [arg for arg in args if not isinstance(arg, int)]
    compile_ahead(call, arrays)
    return tuple(_call_p.bind(*arrays, call=call))


@dataclasses.dataclass(frozen=True)
class Call:
    """The call of a kernel, but for the arrays; JAX lowers equal calls once.

    Attributes:
      kernel: the kernel.
      sizes: for each input of the kernel, the integer, or None for an array.
      outputs: shapes and dtypes of the outputs.
      grid: the number of programs along each axis.
      num_warps: the number of warps per program.
      num_stages: the depth of the pipeline of loads.
      in_place: pairs of an input and the output that takes its memory.
      constants: the names and values of the ``tl.constexpr`` arguments.
    """

    kernel: triton.JITFunction
    sizes: tuple[int | None, ...]
    outputs: tuple[jax.ShapeDtypeStruct, ...]
    grid: tuple[int, ...]
    num_warps: int
    num_stages: int
    in_place: tuple[tuple[int, int], ...]
    constants: tuple[tuple[str, Any], ...]

    def __call__(self, *arrays: jax.Array) -> list[jax.Array]:
        """Calls the kernel through jax-triton."""
        # Imported here because jax-triton cannot be imported without a GPU.
        import jax_triton

        results: list[jax.Array] = jax_triton.triton_call(
            *self.arguments(arrays),
            kernel=self.kernel,
            out_shape=list(self.outputs),
            grid=self.grid,
            num_warps=self.num_warps,
            num_stages=self.num_stages,
            enable_fp_fusion=False,
            input_output_aliases=dict(self.in_place),
            **dict(self.constants),
        )
        return results

    def arguments(self, arrays: Sequence[Any]) -> list[Any]:
        """The inputs of the kernel: the arrays, with the integers between them."""
        rest = iter(arrays)
        return [next(rest) if size is None else size for size in self.sizes]

    def compiled_for(self, arrays: Sequence[Any]) -> Hashable:
        """What the compiler knows of the kernel and its arguments."""
        args = (*self.arguments(arrays), *self.outputs)
        kinds = tuple(
            (arg == 1, arg.bit_length() > 31) if isinstance(arg, int) else arg.dtype
            for arg in args
        )
        return self.kernel, kinds, self.num_warps, self.num_stages, self.constants


# By what a kernel is compiled for. jax-triton keeps the kernels, by the same.
_compilations: dict[Hashable, futures.Future[None]] = {}


def compile_ahead(call: Call, arrays: Sequence[jax.Array]) -> None:
    """Compiles the kernel of a call in another thread, unless that is done."""
    key = call.compiled_for(arrays)
    if key not in _compilations:
        shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in arrays]
        _compilations[key] = _threads().submit(_compile, call, shapes)


@functools.cache
def _threads() -> futures.Executor:
    workers = max(1, (os.cpu_count() or 1) - 1)
    return futures.ThreadPoolExecutor(workers, "compile-triton")


def _compile(call: Call, shapes: Sequence[jax.ShapeDtypeStruct]) -> None:
    """Compiles a kernel, by lowering a program that only calls it."""
    jax.jit(call).trace(*shapes).lower(lowering_platforms=("cuda",))


@_call_p.def_abstract_eval
def _abstract_results(*_arrays: Any, call: Call) -> list[Any]:
    return [jax.core.ShapedArray(x.shape, x.dtype) for x in call.outputs]


@_call_p.def_impl
def _run(*arrays: jax.Array, call: Call) -> list[jax.Array]:
    return jax.jit(call)(*arrays)


def _lower(ctx: mlir.LoweringRuleContext, *arrays: Any, call: Call) -> Sequence[Any]:
    compilation = _compilations.get(call.compiled_for(ctx.avals_in))
    # A compilation that has not started is jax-triton's.  So is one that failed:
    # jax-triton repeats it, which raises the error.
    if compilation is not None and not compilation.cancel():
        futures.wait([compilation])
    results = mlir.lower_fun(call, multiple_results=True)(ctx, *arrays)
    attributes = results[0].owner.attributes
    untyped = attributes["backend_config"]
    name = ir.StringAttr.get(getattr(call.kernel, "__name__", ""))
    attributes["call_target_name"] = ir.StringAttr.get(_TYPED_CUSTOM_CALL)
    attributes["backend_config"] = ir.DictAttr.get({"name": name, "opaque": untyped})
    attributes["api_version"] = ir.IntegerAttr.get(
        ir.IntegerType.get_signless(32), _TYPED_INTERFACE
    )
    return results


mlir.register_lowering(_call_p, _lower, platform="cuda")


def seed_arguments(
    seeds: Seeds, *roundings: Rounding | None
) -> tuple[tuple[jax.Array, ...], bool]:
    """The five arrays of seeds that a kernel takes, and whether it folds them.

    A single array takes the place of all.  Without stochastic rounding they are zeros,
    so that a later kernel may overwrite the number of calls.
    """
    if "stochastic" not in roundings:
        seeds = jnp.zeros_like(seeds[0] if isinstance(seeds, tuple) else seeds)
    if isinstance(seeds, tuple):
        return seeds, True
    return (seeds,) * 5, False


def mode_of(rounding: Rounding | None, dtype: CodeDtype) -> str | None:
    """The mode of a layout (``block_codes``)."""
    return "float8" if rounding and dtype == "float8_e4m3fn" else rounding


def launch_on_blocks(
    kernel: triton.JITFunction,
    x: jax.Array,
    *args: jax.Array,
    block: Block,
    shape: Any = None,
    **options: Any,
) -> tuple[jax.Array, ...]:
    """Runs one program per block of matrices ``[B, R, C]``.

    Args:
      kernel: takes x, args, ``R``, ``C / COLUMN_UNIT`` and outputs; its constants
        include ``r``, ``c`` and ``COLUMN_UNIT``.
      x: the matrices, or values that the kernel makes them from.
      *args: further inputs of the kernel.
      block: rows ``r`` and columns ``c`` of a block.
      shape: ``(B, R, C)``; by default that of x.
      **options: further arguments of ``launch``.
    """
    shape = shape or x.shape
    _, rows, columns = shape
    # With this constant, the compiler knows that each row starts at a multiple of the
    # unit, and loads that many elements at once.
    unit = math.gcd(columns, 16)
    return launch(
        kernel,
        x,
        *args,
        rows,
        columns // unit,
        grid=(BlockOutputs(shape, block).programs,),
        r=block[0],
        c=block[1],
        COLUMN_UNIT=unit,
        **options,
    )
