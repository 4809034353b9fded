"""Launches of Triton kernels: what XLA gets, and when kernels compile."""

import re
import sys
import threading
from concurrent import futures

import jax
import jax.numpy as jnp
import jax_triton
import pytest
import triton
import triton.language as tl

from fbq_jax.kernels.triton import compile_ahead
from fbq_jax.kernels.triton.launch import launch
from tests import gpus
from tests.compile_tools import compile_kernels


@triton.jit
def add(x, rows, step, y, limit, end, out, unit, COUNT: tl.constexpr):
    """Adds two arrays and uses each of its integers."""
    i = tl.program_id(0).to(tl.int64) * step + tl.arange(0, COUNT)
    inside = (i < limit) & (i < end)
    total = tl.load(x + i, inside) + tl.load(y + i, inside)
    tl.store(out + i, total + rows * unit, inside)


@triton.jit
def multiply_add(x, y, out, COUNT: tl.constexpr):
    """``x * y + x``."""
    i = tl.arange(0, COUNT)
    a = tl.load(x + i)
    tl.store(out + i, a * tl.load(y + i) + a)


X = jax.ShapeDtypeStruct((128,), jnp.float32)


def add_in_place(x):
    """Two arrays, and integers, of which one is 1."""
    (out,) = launch(
        *(add, x, 3, 1, x, 100, 2**31 - 1),
        outputs=[X],
        grid=(1,),
        in_place={1: 0},
        COUNT=128,
        unit=5,
    )
    return out


def fused(x, y):
    return launch(multiply_add, x, y, outputs=[X], grid=(1,), COUNT=128)


@pytest.fixture
def hopper(monkeypatch):
    gpus.compile_for_hopper(monkeypatch)
    monkeypatch.setattr(compile_ahead, "_compilations", {})


def lower(function, *args):
    return jax.jit(function).trace(*args).lower(lowering_platforms=("cuda",))


@pytest.mark.usefixtures("hopper")
def test_xla_gets_a_typed_call_that_writes_in_place():
    (call,) = re.findall(r"stablehlo\.custom_call .*", lower(add_in_place, X).as_text())
    assert "@triton_kernel_call_ffi(%arg0, %arg0)" in call
    assert "opaque = " in call
    (alias,) = re.findall(r"output_operand_alias<([^>]*)>", call)
    assert "output_tuple_indices = [], operand_index = 1" in alias


@pytest.mark.usefixtures("hopper")
def test_equal_calls_have_one_kernel():
    """By this text jaxlib knows which kernels are loaded already."""
    text = lower(lambda x, y: [fused(x, y), fused(x, y)], X, X).as_text()
    first, second = re.findall(r'opaque = (".*?")', text)
    assert first == second


def test_products_and_sums_are_not_fused():
    (kernel,) = compile_kernels(fused, X, X, capability=90)
    assert "fma." not in kernel.ptx
    assert "mul.rn.f32" in kernel.ptx or "mul.f32" in kernel.ptx


needs_threads = pytest.mark.skipif(
    sys.version_info < (3, 12), reason="kernels compile one after the other"
)


@pytest.fixture
def compiled(monkeypatch, request):
    """The threads in which jax-triton was called."""
    request.getfixturevalue("hopper")
    threads, call = [], jax_triton.triton_call

    def triton_call(*args, **options):
        threads.append(threading.current_thread())
        return call(*args, **options)

    monkeypatch.setattr(jax_triton, "triton_call", triton_call)
    return threads


@needs_threads
def test_a_kernel_compiles_in_a_thread_once_its_call_is_traced(compiled):
    traced = jax.jit(lambda x, y: fused(x, y)).trace(X, X)
    futures.wait(compile_ahead._compilations.values())
    (ahead,) = compiled
    assert ahead != threading.main_thread()
    traced.lower(lowering_platforms=("cuda",))
    assert compiled == [ahead, threading.main_thread()]


@needs_threads
def test_a_kernel_that_waits_for_a_thread_compiles_where_it_is_lowered(
    compiled, monkeypatch
):
    blocked = threading.Event()
    with futures.ThreadPoolExecutor(1) as pool:
        pool.submit(blocked.wait)
        monkeypatch.setattr(compile_ahead, "_threads", pool)
        lower(lambda x, y: fused(x, y), X, X)
        blocked.set()
    assert compiled == [threading.main_thread()]


@triton.jit
def undefined(x, out):
    tl.store(out, missing(x))  # noqa: F821


@pytest.mark.usefixtures("hopper")
def test_every_program_raises_an_error_of_the_compiler():
    for _ in range(2):
        with pytest.raises(triton.CompilationError, match="missing is not defined"):
            lower(lambda x: launch(undefined, x, outputs=[X], grid=(1,)), X)


@pytest.mark.gpu
def test_a_kernel_with_integers_runs():
    """It also takes the same array twice."""
    x = jnp.arange(128, dtype=jnp.float32)
    actual = jax.jit(add_in_place)(x)
    assert jnp.array_equal(actual, jnp.where(x < 100, 2 * x + 15, x))
