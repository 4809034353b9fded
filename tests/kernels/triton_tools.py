"""Triton kernels without a GPU, run by Triton's interpreter.

To interpret kernels, ``fbq_jax.kernels.triton`` is reloaded with another ``launch``,
because Triton decides at the definition of a kernel whether it is interpreted.
"""

import contextlib
import functools
import importlib
import sys
import types
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import triton
import triton.language as tl
from triton.runtime import interpreter

from fbq_jax import kernels
from fbq_jax.kernels import reference, rounding  # noqa: F401 (stay when others go)
from tests.kernels import ptx

PACKAGE = "fbq_jax.kernels.triton"


@functools.cache
def interpreted(name: str) -> types.ModuleType:
    """Loads ``fbq_jax.kernels.triton.<name>`` with interpreted kernels.

    Its functions take and return arrays and must not be traced.  Elements that a kernel
    does not write are -77, 77 or NaN, and so are elements that it reads outside an
    array.  A write outside an array fails.
    """
    return _load(name, _interpret, interpret=True)


def _load(name: str, launch: Callable[..., Any], *, interpret: bool) -> Any:
    def loaded() -> list[str]:
        return [key for key in sys.modules if f"{key}.".startswith(f"{PACKAGE}.")]

    kept = {key: sys.modules.pop(key) for key in loaded()}
    try:
        with triton.knobs.runtime.scope():
            triton.knobs.runtime.interpret = interpret
            importlib.import_module(f"{PACKAGE}.launch").launch = launch  # type: ignore[attr-defined]
            return importlib.import_module(f"{PACKAGE}.{name}")
    finally:
        for key in loaded():
            del sys.modules[key]
        sys.modules.update(kept)
        if PACKAGE in kept:
            kernels.triton = kept[PACKAGE]
        else:
            del kernels.triton


# The interpreter.


class _Tensor:
    """The part of PyTorch's tensor that the interpreter uses, between guards."""

    GUARD = 256

    def __init__(self, values: np.ndarray) -> None:
        self.dtype = str(values.dtype)
        self._padded = np.full(
            values.size + 2 * self.GUARD, _garbage(values.dtype), values.dtype
        )
        inside = self._padded[self.GUARD : self.GUARD + values.size]
        self.values = inside.reshape(values.shape)
        self.values[...] = values

    def check_guards(self) -> None:
        for guard in (self._padded[: self.GUARD], self._padded[-self.GUARD :]):
            untouched = np.full_like(guard, _garbage(guard.dtype))
            assert guard.tobytes() == untouched.tobytes(), "written beyond an array"

    def data_ptr(self) -> int:
        return self.values.ctypes.data

    def untyped_storage(self) -> "_Tensor":
        return self

    def new_empty(self, *_: Any, **__: Any) -> "_Tensor":
        return self

    def cpu(self) -> "_Tensor":
        return self

    def size(self) -> tuple[int, ...]:
        return self.values.shape

    def storage_offset(self) -> int:
        return 0

    def stride(self) -> tuple[int, ...]:
        return self.values.strides

    def set_(self, *_: Any) -> None: ...

    def copy_(self, *_: Any) -> None: ...


def _garbage(dtype: np.dtype) -> Any:
    if np.issubdtype(dtype, np.unsignedinteger):
        return 77
    return -77 if np.issubdtype(dtype, np.integer) else np.nan


def _interpret(
    kernel: Any,
    *args: Any,
    outputs: Sequence[jax.ShapeDtypeStruct],
    grid: tuple[int, ...],
    num_warps: int = 4,
    num_stages: int = 1,
    programs: int | None = None,
    in_place: Mapping[int, int] = MappingProxyType({}),
    **constants: Any,
) -> tuple[jax.Array, ...]:
    del num_warps, num_stages, programs
    inputs = [a if isinstance(a, int) else _Tensor(np.asarray(a)) for a in args]
    results = [_Tensor(np.full(o.shape, _garbage(o.dtype), o.dtype)) for o in outputs]
    for position, output in in_place.items():
        results[output] = inputs[position]
    with (
        _interpreting(),
        np.errstate(all="ignore"),
        triton.knobs.runtime.scope(),
        triton.knobs.compilation.scope(),
    ):
        triton.knobs.runtime.interpret = True
        triton.knobs.compilation.front_end_debugging = True
        kernel[grid](*inputs, *results, **constants)
    for result in results:
        result.check_guards()
    return tuple(jax.device_put(result.values) for result in results)


@contextlib.contextmanager
def _interpreting() -> Any:
    """Corrects the interpreter while it runs a kernel.

    The interpreter patches Triton's language and does not restore all of it.  It cannot
    call the functions of Triton's library that were imported for compilation, nor, with
    NumPy 2.4, convert a scalar to an index.  It truncates floats to bfloat16, where a
    GPU rounds to nearest even.  It knows no assembly.  It calls a kernel's own
    reduction for each element, which takes long.  And it describes the type of every
    tensor anew, which takes a third of its time.
    """
    patch_language = interpreter._patch_lang
    get_np_dtype = interpreter._get_np_dtype
    type_of_tuple = tl.core._type_for_tuple_values
    init_block_type = tl.block_type.__init__
    convert_float = interpreter._convert_float
    scopes = contextlib.ExitStack()
    nothing = types.SimpleNamespace(restore=lambda: None)
    patched: set[int] = set()

    def patch(fn: Any) -> Any:
        """Patches the language as a module sees it, once for all its functions."""
        if id(fn.__globals__) in patched:
            return nothing
        patched.add(id(fn.__globals__))
        scope = patch_language(fn)
        scope.set_attr(tl.tensor, "__index__", lambda x: int(x.handle.data.item()))
        for module in (tl, tl.core, tl.standard):
            for name, value in list(vars(module).items()):
                if isinstance(value, triton.JITFunction):
                    function = interpreter.InterpretedFunction(value.fn)
                    scope.set_attr(module, name, function)
        scopes.callback(scope.restore)
        return nothing

    def convert(data: np.ndarray, source: Any, target: Any, mode: Any) -> np.ndarray:
        if (source, target) == (tl.float32, tl.bfloat16):
            return data.view(np.float32).astype(jnp.bfloat16).view(np.uint16)
        return convert_float(data, source, target, mode)

    def run_assembly(_: Any, assembly: str, *args: Any) -> Any:
        _, values, (kind,), _, pack = args
        if assembly.count("cvt.rn.satfinite.e4m3x2.f32") == 2:
            result = _to_float8(values)  # of one tile or of four
        else:
            operands = [word for x in values for word in _words(x.data, pack)]
            words = ptx.run(assembly, operands, pack)
            data = np.stack(words, -1).reshape(values[0].data.shape)
            dtype = interpreter._get_np_dtype(kind.scalar)
            result = interpreter.TensorHandle(data.view(dtype), kind.scalar)
        return types.SimpleNamespace(get_result=lambda _: result)

    def reduce(self: Any, tensors: Any) -> list[Any]:
        """Reduces slices of a tensor, not element after element."""
        (tensor,) = tensors
        slices = np.moveaxis(tensor.handle.data, self.axis, 0)
        parts = [self.to_tensor(x, tensor.dtype) for x in slices]
        return [functools.reduce(self.combine_fn.fn, parts)]

    numpy_dtypes: dict[str, np.dtype] = {}
    types_of_shapes: dict[tuple[int, ...], Any] = {}
    blocks: dict[tuple[Any, ...], tuple[Any, ...]] = {}

    def numpy_dtype(kind: Any) -> np.dtype:
        name = kind.scalar.name
        if name not in numpy_dtypes:
            numpy_dtypes[name] = get_np_dtype(kind)
        return numpy_dtypes[name]

    def type_of_values(values: Sequence[Any], fields: Any = None) -> Any:
        shape = tuple(x.value for x in values if isinstance(x, tl.constexpr))
        if fields or len(shape) < len(values) or {*map(type, shape)} - {int}:
            return type_of_tuple(values, fields)
        if shape not in types_of_shapes:
            types_of_shapes[shape] = type_of_tuple(values)
        return types_of_shapes[shape]

    def init_block(self: Any, element_ty: Any, shape: Sequence[Any]) -> None:
        key = element_ty.name, *map(int, shape)
        if key not in blocks:
            init_block_type(self, element_ty, shape)
            blocks[key] = self.shape, self.numel, self.name
        self.element_ty = element_ty
        self.shape, self.numel, self.name = blocks[key]

    builder, reductions = type(interpreter.interpreter_builder), interpreter.ReduceOps
    with scopes, pytest.MonkeyPatch.context() as replaced:
        replaced.setattr(interpreter, "_patch_lang", patch)
        replaced.setattr(interpreter, "_get_np_dtype", numpy_dtype)
        replaced.setattr(tl.core, "_type_for_tuple_values", type_of_values)
        replaced.setattr(tl.block_type, "__init__", init_block)
        replaced.setattr(interpreter, "_convert_float", convert)
        replaced.setattr(builder, "create_inline_asm", run_assembly)
        replaced.setattr(reductions, "generic_reduce", reduce)
        yield


def _words(x: np.ndarray, pack: int) -> list[np.ndarray]:
    """The words of ``pack`` neighbouring elements, each of all words of this place."""
    words = np.ascontiguousarray(x).view(np.uint32)
    if pack == 1:
        return [words]
    count = pack * x.itemsize // 4
    words = words.reshape(*x.shape[:-1], x.shape[-1] // pack, count)
    return [words[..., i] for i in range(count)]


def _to_float8(values: Sequence[Any]) -> Any:
    """The bits of floats in E4M3; words of those of four tiles, the first lowest."""
    tiles = [np.clip(x.data, -448.0, 448.0) for x in values]
    codes = np.stack([x.astype(jnp.float8_e4m3fn).view(np.int8) for x in tiles], -1)
    if len(tiles) == 1:
        return interpreter.TensorHandle(codes[..., 0], tl.int8)
    words = np.ascontiguousarray(codes).view("<i4")[..., 0]
    return interpreter.TensorHandle(words, tl.int32)
