"""The objective of GRPO (DeepSeekMath, arXiv 2402.03300), without its KL term."""

import jax
import jax.numpy as jnp


def advantages(rewards: jax.Array) -> jax.Array:
    """Normalizes the rewards of each group, float32 [prompts, samples].

    A_i = (r_i - mean(r)) / std(r), over the samples of one prompt. If all of them have
    the same reward, the advantages are 0.
    """
    centered = rewards - rewards.mean(axis=1, keepdims=True)
    deviation = jnp.sqrt(jnp.mean(centered**2, axis=1, keepdims=True))
    return centered / jnp.maximum(deviation, 1e-6)


def clipped_loss(
    log_ratios: jax.Array, advantages: jax.Array, clip: float
) -> tuple[jax.Array, jax.Array]:
    """Returns the loss, and the share of tokens that the clip takes the gradient of.

    With ratio_t = exp(log_ratio_t) = p(token_t) / p_rollout(token_t), the loss is

        -mean_t(min(ratio_t * A, max(1 - clip, min(1 + clip, ratio_t)) * A))

    Where all ratios are 1, its gradient is the policy gradient, -mean_t(A * grad log
    p(token_t)). All answers have the same length, so the mean over tokens is GRPO's
    mean over samples of the means over their tokens.

    Args:
        log_ratios: float32 [B, T].
        advantages: float32 [B]; all tokens of a sample share its advantage.
        clip: How far a ratio may be from 1 before it stops counting.
    """
    ratios, gain = jnp.exp(log_ratios), advantages[:, None]
    limited = jnp.clip(ratios, 1 - clip, 1 + clip)
    is_clipped = limited * gain < ratios * gain
    loss = -jnp.minimum(ratios * gain, limited * gain).mean()
    return loss, is_clipped.astype(jnp.float32).mean()
