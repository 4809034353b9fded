"""Kernels compile in other threads, and XLA launches them in its CUDA graphs."""

import os
import re
import subprocess
import sys
import threading
import time
import types
from concurrent import futures

import jax
import jax.numpy as jnp
import pytest
import triton
import triton.language as tl

from fbq_jax.kernels.triton import driver_cache
from fbq_jax.kernels.triton import launch as launch_module
from fbq_jax.kernels.triton.call import Call
from fbq_jax.kernels.triton.launch import launch

X = jnp.ones((4, 8), jnp.bfloat16)
PROGRAMS = (3, 2)


class Compiler:
    """Takes the place of Triton's compiler, and records kernels and threads."""

    def __init__(self):
        self.compiled = []
        self.error = None

    def __call__(self, call, _arrays, capability):
        assert capability == 90
        if self.error:
            raise self.error
        self.compiled.append((call.kernel, threading.current_thread()))
        metadata = types.SimpleNamespace(name=call.kernel, num_warps=8, shared=1000)
        return types.SimpleNamespace(metadata=metadata)


@pytest.fixture
def compiler(monkeypatch):
    compiler = Compiler()
    monkeypatch.setattr(launch_module, "_compilations", {})
    monkeypatch.setattr(launch_module, "_waiting", {})
    monkeypatch.setattr(launch_module, "_filled", set())
    monkeypatch.setattr(launch_module, "compute_capability", lambda: 90)
    # A function, so that it becomes a method.
    monkeypatch.setattr(Call, "compile", lambda *args: compiler(*args))
    monkeypatch.setattr(Call, "ptx", lambda *_: "the assembly")
    return compiler


class Kernel(str):
    """A kernel that is not one."""

    arg_names = ("x", "size", "out", "ROUNDING")


def call(kernel, x, size=7, **options):
    """Launches a kernel."""
    outputs = [jax.ShapeDtypeStruct(x.shape, x.dtype)]
    return launch(Kernel(kernel), x, size, outputs=outputs, grid=PROGRAMS, **options)[0]


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
        lambda x: call("kernel", x, size=2**40),
        lambda x: call("kernel", x, num_warps=8),
        lambda x: call("kernel", x, ROUNDING="nearest"),
    ]
    for function in calls:
        compile_and_lower(function)
    assert len(compiler.compiled) == 6


def test_an_error_of_the_compiler_comes_when_the_program_is_lowered(compiler):
    compiler.error = RuntimeError("out of registers")
    with pytest.raises(RuntimeError, match="out of registers"):
        compile_and_lower(lambda x: call("kernel", x))
    compiler.error = None  # such as a full disk, which now has room
    compile_and_lower(lambda x: -call("kernel", x))


def test_a_compilation_that_has_not_started_is_not_awaited(compiler):
    program = jax.jit(lambda x: call("kernel", x))
    key = Call(Kernel("kernel"), (None, 7), (X,), PROGRAMS, 4, 1, (), ())
    compilation = futures.Future()
    launch_module._compilations[key.compiled_for([X])] = compilation
    program.trace(X).lower(lowering_platforms=("cuda",))
    assert compilation.cancelled()
    assert [thread for _, thread in compiler.compiled] == [threading.current_thread()]
    compile_and_lower(lambda x: -call("kernel", x))
    assert len(compiler.compiled) == 1


def test_threads_that_lower_a_kernel_share_its_compilation(compiler, monkeypatch):
    compile_at_once = Call.compile

    def compile_slowly(*args):
        time.sleep(0.2)
        return compile_at_once(*args)

    monkeypatch.setattr(Call, "compile", compile_slowly)
    programs = [jax.jit(lambda x, n=n: call("kernel", x) + n) for n in range(4)]
    traced = [program.trace(X) for program in programs]
    futures.wait(launch_module._compilations.values())
    launch_module._compilations.clear()
    compiler.compiled.clear()
    with futures.ThreadPoolExecutor(len(traced)) as pool:
        lower = [
            pool.submit(program.lower, lowering_platforms=("cuda",))
            for program in traced
        ]
    assert all(lowered.result() for lowered in lower)
    assert len(compiler.compiled) == 1


def test_kernels_of_a_forward_pass_wait_until_one_is_lowered(compiler):
    def trace(*kernels):
        return jax.jit(lambda x: [call(k, x, waits=True) for k in kernels]).trace(X)

    trace("dropped")
    program = trace("first", "second")
    compile_and_lower(lambda x: call("gradient", x))
    assert [kernel for kernel, _ in compiler.compiled] == ["gradient"]
    program.lower(lowering_platforms=("cuda",))
    kernels = {str(kernel) for kernel, _ in compiler.compiled}
    assert kernels == {"gradient", "first", "second"}


def test_a_kernel_that_waits_starts_where_a_gradient_has_it(compiler):
    compile_and_lower(lambda x: [call("kernel", x, waits=True), call("kernel", x)])
    (compiled,) = compiler.compiled
    assert compiled[1] != threading.main_thread()
    assert not launch_module._waiting


def test_identical_calls_are_equal():
    """So that JAX lowers them once."""
    call, other = (Call("k", (None,), (), PROGRAMS, 4, 1, (), ()) for _ in range(2))
    assert call == other
    assert hash(call) == hash(other)


@pytest.mark.usefixtures("compiler")
def test_xla_knows_all_of_a_launch():
    text = compile_and_lower(lambda x: call("kernel", x, in_place={0: 0}))
    (line,) = (line for line in text.splitlines() if "custom_call" in line)
    assert "@__gpu$xla.gpu.ptx(" in line
    assert "output_operand_aliases" in line
    assert "output_indices = [1 : i32]" in line
    sizes = dict(re.findall(r"(\w+) = (\d+) : i32", line))
    assert [sizes[f"grid_{axis}"] for axis in "xyz"] == ["3", "2", "1"]
    assert [sizes[f"block_{axis}"] for axis in "xyz"] == ["256", "1", "1"]
    assert sizes["shared_mem_bytes"] == "1000"
    assert 'kernel_data = "the assembly"' in line


@pytest.mark.usefixtures("compiler")
def test_the_driver_compiles_each_kernel_once_in_another_thread(monkeypatch):
    filled, gpu = [], types.SimpleNamespace(local_hardware_id=3)
    monkeypatch.setattr(
        driver_cache, "fill", lambda *args: filled.append((args, threading.get_ident()))
    )
    compile_and_lower(lambda x: call("lowered for another machine", x))
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(jax, "local_devices", lambda: [gpu])
    with futures.ThreadPoolExecutor(1) as pool:
        monkeypatch.setattr(launch_module, "_driver_threads", lambda: pool)
        compile_and_lower(lambda x: call("kernel", x) + call("kernel", -x))
        compile_and_lower(lambda x: -call("kernel", x))
    assert [args for args, _ in filled] == [("the assembly", "kernel", 3)]
    assert filled[0][1] != threading.get_ident()


@triton.jit
def add(x, rows, step, y, limit, end, out, unit, COUNT: tl.constexpr):
    """Adds two arrays and uses each of its integers."""
    i = tl.program_id(0).to(tl.int64) * step + tl.arange(0, COUNT)
    inside = (i < limit) & (i < end)
    total = tl.load(x + i, inside) + tl.load(y + i, inside)
    tl.store(out + i, total + rows * unit, inside)


@triton.jit
def negate(x, out, COUNT: tl.constexpr):
    """Negates an array."""
    i = tl.arange(0, COUNT)
    tl.store(out + i, -tl.load(x + i))


F32 = jax.ShapeDtypeStruct((128,), jnp.float32)


def call_of(kernel, sizes, programs=None, **constants):
    """A launch of one program on arrays of 128 floats."""
    constants = tuple(sorted({"COUNT": 128, **constants}.items()))
    return Call(kernel, sizes, (F32,), (1,), 4, 1, (), constants, programs)


def compiled_add():
    """Integers of 32 bits, of 32 that the kernel extends to 64, and of 64; and a 1."""
    call = call_of(add, (None, 3, 1, None, 100, 2**40), unit=5)
    return call, call.compile([F32, F32], 90)


def test_the_ptx_of_a_call_takes_addresses_only(tmp_path):
    call, compiled = compiled_add()
    before, after = compiled.asm["ptx"], call.ptx(compiled)
    # Three arrays, three integers and two addresses of scratch memory.
    parameter = r"\.param [^\n]* add_param_\d+"
    assert len(re.findall(parameter, before)) == 8
    assert len(re.findall(parameter, after)) == 3
    for bits, register, integer in ((32, "r", 3), (64, "rd", 100), (64, "rd", 2**40)):
        assert re.search(rf"mul\.lo\.u{bits} %{register}\d+, .*, {integer};", after)
    file = tmp_path / "add.ptx"
    file.write_text(after)
    assembler = triton.knobs.nvidia.ptxas.path
    command = [assembler, "--gpu-name=sm_90a", "-o", tmp_path / "add.cubin", file]
    subprocess.run(command, check=True)


def test_registers_leave_room_for_the_programs_of_a_multiprocessor():
    call, free = (call_of(negate, (None,), programs) for programs in (12, None))
    assert ".maxnreg 40" in call.ptx(call.compile([F32], 90))  # of 42.7
    assert ".maxnreg" not in free.ptx(free.compile([F32], 90))
    assert free.compiled_for([F32]) != call.compiled_for([F32])


@pytest.mark.skipif(sys.version_info >= (3, 12), reason="threads may parse together")
def test_threads_parse_one_after_the_other(monkeypatch, tmp_path):
    """Python 3.11's parser raises an error if the parsing of two threads overlaps."""
    parse, parsing, overlaps = triton.JITFunction.parse, threading.Lock(), []

    def parse_slowly(kernel):
        overlaps.append(not parsing.acquire(blocking=False))
        time.sleep(0.02)
        if not overlaps[-1]:
            parsing.release()
        return parse(kernel)

    monkeypatch.setattr(triton.JITFunction, "parse", parse_slowly)
    monkeypatch.setattr(triton.knobs.cache, "dir", str(tmp_path))
    # Otherwise the last threads may read what the first one compiled.
    monkeypatch.setattr(triton.knobs.compilation, "always_compile", True)
    for kernel in (add, negate):
        monkeypatch.setattr(kernel, "hash", None)  # as in a new process
    with futures.ThreadPoolExecutor(4) as threads:
        compilations = [threads.submit(compiled_add) for _ in range(4)]
        call_of(negate, (None,)).compile([F32], 90)
        assert len({done.result()[1].hash for done in compilations}) == 1
    assert len(overlaps) > 5
    assert not any(overlaps)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("ld.param.b64 \t%rd", "ld.param.v2.b64 \t%rd"),  # the integer's load
        ("add_param_7", "add_param_07"),  # the declaration of scratch memory
    ],
)
def test_other_ptx_than_known_is_refused(before, after):
    call, compiled = compiled_add()
    ptx = compiled.asm["ptx"]
    assert before in ptx
    changed = types.SimpleNamespace(
        metadata=compiled.metadata, asm={"ptx": ptx.replace(before, after)}
    )
    with pytest.raises(
        RuntimeError, match=r"Triton .* compiled add to PTX that differs"
    ):
        call.ptx(changed)


@pytest.mark.gpu
def test_a_kernel_with_integers_runs():
    """It also takes the same array twice."""
    x = jnp.arange(128, dtype=jnp.float32)
    out = jax.ShapeDtypeStruct(x.shape, x.dtype)
    integers, constants = (100, 2**40), {"COUNT": 128, "unit": 5}

    def program(x):
        return launch(
            add,
            *(x, 3, 1, x, *integers),
            outputs=[out],
            grid=(1,),
            in_place={1: 0},
            **constants,
        )

    (actual,) = jax.jit(program)(x)
    assert jnp.array_equal(actual, jnp.where(x < 100, 2 * x + 15, x))


_FIRST_RUN = """
import sys
from pathlib import Path

import jax
import jax.numpy as jnp

from fbq_jax.kernels.triton import driver_cache, launch as launch_module
from tests.kernels.triton.test_launch import negate

cache = Path(sys.argv[1])
x = jnp.arange(128, dtype=jnp.float32)
jax.block_until_ready(x)
files = lambda: {p: p.stat().st_size for p in cache.rglob("*") if p.is_file()}
filled, fill = [], driver_cache.fill


def count_files(*args):
    before = files()
    fill(*args)
    filled.append((len(before), len(files())))


driver_cache.fill = count_files
outputs, grid = [jax.ShapeDtypeStruct(x.shape, x.dtype)], (1,)
program = jax.jit(
    lambda x: launch_module.launch(
        negate, x, outputs=outputs, grid=grid, COUNT=128
    )[0]
).lower(x).compile()
launch_module._driver_threads().shutdown()
(counts,) = filled
before = files()
assert jnp.array_equal(program(x), -x)
print(*counts, files() == before)
"""


@pytest.mark.gpu
def test_a_program_finds_its_kernels_in_the_cache_of_the_driver(tmp_path):
    """A new process has an empty cache, and the first run adds nothing to it."""
    environment = {
        **os.environ,
        "CUDA_CACHE_PATH": str(tmp_path),
        "CUDA_CACHE_DISABLE": "0",
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
    }
    command = [sys.executable, "-c", _FIRST_RUN, str(tmp_path)]
    output = subprocess.run(
        command, env=environment, check=True, capture_output=True, text=True
    ).stdout
    before, after, unchanged = output.split()
    assert int(before) < int(after)
    assert unchanged == "True"
