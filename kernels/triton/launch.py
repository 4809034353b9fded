"""Calls of Triton kernels from JAX.

JAX lowers the calls of a program one after the other, and compiles the kernel of each.
So that kernels compile at the same time, other threads start when the calls are traced.
They also have the driver compile the PTX (``driver_cache``).

A kernel reaches XLA as PTX, in a custom call that XLA turns into a node of its CUDA
graphs.  A training step is then one graph, and the host does not hold up small layers.
The custom calls of JAX and jax-triton for Triton kernels are opaque to XLA, which
captures each as a graph of its own: such graphs take longer to start and to update.
"""

import functools
import os
import threading
from collections.abc import Hashable, Mapping, Sequence
from concurrent import futures
from types import MappingProxyType
from typing import Any

import jax
import numpy as np
import triton
from jax.extend.core import Primitive
from jax.interpreters import mlir
from triton.compiler import CompiledKernel

from fbq_jax.kernels.triton import driver_cache
from fbq_jax.kernels.triton.call import Call

_CUSTOM_CALL = "__gpu$xla.gpu.ptx"

_call_p = Primitive("triton_kernel")
_call_p.multiple_results = True


def launch(
    kernel: triton.JITFunction,
    *args: jax.Array | int,
    outputs: Sequence[jax.ShapeDtypeStruct],
    grid: tuple[int, ...],
    num_warps: int = 4,
    num_stages: int = 1,
    programs: int | None = None,
    in_place: Mapping[int, int] = MappingProxyType({}),
    waits: bool = False,
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
      programs: how many programs a multiprocessor should run at the same time, which
        limits their registers; None lets the compiler choose.
      in_place: maps an array to the output that takes its memory, by position.
      waits: whether the kernel waits with compiling until one that waits is lowered,
        and does not start when it is traced.  For kernels of a forward pass
        without derivatives: JAX traces it, too, where it then takes derivatives, and
        ``init`` of a Flax module drops its output.
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
        programs,
    )
    arrays = [arg for arg in args if not isinstance(arg, int)]
    compile_ahead(call, arrays, waits=waits)
    return tuple(_call_p.bind(*arrays, call=call))


# By what a kernel is compiled for.  Several threads may lower programs.
_compilations: dict[Hashable, futures.Future[CompiledKernel]] = {}
_lock = threading.Lock()  # of the compilations
# The calls, with the shapes of their arrays, whose kernels wait.
_waiting: dict[Hashable, tuple[Call, list[jax.ShapeDtypeStruct]]] = {}


def compile_ahead(
    call: Call,
    arrays: Sequence[jax.Array | jax.ShapeDtypeStruct],
    *,
    waits: bool = False,
) -> None:
    """Compiles the kernel of a call in another thread, unless that is done.

    Args:
      call: the call.
      arrays: its arrays, or their shapes and dtypes.
      waits: whether to start when the kernel, or one that waits and was traced before
        it, is lowered.
    """
    key = call.compiled_for(arrays)
    with _lock:
        if key in _compilations:
            return
        shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in arrays]
        if waits:
            _waiting.setdefault(key, (call, shapes))
        else:
            _waiting.pop(key, None)
            _compilations[key] = compiling_threads().submit(_compile, call, shapes)


def _end_wait(key: Hashable) -> None:
    """Starts to compile a kernel that waits, and those that were traced after it."""
    keys = list(_waiting)
    if key in keys:
        for later in keys[keys.index(key) :]:
            # Another thread may lower a program at the same time.
            if waiting := _waiting.pop(later, None):
                compile_ahead(*waiting)


@functools.cache
def compiling_threads() -> futures.Executor:
    """The threads that compile kernels."""
    return _make_threads("compile-kernels")


def _make_threads(name: str) -> futures.Executor:
    return futures.ThreadPoolExecutor(max(1, (os.cpu_count() or 1) - 1), name)


def _finish(call: Call, arrays: Sequence[Any]) -> CompiledKernel:
    """The compiled kernel of a call."""
    key = call.compiled_for(arrays)
    _end_wait(key)
    with _lock:
        compilation = _compilations.get(key)
        # A compilation that has not started does not wait for the ones before it.
        if starts := compilation is None or compilation.cancel():
            compilation = _compilations[key] = futures.Future()
            compilation.set_running_or_notify_cancel()
    if starts:
        try:
            compilation.set_result(_compile(call, arrays))
        except BaseException as error:
            compilation.set_exception(error)
    if compilation.exception():
        with _lock:
            # The next program starts again.
            if _compilations.get(key) is compilation:
                del _compilations[key]
    return compilation.result()


def _compile(call: Call, arrays: Sequence[Any]) -> CompiledKernel:
    # jax-triton sets an empty directory where it is imported; Triton refuses that one.
    if not triton.knobs.cache.dir:
        triton.knobs.cache.dir = triton.knobs.cache.get_triton_dir("cache")
    return call.compile(arrays, compute_capability())


_filled: set[int] = set()  # hashes of PTX, which is long


def _fill_driver_cache(ptx: str, name: str) -> None:
    """Has the driver compile a kernel in another thread, once."""
    key = hash(ptx)
    if jax.default_backend() == "gpu" and key not in _filled:
        _filled.add(key)
        ordinal = jax.local_devices()[0].local_hardware_id
        _driver_threads().submit(driver_cache.fill, ptx, name, ordinal)


@functools.cache
def _driver_threads() -> futures.Executor:
    """The threads that wait for the driver, which must not queue behind Triton."""
    return _make_threads("fill-driver-cache")


def compute_capability() -> int:
    """The compute capability of this process's first device, times ten."""
    return int(jax.local_devices()[0].compute_capability.replace(".", ""))


@_call_p.def_abstract_eval
def _abstract_results(*_arrays: Any, call: Call) -> list[Any]:
    return [jax.core.ShapedArray(x.shape, x.dtype) for x in call.outputs]


@_call_p.def_impl
@functools.partial(jax.jit, static_argnames="call")
def _run(*arrays: jax.Array, call: Call) -> list[jax.Array]:
    return list(_call_p.bind(*arrays, call=call))


def _lower(ctx: mlir.LoweringRuleContext, *arrays: Any, call: Call) -> Sequence[Any]:
    compiled = _finish(call, ctx.avals_in)
    ptx = call.ptx(compiled)
    _fill_driver_cache(ptx, compiled.metadata.name)
    # Without the positions of the outputs, XLA passes an array once that is an argument
    # twice.
    inputs = len(arrays)
    outputs = tuple(np.int32(inputs + i) for i in range(len(call.outputs)))
    programs = zip("xyz", (*call.grid, 1, 1), strict=False)
    threads = zip("xyz", (32 * compiled.metadata.num_warps, 1, 1), strict=True)
    lower = jax.ffi.ffi_lowering(
        _CUSTOM_CALL, operand_output_aliases=dict(call.in_place)
    )
    return lower(
        ctx,
        *arrays,
        name=compiled.metadata.name,
        kernel_type="ptx",
        kernel_data=ptx,
        shared_mem_bytes=np.int32(compiled.metadata.shared),
        output_indices=outputs,
        **{f"grid_{axis}": np.int32(number) for axis, number in programs},
        **{f"block_{axis}": np.int32(number) for axis, number in threads},
    )


mlir.register_lowering(_call_p, _lower, platform="cuda")
