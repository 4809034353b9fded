"""A linear layer's three products, forward and backward, against other libraries."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from fbq_jax.bench import baselines, data, matmuls, measure
from fbq_jax.bench.matmuls import MATMUL, Matmul, Product
from fbq_jax.bench.measure import Effort
from fbq_jax.bench.results import Row, row, with_ratios

SHAPES = ((8192, 4096, 4096), (8192, 4096, 14336), (8192, 14336, 4096))
SETTLING_STEPS = 2  # until delayed scales fit these operands
_ARRAYS = ("y", "dx", "dw")
_INT8_LIMIT = 0.1  # error of INT8 against float32
# bf16 outputs of float32 sums in another order: some values round the other way.
_REFERENCE_LIMIT = 1e-3
# The reference compiles slowly: it computes only a corner of this size.
_CORNER = 1024


def rows(
    shapes: Sequence[tuple[int, ...]], *, implementation: str | None, effort: Effort
) -> Iterator[Row]:
    """Measures ``Y = X . W``, ``dX`` and ``dW`` of each ``(M, K, N)``, bf16 in and out.

    A fifth of X's blocks exceed the threshold, and a key makes the rounding stochastic,
    as in training. Work counts the products' ``6 M K N`` operations and nothing that a
    recipe adds.

    Raises:
      WrongResultError: if a product or gradient differs from the reference on a corner
        of the operands, or from float32 by more than INT8 may.
    """
    int8_libraries = list(baselines.installed_int8_libraries())
    for shape in shapes:
        M, K, N = shape
        keys = jax.random.split(jax.random.key(0), 3)
        x = data.activation(keys[0], (M, K))
        w = jax.random.normal(keys[1], (K, N), jnp.bfloat16) * K**-0.5
        dy = jax.random.normal(keys[2], (M, N), jnp.bfloat16)
        exact = exact_products(x, w, dy)
        measured = [
            baselines.bf16(),
            *matmuls.timed(x, implementation),
            baselines.flax_fp8(x, w),
            *int8_libraries,
        ]
        yield from with_ratios(
            _measure(matmul, (x, w, dy), exact, effort) for matmul in measured
        )


def _measure(
    matmul: Matmul,
    operands: tuple[jax.Array, jax.Array, jax.Array],
    exact: tuple[jax.Array, ...],
    effort: Effort,
) -> Row:
    x, w, _ = operands
    (M, K), (_, N) = x.shape, w.shape
    state, inputs = matmul.state, matmul.inputs
    step, compile_s, _ = measure.first_call(
        jax.jit(step_of(matmul.product)), *operands, state, inputs
    )
    _check_reference(matmul, operands)
    for _ in range(SETTLING_STEPS):
        *arrays, state = step(*operands, state, inputs)
    what = f"{matmul.name} at {(M, K, N)}"
    errors = measure.checked_errors(_ARRAYS, arrays, exact, _INT8_LIMIT, what)
    return row(
        measure.timing(step, *operands, state, inputs, effort=effort),
        6.0 * M * K * N,
        what=matmul.name,
        implementation=matmul.implementation,
        shape=(M, K, N),
        fallback=matmul.fallback,
        errors=errors,
        compile_s=compile_s,
    )


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


def _check_reference(
    matmul: Matmul, operands: tuple[jax.Array, jax.Array, jax.Array]
) -> None:
    """Raises if a corner of the results differs from the reference's."""
    if matmul.reference is None:
        return
    args = *(x[:_CORNER, :_CORNER] for x in operands), matmul.state, matmul.inputs
    # Eager, so that shapes and recipes share compiled ops.
    *actual, _ = step_of(matmul.product)(*args)
    *expected, _ = step_of(matmul.reference)(*args)
    what = f"{matmul.name} by {matmul.implementation}"
    measure.checked_errors(_ARRAYS, actual, expected, _REFERENCE_LIMIT, what)


@jax.jit
def exact_products(x: jax.Array, w: jax.Array, dy: jax.Array) -> tuple[jax.Array, ...]:
    """``y, dx, dw`` in float32."""

    def product(x: jax.Array, w: jax.Array) -> jax.Array:
        return lax.dot_general(x, w, MATMUL, lax.Precision.HIGHEST)

    x, w, dy = (operand.astype(jnp.float32) for operand in (x, w, dy))
    y, vjp = jax.vjp(product, x, w)
    return y, *vjp(dy)
