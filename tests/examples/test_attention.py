"""The attention core: which implementation runs, and that both agree."""

import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from examples.llama import attention
from tests.marks import rows_with_first_fast, with_first_fast


def pretend(monkeypatch, backend, capability):
    device = types.SimpleNamespace(compute_capability=capability)
    monkeypatch.setattr(jax, "default_backend", lambda: backend)
    monkeypatch.setattr(jax, "devices", lambda: [device])


@pytest.mark.parametrize(
    ("expected", "backend", "capability", "dtype", "seq", "head_dim"),
    [
        ("cudnn", "gpu", "9.0", jnp.bfloat16, 512, 128),
        ("cudnn", "gpu", "8.0", jnp.float16, 512, 64),
        ("cudnn", "gpu", "12.0", jnp.bfloat16, 512, 8),
        ("xla", "gpu", "7.5", jnp.bfloat16, 512, 128),
        ("xla", "gpu", "gfx942", jnp.bfloat16, 512, 128),
        ("xla", "gpu", "9.0", jnp.bfloat16, 512, 12),
        ("splash", "tpu", "", jnp.bfloat16, 512, 64),
        ("splash", "tpu", "", jnp.float32, 128, 256),
        ("xla", "tpu", "", jnp.float16, 512, 128),
    ],
)
def test_implementation_by_device_and_shape(
    monkeypatch, expected, backend, capability, dtype, seq, head_dim
):
    pretend(monkeypatch, backend, capability)
    assert attention.choose(dtype, seq, head_dim)[0] == expected


def test_attend_uses_the_chosen_implementation(monkeypatch):
    asked = []

    def spy(q, *_, **options):
        asked.append(options)
        return q

    monkeypatch.setattr(jax.nn, "dot_product_attention", spy)
    q = jnp.ones((1, 4, 2, 8), jnp.bfloat16)
    assert attention.attend(q, q, q).shape == (1, 4, 16)
    pretend(monkeypatch, "gpu", "9.0")
    attention.attend(q, q, q, scale=2.0, window=3)
    first = {"is_causal": True, "implementation": "xla", "scale": None}
    first["local_window_size"] = None
    second = {"implementation": "cudnn", "scale": 2.0, "local_window_size": (2, 0)}
    assert asked == [first, first | second]


@pytest.mark.parametrize(
    ("shape", "softcap", "named"),
    rows_with_first_fast(
        [
            ((1, 4, 2, 8), 5.0, "has no soft cap"),
            ((1, 4, 2, 256), None, "got 256 channels and 4 tokens"),
            ((1, 3, 2, 64), None, "got 64 channels and 3 tokens"),
        ],
        fast=2,
    ),
)
def test_what_cudnn_lacks_is_a_warning(monkeypatch, shape, softcap, named):
    q = jnp.ones(shape, jnp.bfloat16)
    attend = functools.partial(attention.attend, softcap=softcap)
    attend(q, q, q)
    pretend(monkeypatch, "gpu", "9.0")
    with pytest.warns(UserWarning, match=f"runs as XLA ops, .* {named}"):
        attend(q, q, q)
    attend(q[:, :1], q[:, :1], q[:, :1])  # as when parameters are traced
    q = q.astype(jnp.float32)
    attend(q, q, q)  # cuDNN has no float32
    pretend(monkeypatch, "tpu", "")
    q = jnp.ones((1, 100, 2, 8), jnp.bfloat16)
    with pytest.warns(UserWarning, match="multiples of 128 tokens, got bfloat16 and 1"):
        attention.attend(q, q, q)


@pytest.mark.parametrize("window", [None, 1, 3, 40])
@pytest.mark.parametrize("softcap", [None, 0.7])
def test_attend_matches_its_definition(window, softcap):
    batch, seq, heads, kv_heads, dim = 2, 7, 4, 2, 6
    draw = np.random.default_rng(0).standard_normal
    q = draw((batch, seq, heads, dim), np.float32)
    k, v = draw((2, batch, seq, kv_heads, dim), np.float32)
    scores = np.einsum("bqhd,bshd->bhqs", q, k.repeat(heads // kv_heads, 2)) * 0.3
    if softcap is not None:
        scores = softcap * np.tanh(scores / softcap)
    distance = np.subtract.outer(np.arange(seq), np.arange(seq))
    scores[..., (distance < 0) | (distance >= (window or seq))] = -np.inf
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    expected = np.einsum("bhqs,bshd->bqhd", weights, v.repeat(heads // kv_heads, 2))
    out = attention.attend(q, k, v, scale=0.3, window=window, softcap=softcap)
    expected = expected.reshape(batch, seq, -1)
    np.testing.assert_allclose(out, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("seq", [2, 78, 256])
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("window", [None, 2])
def test_cudnn_agrees_with_xla(seq, head_dim, window):
    keys = jax.random.split(jax.random.key(0), 4)
    heads = (4, 2, 2, 4)
    q, k, v, dy = (
        jax.random.normal(key, (2, seq, n, head_dim), jnp.bfloat16)
        for key, n in zip(keys, heads, strict=True)
    )
    dy = dy.reshape(2, seq, -1)

    def by_xla(q, k, v):
        return attention.attend(q, k, v, start=0, window=window)

    def results(attend):
        with jax.numpy_dtype_promotion("standard"):
            out, backward = jax.vjp(attend, q, k, v)
            arrays = jax.tree.leaves((out, backward(dy)))
        return [np.asarray(x, np.float32) for x in arrays]

    assert attention.choose(q.dtype, seq, head_dim)[0] == "cudnn"
    by_cudnn = results(functools.partial(attention.attend, window=window))
    for a, b in zip(by_cudnn, results(by_xla), strict=True):
        assert np.linalg.norm(a - b) <= 0.02 * np.linalg.norm(b) + 1e-6


@pytest.mark.parametrize(
    "options", with_first_fast([{}, {"window": 100}, {"softcap": 3.0}])
)
def test_splash_attention_agrees_with_xla(monkeypatch, options):
    """In the kernel's interpreter, with two queries for each key."""
    make = attention.splash.make_splash_mha_single_device
    interpreted = functools.partial(make, interpret=True)
    name = "make_splash_mha_single_device"
    monkeypatch.setattr(attention.splash, name, interpreted)
    keys = jax.random.split(jax.random.key(0), 3)
    heads = 4, 2, 2
    q, k, v = (
        jax.random.normal(key, (2, 256, n, 128), jnp.float32)
        for key, n in zip(keys, heads, strict=True)
    )
    want = attention.attend(q, k, v, start=0, **options)
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
    got = attention.attend(q, k, v, **options)
    np.testing.assert_allclose(got, want, rtol=2e-5, atol=2e-5)
