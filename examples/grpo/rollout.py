"""Rollouts: answers that a model samples with its KV cache."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from examples.llama.invariant import log_probabilities
from examples.llama.model import KVCache, Llama, empty_cache


class Rollout(NamedTuple):
    """Sampled answers; those to a prompt are next to each other."""

    tokens: jax.Array  # int32 [B, prompt + answer]
    log_probabilities: jax.Array  # float32 [B, answer], by the sampling model


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
        model: The model.
        variables: Its variables, which may be frozen.
        prompts: int32 [P, S]; all have the same length, so none is padded.
        key: Of all draws.
        samples: Answers to each prompt.
        length: Tokens of an answer.

    Returns:
        P * samples sequences.
    """
    cache = empty_cache(model.config, len(prompts), prompts.shape[1] + length)
    logits, cache = _read(model, variables, prompts, cache)
    answers = _draw(model, samples, length, variables, logits, cache, key)
    prompts = jnp.repeat(prompts, samples, axis=0)
    tokens = jnp.concatenate([prompts, answers.tokens], axis=1)
    return Rollout(tokens, answers.log_probabilities)


@functools.partial(jax.jit, static_argnums=0)
def _read(
    model: Llama, variables: Any, prompts: jax.Array, cache: KVCache
) -> tuple[jax.Array, KVCache]:
    """Returns the logits after the prompts, [P, V], and their cache."""
    found: Any = model.apply(variables, prompts, cache)
    logits, cache = found
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
) -> Rollout:
    """Returns answers without their prompts."""
    keys, values = (jnp.repeat(x, samples, axis=1) for x in cache[:2])

    def choose(logits: jax.Array, key: jax.Array) -> Rollout:
        tokens = jax.random.categorical(key, logits).astype(jnp.int32)
        found = log_probabilities(logits[:, None], tokens[:, None])
        return Rollout(tokens, found[:, 0])

    def advance(
        state: tuple[jax.Array, KVCache], key: jax.Array
    ) -> tuple[tuple[jax.Array, KVCache], Rollout]:
        tokens, cache = state
        found: Any = model.apply(variables, tokens[:, None], cache)
        logits, cache = found
        chosen = choose(logits[:, -1], key)
        return (chosen.tokens, cache), chosen

    key, *keys_of_others = jax.random.split(key, length)
    first = choose(jnp.repeat(logits, samples, axis=0), key)
    state = first.tokens, KVCache(keys, values, cache.length)
    _, others = jax.lax.scan(advance, state, jnp.stack(keys_of_others))
    return jax.tree.map(
        lambda x, xs: jnp.concatenate([x[:, None], xs.T], axis=1), first, others
    )
