"""Hugging Face checkpoints: PyTorch's logits, exact round trips, clear errors."""

import dataclasses
import json
import shutil
from pathlib import Path
from unittest.mock import Mock

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy

from examples.llama import hf
from examples.llama.hf.files import WEIGHTS
from examples.llama.model import Llama
from tests.examples import make_hf_fixture
from tests.examples.small import random_params, small_config
from tests.marks import with_first_fast

FAMILIES = [name.lower() for name in make_hf_fixture.CONFIGS]
FIXTURE = make_hf_fixture.FIXTURE
# For changes to the keys of older transformers, which these would override.
TOP = {"rope_parameters": None}


def logits_of(folder, tokens, **changes):
    config, params = hf.load(folder)
    model = Llama(dataclasses.replace(config, dtype=jnp.float32, **changes))
    return np.asarray(jax.jit(model.apply)({"params": params}, tokens))


def assert_equal_checkpoints(a, b):
    assert a[0] == b[0]
    jax.tree.map(np.testing.assert_array_equal, a[1], b[1])


@pytest.fixture
def checkpoint(tmp_path):
    """A copy of the Llama fixture, to damage."""
    return Path(shutil.copytree(FIXTURE / "llama", tmp_path / "checkpoint"))


def edit_config(folder, **changes):
    """Changes config.json; the value ``...`` removes a key."""
    file = folder / "config.json"
    stored = json.loads(file.read_text()) | changes
    stored = {key: value for key, value in stored.items() if value is not ...}
    file.write_text(json.dumps(stored))


def edit_tensors(folder, edit, file="model.safetensors"):
    tensors = safetensors.numpy.load_file(folder / file)
    edit(tensors)
    safetensors.numpy.save_file(tensors, folder / file)
    return tensors


def shard(folder):
    """Splits model.safetensors in two and writes their index."""
    tensors = edit_tensors(folder, lambda _: None)
    weight_map = {}
    for index, name in enumerate(sorted(tensors)):
        weight_map[name] = f"model-{index % 2 + 1:05}-of-00002.safetensors"
    for file in set(weight_map.values()):
        part = {name: tensors[name] for name in tensors if weight_map[name] == file}
        safetensors.numpy.save_file(part, folder / file)
    index_file = folder / "model.safetensors.index.json"
    index_file.write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    (folder / "model.safetensors").unlink()


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_match_pytorch(family):
    reference = safetensors.numpy.load_file(FIXTURE / family / "reference.safetensors")
    logits = logits_of(FIXTURE / family, reference["tokens"])
    np.testing.assert_allclose(logits, reference["logits"], rtol=0, atol=1e-4)


def test_reads_the_keys_of_older_transformers(checkpoint):
    before = hf.load(checkpoint)
    scaling = json.loads((checkpoint / "config.json").read_text())["rope_parameters"]
    theta = scaling.pop("rope_theta")
    edit_config(
        checkpoint,
        rope_parameters=...,
        rope_theta=theta,
        rope_scaling=scaling,
        head_dim=...,
        mlp_bias=...,
    )
    assert_equal_checkpoints(hf.load(checkpoint), before)


def test_reads_shards_and_ignores_what_is_stored_twice(checkpoint):
    table = edit_tensors(checkpoint, lambda _: None)["model.embed_tokens.weight"]
    edit_config(checkpoint, tie_word_embeddings=True)
    more = {"model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(4)}
    more["lm_head.weight"] = table.copy()
    edit_tensors(checkpoint, lambda tensors: tensors.update(more))
    whole = hf.load(checkpoint)
    assert whole[0].tie_embeddings
    assert "lm_head" not in whole[1]
    np.testing.assert_array_equal(whole[1]["embed"]["embedding"], table)
    shard(checkpoint)
    assert_equal_checkpoints(hf.load(checkpoint), whole)


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16])
def test_reads_16_bit_weights_exactly(checkpoint, dtype):
    def round_to_dtype(tensors):
        tensors.update({name: x.astype(dtype) for name, x in tensors.items()})

    tensors = edit_tensors(checkpoint, round_to_dtype)
    _, params = hf.load(checkpoint)
    kernel = params["layers"]["mlp"]["down"]["kernel"][1]
    stored = tensors["model.layers.1.mlp.down_proj.weight"]
    np.testing.assert_array_equal(kernel, stored.T.astype(np.float32))
    assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {np.dtype("float32")}


@pytest.mark.parametrize(
    "family", with_first_fast(["phi3", *(f for f in FAMILIES if f != "phi3")], 3)
)
def test_round_trip_is_bit_exact(tmp_path, family):
    before, out = hf.load(FIXTURE / family), tmp_path / "new" / "folder"
    hf.save(out, *before, like=FIXTURE / family)
    original, written = (
        safetensors.numpy.load_file(folder / "model.safetensors")
        for folder in (FIXTURE / family, out)
    )
    assert original.keys() == written.keys()
    jax.tree.map(np.testing.assert_array_equal, original, written)
    # Without a source, it finds the family of the model.
    hf.save(tmp_path / "found", *before)
    for folder in out, tmp_path / "found":
        assert_equal_checkpoints(hf.load(folder), before)
    stored = json.loads((tmp_path / "found" / "config.json").read_text())
    original = json.loads((FIXTURE / family / "config.json").read_text())
    # A Phi-3 is a Mistral whose tensors are joined.
    expected = "mistral" if family == "phi3" else original["model_type"]
    assert stored["model_type"] == expected
    if family == "gemma2":  # A Gemma needs the scale of scores.
        config = dataclasses.replace(before[0], query_pre_attn_scalar=None)
        hf.save(tmp_path / "scaled", config, before[1])
        stored = json.loads((tmp_path / "scaled" / "config.json").read_text())
        assert stored["query_pre_attn_scalar"] == config.head_dim


@pytest.mark.parametrize(
    ("family", "changes", "like", "message"),
    [
        (
            *("gemma2", {}, "llama"),
            r"a llama does not have the model's .*unit_offset_norms.*attn_softcap"
            ".*activation.*kinds of layers",
        ),
        ("gemma2", {"qkv_bias": True}, None, r"params lacks .*bias"),
        ("gemma2", {"post_norms": False}, None, "none of the families has all"),
        ("mixtral", {}, "mistral", "a mistral does not have .*num_exp"),
        ("mistral", {}, "mixtral", "'num_local_experts' expected int"),
    ],
)
def test_save_names_what_a_family_lacks(tmp_path, family, changes, like, message):
    config, params = hf.load(FIXTURE / family)
    config = dataclasses.replace(config, **changes)
    if "post_norms" in changes:
        del params["layers"]["post_attention_norm"], params["layers"]["post_mlp_norm"]
    like = like and FIXTURE / like
    with pytest.raises(hf.CheckpointError, match=message):
        hf.save(tmp_path / "out", config, params, like=like)
    assert list(tmp_path.iterdir()) == []


def test_save_keeps_what_generation_needs(checkpoint, tmp_path):
    edit_config(checkpoint, bos_token_id=1, eos_token_id=[2, 3], pad_token_id=0)
    files = ("generation_config.json", "tokenizer.json", "tokenizer_config.json")
    files += ("special_tokens_map.json", "chat_template.jinja", "tokenizer.model")
    for name in files:
        (checkpoint / name).write_text(f"the content of {name}")
    (checkpoint / "training_args.bin").write_text("not this one")
    hf.save(tmp_path / "out", *hf.load(checkpoint), like=checkpoint)
    written = {path.name for path in (tmp_path / "out").iterdir()}
    assert written == {*files, "config.json", "model.safetensors"}
    for name in files:
        assert (tmp_path / "out" / name).read_text() == f"the content of {name}"
    stored = json.loads((tmp_path / "out" / "config.json").read_text())
    ids = [stored[f"{name}_token_id"] for name in ("bos", "eos", "pad")]
    assert ids == [1, [2, 3], 0]


def test_save_is_all_or_nothing(tmp_path, monkeypatch):
    config, out = small_config(head_dim=10), tmp_path / "out"
    params = jax.tree.map(jnp.asarray, random_params(config))
    for kind in OSError, safetensors.SafetensorError:
        with monkeypatch.context() as patch:
            patch.setattr(
                safetensors.numpy, "save_file", Mock(side_effect=kind("full"))
            )
            with pytest.raises(OSError, match=r"out cannot be written: full"):
                hf.save(out, config, params)
        assert list(tmp_path.iterdir()) == []
    out.mkdir()
    hf.save(out, config, params)
    assert_equal_checkpoints(hf.load(out), (config, params))
    assert list(tmp_path.iterdir()) == [out]
    before = (out / "config.json").read_bytes()
    with pytest.raises(FileExistsError, match="out already exists"):
        hf.save(out, small_config(), params)
    assert (out / "config.json").read_bytes() == before


NORM = r"params: norm/scale takes float32 \(32,\), got "


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        ({"norm": None}, "params lacks norm/scale"),
        ({"head": np.ones(3)}, "params has the unexpected head"),
        ({"norm": {"scale": np.ones(3, np.float32)}}, NORM + r"float32 \(3,\)"),
        ({"norm": {"scale": np.ones(32)}}, NORM + "float64"),
    ],
)
def test_save_checks_the_parameters(tmp_path, spoil, message):
    config, params = hf.load(FIXTURE / "llama")
    params = {name: x for name, x in (params | spoil).items() if x is not None}
    with pytest.raises(hf.CheckpointError, match=message):
        hf.save(tmp_path / "out", config, params)


YARN, LINEAR = {"type": "yarn", "factor": 2.0}, {"rope_type": "linear", "factor": 2.0}
LONG = {"rope_type": "longrope", "short_factor": [1.0] * 2, "long_factor": [1.0] * 2}
PARTIAL = {"partial_rotary_factor": 0.5}
OF_LLAMA = [
    ({"model_type": "gpt2"}, "model_type is 'gpt2', supported: llama, qwen2, mi"),
    ({"model_type": ...}, "model_type is None, .* in the subfolder hf"),
    ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
    ({"attention_bias": True}, "attention_bias is True"),
    ({"mlp_bias": True}, "mlp_bias is True"),
    ({"quantization_config": {"bits": 4}}, "quantization_config is"),
    ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5"),
    ({"hidden_size": ...}, "config.json: lacks hidden_size"),
    ({"hidden_size": 36}, "lm_head.weight has shape .*asks for"),
    ({"num_key_value_heads": 3}, "num_kv_heads takes a divisor of num_heads"),
    ({"rope_parameters": {"rope_type": "proportional"}}, "is not supported in a llama"),
    (
        {"rope_parameters": {"rope_type": "longrope"}},
        "cannot read it: .* required",
    ),
    ({"rope_parameters": YARN | {"factor": 0.5}}, "factor takes a number from 1 to"),
    (
        {**TOP, "rope_scaling": YARN | {"mscale": 1, "mscale_all_dim": 1}},
        "mscale and mscale_all_dim are not supported",
    ),
    (TOP | {"rope_scaling": YARN, "rope_theta": 1}, "YaRN takes a rope_theta above 1 "),
    (
        {"rope_parameters": make_hf_fixture.LLAMA3_ROPE | {"high_freq_factor": 1.0}},
        "high_freq_factor takes a number above",
    ),
    ({"rope_parameters": {"full_attention": {}}}, "takes one rotation for all layers"),
    ({"layer_types": ["sliding_attention"] * 2}, "layer_types takes 'full_attention'"),
    ({"layer_types": 5}, "transformers cannot read it: .*'int' object is"),
    ({"rope_parameters": "linear"}, "config.json: transformers cannot read it: .*'lin"),
    ({"rope_parameters": PARTIAL}, "partial_rotary_factor is 0.5"),
    ({"num_hidden_layers": 10**9}, "num_hidden_layers asks for 1000000000, the"),
    ({"vocab_size": 2**31 - 1, "hidden_size": 2**31 - 4}, "cannot be allocated"),
    ({"num_hidden_layers": 3}, "lacks model.layers.2.input_layernorm.weight and 8"),
    ({"num_hidden_layers": 1}, "the unexpected model.layers.1.input_layernorm"),
    ({"tie_word_embeddings": True}, "lm_head.weight differs from model.embed_"),
    ({"model_type": "qwen2"}, "lacks model.layers.0.self_attn.k_proj.bias and 5"),
]


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        *(("llama", *row) for row in OF_LLAMA),
        ("gemma2", {"hidden_activation": "gelu"}, "hidden_activation is 'gelu', supp"),
        ("gemma2", {"sliding_window": None}, "sliding_window takes an integer"),
        ("gemma2", {"layer_types": ["full_attention"]}, "config.json: transformers "),
        ("gemma3", {"attn_logit_softcapping": 5.0}, "attn_logit_softcapping is 5.0"),
        ("gemma3", {"use_bidirectional_attention": True}, "use_bidirectional_attenti"),
        (
            *("gemma3", {"rope_parameters": {"sliding_attention": LINEAR}}),
            "takes the default rotation for sliding_attention",
        ),
        (
            *("gemma3", {"layer_types": None, "sliding_window_pattern": 0}),
            "transformers cannot read it: integer modulo by zero",
        ),
        (
            *("gemma3", TOP | {"rope_local_base_freq": None}),
            "rope_local_base_freq takes a number from 1 to .*, got None",
        ),
        ("smollm3", {"no_rope_layers": [1, 2]}, "takes 0 or 1 for each of the 3"),
        (
            *("phi3", {"rope_parameters": LONG}),
            "'longrope' is not supported in a phi3, supported: default$",
        ),
        ("phi3", TOP | {"partial_rotary_factor": 0.75}, "partial_rotary_factor is 0.7"),
        ("mixtral", {"router_jitter_noise": 0.1}, "router_jitter_noise is 0.1"),
        ("mixtral", {"num_local_experts": None}, "'num_local_experts' expected int"),
        ("mixtral", {"num_local_experts": 10**6}, "num_local_experts asks for 1000000"),
        ("mixtral", {"num_local_experts": 6}, "lacks .*experts.5.w1.weight and 5 more"),
        ("qwen3moe", {"mlp_only_layers": [1]}, r"mlp_only_layers is \[1\], supported"),
        ("qwen3moe", {"decoder_sparse_step": 2}, "decoder_sparse_step is 2, supported"),
        ("qwen3moe", {"moe_intermediate_size": 13}, "has shape .*asks for"),
    ],
)
def test_unsupported_configurations_are_named(tmp_path, family, changes, message):
    folder = Path(shutil.copytree(FIXTURE / family, tmp_path / "checkpoint"))
    edit_config(folder, **changes)
    with pytest.raises(hf.CheckpointError, match=message):
        hf.load(folder)


@pytest.mark.parametrize(
    ("family", "changes", "sliding"),
    [
        ("qwen2", {"use_sliding_window": True, "max_window_layers": 1}, (1,)),
        ("qwen2", {"use_sliding_window": True, "max_window_layers": 0}, None),
        ("qwen2", {"use_sliding_window": True, "max_window_layers": 2}, ()),
        ("qwen2", {"use_sliding_window": True, "max_window_layers": ...}, ()),
        ("qwen2", {"use_sliding_window": False, "max_window_layers": 1}, ()),
        ("smollm3", {"use_sliding_window": True}, (1,)),
        ("mistral", {}, None),
        ("mistral", {"sliding_window": ...}, None),  # as transformers does: 4096
        ("mistral", {"sliding_window": None}, ()),
        ("gemma2", {}, (0, 2)),
        ("gemma3", {}, None),
        ("gemma3", {"sliding_window_pattern": 3}, (0, 1)),
        ("qwen3moe", {}, ()),
        ("qwen3moe", {"use_sliding_window": True}, None),
    ],
)
def test_layers_with_a_window_where_no_list_says(tmp_path, family, changes, sliding):
    folder = Path(shutil.copytree(FIXTURE / family, tmp_path / "checkpoint"))
    edit_config(folder, **{"sliding_window": 16, "layer_types": ..., **changes})
    config, _ = hf.load(folder)
    if sliding == ():
        assert config.sliding_window is None
    else:
        window = 4096 if changes.get("sliding_window") is ... else 16
        assert (config.sliding_window, config.sliding_layers) == (window, sliding)


def test_loads_the_configuration_of_experts(tmp_path):
    config, params = hf.load(FIXTURE / "qwen3moe")
    experts = jax.tree.map(np.shape, params["layers"]["mlp"]["experts"])
    assert experts["gate_up"]["kernel"] == (2, 6, 16, 24)
    coefficients = config, hf.load(FIXTURE / "mixtral")[0]
    assert [c.router_aux_loss_coef for c in coefficients] == [0.001, 0.02]
    # Published checkpoints name the number of experts otherwise than transformers 5.
    folder = Path(shutil.copytree(FIXTURE / "qwen3moe", tmp_path / "checkpoint"))
    edit_config(folder, num_local_experts=..., num_experts=6)
    assert hf.load(folder)[0] == config


def truncate(file):
    file.write_bytes(file.read_bytes()[:-10])


NORM_NAME = "model.norm.weight"


def replace_norm(array):
    change = {NORM_NAME: array}
    return lambda folder: edit_tensors(folder, lambda tensors: tensors.update(change))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda f: (f / "config.json").unlink(), "config.json does not exist"),
        (lambda f: truncate(f / "config.json"), "config.json is not JSON"),
        (lambda f: (f / "config.json").write_text("[]"), "does not hold a JSON object"),
        (lambda f: (f / WEIGHTS).unlink(), f"neither {WEIGHTS} nor {WEIGHTS}.index"),
        (lambda f: truncate(f / WEIGHTS), "is not a safetensors file"),
        (lambda f: edit_tensors(f, lambda t: t.pop(NORM_NAME)), f"lacks {NORM_NAME}$"),
        (
            replace_norm(np.ones((1, 32), "f4")),
            r"model.norm.weight has shape \(1, 32\), config.json asks for \(32,\)",
        ),
        (replace_norm(np.ones(32, np.int8)), "model.norm.weight is I8, supported are"),
        (
            lambda f: [shard(f), (f / "model-00002-of-00002.safetensors").unlink()],
            r"00002-of-00002.* does not exist",
        ),
        (
            lambda f: [shard(f), (f / f"{WEIGHTS}.index.json").write_text("{}")],
            "index.json lacks weight_map",
        ),
    ],
)
def test_damaged_checkpoints_are_named(checkpoint, damage, message):
    damage(checkpoint)
    with pytest.raises(hf.CheckpointError, match=message):
        hf.load(checkpoint)


SLIDING = {"use_sliding_window": True, "sliding_window": 5}
# Each family as it is, and with other settings; 16 bits are stored in shards.
LIVE = [(family, {}, "bfloat16") for family in make_hf_fixture.CONFIGS] + [
    ("Llama", {}, "float32"),
    ("Llama", {"head_dim": 12}, "bfloat16"),
    ("Llama", {"tie_word_embeddings": True, "rope_parameters": None}, "float16"),
    ("Qwen2", {"tie_word_embeddings": False, "head_dim": 4}, "float32"),
    ("Qwen2", SLIDING | {"max_window_layers": 1}, "float32"),
    ("Mistral", {"rope_parameters": make_hf_fixture.YARN_ROPE}, "bfloat16"),
    ("Qwen3", {"use_sliding_window": False}, "bfloat16"),
    ("Qwen3", {"tie_word_embeddings": True, "head_dim": 6}, "float32"),
    ("SmolLM3", {"tie_word_embeddings": False}, "bfloat16"),
    ("SmolLM3", SLIDING, "float32"),
    ("Gemma2", {"attn_logit_softcapping": None}, "float32"),
    ("Gemma3", {"final_logit_softcapping": None, "layer_types": None}, "float32"),
    ("Phi3", {"num_key_value_heads": 4, "sliding_window": None}, "float32"),
    ("Mixtral", {"sliding_window": None, "num_experts_per_tok": 4}, "float32"),
    ("Mixtral", {"head_dim": 6}, "float32"),
    ("Qwen3Moe", SLIDING | {"norm_topk_prob": False}, "float32"),
    ("Qwen3Moe", {"num_experts": 12, "tie_word_embeddings": True}, "float32"),
]


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.parametrize(("family", "changes", "dtype"), LIVE)
@pytest.mark.exhaustive  # test_logits_match_pytorch has stored logits of each family
def test_live_pytorch_model(tmp_path, family, changes, dtype):
    torch = pytest.importorskip("torch", reason="compares with PyTorch")
    transformers = pytest.importorskip("transformers", reason="compares with it")
    config = make_hf_fixture.CONFIGS[family] | changes
    model = make_hf_fixture.random_model(family, config, seed=1)
    # Only the weights: model.to would also round the rotary frequencies.
    for parameter in model.parameters():
        parameter.data = parameter.data.to(getattr(torch, dtype))
    shards = "5GB" if dtype == "float32" else "20KB"
    model.save_pretrained(tmp_path / "a", max_shard_size=shards)
    for parameter in model.parameters():
        parameter.data = parameter.data.to(torch.float32)
    reference = make_hf_fixture.reference(model, seed=1)
    logits = logits_of(tmp_path / "a", reference["tokens"])
    np.testing.assert_allclose(logits, reference["logits"], rtol=0, atol=1e-4)

    # transformers reads the same model from the saved checkpoint.
    hf.save(tmp_path / "b", *hf.load(tmp_path / "a"), like=tmp_path / "a")
    reread = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "b").eval()
    again = make_hf_fixture.reference(reread, seed=1)
    np.testing.assert_array_equal(again["logits"], reference["logits"])
