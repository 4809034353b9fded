"""A linear layer's three products, forward and backward, against other libraries."""

import functools
from collections.abc import Iterator, Sequence

import jax
import jax.numpy as jnp
from jax import lax

from fbq_jax.bench import data, layers, matmuls
from fbq_jax.bench.compare import Comparison, compile_all
from fbq_jax.bench.layers import Stack
from fbq_jax.bench.measure import Effort
from fbq_jax.bench.results import Row

SHAPES = ((8192, 4096, 4096), (8192, 4096, 14336), (8192, 14336, 4096))
SETTLING_STEPS = 2  # until delayed scales fit these operands
_LIMITS = dict.fromkeys(("y", "dx", "dw"), 0.1)  # errors of INT8 against float32
_OTHERS = "row_block", "fp8_row_block"  # recipes that only this section measures


def rows(
    shapes: Sequence[tuple[int, ...]], *, implementation: str | None, effort: Effort
) -> Iterator[Row]:
    """Measures ``Y = X . W``, ``dX`` and ``dW`` of each ``(M, K, N)``, bf16 in and out.

    The layers are Flax's, with state that moves, as in training.  Work counts the
    products' ``6 M K N`` operations and nothing that a recipe adds. The products and
    gradients are checked against float32's.
    """
    stacks = _stacks(implementation)
    for shape in shapes:
        M, K, N = shape
        keys = jax.random.split(jax.random.key(0), 3)
        x = data.activation(keys[0], (M, K))
        w = jax.random.normal(keys[1], (K, N), jnp.bfloat16) * K**-0.5
        dy = jax.random.normal(keys[2], (M, N), jnp.bfloat16)
        inputs = x, dy, jax.random.key(1)
        kernels: functools.partial[list[jax.Array]] = functools.partial(list, [w])
        compilations = [
            functools.partial(stack.program, layers.products_step, kernels, *inputs)
            for stack in stacks
        ]
        yield from Comparison(
            shape,
            6.0 * M * K * N,
            inputs,
            _LIMITS,
            SETTLING_STEPS,
            exact=exact_products(x, w, dy),
            checks_rates=True,
        ).rows(compile_all(compilations), effort)


def _stacks(implementation: str | None) -> list[Stack]:
    """The Flax layers to measure; bf16 is the first."""
    return [
        layers.bf16(1),
        layers.flax_fp8(1),
        *layers.linen(1, implementation, (*matmuls.TIMED, *_OTHERS)),
        *(layers.nnx_stack(name, implementation) for name in layers.RECIPES),
        *layers.installed_int8_libraries(1),
    ]


@jax.jit
def exact_products(x: jax.Array, w: jax.Array, dy: jax.Array) -> tuple[jax.Array, ...]:
    """``y, dx, dw`` in float32."""
    x, w, dy = (operand.astype(jnp.float32) for operand in (x, w, dy))
    product = functools.partial(jnp.matmul, precision=lax.Precision.HIGHEST)
    y, vjp = jax.vjp(product, x, w)
    return y, *vjp(dy)
