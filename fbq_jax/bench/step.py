"""A training step of Flax layers in wall-clock time: what users of the library get."""

import contextlib
import functools
import importlib
import itertools
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence

import jax
import jax.numpy as jnp
from flax import nnx

from fbq_jax.bench import data, layers, matmuls, measure
from fbq_jax.bench.layers import Program, Stack
from fbq_jax.bench.measure import Effort, RunningStep
from fbq_jax.bench.results import Row, row, with_ratios

# (tokens, D, F). Other INT8 libraries, which compile for long, take the first.
SHAPES = (
    (8192, 4096, 4096),
    (8192, 2048, 2048),
    (8192, 4096, 14336),
    (16384, 4096, 4096),
)
DEPTH = 8  # layers
FIRST_CALL_DEPTHS = (1, 12)  # layers of the steps whose first call is timed
# Until thresholds stay in their range, and delayed scales have reached the first layer.
SETTLING_STEPS = 16
# The limits of the errors through all layers. Of an update that has nothing to do with
# bf16's, the error is 1 or more.
_LIMITS = {"loss": 0.2, "update": 0.5}
# The standard deviations of the scales' logarithms, of tokens and of channels. They
# make some blocks of every layer's activation several times as large as others.
_SPREAD = 0.5
_KERNELS_WARM_UP_S = 0.2
_STEPS_INTO_RANGE = 4


def rows(
    shapes: Sequence[tuple[int, ...]],
    depth: int = DEPTH,
    *,
    implementation: str | None,
    effort: Effort,
) -> Iterator[Row]:
    """Measures steps of layers from D to F and back, for each ``(tokens, D, F)``.

    A step is forward, gradient and SGD update of float32 weights, computed in bf16,
    always on the same tokens. Work counts the layers' products; there is no dX of the
    first one.

    Raises:
      WrongResultError: if the loss or an update differs from bf16's by more than INT8
        may, or a fallback rate is outside the recipe's range.
    """
    bf16, *stacks = _stacks(depth, implementation)
    # A TPU belongs to one process.
    timed = [] if jax.default_backend() == "tpu" else [bf16, *stacks]
    first_calls = {
        stack: _first_calls(stack, shapes[0], implementation)
        for stack in timed
        if stack is bf16 or stack.name in layers.RECIPES
    }
    libraries = list(layers.installed_int8_libraries(depth))
    measured = {
        shape: stacks if i else stacks + libraries for i, shape in enumerate(shapes)
    }
    # Alone, because XLA chooses the kernels of what all others are compared with by
    # timing them.
    baselines = [compile_stack(bf16, shape, depth) for shape in shapes]
    # All shapes at the same time: one slow program does not hold up the others.
    programs = layers.compile_together(
        [
            functools.partial(compile_stack, stack, shape, depth)
            for shape, stacks in measured.items()
            for stack in stacks
        ]
    )
    for (shape, stacks), baseline in zip(measured.items(), baselines, strict=True):
        compiled = [(stack, programs.pop(0)) for stack in stacks]
        calls = first_calls if shape == shapes[0] else {}
        yield from with_ratios(
            _rows(shape, depth, [(bf16, baseline), *compiled], calls, effort)
        )


def _first_calls(
    stack: Stack, shape: tuple[int, ...], implementation: str | None
) -> dict[str, float]:
    """The seconds of the first call, by the number of layers.

    Each is measured in a process of its own, which has compiled nothing before.
    """
    return {
        str(depth): _in_new_process(
            f"from {__name__} import first_call_s\n"
            f"print(first_call_s({stack.name!r}, {shape}, {depth}, {implementation!r}))"
        )
        for depth in FIRST_CALL_DEPTHS
    }


def _in_new_process(program: str) -> float:
    """Runs a Python program without cached compilations; returns the number it prints.

    Raises:
      RuntimeError: if the program fails.
    """
    with tempfile.TemporaryDirectory() as empty:
        environment = os.environ | {
            "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
            "TRITON_CACHE_DIR": f"{empty}/triton",
            "CUDA_CACHE_PATH": f"{empty}/cuda",  # of the driver, which assembles PTX
        }
        environment.pop("JAX_COMPILATION_CACHE_DIR", None)
        command = [sys.executable, "-c", program]
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"a process that measures failed: {program}\n{done.stderr}")
    return float(done.stdout.split()[-1])


def first_call_s(
    name: str, shape: tuple[int, ...], depth: int, implementation: str | None
) -> float:
    """The seconds of a step's first call: tracing, lowering, compilation and one run.

    Imports are not counted, and among them PyTorch's, which takes seconds: Triton
    imports it where it is installed, when it compiles its first kernel.
    """
    with contextlib.suppress(ImportError):
        importlib.import_module("torch")
    # No other stack, because the kernels of its layers would compile at the same time.
    if name == "bf16":
        stack: Stack = layers.bf16(depth)
    else:
        (stack,) = layers.linen(depth, implementation, (name,))
    x, key, kernels = operands(shape, depth)
    state = jax.block_until_ready(stack.start(kernels))
    start = time.perf_counter()
    program = compile_stack(stack, shape, depth)
    jax.block_until_ready(program.step(state, x, key))
    return time.perf_counter() - start


def _stacks(depth: int, implementation: str | None) -> list[Stack]:
    """What is measured for every shape; bf16 is the first."""
    return [
        layers.bf16(depth),
        layers.flax_fp8(depth),
        *layers.linen(depth, implementation, matmuls.TIMED),
        layers.nnx_stack("fallback", implementation),
    ]


def compile_stack(stack: Stack, shape: tuple[int, ...], depth: int) -> Program:
    """Compiles a stack's step for ``(tokens, D, F)``; allocates nothing."""
    x, key, kernels = jax.eval_shape(functools.partial(operands, shape, depth))
    return stack.compile_training(nnx.eval_shape(stack.start, kernels), x, key)


def _rows(
    shape: tuple[int, ...],
    depth: int,
    compiled: Sequence[tuple[Stack, Program]],
    first_calls: Mapping[Stack, dict[str, float]],
    effort: Effort,
) -> Iterator[Row]:
    x, key, kernels = operands(shape, depth)
    exact: tuple[jax.Array, ...] = ()
    for stack, program in compiled:
        step = RunningStep(program.step, stack.start(kernels), x, key)
        what = f"{stack.name} at {shape}"
        results = _settle(stack, step)
        exact = exact or results
        errors = measure.checked_errors(_LIMITS, results, exact, what)
        timing = measure.running_timing(step, effort=effort)
        launches, kernels_ms = _launches(step)
        yield row(
            timing,
            work(shape, depth),
            what=stack.name,
            implementation=stack.backend,
            shape=shape,
            fallback=_settled_rate(stack, step, what),
            errors=errors,
            compile_s=program.compile_s,
            first_calls_s=first_calls.get(stack),
            launches=None if launches is None else launches / depth,
            kernels_ms=kernels_ms,
            gap_ms=None if kernels_ms is None else timing.ms - kernels_ms,
            conditionals=program.text.count(" conditional("),
        )


def _settle(stack: Stack, step: RunningStep) -> tuple[jax.Array, ...]:
    """Runs the first steps; returns the last one's loss and first layer's update."""
    for _ in range(SETTLING_STEPS - 1):
        step()
    before = jnp.copy(stack.first_kernel(step.state))
    loss = step()
    return loss, stack.first_kernel(step.state) - before


def _settled_rate(stack: Stack, step: RunningStep, what: str) -> float | None:
    """The mean fallback rate; raises if one does not come into the recipe's range.

    As weights change, a rate leaves the range for single steps: then its threshold
    moves. So a few steps more may be needed.
    """
    for _ in range(_STEPS_INTO_RANGE):
        if layers.rates_in_range(stack, step.state):
            break
        step()
    return layers.checked_rate(stack, step.state, what)


def _launches(step: RunningStep) -> tuple[int, float] | tuple[None, None]:
    """The number and the milliseconds of a step's kernels; None without CUPTI."""
    end = time.perf_counter() + _KERNELS_WARM_UP_S
    while time.perf_counter() < end:
        jax.block_until_ready(step())
    try:
        kernels = measure.kernels(step)
    except measure.NoKernelsError:
        return None, None
    return len(kernels), sum(ms for _, ms in kernels)


def work(shape: tuple[int, ...], depth: int) -> float:
    """Operations of a step: three products a layer, but two in the first."""
    tokens, D, F = shape
    return 2.0 * tokens * D * F * (3 * depth - 1)


def operands(
    shape: tuple[int, ...], depth: int
) -> tuple[jax.Array, jax.Array, list[jax.Array]]:
    """The activation, a key for noise, and the kernels of ``(tokens, D, F)``.

    The kernels are float32, ``[D, F]``, ``[F, D]``, ...
    """
    tokens, D, F = shape
    keys = jax.random.split(jax.random.key(0), 3)
    shapes = itertools.islice(itertools.cycle(((D, F), (F, D))), depth)
    of_kernels = zip(jax.random.split(keys[2], depth), shapes, strict=True)
    x = _activation(keys[0], (tokens, D))
    return x, keys[1], [_kernel(key, shape) for key, shape in of_kernels]


@functools.partial(jax.jit, static_argnums=1)
def _activation(key: jax.Array, shape: tuple[int, int]) -> jax.Array:
    """A bf16 array ``[tokens, channels]`` with heavy tails, also among tokens."""
    x_key, scale_key = jax.random.split(key)
    scales = _scales(scale_key, (shape[0], 1))
    return data.activation(x_key, shape) * scales.astype(jnp.bfloat16)


@functools.partial(jax.jit, static_argnums=1)
def _kernel(key: jax.Array, shape: tuple[int, int]) -> jax.Array:
    """A kernel whose outputs have many scales."""
    w_key, scale_key = jax.random.split(key)
    scales = _scales(scale_key, (1, shape[1]))
    return jax.random.normal(w_key, shape) * shape[0] ** -0.5 * scales


def _scales(key: jax.Array, shape: tuple[int, int]) -> jax.Array:
    """Log-normal scales whose mean square is 1."""
    return jnp.exp(_SPREAD * jax.random.normal(key, shape) - _SPREAD**2)
