"""A call of a Triton kernel, and the PTX that XLA launches for it."""

import contextlib
import dataclasses
import re
import sys
import threading
from collections.abc import Hashable, Sequence
from functools import partial
from typing import Any

import jax
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, CompiledKernel

_TYPES = {
    "bfloat16": "*bf16",
    "float16": "*fp16",
    "float32": "*fp32",
    "int8": "*i8",
    "uint8": "*u8",
    "float8_e4m3fn": "*fp8e4nv",
    "int32": "*i32",
    "uint32": "*u32",
}


# Of a multiprocessor, and of a thread.
_REGISTERS, _MOST_REGISTERS = 2**16, 255

# In Python 3.11 threads parse one after the other: ``ast.parse`` counts the depth of
# its recursion for all threads together, and raises a SystemError if they overlap, as
# they can where garbage is collected.  Later versions do not collect it there.
_parser: contextlib.AbstractContextManager[Any] = (
    threading.RLock() if sys.version_info < (3, 12) else contextlib.nullcontext()
)


class _Source(ASTSource):
    """The source of a kernel, which any thread may compile."""

    def make_ir(self, *args: Any) -> Any:
        with _parser:
            return super().make_ir(*args)


@dataclasses.dataclass(frozen=True)
class Call:
    """The call of a kernel, without its arrays; JAX lowers equal calls once.

    Attributes:
      kernel: the kernel.
      sizes: for each input of the kernel, the integer, or None for an array.
      outputs: shapes and dtypes of the outputs.
      grid: the number of programs along x, or along x and y.
      num_warps: the number of warps per program.
      num_stages: the depth of the pipeline of loads.
      in_place: pairs of an array and the output that takes its memory, by position.
      constants: the names and values of the ``tl.constexpr`` arguments.
      programs: how many programs a multiprocessor should run at the same time, which
        limits their registers; None lets the compiler choose.
    """

    kernel: triton.JITFunction
    sizes: tuple[int | None, ...]
    outputs: tuple[jax.ShapeDtypeStruct, ...]
    grid: tuple[int, ...]
    num_warps: int
    num_stages: int
    in_place: tuple[tuple[int, int], ...]
    constants: tuple[tuple[str, Any], ...]
    programs: int | None = None

    def __post_init__(self) -> None:
        with _parser:
            # Triton parses a kernel the first time that it is hashed.
            hash((self.kernel, self.constants))

    def compiled_for(self, arrays: Sequence[Any]) -> Hashable:
        """What the compiler knows of the kernel and its arguments."""
        types = tuple(self._types(arrays))
        options = self.num_warps, self.num_stages, self.programs
        return self.kernel, types, options, self.constants

    def compile(self, arrays: Sequence[Any], capability: int) -> CompiledKernel:
        """Compiles the kernel; an integer argument of 1 is a constant of it.

        The compiler does not fuse a product and a sum into an FMA, and knows that XLA
        aligns arrays to 16 bytes.

        Args:
          arrays: shapes and dtypes of the arrays.
          capability: the compute capability of the GPU times ten.
        """
        names = self.kernel.arg_names
        types = dict(zip(names, self._types(arrays), strict=False))
        constants = dict(self.constants)
        constants |= {name: 1 for name, kind in types.items() if kind == "constexpr"}
        signature = {name: types.get(name, "constexpr") for name in names}
        attributes = {
            (position,): [["tt.divisibility", 16]]
            for position, name in enumerate(names)
            if signature[name].startswith("*")
        }
        return triton.compile(
            _Source(self.kernel, signature, constants, attributes),
            target=GPUTarget("cuda", capability, 32),
            options={
                "num_warps": self.num_warps,
                "num_stages": self.num_stages,
                "maxnreg": self._max_registers(),
                "enable_fp_fusion": False,
            },
        )

    def ptx(self, compiled: CompiledKernel) -> str:
        """The PTX of the compiled kernel, with the addresses of arrays as parameters.

        XLA passes nothing else to a kernel. So the addresses of scratch memory are left
        out, which no kernel of this package needs, and the integers become constants,
        times the number of programs along z, which is 1: from a constant number of
        steps, ptxas unrolls loops of WGMMA, and loses products in one of the copies
        (versions 12.8 and 13.0).

        Raises:
          RuntimeError: if the kernel reads one of these parameters in a way that this
            function does not know.
        """
        assert len(self.grid) < 3  # or integers would be multiplied
        name, ptx = compiled.metadata.name, compiled.asm["ptx"]
        parameters = [size for size in (*self.sizes, *self.outputs) if size != 1]
        integers = {i: x for i, x in enumerate(parameters) if isinstance(x, int)}
        scratch = (len(parameters), len(parameters) + 1)
        for position, size in integers.items():
            # A load may extend the integer: to 64 bits, if the register has a "d".
            load = rf"ld\.param\.[bsu]\d+(\s+%r(d?)\d+), \[{name}_param_{position}\];"
            ptx = re.sub(load, partial(_move, size), ptx)
        for position in (*integers, *scratch):
            declaration = rf",\s+\.param [^\n,]+ {name}_param_{position}\b"
            ptx, found = re.subn(declaration, "", ptx)
            if found != 1 or re.search(rf"\b{name}_param_{position}\b", ptx):
                raise RuntimeError(
                    f"Triton {triton.__version__} compiled {name} to PTX that differs "
                    "from what fbq_jax knows; install the version in pyproject.toml"
                )
        return ptx

    def _max_registers(self) -> int | None:
        """The most registers of a thread with which so many programs fit."""
        if self.programs is None:
            return None
        registers = _REGISTERS // (self.programs * self.num_warps * 32)
        return min(registers // 8 * 8, _MOST_REGISTERS)

    def _types(self, arrays: Sequence[Any]) -> list[str]:
        """Triton's types of the inputs and outputs."""
        rest = iter(arrays)
        inputs = [next(rest) if size is None else size for size in self.sizes]
        return [_type(x) for x in (*inputs, *self.outputs)]


def _move(constant: int, load: re.Match[str]) -> str:
    """Sets the register of a load to a constant that the assembler does not know."""
    register, is_wide = load[1].strip(), bool(load[2])
    if not is_wide:
        multiply = f"mul.lo.u32 {register}, %one, {constant};"
    else:
        widen = f"cvt.u64.u32 {register}, %one;"
        multiply = f"{widen} mul.lo.u64 {register}, {register}, {constant};"
    return f"{{ .reg .b32 %one; mov.u32 %one, %nctaid.z; {multiply} }}"


def _type(argument: Any) -> str:
    if not isinstance(argument, int):
        return _TYPES[str(argument.dtype)]
    if argument == 1:
        return "constexpr"
    return "i32" if argument < 2**31 else "i64"
