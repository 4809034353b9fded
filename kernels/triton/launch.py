"""Calls of Triton kernels from JAX, by jax-triton."""

import functools
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import jax
import jax_triton
import triton
from jax.extend.core import Primitive
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import stablehlo
from jax.interpreters import mlir

from fbq_jax.kernels.triton import compile_ahead

_IS_TYPED = jax_triton.__version_info__ >= (0, 4)

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
      grid: the number of programs along x, or along x and y.
      num_warps: the number of warps per program.
      num_stages: the depth of the pipeline of loads.
      in_place: maps an array to the output that takes its memory, by position.
      **constants: the ``tl.constexpr`` arguments of the kernel.

    Returns:
      The outputs.
    """
    arrays = [arg for arg in args if not isinstance(arg, int)]
    call = {
        "kernel": kernel,
        "sizes": tuple(arg if isinstance(arg, int) else None for arg in args),
        "outputs": tuple(outputs),
        "grid": grid,
        "options": (("num_warps", num_warps), ("num_stages", num_stages)),
        "constants": tuple(sorted(constants.items())),
    }
    compile_ahead.start(_triton_call, arrays, call)
    return tuple(_call_p.bind(*arrays, in_place=tuple(in_place.items()), **call))


def compute_capability() -> int:
    """The compute capability of this process's first device, times ten."""
    return int(jax.local_devices()[0].compute_capability.replace(".", ""))


def _triton_call(
    *arrays: jax.Array,
    kernel: triton.JITFunction,
    sizes: tuple[int | None, ...],
    outputs: tuple[jax.ShapeDtypeStruct, ...],
    grid: tuple[int, ...],
    options: tuple[tuple[str, Any], ...],
    constants: tuple[tuple[str, Any], ...],
) -> Any:
    rest, fusion = iter(arrays), {"enable_fp_fusion": False}
    return jax_triton.triton_call(
        *(next(rest) if size is None else size for size in sizes),
        kernel=kernel,
        grid=grid,
        compute_capability=compute_capability(),
        **{"out_type" if _IS_TYPED else "out_shape": list(outputs)},
        **({"backend_options": fusion} if _IS_TYPED else fusion),
        **dict(options + constants),
    )


@_call_p.def_abstract_eval
def _abstract_results(*_: Any, outputs: Any, **__: Any) -> list[Any]:
    return [jax.core.ShapedArray(x.shape, x.dtype) for x in outputs]


def _lower(ctx: Any, *arrays: Any, in_place: Any, **call: Any) -> list[Any]:
    compile_ahead.wait(ctx.avals_in, call)
    lower = mlir.lower_fun(functools.partial(_triton_call, **call))
    results = list(lower(ctx, *arrays))
    attributes = results[0].owner.attributes
    if not _IS_TYPED:
        _make_typed(attributes, call["kernel"].__name__)
    # With jax-triton's own option, the kernel gets another number of pointers by 0.4.
    aliases = [
        stablehlo.OutputOperandAlias.get([out] if len(results) > 1 else [], array, [])
        for array, out in in_place
    ]
    attributes["output_operand_aliases"] = ir.ArrayAttr.get(aliases)
    return results


mlir.register_lowering(_call_p, _lower, platform="cuda")


def _make_typed(attributes: Any, name: str) -> None:
    """Turns a call by jax-triton 0.3 into the one that 0.4 makes.

    XLA makes nodes of its CUDA graphs of such calls: a training step is one graph.
    """
    config = {"name": ir.StringAttr.get(name), "opaque": attributes["backend_config"]}
    attributes["call_target_name"] = ir.StringAttr.get("triton_kernel_call_ffi")
    attributes["backend_config"] = ir.DictAttr.get(config)
    attributes["api_version"] = ir.IntegerAttr.get(ir.IntegerType.get_signless(32), 4)
