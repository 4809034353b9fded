"""Kernels compile in other threads, before JAX lowers their calls."""

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
from fbq_jax.kernels.triton.launch import Grid, launch

X = jnp.ones((4, 8), jnp.bfloat16)
PROGRAMS = (3, 2)


class Compiler:
    """jax-triton without Triton: it compiles a kernel when a call is lowered."""

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

    def triton_call(self, *args, kernel, out_shape, grid, **_options):
        arrays = [x for x in args if not isinstance(x, int)]
        return self._call_p.bind(
            *arrays, kernel=kernel, outputs=tuple(out_shape), grid=grid
        )

    def _lower(self, ctx, *args, kernel, outputs, grid):
        if callable(grid):
            grid = grid({})
            assert grid == PROGRAMS
        elif self.error:
            raise self.error
        else:
            self.compiled.append((kernel, threading.current_thread()))
        zeros = mlir.lower_fun(
            lambda *_: [jnp.zeros(x.shape, x.dtype) for x in outputs],
            multiple_results=True,
        )
        return zeros(ctx, *args)


@pytest.fixture
def compiler(monkeypatch):
    compiler = Compiler()
    fake = types.SimpleNamespace(triton_call=compiler.triton_call)
    monkeypatch.setitem(sys.modules, "jax_triton", fake)
    monkeypatch.setattr(launch_module, "_compilations", {})
    return compiler


def call(kernel, x, size=7, **constants):
    """Launches a kernel."""
    outputs = [jax.ShapeDtypeStruct(x.shape, jnp.int8)]
    return launch(kernel, x, size, outputs=outputs, grid=PROGRAMS, **constants)[0]


def compile_and_lower(function):
    """Traces a function, awaits the other threads, and lowers it for a GPU."""
    program = jax.jit(function).trace(X)
    futures.wait(launch_module._compilations.values())
    program.lower(lowering_platforms=("cuda",))


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
    compile_and_lower(lambda x: call("kernel", x))
    (compilation,) = launch_module._compilations.values()
    assert compilation.exception() is compiler.error


def test_a_compilation_that_has_not_started_is_not_awaited():
    compilation = futures.Future()
    assert Grid(PROGRAMS, compilation)({}) == PROGRAMS
    assert compilation.cancelled()


def test_grids_are_equal_whoever_compiles():
    """So that JAX lowers identical calls once."""
    grid, other = (Grid(PROGRAMS, futures.Future()) for _ in range(2))
    assert grid == other
    assert hash(grid) == hash(other)
