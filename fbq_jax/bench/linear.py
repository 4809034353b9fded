"""A linear layer's three products, forward and backward, beside what else there is."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from fbq_jax.bench import contenders, data, measure
from fbq_jax.bench.contenders import MATMUL, Contender, Product
from fbq_jax.bench.measure import Effort
from fbq_jax.bench.results import Row, row

SHAPES = ((8192, 4096, 4096), (8192, 4096, 14336), (8192, 14336, 4096))
_ARRAYS = ("y", "dx", "dw")
# bf16 outputs whose float32 sums were in another order: some round the other way.
_LIMIT = 1e-3
# The definition is slow to compile: it is asked for a corner of this size.
_CORNER = 1024
# What INT8 may lose against float32.
_LOSS = 0.1
SETTLING_STEPS = 2  # until scales that lag a step belong to these operands


def rows(
    shapes: Sequence[tuple[int, ...]],
    *,
    implementation: str | None,
    effort: Effort,
) -> Iterator[Row]:
    """Measures ``Y = X . W``, ``dX`` and ``dW`` of each ``(M, K, N)``, bf16 in and out.

    The threshold is one that a fifth of X's blocks exceed, and a key makes the rounding
    stochastic, as in training.  The work counted is that of the products, ``6 M K N``,
    whatever else a recipe computes.

    Raises:
      WrongResultError: if a product or gradient differs from the definition's, on a
        corner of the operands, or from float32 by more than INT8 loses.
    """
    others = list(contenders.others())
    for shape in shapes:
        M, K, N = shape
        keys = jax.random.split(jax.random.key(0), 3)
        x = data.activation(keys[0], (M, K))
        w = jax.random.normal(keys[1], (K, N), jnp.bfloat16) * K**-0.5
        dy = jax.random.normal(keys[2], (M, N), jnp.bfloat16)
        exact = exact_products(x, w, dy)
        baseline: Row | None = None
        for contender in (
            contenders.bf16(),
            *contenders.own(x, implementation),
            contenders.flax_fp8(x, w),
            *others,
        ):
            measured = _measure(contender, (x, w, dy), exact, baseline, effort)
            baseline = baseline or measured
            yield measured


def _measure(
    contender: Contender,
    operands: tuple[jax.Array, jax.Array, jax.Array],
    exact: tuple[jax.Array, ...],
    baseline: Row | None,
    effort: Effort,
) -> Row:
    x, w, dy = operands
    (M, K), (_, N) = x.shape, w.shape
    product, state, inputs = contender.product, contender.state, contender.inputs
    step, compile_s = measure.first_call(step_of(product), x, w, dy, state, inputs)
    _check(contender, operands)
    for _ in range(SETTLING_STEPS):
        *arrays, state = step(x, w, dy, state, inputs)
    errors = dict(zip(_ARRAYS, map(measure.relative_error, arrays, exact), strict=True))
    for name, error in errors.items():
        measure.require(error, _LOSS, f"{name} of {contender.name} at {(M, K, N)}")
    return row(
        measure.timing(step, x, w, dy, state, inputs, effort=effort),
        6.0 * M * K * N,
        baseline,
        what=contender.name,
        implementation=contender.implementation,
        shape=(M, K, N),
        fallback=contender.fallback,
        errors=errors,
        compile_s=compile_s,
    )


def step_of(product: Product) -> Callable[..., tuple[Any, ...]]:
    """``(y, dx, dw, new state)`` of a product."""

    def step(
        x: jax.Array, w: jax.Array, dy: jax.Array, state: Any, inputs: Any
    ) -> tuple[Any, ...]:
        def forward(x: jax.Array, w: jax.Array, state: Any) -> jax.Array:
            return product(x, w, state, inputs)

        y, vjp = jax.vjp(forward, x, w, state)
        return y, *vjp(dy)

    return step


def _check(
    contender: Contender, operands: tuple[jax.Array, jax.Array, jax.Array]
) -> None:
    """Refuses what differs from the definition, on a corner of the operands."""
    if contender.definition is None:
        return
    corner = tuple(operand[:_CORNER, :_CORNER] for operand in operands)
    # Op by op, so that shapes and recipes share what they compile.
    *actual, _ = step_of(contender.product)(*corner, contender.state, contender.inputs)
    *wanted, _ = step_of(contender.definition)(
        *corner, contender.state, contender.inputs
    )
    for name, *pair in zip(_ARRAYS, actual, wanted, strict=True):
        what = f"{name} of {contender.name} by {contender.implementation}"
        measure.require(measure.relative_error(*pair), _LIMIT, what)


@jax.jit
def exact_products(x: jax.Array, w: jax.Array, dy: jax.Array) -> tuple[jax.Array, ...]:
    """``y, dx, dw`` in float32."""

    def product(x: jax.Array, w: jax.Array) -> jax.Array:
        return lax.dot_general(x, w, MATMUL, lax.Precision.HIGHEST)

    x, w, dy = (operand.astype(jnp.float32) for operand in (x, w, dy))
    y, vjp = jax.vjp(product, x, w)
    return y, *vjp(dy)
