"""Rollouts: answers that a model samples with its KV cache."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from examples.llama.invariant import log_probabilities
from examples.llama.model import KVCache, Llama, empty_cache


class Rollout(NamedTuple):
    """Prompts with sampled answers.

    The samples of a prompt are next to each other. Log-probabilities are those that the
    sampling model gave its tokens.
    """

    tokens: jax.Array  # int32 [B, prompt + answer]
    log_probabilities: jax.Array  # float32 [B, answer]


def sample(
    model: Llama,
    variables: Any,
    prompts: jax.Array,
    key: jax.Array,
    *,
    samples: int,
    length: int,
) -> Rollout:
    """Samples answers to prompts, at temperature 1.

    One program reads each prompt once, and another one draws all answers.

    Args:
        model: The model; may be frozen.
        variables: Its variables.
        prompts: int32 [P, S]; all have the same length, so none is padded.
        key: Of all draws.
        samples: Answers to each prompt.
        length: Tokens of an answer.

    Returns:
        P * samples sequences.
    """
    cache = empty_cache(model.config, len(prompts), prompts.shape[1] + length)
    logits, cache = _read(model, variables, prompts, cache)
    answers, found = _draw(model, samples, length, variables, logits, cache, key)
    prompts = jnp.repeat(prompts, samples, axis=0)
    return Rollout(jnp.concatenate([prompts, answers], axis=1), found)


@functools.partial(jax.jit, static_argnums=0)
def _read(
    model: Llama, variables: Any, prompts: jax.Array, cache: KVCache
) -> tuple[jax.Array, KVCache]:
    """Returns the logits after the prompts, [P, V], and their cache."""
    logits, cache = model.apply(variables, prompts, cache)  # type: ignore[misc]
    return logits[:, -1], cache


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _draw(
    model: Llama,
    samples: int,
    length: int,
    variables: Any,
    logits: jax.Array,
    cache: KVCache,
    key: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """Returns answers and their log-probabilities, [P * samples, length] each."""
    keys, values = (jnp.repeat(x, samples, axis=1) for x in cache[:2])
    cache = KVCache(keys, values, cache.length)

    def choose(logits: jax.Array, key: jax.Array) -> tuple[jax.Array, jax.Array]:
        tokens = jax.random.categorical(key, logits).astype(jnp.int32)
        return tokens, log_probabilities(logits[:, None], tokens[:, None])[:, 0]

    def advance(
        state: tuple[jax.Array, KVCache], key: jax.Array
    ) -> tuple[tuple[jax.Array, KVCache], tuple[jax.Array, jax.Array]]:
        tokens, cache = state
        logits, cache = model.apply(  # type: ignore[misc]
            variables, tokens[:, None], cache
        )
        chosen = choose(logits[:, -1], key)
        return (chosen[0], cache), chosen

    first_key, *others = jax.random.split(key, length)
    first = choose(jnp.repeat(logits, samples, axis=0), first_key)
    _, others = jax.lax.scan(advance, (first[0], cache), jnp.stack(others))
    answers, found = (
        jnp.concatenate([x[:, None], xs.T], axis=1)
        for x, xs in zip(first, others, strict=True)
    )
    return answers, found
