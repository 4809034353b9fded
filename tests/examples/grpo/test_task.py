"""Prompts are sums, and the checker knows the right answers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from examples.grpo import task


def tokens_of(*texts):
    return jnp.asarray([[task.CHARACTERS.index(c) for c in text] for text in texts])


def text_of(tokens):
    return "".join(task.CHARACTERS[token] for token in tokens.tolist())


def test_prompts_are_sums_of_two_numbers():
    prompts = task.draw(jax.random.key(0), 500)
    texts = set(map(text_of, prompts))
    assert len(texts) > 450
    for text in texts:
        a, b = text.removesuffix("=").split("+")
        assert (len(a), len(b)) == (2, 2)
        assert 0 <= int(a) + int(b) <= 198
    assert len({text[:2] for text in texts}) > 90


def test_right_answers_get_the_reward():
    prompts = task.draw(jax.random.key(0), 100)
    answers = task.solve(prompts)
    tokens = jnp.concatenate([prompts, answers], axis=1)
    for text in map(text_of, tokens):
        equation, _, total = text.partition("=")
        assert sum(map(int, equation.split("+"))) == int(total)
    np.testing.assert_array_equal(task.reward(tokens), 1)
    np.testing.assert_array_equal(task.reward(tokens.at[:, -1].add(1)), 0)


@pytest.mark.parametrize(
    ("text", "reward"),
    [
        ("07+15=022", 1),
        ("99+99=198", 1),
        ("00+00=000", 1),
        ("07+15=023", 0),
        ("07+15=122", 0),
        # "+" is token 10: 0 * 100 + 1 * 10 + 10 is 20.
        ("05+15=01+", 0),
        ("05+15=020", 1),
    ],
)
def test_an_answer_is_a_number_of_three_digits(text, reward):
    assert task.reward(tokens_of(text)).tolist() == [reward]
