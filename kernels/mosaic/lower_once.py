"""Kernels that are lowered and compiled once in a process.

JAX lowers a Pallas kernel again for each program that calls it, and gives it another
name each time, so that XLA does not recognize the kernel that it has compiled.  Here,
programs share what the first one lowered, and another thread compiles it while JAX
lowers the rest of that program.
"""

import functools
from collections.abc import Callable
from concurrent import futures
from typing import Any

import jax
from jax import export
from jax.extend.core import Primitive
from jax.interpreters import mlir

from fbq_jax.kernels.triton.launch import compiling_threads

Kernel = Callable[..., jax.Array]

_CUSTOM_CALL = "mosaic_gpu_v2"

_call_p = Primitive("mosaic_kernel")


def call_lowered_once(
    kernel: Kernel,
    operands: Any,
    out: jax.ShapeDtypeStruct,
    *,
    on_several_devices: Kernel,
) -> jax.Array:
    """Calls a kernel that programs share.

    Args:
      kernel: takes the operands.  Equal kernels are lowered once.
      operands: a tree of arrays.
      out: the shape and dtype of the result.
      on_several_devices: the kernel in a program for several devices, with the same
        result.
    """
    arrays, tree = jax.tree.flatten(operands)
    kernels = kernel, on_several_devices
    result: jax.Array = _call_p.bind(*arrays, kernels=kernels, tree=tree, out=out)
    return result


@_call_p.def_abstract_eval
def _abstract_result(*_arrays: Any, out: jax.ShapeDtypeStruct, **_params: Any) -> Any:
    return jax.core.ShapedArray(out.shape, out.dtype)


@_call_p.def_impl
def _call(
    *arrays: jax.Array, kernels: tuple[Kernel, Kernel], tree: Any, **_params: Any
) -> jax.Array:
    return kernels[0](jax.tree.unflatten(tree, arrays))


def _lower(
    context: mlir.LoweringRuleContext,
    *arrays: Any,
    kernels: tuple[Kernel, Kernel],
    tree: Any,
    **_params: Any,
) -> Any:
    # Kernels are partitioned, or inside shard_map, where there are several devices.
    mesh = getattr(context.module_context.axis_context, "mesh", None)
    kernel = kernels[mesh is not None and mesh.size > 1]

    def call(*arrays: jax.Array) -> jax.Array:
        shapes = tuple((x.shape, x.dtype) for x in arrays)
        exported = _export(kernel, tree, shapes)
        result: jax.Array = exported.call(jax.tree.unflatten(tree, arrays))
        return result

    return mlir.lower_fun(call, multiple_results=False)(context, *arrays)


mlir.register_lowering(_call_p, _lower, platform="cuda")


def _export(*call: Any) -> export.Exported:
    """The lowered kernel of a call; see ``_export_in_thread``.

    One thread lowers, so that several that ask for a kernel get the same.  It has no
    mesh: the first program's may have several devices.
    """
    return _lowering_thread().submit(_export_in_thread, *call).result()


@functools.cache
def _export_in_thread(
    kernel: Kernel, tree: Any, shapes: tuple[Any, ...]
) -> export.Exported:
    """The lowered kernel, which another thread starts to compile."""
    operands = jax.tree.unflatten(tree, [jax.ShapeDtypeStruct(*x) for x in shapes])
    make = export.export(
        jax.jit(kernel),
        platforms=("cuda",),
        disabled_checks=[export.DisabledSafetyCheck.custom_call(_CUSTOM_CALL)],
    )
    exported: export.Exported = make(operands)
    if jax.default_backend() == "gpu":
        program = jax.jit(exported.call)
        compiling_threads().submit(lambda: program.lower(operands).compile())
    return exported


@functools.cache
def _lowering_thread() -> futures.Executor:
    return futures.ThreadPoolExecutor(1, "lower-mosaic")
