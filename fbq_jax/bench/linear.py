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
_SETTLING_STEPS = 2  # until scales that lag a step belong to these operands


def rows(
    shapes: Sequence[tuple[int, ...]],
    *,
    implementation: str | None,
    effort: Effort,
) -> Iterator[Row]:
    """Measures ``Y = X . W``, ``dX`` and ``dW`` of each ``(M, K, N)``, bf16 in and out.

    The threshold is one that a fifth of X's blocks exceed, and a key makes the rounding
    stochastic, as in training.  The work counted is that of the products, ``6 M K N``,
    or ``2 M K N`` forward alone, whatever else a recipe computes.

    Raises:
      WrongResultError: if a product or gradient differs from the definition's.
    """
    others = list(contenders.others())
    for shape in shapes:
        M, K, N = shape
        keys = jax.random.split(jax.random.key(0), 3)
        x = data.activation(keys[0], (M, K))
        w = jax.random.normal(keys[1], (K, N), jnp.bfloat16) * K**-0.5
        dy = jax.random.normal(keys[2], (M, N), jnp.bfloat16)
        exact = _exact(x, w, dy)
        baselines: list[Row] = []
        for contender in (
            contenders.bf16(),
            *contenders.own(x, implementation),
            contenders.flax_fp8(x, w),
            *others,
        ):
            measured = list(_measure(contender, (x, w, dy), exact, baselines, effort))
            baselines = baselines or measured
            yield from measured


def _measure(
    contender: Contender,
    operands: tuple[jax.Array, jax.Array, jax.Array],
    exact: tuple[jax.Array, ...],
    baselines: Sequence[Row],
    effort: Effort,
) -> Iterator[Row]:
    """The row of all three products and, where asked for, that of the forward one."""
    x, w, dy = operands
    (M, K), (_, N) = x.shape, w.shape
    labels = {
        "implementation": contender.implementation,
        "shape": (M, K, N),
        "fallback": contender.fallback,
    }
    product, state, inputs = contender.product, contender.state, contender.inputs
    step, compile_s = measure.first_call(_step(product), x, w, dy, state, inputs)
    for _ in range(_SETTLING_STEPS):
        *arrays, state = step(x, w, dy, state, inputs)
    _check(contender, arrays, operands)
    errors = dict(zip(_ARRAYS, map(measure.relative_error, arrays, exact), strict=True))
    yield row(
        measure.timing(step, x, w, dy, state, inputs, effort=effort),
        6.0 * M * K * N,
        baselines[0] if baselines else None,
        what=contender.name,
        errors=errors,
        compile_s=compile_s,
        **labels,
    )
    if not contender.forward:
        return
    forward, compile_s = measure.first_call(product, x, w, state, inputs)
    error = measure.relative_error(forward(x, w, state, inputs), exact[0])
    yield row(
        measure.timing(forward, x, w, state, inputs, effort=effort),
        2.0 * M * K * N,
        baselines[1] if baselines else None,
        what=f"{contender.name}, forward",
        errors={"y": error},
        compile_s=compile_s,
        **labels,
    )


def _step(product: Product) -> Callable[..., tuple[Any, ...]]:
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
    contender: Contender,
    arrays: Sequence[jax.Array],
    operands: tuple[jax.Array, jax.Array, jax.Array],
) -> None:
    """Refuses what differs from the definition."""
    if contender.definition is None:
        return
    # Op by op, so that the recipes share what they compile.
    *expected, _ = _step(contender.definition)(
        *operands, contender.state, contender.inputs
    )
    shape = "{} x {} x {}".format(*operands[0].shape, operands[1].shape[1])
    for name, actual, wanted in zip(_ARRAYS, arrays, expected, strict=True):
        what = f"{name} of {contender.name} at {shape} by {contender.implementation}"
        measure.require(measure.relative_error(actual, wanted), _LIMIT, what)


@jax.jit
def _exact(x: jax.Array, w: jax.Array, dy: jax.Array) -> tuple[jax.Array, ...]:
    """``y, dx, dw`` in float32."""

    def product(x: jax.Array, w: jax.Array) -> jax.Array:
        return lax.dot_general(x, w, MATMUL, lax.Precision.HIGHEST)

    x, w, dy = (operand.astype(jnp.float32) for operand in (x, w, dy))
    y, vjp = jax.vjp(product, x, w)
    return y, *vjp(dy)
