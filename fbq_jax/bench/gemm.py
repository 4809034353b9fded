"""The block-scaled INT8 GEMM beside XLA's bf16 one."""

import functools
import math
from collections.abc import Iterator, Sequence

import jax
import jax.numpy as jnp
from jax import lax

from fbq_jax import dispatch
from fbq_jax.bench import measure
from fbq_jax.bench.measure import Effort
from fbq_jax.bench.results import Row, row
from fbq_jax.kernels.reference import Quantized

SIZES = (4096, 8192)
RATES = (0.0, 0.1, 0.2, 0.3)
_SIDE = 128
_BLOCKS = (_SIDE, _SIDE, _SIDE)
_LIMIT = 1e-5  # float32 sums in another order
_NT = (((1,), (1,)), ((), ()))


def rows(
    sizes: Sequence[int],
    rates: Sequence[float],
    *,
    implementation: str | None,
    effort: Effort,
) -> Iterator[Row]:
    """Measures ``M = N = K`` of each size: bf16, and INT8 at each fallback rate.

    Codes are those of Gaussian data, and blocks fall back at random.  The work counted
    is that of the product, ``2 M N K``, without the residual's.

    Raises:
      WrongResultError: if a product differs from the definition's.
    """
    name = dispatch.choose("matmul", _BLOCKS, implementation=implementation)
    bf16 = jax.jit(functools.partial(lax.dot_general, dimension_numbers=_NT))
    int8, checked, definition = (
        jax.jit(
            functools.partial(
                dispatch.matmul, blocks=_BLOCKS, dtype=dtype, implementation=by
            )
        )
        for dtype, by in (
            (jnp.bfloat16, name.implementation),
            (jnp.float32, name.implementation),
            (jnp.float32, "reference"),
        )
    )
    for size in sizes:
        keys = jax.random.split(jax.random.key(size), 6)
        labels = {"shape": (size,) * 3}
        work = 2.0 * size**3
        a, b = (jax.random.normal(key, (size, size), jnp.bfloat16) for key in keys[:2])
        baseline = row(
            measure.timing(bf16, a, b, effort=effort),
            work,
            what="bf16",
            implementation="xla",
            **labels,
        )
        yield baseline
        lhs, rhs, residual = (_codes(key, size, name.implementation) for key in keys[2:5])
        for rate in rates:
            taken = _flags(keys[5], residual.scales.shape, rate)
            scales = jnp.where(taken, residual.scales, 0.0)
            term = Quantized(residual.codes, scales) if rate else None
            error = measure.relative_error(
                checked(lhs, term, rhs), definition(lhs, term, rhs)
            )
            what = f"the {size} x {size} x {size} GEMM by {name.implementation}"
            measure.require(error, _LIMIT, what)
            yield row(
                measure.timing(int8, lhs, term, rhs, effort=effort),
                work,
                baseline,
                what="INT8",
                implementation=name.implementation,
                fallback=float(jnp.mean(taken, dtype=jnp.float32)),
                errors={"out": error},
                **labels,
            )


def _codes(key: jax.Array, size: int, implementation: str) -> Quantized:
    x = jax.random.normal(key, (1, size, size), jnp.bfloat16)
    codes = dispatch.quantize(
        x,
        jnp.zeros(1, jnp.uint32),
        block=(_SIDE, _SIDE),
        rows="nearest",
        columns=None,
        implementation=implementation,
    ).rows
    assert codes is not None
    return codes


def _flags(key: jax.Array, shape: tuple[int, ...], rate: float) -> jax.Array:
    """Random flags, of which a share ``rate`` is True."""
    blocks = math.prod(shape)
    flags = jnp.arange(blocks) < round(rate * blocks)
    return jax.random.permutation(key, flags).reshape(shape)
