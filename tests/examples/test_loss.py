"""The loss of a Llama, in chunks and whole."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from examples.llama import loss, mesh
from examples.llama.model import Llama
from fbq_jax import FallbackDot, fallback_stats, recipes
from tests.examples.small import small_config
from tests.marks import with_first_fast

pytestmark = pytest.mark.usefixtures("standard_promotion")

TOKENS = jnp.arange(48).reshape(2, 24) % 40
TARGETS = (TOKENS + 1) % 40


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ((1, 8192, 32_000), 1),
        ((64, 1024, 16_384), 1),  # exactly as many as there may be
        ((2, 8192, 128_256), 2),
        ((3, 8192, 128_256), 4),  # three do not divide the length
        ((2**20, 4, 2**20), 4),  # a position of all sequences is the least
    ],
)
def test_chunks(sizes, expected):
    assert loss.chunks(*sizes) == expected


def losses(monkeypatch, most, recipe=None, **options):
    """Loss, gradients and new state with at most so many logits at once."""
    monkeypatch.setattr(loss, "_MOST_LOGITS", most)
    op = None if recipe is None else FallbackDot(recipe)
    model = Llama(small_config(dtype=jnp.float32, **options), op)
    variables = jax.jit(model.init)(jax.random.key(0), TOKENS)
    params, state = variables.pop("params"), variables

    def of(params):
        all_ = {"params": params, **state}
        return model.apply(all_, TOKENS, targets=TARGETS, mutable=["fallback"])

    gradient = jax.jit(jax.value_and_grad(of, has_aux=True))
    return gradient(params), (model, variables, params)


@pytest.mark.parametrize(("devices", "loops"), [("", 2), ("fsdp=2", 1)])
def test_chunks_divide_the_logits_of_one_device(monkeypatch, devices, loops):
    config = small_config()
    monkeypatch.setattr(loss, "_MOST_LOGITS", 24 * config.vocab_size)
    model = Llama(config)
    with mesh.use(mesh.make(devices)):
        params = jax.eval_shape(model.init, jax.random.key(0), TOKENS)
        found = jax.make_jaxpr(model.apply)(params, TOKENS, targets=TARGETS)
    assert str(found).count(" scan[") == loops  # the layers, and the chunks


@pytest.mark.parametrize(
    "options", [{}, {"tie_embeddings": True}, {"logit_softcap": 5.0}]
)
def test_chunks_add_up_to_the_whole(monkeypatch, options):
    whole, _ = losses(monkeypatch, 2**30, **options)
    chunked, (model, state, params) = losses(monkeypatch, 2 * 6 * 40, **options)
    close = {"rtol": 1e-5, "atol": 1e-6}
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, **close), chunked, whole)
    logits = model.apply({"params": params, **state}, TOKENS)
    expected = loss.cross_entropy(logits, TARGETS)
    np.testing.assert_allclose(whole[0][0], expected, rtol=1e-6)


@pytest.mark.exhaustive
def test_evaluation_in_chunks(monkeypatch):
    options = {"recipe": recipes.fallback, "quantize_head": True}
    _, (model, state, params) = losses(monkeypatch, 2 * 6 * 40, **options)
    variables = {"params": params, **state}
    expected = loss.cross_entropy(model.apply(variables, TOKENS), TARGETS)
    actual = model.apply(variables, TOKENS, targets=TARGETS)
    np.testing.assert_allclose(actual, expected, atol=1e-2)  # of other blocks


def test_only_a_chunk_of_logits_exists():
    config = small_config(vocab_size=4096, max_seq_len=64)
    model, tokens = Llama(config), jnp.zeros((4, 64), jnp.int32)
    params = jax.eval_shape(model.init, jax.random.key(0), tokens)

    def temporary(most):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(loss, "_MOST_LOGITS", most)

            def of(params):
                return model.apply(params, tokens, targets=tokens)

            compiled = jax.jit(jax.grad(of)).lower(params).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    logits = 4 * 64 * 4096 * 4
    assert temporary(2**30) - temporary(2**16) > logits // 2


@pytest.mark.parametrize("most", with_first_fast([2 * 6 * 40, 2**30]))
def test_the_head_is_quantized(monkeypatch, most):
    options = {"recipe": recipes.fallback, "quantize_head": True}
    ((loss_, state), grads), _ = losses(monkeypatch, most, **options)
    stats = fallback_stats(state)
    assert stats["lm_head"].count > 0
    exact, _ = losses(monkeypatch, most, recipes.fallback)
    difference = abs(float(loss_ - exact[0][0]))
    assert 0 < difference < 0.01
    head, exact_head = (g["lm_head"]["kernel"] for g in (grads, exact[1]))
    assert 0 < jnp.linalg.norm(head - exact_head) < 0.1 * jnp.linalg.norm(exact_head)
