"""Frozen layers in INT8 against bf16: the linear layers of a Llama, without training.

The widths of 4096 and 14336 are Llama-3-8B's.  A prompt has thousands of rows; a
decoding step has one for each sequence, and spends its time on reading the weights.
A call decodes several tokens, as a generation loop in a program does.
"""

import dataclasses
import functools
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

from fbq_jax.bench import data, layers, matmuls, measure
from fbq_jax.bench.compare import Comparison, Program
from fbq_jax.bench.measure import Effort
from fbq_jax.bench.results import Row
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
    """The linear layers, norms and gates of Transformer layers, without attention."""

    hidden: int
    intermediate: int
    dot_general: FallbackDot | None = None

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


def _qkv_width(hidden: int) -> int:
    return hidden + 2 * hidden // _QUERIES_PER_KV_HEAD


def _norm(x: jax.Array) -> jax.Array:
    wide = x.astype(jnp.float32)
    mean = jnp.mean(wide**2, axis=1, keepdims=True)
    return (wide * jax.lax.rsqrt(mean)).astype(x.dtype)


def rows(
    shapes: Sequence[tuple[int, ...]], *, implementation: str | None, effort: Effort
) -> Iterator[Row]:
    """Measures frozen ``Layers`` for each ``(rows, hidden, MLP)``, bf16 in and out."""
    for widths, group in itertools.groupby(shapes, lambda shape: shape[1:]):
        hidden, intermediate = widths
        weights = hidden * (_qkv_width(hidden) + hidden + 3 * intermediate)
        models = [*_models(widths, implementation)]
        for shape in group:
            x = data.activation(jax.random.key(2), shape[:2])
            calls = _TOKENS if shape[0] <= _DECODING_ROWS else 1
            comparison = Comparison(
                shape,
                2.0 * DEPTH * shape[0] * weights * calls,
                (x,),
                {"y": _INT8_LIMIT},
                results=lambda step: step()[:1],
                burst_of="kernels",
            )
            programs = [_program(*model, x, calls) for model in models]
            for row in comparison.rows(programs, effort):
                ms, burst_ms = row.ms / calls, row.burst_ms / calls
                yield dataclasses.replace(row, ms=ms, burst_ms=burst_ms)


def _models(
    widths: tuple[int, ...], implementation: str | None
) -> Iterator[tuple[str, str, list[float], Layers, Variables]]:
    """The name, the backend, the fallback rates, the layers and their variables."""
    hidden, intermediate = widths
    key = jax.random.key(0)
    x = data.activation(jax.random.key(1), (_SETTLING_ROWS, hidden))
    floats = Layers(hidden, intermediate)
    variables = jax.jit(floats.init)(key, x)
    yield "bf16", "xla", [], floats, variables
    for name, recipe, backend in matmuls.supported(layers.RECIPES, implementation):
        dot = FallbackDot(recipe, implementation=implementation)
        model = Layers(hidden, intermediate, dot)
        first = jax.jit(lambda model=model: model.init(key, x)["fallback"])
        trained = {**variables, "fallback": first()}
        step = jax.jit(functools.partial(model.apply, mutable=["fallback"]))
        for _ in range(_SETTLING_STEPS):
            _, state = step(trained, x)
            trained |= state
        rates = [] if recipe.criterion is None else [mean_rate(trained) or 0.0]
        yield name, backend, rates, model, freeze(model, trained, x)


def _program(
    name: str,
    backend: str,
    rates: list[float],
    model: Layers,
    variables: Variables,
    x: jax.Array,
    calls: int,
) -> Program:
    """Calls that follow each other; their results are the first and the last output."""

    def chain(variables: Variables, x: jax.Array) -> tuple[Any, Any]:
        first = last = model.apply(variables, x)
        for _ in range(calls - 1):
            last = model.apply(variables, last)
        return first, last

    compiled, seconds, _ = measure.first_call(jax.jit(chain), variables, x)
    return Program(
        name,
        backend,
        # Serving changes nothing, and a program would copy what it returns unchanged.
        lambda variables, x: (variables, compiled(variables, x)),
        lambda: variables,
        seconds,
        lambda _: rates,
    )
