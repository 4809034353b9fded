"""Model FLOPs and the peaks of devices."""

import dataclasses
import types

import flax.traverse_util
import jax
import jax.numpy as jnp
import pytest

from examples.llama import flops
from examples.llama.model import Llama
from tests.examples.small import small_config


@pytest.mark.parametrize("tie_embeddings", [False, True])
def test_six_per_multiplied_parameter_and_half_of_palms_attention(tie_embeddings):
    config = small_config(head_dim=6, qkv_bias=True, tie_embeddings=tie_embeddings)
    tokens = jnp.zeros((1, 1), jnp.int32)
    params = jax.eval_shape(Llama(config).init, jax.random.key(0), tokens)["params"]
    flat = flax.traverse_util.flatten_dict(params)
    multiplies = sum(leaf.size for path, leaf in flat.items() if path[-1] == "kernel")
    if tie_embeddings:
        multiplies += params["embed"]["embedding"].size
    assert flops.per_token(config, 0) == 6 * multiplies
    attention = flops.per_token(config, 10) - 6 * multiplies
    assert attention == 12 * 3 * (4 * 6) * 10 / 2


@pytest.mark.parametrize(
    ("kind", "peak"),
    [
        ("NVIDIA H200", 989.4e12),
        ("NVIDIA H100 80GB HBM3", 989.4e12),
        ("NVIDIA H100 PCIe", 756.5e12),
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA L40S", 362.05e12),
        ("NVIDIA L4", 121e12),
        ("NVIDIA H20", None),
        ("NVIDIA L40", None),
        ("cpu", None),
    ],
)
def test_peak_by_the_name_of_the_device(monkeypatch, kind, peak):
    device = types.SimpleNamespace(device_kind=kind)
    monkeypatch.setattr(jax, "devices", lambda: [device])
    assert flops.peak() == peak


def test_a_window_lowers_the_flops_of_attention():
    config = small_config(num_layers=2)
    heads = config.num_heads * config.head_dim
    linear = flops.per_token(config, 0)
    window = dataclasses.replace(config, sliding_window=4, sliding_layers=(1,))
    # Of 8 keys a query sees 4 on average. With the window, half of the queries see 2.
    assert flops.per_token(window, 8) - linear == 12 * heads * (4 + 3)
