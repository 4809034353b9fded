"""The cross-entropy of a language model, whose logits can be its largest array."""

import jax
import jax.numpy as jnp

# Logits that are in memory at once, unless one position of a batch has more. Chunks
# cost time, because the backward pass computes the logits of a chunk again.
_MOST_LOGITS = 2**30


def cross_entropy(logits: jax.Array, targets: jax.Array) -> jax.Array:
    """Mean cross-entropy in nats per token, float32 [], of float32 logits [B, S, V]."""
    # The gradient of optax's loss for integer labels is a scatter into float32 logits.
    # On a GPU, that of a masked sum takes one pass, which reads the head's logits and
    # writes their gradient, both in bfloat16.
    is_target = jax.nn.one_hot(targets, logits.shape[-1], dtype=bool)
    target_logits = jnp.sum(jnp.where(is_target, logits, 0.0), axis=-1)
    return jnp.mean(jax.nn.logsumexp(logits, axis=-1) - target_logits)


def chunks(batch: int, length: int, vocab_size: int) -> int:
    """Into how many chunks of equal length sequences are divided for their loss."""
    fewest = -(-batch * length * vocab_size // _MOST_LOGITS)
    return next(n for n in range(min(fewest, length), length + 1) if length % n == 0)


def in_chunks(x: jax.Array, count: int) -> jax.Array:
    """Divides [B, S, ...] into [count, B, S / count, ...]."""
    return jnp.moveaxis(x.reshape(len(x), count, -1, *x.shape[2:]), 1, 0)
