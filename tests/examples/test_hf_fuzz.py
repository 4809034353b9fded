"""A Hugging Face folder with odd content is one CheckpointError or the right model."""

import functools
import json
import math
import re
import shutil
import tempfile
from pathlib import Path

import jax
import numpy as np
import pytest
import safetensors.numpy
from hypothesis import given, settings
from hypothesis import strategies as st

from examples.llama import hf
from tests.examples.make_hf_fixture import CONFIGS, FIXTURE

FAMILIES = tuple(name.lower() for name in CONFIGS)
# Entries of config.json that a model takes over as they are.
FIELDS = {
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "intermediate_size": "intermediate_size",
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "norm_eps": "rms_norm_eps",
    "max_seq_len": "max_position_embeddings",
}
TOP = [
    *FIELDS.values(),
    *("num_key_value_heads", "head_dim", "rope_theta", "rope_scaling"),
    *("rope_parameters", "partial_rotary_factor", "tie_word_embeddings"),
    *("layer_types", "sliding_window", "use_sliding_window", "max_window_layers"),
    *("model_type", "hidden_act", "attention_bias", "quantization_config"),
    *("hidden_activation", "query_pre_attn_scalar", "final_logit_softcapping"),
    *("attn_logit_softcapping", "rope_local_base_freq", "sliding_window_pattern"),
    *("no_rope_layers", "no_rope_layer_interval"),
    *("num_local_experts", "num_experts", "num_experts_per_tok", "norm_topk_prob"),
    *("moe_intermediate_size", "decoder_sparse_step", "mlp_only_layers"),
    *("router_aux_loss_coef", "router_jitter_noise"),
]
ROPE = [
    *("rope_theta", "rope_type", "type", "factor", "low_freq_factor"),
    *("high_freq_factor", "original_max_position_embeddings", "partial_rotary_factor"),
    *("beta_fast", "beta_slow", "attention_factor", "truncate", "mscale"),
    *("full_attention", "sliding_attention"),
]
PLAIN = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-2, 80),
    st.sampled_from([2**31, 10**20, 10**400, -(10**30)]),
    st.floats(),
    st.sampled_from(
        ["", "x", "llama", "qwen2", "llama3", "yarn", "linear", "default", "1e-6"]
    ),
)
VALUES = st.one_of(
    PLAIN,
    st.lists(PLAIN, max_size=3),
    st.dictionaries(st.sampled_from(ROPE), PLAIN, max_size=4),
)


@functools.cache
def fixture(family):
    stored = json.loads((FIXTURE / family / "config.json").read_text())
    return stored, *hf.load(FIXTURE / family)


@pytest.mark.exhaustive
@settings(max_examples=200, deadline=None, derandomize=True)
@given(
    family=st.sampled_from(FAMILIES),
    changes=st.dictionaries(st.sampled_from(TOP), VALUES, max_size=3),
    rope=st.dictionaries(st.sampled_from(ROPE), PLAIN, max_size=2),
    removed=st.sets(st.sampled_from(TOP), max_size=1),
)
def test_any_config_is_an_error_or_the_model_that_it_describes(
    family, changes, rope, removed
):
    stored, _, params = fixture(family)
    stored = stored | {"rope_parameters": stored["rope_parameters"] | rope} | changes
    stored = {key: value for key, value in stored.items() if key not in removed}
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        shutil.copy(FIXTURE / family / "model.safetensors", folder)
        (folder / "config.json").write_text(json.dumps(stored))
        try:
            config, loaded = hf.load(folder)
        except hf.CheckpointError:
            return
    fields = dict(FIELDS)
    if stored["model_type"] == "qwen3_moe":
        fields["intermediate_size"] = "moe_intermediate_size"
        stored = {"moe_intermediate_size": 768} | stored
    for field, key in fields.items():
        assert getattr(config, field) == stored[key]
    assert not any(isinstance(stored[key], bool) for key in fields.values())
    nested = global_rope(stored, "rope_scaling") | global_rope(
        stored, "rope_parameters"
    )
    theta = {"gemma3_text": 1e6, "smollm3": 2e6, "mixtral": 1e6}.get(
        stored["model_type"], 1e4
    )
    theta = stored.get("rope_theta", theta)
    assert config.rope_theta == nested.get("rope_theta", theta)
    scaled = nested.get("rope_type", nested.get("type", "default")) != "default"
    assert (config.rope_scaling is not None) == scaled
    assert config.norm_eps > 0
    assert math.isfinite(config.norm_eps)
    assert np.float32(config.norm_eps) > 0
    tables = config.rotary_tables(8)
    assert all(np.isfinite(table).all() for table in tables)
    if config.num_kv_heads == 2:  # else the columns of QKV have another order
        jax.tree.map(np.testing.assert_array_equal, loaded, params)


def global_rope(stored, key):
    """The entries of layers without a window; others have entries of their own."""
    rope = stored.get(key) or {}
    if "full_attention" in rope or "sliding_attention" in rope:
        return rope.get("full_attention") or {}
    return rope


NAMES = ("a.safetensors", "b.safetensors")
ODD_NAMES = st.one_of(
    st.sampled_from(["../a.safetensors", "/a.safetensors", "", ".", "..", "c", "a\0"]),
    st.sampled_from(["a" * 5000, "\0", "\ud800"]).map(lambda x: x + ".safetensors"),
    PLAIN,
)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(data=st.data())
def test_any_index_is_an_error_or_followed(data):
    _, config, params = fixture("llama")
    right = safetensors.numpy.load_file(FIXTURE / "llama" / "model.safetensors")
    names = sorted(right)
    home = {n: data.draw(st.sampled_from(NAMES), label=n) for n in names}
    copies = data.draw(st.sets(st.sampled_from(names), max_size=3), label="copies")
    lost = data.draw(st.sets(st.sampled_from(names), max_size=1), label="lost")
    odd = data.draw(st.dictionaries(st.sampled_from(names), ODD_NAMES, max_size=1))
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        shutil.copy(FIXTURE / "llama" / "config.json", folder)
        for name in NAMES:
            held = {n: right[n] for n in names if home[n] == name and n not in lost}
            # A copy in the other file has other values.
            held |= {n: right[n] + 1 for n in copies if home[n] != name}
            safetensors.numpy.save_file(held, folder / name)
        index = folder / "model.safetensors.index.json"
        index.write_text(json.dumps({"weight_map": home | odd}))
        if lost or odd:
            says = "takes names of files beside it|lacks |does not exist|cannot be read"
            with pytest.raises(hf.CheckpointError, match=says):
                hf.load(folder)
            return
        loaded, arrays = hf.load(folder)
    assert loaded == config
    jax.tree.map(np.testing.assert_array_equal, arrays, params)


@pytest.mark.exhaustive  # test_llama_hf.py has a case of each kind
@settings(max_examples=50, deadline=None, derandomize=True)
@given(
    file=st.sampled_from(["config.json", "model.safetensors", "tokenizer.json"]),
    content=st.one_of(
        st.binary(max_size=200),
        st.recursive(VALUES, lambda x: st.dictionaries(st.text(), x)).map(
            lambda value: json.dumps(value).encode()
        ),
        st.just(b"[" * 100_000),
    ),
)
def test_any_bytes_are_an_error(file, content):
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        for name in ("config.json", "model.safetensors"):
            shutil.copy(FIXTURE / "llama" / name, folder)
        (folder / file).write_bytes(content)
        read = hf.load_tokenizer if file == "tokenizer.json" else hf.load
        with pytest.raises(hf.CheckpointError, match=re.escape(scratch)):
            read(folder)
