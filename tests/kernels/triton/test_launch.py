"""Kernels compile in other threads, and XLA may put their calls into CUDA graphs."""

import sys
import threading
import types
from concurrent import futures

import jax
import jax.numpy as jnp
import pytest
from jax.extend.core import Primitive
from jax.interpreters import mlir

from fbq_jax.kernels.triton import launch as launch_module
from fbq_jax.kernels.triton.launch import Call, launch

X = jnp.ones((4, 8), jnp.bfloat16)
PROGRAMS = (3, 2)


class Compiler:
    """jax-triton without Triton: it compiles a kernel when a call is first lowered."""

    def __init__(self):
        self.compiled = []  # kernel and thread
        self.error = None
        call_p = Primitive("triton_call")
        call_p.multiple_results = True
        call_p.def_abstract_eval(
            lambda *_, outputs, **__: [
                jax.core.ShapedArray(x.shape, x.dtype) for x in outputs
            ]
        )
        mlir.register_lowering(call_p, self._lower, platform="cuda")
        self._call_p = call_p
        self._kernels = set()

    def triton_call(
        self, *args, kernel, out_shape, grid, input_output_aliases, **options
    ):
        assert grid == PROGRAMS
        arrays = [x for x in args if not isinstance(x, int)]
        ones = tuple(x == 1 for x in args if isinstance(x, int))
        dtypes = tuple(x.dtype for x in arrays)
        return self._call_p.bind(
            *arrays,
            kernel=(kernel, ones, dtypes, *sorted(options.items())),
            outputs=tuple(out_shape),
            aliases=tuple(input_output_aliases.items()),
        )

    def _lower(self, ctx, *args, kernel, outputs, aliases):
        del outputs
        if kernel not in self._kernels:
            if self.error:
                raise self.error
            self.compiled.append((kernel[0], threading.current_thread()))
            self._kernels.add(kernel)
        rule = jax.ffi.ffi_lowering(
            "triton_kernel_call",
            api_version=2,
            backend_config=b"compressed",
            operand_output_aliases=dict(aliases),
        )
        return rule(ctx, *args)


@pytest.fixture
def compiler(monkeypatch):
    compiler = Compiler()
    fake = types.SimpleNamespace(triton_call=compiler.triton_call)
    monkeypatch.setitem(sys.modules, "jax_triton", fake)
    monkeypatch.setattr(launch_module, "_compilations", {})
    return compiler


def call(kernel, x, size=7, **options):
    """Launches a kernel."""
    outputs = [jax.ShapeDtypeStruct(x.shape, x.dtype)]
    return launch(kernel, x, size, outputs=outputs, grid=PROGRAMS, **options)[0]


def compile_and_lower(function):
    """Traces a function, awaits the other threads, and lowers it for a GPU."""
    program = jax.jit(function).trace(X)
    futures.wait(launch_module._compilations.values())
    return program.lower(lowering_platforms=("cuda",)).as_text()


def test_every_kernel_compiles_once_in_another_thread(compiler):
    def two_layers(x):
        return [call("quantize", x), call("sum", x), call("quantize", x + x)]

    compile_and_lower(two_layers)
    assert sorted(kernel for kernel, _ in compiler.compiled) == ["quantize", "sum"]
    threads = [thread for _, thread in compiler.compiled]
    assert threading.main_thread() not in threads


def test_kernels_differ_by_what_they_are_compiled_for(compiler):
    calls = [
        lambda x: call("kernel", x),
        lambda x: call("kernel", x[:2], size=8),  # the same
        lambda x: call("kernel", x.astype(jnp.float32)),
        lambda x: call("kernel", x, size=1),
        lambda x: call("kernel", x, num_warps=8),
        lambda x: call("kernel", x, ROUNDING="nearest"),
    ]
    for function in calls:
        compile_and_lower(function)
    assert len(compiler.compiled) == 5


def test_a_failed_compilation_is_left_to_jax_triton(compiler):
    compiler.error = RuntimeError("out of registers")
    with pytest.raises(RuntimeError, match="out of registers"):
        compile_and_lower(lambda x: call("kernel", x))
    (compilation,) = launch_module._compilations.values()
    assert compilation.exception() is compiler.error


def test_a_compilation_that_has_not_started_is_not_awaited(compiler):
    program = jax.jit(lambda x: call("kernel", x))
    key = Call("kernel", (None, 7), (X,), PROGRAMS, 4, 1, (), ()).compiled_for([X])
    compilation = launch_module._compilations[key] = futures.Future()
    program.trace(X).lower(lowering_platforms=("cuda",))
    assert compilation.cancelled()
    assert [thread for _, thread in compiler.compiled] == [threading.current_thread()]


def test_identical_calls_are_equal():
    """So that JAX lowers them once."""
    call, other = (Call("k", (None,), (), PROGRAMS, 4, 1, (), ()) for _ in range(2))
    assert call == other
    assert hash(call) == hash(other)


@pytest.mark.usefixtures("compiler")
def test_calls_have_the_interface_that_cuda_graphs_need():
    text = compile_and_lower(lambda x: call("kernel", x, in_place={0: 0}))
    (line,) = (line for line in text.splitlines() if "custom_call" in line)
    assert "@triton_kernel_call_ffi(" in line
    assert "api_version = 4" in line
    assert 'opaque = "compressed"' in line
    assert "output_operand_aliases" in line
