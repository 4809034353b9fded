"""What an invariant Llama costs: in an optimizer step, and in decoding 8 sequences."""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from examples.llama import flops
from examples.llama.model import KVCache, Llama, empty_cache
from experiments.bench import harness
from fbq_jax import freeze
from fbq_jax.bench import measure
from fbq_jax.bench.measure import Effort
from fbq_jax.bench.results import Row, row, with_ratios
from fbq_jax.recipes import NAMED

# (hidden, intermediate, layers, sequences of 2048 tokens): as in ``train``.
SHAPES = ((2048, 5632, 22, 4),)
RECIPES = "rowwise", "row_block_lhs"
_SEQUENCES = 8
# Tokens that a call decodes, one after the other, as a generation loop does.
_TOKENS = 8


def rows(
    shapes: Sequence[tuple[int, ...]], *, implementation: str | None, effort: Effort
) -> Iterator[Row]:
    """Measures each of these shapes of `harness.Program`.

    Rows of training are as in ``train``. Rows of decoding are one token of each of 8
    sequences, which are half as long as in training, with frozen weights.
    """
    recipes = {name: NAMED[name] for name in RECIPES}
    for shape in shapes:
        programs = [harness.Program("bf16", None, shape)]
        for name, recipe in recipes.items():
            program = harness.Program(name, recipe, shape)
            programs += [program, program._replace(invariant=True)]
        yield from with_ratios(
            measured
            for program in programs
            for measured in _measure(program, implementation, effort)
        )


def _measure(
    program: harness.Program, implementation: str | None, effort: Effort
) -> Iterator[Row]:
    trained, _ = harness.train(program, implementation, steps=2, effort=effort)
    yield dataclasses.replace(trained, data="training")
    yield _decode(program, implementation, effort)


def _decode(
    program: harness.Program, implementation: str | None, effort: Effort
) -> Row:
    config = program.llama()
    backend, product = harness.dot_general(program.recipe, implementation)
    model, length = Llama(config, product), config.max_seq_len
    tokens = jnp.zeros((_SEQUENCES, 1), jnp.int32)
    variables = jax.jit(model.init)(jax.random.key(0), tokens)
    if program.recipe is not None:
        variables = freeze(model, variables, tokens)

    @jax.jit
    def step(state: tuple[jax.Array, KVCache], variables: Any) -> tuple[Any, jax.Array]:
        def decode(state: Any, _: Any) -> tuple[Any, jax.Array]:
            logits, cache = model.apply(variables, *state)
            chosen = jnp.argmax(logits, axis=-1).astype(jnp.int32)
            return (chosen, cache), chosen

        tokens, cache = state
        cache = cache._replace(length=jnp.int32(length // 2))
        return jax.lax.scan(decode, (tokens, cache), None, length=_TOKENS)

    state = tokens, empty_cache(config, _SEQUENCES, length)
    compiled, compile_s, (state, _) = measure.first_call(step, state, variables)
    timing = measure.step_timing(compiled, state, variables, effort=effort)
    each = timing._replace(ms=timing.ms / _TOKENS, burst_ms=timing.burst_ms / _TOKENS)
    return row(
        each,
        _SEQUENCES * flops.per_token(config, length // 2) / 3,  # the forward pass
        what=program.row_name(),
        data="decoding",
        implementation=backend,
        shape=program.shape,
        compile_s=compile_s,
    )
