"""A linear layer's three products, forward and backward, against other libraries.

They are measured through Flax layers, as users call them, and as calls of the
functional core, which are a part of that.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from fbq_jax.bench import data, layers, matmuls, measure
from fbq_jax.bench.layers import Stack
from fbq_jax.bench.matmuls import MATMUL, Matmul, Product
from fbq_jax.bench.measure import Effort, RunningStep, Timing
from fbq_jax.bench.results import Row, row, with_ratios

SHAPES = ((8192, 4096, 4096), (8192, 4096, 14336), (8192, 14336, 4096))
SETTLING_STEPS = 2  # until delayed scales fit these operands
# Recipes that are measured only in ``nn.Dense``, not in the core.
_OTHERS = "row_block", "fp8_row_block"
_ARRAYS = ("y", "dx", "dw")
_INT8_LIMITS = dict.fromkeys(_ARRAYS, 0.1)  # errors of INT8 against float32
# The reference compiles slowly: it computes only a corner of this size.
_CORNER = 1024

Operands = tuple[jax.Array, ...]  # X, W and dY, or Y, dX and dW


def rows(
    shapes: Sequence[tuple[int, ...]], *, implementation: str | None, effort: Effort
) -> Iterator[Row]:
    """Measures ``Y = X . W``, ``dX`` and ``dW`` of each ``(M, K, N)``, bf16 in and out.

    First come Flax layers with state that moves, as in training. Their bursts time
    calls, and their baseline is bf16 in ``nn.Dense``.

    Then comes the functional core, without state: a fifth of X's blocks exceed the
    given threshold, and a key makes the rounding stochastic.

    Work counts the products' ``6 M K N`` operations and nothing that a recipe adds.

    Raises:
      WrongResultError: if a product or gradient differs from the reference on a corner
        of the operands, or from float32 by more than INT8 may; or if a layer's fallback
        rate is outside the recipe's range.
    """
    libraries = [matmul for matmul, _ in matmuls.installed_int8_libraries()]
    stacks = _stacks(implementation)
    for M, K, N in shapes:
        keys = jax.random.split(jax.random.key(0), 3)
        x = data.activation(keys[0], (M, K))
        w = jax.random.normal(keys[1], (K, N), jnp.bfloat16) * K**-0.5
        dy = jax.random.normal(keys[2], (M, N), jnp.bfloat16)
        exact = exact_products(x, w, dy)
        yield from with_ratios(_layer_rows(stacks, (x, w, dy), exact, effort))
        core = [
            matmuls.bf16(),
            *matmuls.timed(x, implementation),
            matmuls.flax_fp8(x, w),
            *libraries,
        ]
        yield from with_ratios(
            _core_row(matmul, (x, w, dy), exact, effort) for matmul in core
        )


def _stacks(implementation: str | None) -> list[Stack]:
    """The Flax layers to measure; bf16 is the first."""
    return [
        layers.bf16(1),
        layers.flax_fp8(1),
        *layers.linen(1, implementation, (*matmuls.TIMED, *_OTHERS)),
        *(layers.nnx_stack(name, implementation) for name in layers.RECIPES),
    ]


def _layer_rows(
    stacks: Sequence[Stack], operands: Operands, exact: Operands, effort: Effort
) -> Iterator[Row]:
    """The rows of Flax layers, whose programs are compiled at the same time."""
    x, w, dy = operands
    inputs = x, dy, jax.random.key(1)
    states = [stack.start([w]) for stack in stacks]
    programs = layers.compile_together(
        [
            functools.partial(stack.compile_products, state, *inputs)
            for stack, state in zip(stacks, states, strict=True)
        ]
    )
    for stack, program, state in zip(stacks, programs, states, strict=True):
        step = RunningStep(program.step, state, *inputs)
        for _ in range(SETTLING_STEPS):
            arrays = step()
        what = f"{stack.name} in {stack.layer} at {(*x.shape, w.shape[1])}"
        errors = measure.checked_errors(_INT8_LIMITS, arrays, exact, what)
        yield _row(
            operands,
            measure.running_timing(step, effort=effort),
            what=stack.name,
            layer=stack.layer,
            implementation=stack.backend,
            fallback=layers.checked_rate(stack, step.state, what),
            errors=errors,
            compile_s=program.compile_s,
        )


def _core_row(
    matmul: Matmul, operands: Operands, exact: Operands, effort: Effort
) -> Row:
    """The row of a call of the functional core."""
    state, inputs = matmul.state, matmul.inputs
    step, compile_s, _ = measure.first_call(
        jax.jit(step_of(matmul.product)), *operands, state, inputs
    )
    _check_reference(matmul, operands)
    for _ in range(SETTLING_STEPS):
        *arrays, state = step(*operands, state, inputs)
    return _row(
        operands,
        measure.timing(step, *operands, state, inputs, effort=effort),
        what=matmul.name,
        layer="core",
        implementation=matmul.implementation,
        fallback=matmul.fallback,
        errors=measure.checked_errors(_INT8_LIMITS, arrays, exact, matmul.name),
        compile_s=compile_s,
    )


def _row(operands: Operands, timing: Timing, **labels: Any) -> Row:
    """The row of a layer's three products."""
    x, w, _ = operands
    shape = M, K, N = *x.shape, w.shape[1]
    return row(timing, 6.0 * M * K * N, shape=shape, **labels)


def step_of(product: Product) -> Callable[..., tuple[Any, ...]]:
    """The function ``(x, w, dy, state, inputs) -> (y, dx, dw, new state)``."""

    def step(
        x: jax.Array, w: jax.Array, dy: jax.Array, state: Any, inputs: Any
    ) -> tuple[Any, ...]:
        def forward(x: jax.Array, w: jax.Array, state: Any) -> jax.Array:
            return product(x, w, state, inputs)

        y, vjp = jax.vjp(forward, x, w, state)
        return y, *vjp(dy)

    return step


def _check_reference(matmul: Matmul, operands: Operands) -> None:
    """Raises if a corner of the results differs from the reference's."""
    if matmul.reference is None:
        return
    args = *(x[:_CORNER, :_CORNER] for x in operands), matmul.state, matmul.inputs
    # Eager, so that shapes and recipes share compiled ops.
    *actual, _ = step_of(matmul.product)(*args)
    *expected, _ = step_of(matmul.reference)(*args)
    what = f"{matmul.name} by {matmul.implementation}"
    limits = dict.fromkeys(_ARRAYS, matmul.reference_limit)
    measure.checked_errors(limits, actual, expected, what)


@jax.jit
def exact_products(x: jax.Array, w: jax.Array, dy: jax.Array) -> tuple[jax.Array, ...]:
    """``y, dx, dw`` in float32."""

    def product(x: jax.Array, w: jax.Array) -> jax.Array:
        return lax.dot_general(x, w, MATMUL, lax.Precision.HIGHEST)

    x, w, dy = (operand.astype(jnp.float32) for operand in (x, w, dy))
    y, vjp = jax.vjp(product, x, w)
    return y, *vjp(dy)
