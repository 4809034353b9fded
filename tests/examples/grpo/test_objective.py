"""Advantages and the loss are those of GRPO, computed by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from examples.grpo.objective import advantages, clipped_loss


def test_advantages_are_normalized_in_each_group():
    rewards = jnp.asarray([[1.0, 0.0, 0.0, 0.0], [1.0, 1.0, 0.0, 0.0]])
    deviation = np.sqrt(0.25 * 0.75)
    expected = [[0.75 / deviation, *[-0.25 / deviation] * 3], [1, 1, -1, -1]]
    np.testing.assert_allclose(advantages(rewards), expected, rtol=1e-6)


@pytest.mark.parametrize("reward", [0.0, 1.0])
def test_equal_rewards_teach_nothing(reward):
    np.testing.assert_array_equal(advantages(jnp.full((3, 8), reward)), 0)


def test_loss_by_hand():
    # Of an advantage of 2: 2 * min(1.5, 1.2), and 2 * 0.5, which is not clipped.
    # Of an advantage of -1: -1.5, which is not clipped, and -max(0.5, 0.8).
    ratios = jnp.asarray([[1.5, 0.5], [1.5, 0.5]])
    loss, clipped = clipped_loss(jnp.log(ratios), jnp.asarray([2.0, -1.0]), 0.2)
    np.testing.assert_allclose(loss, -(2.4 + 1.0 - 1.5 - 0.8) / 4, rtol=1e-6)
    assert clipped == 0.5


def test_a_clipped_token_has_no_gradient():
    log_ratios = jnp.log(jnp.asarray([[1.5, 0.5], [1.5, 0.5]]))
    gain = jnp.asarray([2.0, -1.0])
    grad = jax.grad(lambda x: clipped_loss(x, gain, 0.2)[0])(log_ratios)
    # The gradient of a ratio by its logarithm is the ratio.
    np.testing.assert_allclose(grad, [[0, -2 * 0.5 / 4], [1.5 / 4, 0]], rtol=1e-6)


def test_the_first_gradient_is_the_policy_gradient():
    key = jax.random.key(0)
    logits = jax.random.normal(key, (5, 3, 7))
    tokens = jax.random.categorical(key, logits)
    gain = jnp.asarray([1.5, -0.5, 0.0, 2.0, -1.0])

    def log_probabilities(logits):
        found = jax.nn.log_softmax(logits)
        return jnp.take_along_axis(found, tokens[..., None], axis=-1)[..., 0]

    of_rollout = log_probabilities(logits)

    def loss(logits):
        return clipped_loss(log_probabilities(logits) - of_rollout, gain, 0.2)[0]

    def policy_loss(logits):
        return -jnp.mean(gain[:, None] * log_probabilities(logits))

    expected = jax.grad(policy_loss)(logits)
    np.testing.assert_allclose(jax.grad(loss)(logits), expected, rtol=1e-5, atol=1e-8)
