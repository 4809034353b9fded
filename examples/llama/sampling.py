"""Chooses the next token from logits."""

import dataclasses

import jax
import jax.numpy as jnp

from examples.llama import field_types


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sampling:
    """How tokens are drawn.

    Attributes:
        temperature: Divides the logits; 0 takes the most likely token.
        top_k: Only so many of the most likely tokens are drawn; 0 means all.
        top_p: Only as many of the most likely tokens are drawn as have this probability
            together.

    Raises:
        ValueError: A field has another type or is out of range. The message names the
            field and what it accepts.
    """

    temperature: float = 0.8
    top_k: int = 0
    top_p: float = 1.0

    def __post_init__(self) -> None:
        field_types.check(self)
        field_types.check_at_least(self, 0, "temperature")
        if self.top_k < 0:
            raise ValueError(f"top_k takes an integer of at least 0, got {self.top_k}")
        if not 0 < self.top_p <= 1:
            raise ValueError(
                f"top_p takes a number above 0 and up to 1, got {self.top_p}"
            )


def sample(logits: jax.Array, key: jax.Array, how: Sampling) -> jax.Array:
    """Draws a token for each sequence.

    Args:
        logits: float32 [B, V].
        key: The key of the draw.
        how: How to draw.

    Returns:
        The tokens, int32 [B].
    """
    if how.temperature == 0:
        return jnp.argmax(logits, axis=-1).astype(jnp.int32)
    logits = logits / how.temperature
    order = jnp.argsort(-logits, axis=-1)
    sorted_logits = jnp.take_along_axis(logits, order, axis=-1)
    probabilities = jax.nn.softmax(sorted_logits)
    # The most likely token stays, whatever top_p is.
    before = jnp.cumsum(probabilities, axis=-1) - probabilities
    kept = before < how.top_p
    if how.top_k:
        vocab_size = logits.shape[-1]
        kept &= (jnp.arange(vocab_size) < min(how.top_k, vocab_size))[None]
    drawn = jax.random.categorical(key, jnp.where(kept, sorted_logits, -jnp.inf))
    return jnp.take_along_axis(order, drawn[:, None], axis=-1)[:, 0].astype(jnp.int32)
