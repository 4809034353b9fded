"""Frozen layers in INT8 against bf16: the linear layers of a Llama, without training.

The widths of 4096 and 14336 are Llama-3-8B's.  A prompt has thousands of rows; a
decoding step has one for each sequence, and spends its time on reading the weights.
A call decodes several tokens, as a generation loop in a program does.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn

from fbq_jax import recipes
from fbq_jax.bench import data, layers, matmuls, measure
from fbq_jax.bench.measure import Effort
from fbq_jax.bench.results import Row, row, with_ratios
from fbq_jax.core.layer_stats import mean_rate
from fbq_jax.linen.dot import FallbackDot
from fbq_jax.linen.freezing import freeze

_WIDTHS = 4096, 14336
#: ``(rows, hidden, MLP)``
SHAPES = tuple((rows, *_WIDTHS) for rows in (1, 8, 32, 128, 8192))
# So that the weights of a call do not fit into the GPU's cache.
DEPTH = 4
_QUERIES_PER_KV_HEAD = 4
# Tokens that a call decodes, one after the other.  A short program of a single token
# would show how long the host takes to start it.
_TOKENS = 8
_DECODING_ROWS = 128  # the most rows of a decoding step
_SETTLING_ROWS = 512  # of the forward passes that set the thresholds
_SETTLING_STEPS = 4
_INT8_LIMIT = 0.2  # error of INT8 against bf16, in the output of all layers

Variables = dict[str, Any]


class Layers(nn.Module):
    """The linear layers of Transformer layers, with their norms and gates.

    There is no attention: the output projection reads the queries.
    """

    hidden: int
    intermediate: int
    dot_general: FallbackDot | None

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps ``[rows, hidden]`` to the same shape."""
        dense = functools.partial(
            nn.Dense,
            use_bias=False,
            dtype=jnp.bfloat16,
            param_dtype=jnp.bfloat16,
            dot_general=self.dot_general,
        )
        for _ in range(DEPTH):
            attended = dense(_qkv_width(self.hidden))(_norm(x))[:, : self.hidden]
            x += dense(self.hidden)(attended)
            gate, up = jnp.split(dense(2 * self.intermediate)(_norm(x)), 2, axis=1)
            x += dense(self.hidden)(nn.silu(gate) * up)
        return x


def _norm(x: jax.Array) -> jax.Array:
    wide = x.astype(jnp.float32)
    mean = jnp.mean(wide**2, axis=1, keepdims=True)
    return (wide * jax.lax.rsqrt(mean)).astype(x.dtype)


class _Program(NamedTuple):
    """Layers, as a function ``(variables, x) -> y``, with their weights."""

    name: str
    backend: str
    fallback: float | None
    apply: Callable[..., Any]
    variables: Variables


def rows(
    shapes: Sequence[tuple[int, ...]], *, implementation: str | None, effort: Effort
) -> Iterator[Row]:
    """Measures frozen ``Layers`` for each ``(rows, hidden, MLP)``, bf16 in and out.

    Work counts the products' operations.

    Raises:
      WrongResultError: if an output differs from bf16's by more than INT8 may.
    """
    for widths in dict.fromkeys(shape[1:] for shape in shapes):
        programs = [*_programs(widths, implementation)]
        for shape in shapes:
            if shape[1:] == widths:
                yield from with_ratios(_rows(shape, programs, effort))


def _programs(
    widths: tuple[int, ...], implementation: str | None
) -> Iterator[_Program]:
    """bf16, and the same weights frozen by each recipe."""
    hidden, intermediate = widths
    key = jax.random.key(0)
    x = data.activation(jax.random.key(1), (_SETTLING_ROWS, hidden))
    floats = Layers(hidden, intermediate, None)
    variables = jax.jit(floats.init)(key, x)
    yield _Program("bf16", "xla", None, floats.apply, variables)
    for name in layers.RECIPES:
        recipe = recipes.NAMED[name]
        dot = FallbackDot(recipe, implementation=implementation)
        model = Layers(hidden, intermediate, dot)
        first = jax.jit(lambda model=model: model.init(key, x)["fallback"])
        trained = {**variables, "fallback": first()}
        step = jax.jit(functools.partial(model.apply, mutable=["fallback"]))
        for _ in range(_SETTLING_STEPS):
            _, state = step(trained, x)
            trained |= state
        backend = matmuls.forward_choice(recipe, implementation).backend
        rate = None if recipe.criterion is None else mean_rate(trained)
        frozen = freeze(model, trained, x)
        yield _Program(name, backend, rate, model.apply, frozen)


def _rows(
    shape: tuple[int, ...], programs: Sequence[_Program], effort: Effort
) -> Iterator[Row]:
    rows, hidden, intermediate = shape
    x = data.activation(jax.random.key(2), (rows, hidden))
    calls = _TOKENS if rows <= _DECODING_ROWS else 1
    weights = hidden * (_qkv_width(hidden) + hidden + 3 * intermediate)
    exact: jax.Array | None = None
    for program in programs:
        args = program.variables, x
        apply, compile_s, (y, _) = measure.first_call(_chain(program, calls), *args)
        exact = y if exact is None else exact
        what = f"{program.name} at {shape}"
        timing = measure.timing(apply, *args, effort=effort)
        yield row(
            timing._replace(ms=timing.ms / calls, burst_ms=timing.burst_ms / calls),
            2.0 * DEPTH * rows * weights,
            what=program.name,
            implementation=program.backend,
            shape=shape,
            fallback=program.fallback,
            errors=measure.checked_errors({"y": _INT8_LIMIT}, (y,), (exact,), what),
            compile_s=compile_s,
        )


def _chain(program: _Program, calls: int) -> Callable[..., tuple[jax.Array, jax.Array]]:
    """The first and the last output of calls that follow each other, jitted."""

    @jax.jit
    def chain(variables: Variables, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        first = last = program.apply(variables, x)
        for _ in range(calls - 1):
            last = program.apply(variables, last)
        return first, last

    return chain


def _qkv_width(hidden: int) -> int:
    return hidden + 2 * hidden // _QUERIES_PER_KV_HEAD
