"""The task: sums of two numbers of two digits, such as ``07+15=022``."""

import jax
import jax.numpy as jnp

CHARACTERS = "0123456789+="
PROMPT, ANSWER = 6, 3  # tokens; all prompts and answers are of one length
_PLUS, _EQUALS = CHARACTERS.index("+"), CHARACTERS.index("=")


def draw(key: jax.Array, count: int) -> jax.Array:
    """Draws prompts, int32 [count, PROMPT]."""
    a, b = jax.random.randint(key, (2, count), 0, 100)
    plus, equals = jnp.full_like(a, _PLUS), jnp.full_like(a, _EQUALS)
    return jnp.stack([*_digits(a, 2), plus, *_digits(b, 2), equals], axis=-1)


def solve(prompts: jax.Array) -> jax.Array:
    """Returns the right answers, int32 [B, ANSWER]."""
    return jnp.stack(_digits(_sum_of(prompts), ANSWER), axis=-1)


def reward(tokens: jax.Array) -> jax.Array:
    """Checks prompts with answers [B, PROMPT + ANSWER].

    Returns:
        Float32 [B]: 1 where the answer is the sum of the prompt's numbers, else 0.
    """
    answers = tokens[:, PROMPT:]
    are_digits = jnp.all(answers < 10, axis=-1)
    is_sum = _number(answers) == _sum_of(tokens[:, :PROMPT])
    return (are_digits & is_sum).astype(jnp.float32)


def _sum_of(prompts: jax.Array) -> jax.Array:
    return _number(prompts[:, :2]) + _number(prompts[:, 3:5])


def _number(digits: jax.Array) -> jax.Array:
    value = digits[:, 0]
    for digit in digits.T[1:]:
        value = 10 * value + digit
    return value


def _digits(number: jax.Array, count: int) -> list[jax.Array]:
    return [number // 10**place % 10 for place in reversed(range(count))]
