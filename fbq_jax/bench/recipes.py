"""Every recipe's errors, on operands with ever larger outliers, its bytes and time."""

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp

import fbq_jax.recipes
from fbq_jax.bench import contenders, data, linear, measure, memory
from fbq_jax.bench.contenders import MATMUL, Contender
from fbq_jax.bench.measure import Effort
from fbq_jax.bench.results import Row, row
from fbq_jax.core.llm_int8 import llm_int8_dot

SHAPES = ((8192, 4096, 4096),)
# X by name: the largest outlier, and of how many channels one has them.  58, 606 and
# 6559 are the largest activations reported for GPT2-XL, Llama-3.1 and Qwen-2.5.  One
# channel of 1024 is in an eighth of the blocks of 128: of those, fallback can take all.
OUTLIERS = {
    "up to 58": (58.0, 1024),
    "up to 606": (606.0, 1024),
    "up to 6559": (6559.0, 1024),
    "606, 1/2 of blocks": (606.0, 256),
}


def rows(
    shapes: Sequence[tuple[int, ...]],
    *,
    implementation: str | None,
    effort: Effort,
) -> Iterator[Row]:
    """Measures ``Y = X . W``, ``dX`` and ``dW`` of each ``(M, K, N)``, bf16 in and out.

    X is Gaussian, or a SwiGLU's output with outliers up to those of large models, in an
    eighth of its blocks or in half of them; the others are Gaussian.  Nothing is
    refused: how wrong a recipe becomes is the result.
    """
    for shape in shapes:
        M, K, N = shape
        keys = jax.random.split(jax.random.key(0), 3)
        w = jax.random.normal(keys[1], (K, N), jnp.bfloat16) * K**-0.5
        dy = jax.random.normal(keys[2], (M, N), jnp.bfloat16)
        xs = {"Gaussian": jax.random.normal(keys[0], (M, K), jnp.bfloat16)} | {
            name: data.swiglu(keys[0], (M, K), *outliers)
            for name, outliers in OUTLIERS.items()
        }
        exact = {name: linear.exact_products(x, w, dy) for name, x in xs.items()}
        baselines: dict[str, Row] = {}
        for make in _contenders(implementation):
            for measured in _rows_of(make, xs, w, dy, exact, baselines, effort):
                yield measured
                assert measured.data is not None
                baselines.setdefault(measured.data, measured)


def _contenders(
    implementation: str | None,
) -> Iterator[Callable[[jax.Array], Contender]]:
    """bf16, and each recipe, given the activation."""
    yield lambda _: contenders.bf16()
    for name, recipe in fbq_jax.recipes.NAMED.items():
        by = contenders.forward_by(recipe, implementation)
        yield functools.partial(contenders.by_recipe, name, recipe, by)
    yield lambda _: contenders.own_fp8("delayed")
    yield lambda _: contenders.own_fp8("current")
    yield lambda _: Contender(
        "llm_int8", "xla", lambda x, w, *_: llm_int8_dot(x, w, MATMUL)
    )


def _rows_of(
    make: Callable[[jax.Array], Contender],
    xs: dict[str, jax.Array],
    w: jax.Array,
    dy: jax.Array,
    exact: dict[str, tuple[jax.Array, ...]],
    baselines: dict[str, Row],
    effort: Effort,
) -> Iterator[Row]:
    """One contender's rows, of a program that is compiled once."""
    compiled: Any = None
    for name, x in xs.items():
        contender = make(x)
        state, inputs = contender.state, contender.inputs
        if compiled is None:
            step = linear.step_of(contender.product)
            compiled, compile_s = measure.first_call(step, x, w, dy, state, inputs)
            saved = _saved_bytes(contender, x, w)
        for _ in range(linear.SETTLING_STEPS):
            *arrays, state = compiled(x, w, dy, state, inputs)
        yield row(
            measure.timing(compiled, x, w, dy, state, inputs, effort=effort),
            6.0 * x.size * w.shape[1],
            baselines.get(name),
            what=contender.name,
            data=name,
            implementation=contender.implementation,
            shape=(*x.shape, w.shape[1]),
            fallback=contender.fallback,
            errors=_errors(arrays, exact[name]),
            compile_s=compile_s,
            saved_bytes=saved,
        )


def _saved_bytes(contender: Contender, x: jax.Array, w: jax.Array) -> float:
    """A token, of X and what belongs to it."""

    def product(w: jax.Array, x: jax.Array) -> jax.Array:
        return contender.product(x, w, contender.state, contender.inputs)

    return memory.saved_bytes(product, w, x)


def _errors(
    arrays: Sequence[jax.Array], exact: Sequence[jax.Array]
) -> dict[str, float]:
    """Relative ones: of each array, and of a token's row of Y and a channel's of dW.

    The latter are means over the rows: what outliers do to the rest does not show in
    norms of which the outliers are the most.
    """
    whole = map(measure.relative_error, arrays, exact)
    (y, _, dw), (exact_y, _, exact_dw) = arrays, exact
    return dict(zip(("y", "dx", "dw"), whole, strict=True)) | {
        "token": float(_mean_row_error(y, exact_y)),
        "channel": float(_mean_row_error(dw, exact_dw)),
    }


@jax.jit
def _mean_row_error(actual: jax.Array, exact: jax.Array) -> jax.Array:
    difference = actual.astype(jnp.float32) - exact
    lost, whole = (jnp.linalg.norm(x, axis=1) for x in (difference, exact))
    return jnp.mean(lost / jnp.maximum(whole, jnp.finfo(jnp.float32).tiny))
