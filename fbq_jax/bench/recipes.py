"""The errors of every recipe as outliers grow, with its saved bytes and its time."""

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

import fbq_jax.recipes
from fbq_jax.bench import baselines, data, linear, matmuls, measure
from fbq_jax.bench.matmuls import Matmul
from fbq_jax.bench.measure import Effort
from fbq_jax.bench.results import Row, row, with_ratios

SHAPES = ((8192, 4096, 4096),)
# X by name: the largest outlier, and the distance between channels with outliers.
# 58, 606 and 6559 are the largest activations reported for GPT2-XL, Llama-3.1 and
# Qwen-2.5. One channel in 1024 reaches an eighth of the blocks of 128, which can all
# fall back; one in 256 reaches half of them.
OUTLIERS = {
    "up to 58": (58.0, 1024),
    "up to 606": (606.0, 1024),
    "up to 6559": (6559.0, 1024),
    "606, 1/2 of blocks": (606.0, 256),
}


class _Operands(NamedTuple):
    """The operands of a layer: every X by name, W, dY, and the exact results by X."""

    xs: dict[str, jax.Array]
    w: jax.Array
    dy: jax.Array
    exact: dict[str, tuple[jax.Array, ...]]


def rows(
    shapes: Sequence[tuple[int, ...]], *, implementation: str | None, effort: Effort
) -> Iterator[Row]:
    """Measures ``Y = X . W``, ``dX`` and ``dW`` of each ``(M, K, N)``, bf16 in and out.

    X is Gaussian, or a SwiGLU output with the outliers of ``OUTLIERS``. W and dY are
    Gaussian. No error is too large: the errors are the result.
    """
    for shape in shapes:
        operands = _operands(shape)
        yield from with_ratios(
            measured
            for matmul_of in _matmuls(implementation)
            for measured in _rows(matmul_of, operands, effort)
        )


def _operands(shape: tuple[int, ...]) -> _Operands:
    M, K, N = shape
    keys = jax.random.split(jax.random.key(0), 3)
    w = jax.random.normal(keys[1], (K, N), jnp.bfloat16) * K**-0.5
    dy = jax.random.normal(keys[2], (M, N), jnp.bfloat16)
    xs = {"Gaussian": jax.random.normal(keys[0], (M, K), jnp.bfloat16)} | {
        name: data.swiglu(keys[0], (M, K), *outliers)
        for name, outliers in OUTLIERS.items()
    }
    exact = {name: linear.exact_products(x, w, dy) for name, x in xs.items()}
    return _Operands(xs, w, dy, exact)


def _matmuls(implementation: str | None) -> Iterator[Callable[[jax.Array], Matmul]]:
    """bf16, then every recipe, as functions of the activation."""
    yield lambda _: baselines.bf16()
    for name, recipe in fbq_jax.recipes.NAMED.items():
        if not matmuls.is_supported(recipe, implementation):
            continue
        yield functools.partial(matmuls.from_recipe, name, recipe, implementation)
    yield lambda _: matmuls.fp8_dot("delayed")
    yield lambda _: matmuls.fp8_dot("current")
    yield lambda _: matmuls.llm_int8()


def _rows(
    matmul_of: Callable[[jax.Array], Matmul],
    operands: _Operands,
    effort: Effort,
) -> Iterator[Row]:
    """One product's rows. All of them share a compiled program."""
    _, w, dy, exact = operands
    compiled: Any = None
    for name, x in operands.xs.items():
        matmul = matmul_of(x)
        state, inputs = matmul.state, matmul.inputs
        if compiled is None:
            step = jax.jit(linear.step_of(matmul.product))
            compiled, compile_s, _ = measure.first_call(step, x, w, dy, state, inputs)
            saved_bytes = matmuls.saved_bytes(matmul, x, w)
        for _ in range(linear.SETTLING_STEPS):
            *arrays, state = compiled(x, w, dy, state, inputs)
        yield row(
            measure.timing(compiled, x, w, dy, state, inputs, effort=effort),
            6.0 * x.size * w.shape[1],
            what=matmul.name,
            data=name,
            implementation=matmul.implementation,
            shape=(*x.shape, w.shape[1]),
            fallback=matmul.fallback,
            errors=_errors(arrays, exact[name]),
            compile_s=compile_s,
            saved_bytes=saved_bytes,
        )


def _errors(
    arrays: Sequence[jax.Array], exact: Sequence[jax.Array]
) -> dict[str, float]:
    """Relative errors of the arrays, of Y's rows (tokens) and of dW's rows (channels).

    Outliers dominate an array's norm and hide the error of the other rows. The errors
    of rows are averaged, so that every row counts.
    """
    whole = map(measure.relative_error, arrays, exact)
    (y, _, dw), (exact_y, _, exact_dw) = arrays, exact
    return dict(zip(("y", "dx", "dw"), whole, strict=True)) | {
        "token": float(mean_row_error(y, exact_y)),
        "channel": float(mean_row_error(dw, exact_dw)),
    }


@jax.jit
def mean_row_error(actual: jax.Array, exact: jax.Array) -> jax.Array:
    """The mean of the rows' relative errors."""
    difference = actual.astype(jnp.float32) - exact
    errors, norms = (jnp.linalg.norm(x, axis=1) for x in (difference, exact))
    return jnp.mean(errors / jnp.maximum(norms, jnp.finfo(jnp.float32).tiny))
