"""GGUF files: the codes of training, read by gguf and computed by llama.cpp."""

import dataclasses
import json
import urllib.request

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tokenizers
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers, processors

import fbq_jax
from examples.llama import hf
from examples.llama.hf.config_json import to_json
from examples.llama.hf.families import FAMILIES
from examples.llama.model import Llama
from examples.llama.rotary import LinearScaling, Llama3Scaling, YarnScaling
from examples.llama.text import byte_tokenizer
from fbq_jax.export import ExportError
from tests.examples.small import small_config
from tests.examples.test_llama_export import (
    DOT,
    EXPERTS,
    SIZES,
    TOKENS,
    float_params,
    trained,
)

gguf = pytest.importorskip("gguf", reason="reads and writes the files")
gguf_tokenizer = pytest.importorskip("examples.llama.hf.gguf_tokenizer")

FILE = "model-Q8_0.gguf"
GEMMA = {
    "activation": "gelu_tanh",
    "unit_offset_norms": True,
    "post_norms": True,
    "embed_scale": 8.0,
    "tie_embeddings": True,
    "sliding_window": 6,
}
YARN = YarnScaling(factor=4.0, original_max_position_embeddings=64)
LLAMA3 = Llama3Scaling(
    factor=8.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=64,
)
TEXT = [
    "The loss 12345 is 3.14; don't WE'LL stop!\n\n  Indented\tcode é 😀 日本語 x=1",
    "hello  world again <|end|>ok",
    "Zero blocks   never\r\n need fall-back 2026",
]


def bytewise(*before, ignore_merges=False):
    """A byte-level tokenizer trained on `TEXT`, with steps before the bytes."""
    own = not any(isinstance(step, pre_tokenizers.Split) for step in before)
    last = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=own)
    tokenizer = tokenizers.Tokenizer(models.BPE(ignore_merges=ignore_merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*before, last])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<s>", "</s>", "<|end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXT, trainer)
    return tokenizer


def sentencepiece():
    """A tokenizer such as Llama 2's."""
    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2}
    vocab |= {f"<0x{byte:02X}>": 3 + byte for byte in range(256)}
    for piece in ("▁", "l", "o", "h", "e", "w", "r", "d", "lo", "el", "hel", "▁w"):
        vocab[piece] = len(vocab)
    merges = [("l", "o"), ("e", "l"), ("h", "el"), ("▁", "w")]
    tokenizer = tokenizers.Tokenizer(
        models.BPE(vocab, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    )
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 1)]
    )
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    return tokenizer


def source(folder, config, family, tokenizer):
    """What `like` needs of a checkpoint: everything but its weights."""
    folder.mkdir()
    ids = {"bos_token_id": 0, "eos_token_id": 1}
    stored = to_json(config, FAMILIES[family]) | ids
    (folder / "config.json").write_text(json.dumps(stored))
    tokenizer.save(str(folder / "tokenizer.json"))
    strings = {"bos_token": "<s>", "eos_token": "</s>", "chat_template": "{{ 'a' }}"}
    (folder / "tokenizer_config.json").write_text(json.dumps(strings))
    return folder


def entries(reader):
    return {name: field.contents() for name, field in reader.fields.items()}


@pytest.mark.exhaustive
def test_codes_read_by_gguf_are_those_of_freeze(tmp_path):
    model, variables = trained(saved_bits=10, vocab_size=320)
    frozen = fbq_jax.freeze(model, variables, TOKENS)
    like = source(tmp_path / "like", model.config, "llama", bytewise())
    hf.export(tmp_path / "out" / "gguf", "gguf", model, frozen, like=like)
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["gguf"]
    reader = gguf.GGUFReader(tmp_path / "out" / "gguf" / FILE)
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    layers = frozen["fallback"]["layers"]
    down = layers["mlp"]["down"]["dot_general"]["weight"].codes.main
    qkv = layers["attention"]["qkv"]["dense"]["dot_general"]["weight"].codes.main
    for layer in range(2):
        found = tensors[f"blk.{layer}.ffn_down.weight"]
        assert found.tensor_type == gguf.GGMLQuantizationType.Q8_0
        blocks = found.data.reshape(64, -1, 34)
        codes = blocks[..., 2:].view(np.int8).reshape(64, -1)
        np.testing.assert_array_equal(codes, down.codes[layer, 0])
        scales = blocks[..., :2].view(np.float16)[..., 0]
        rows = np.repeat(down.scales[layer, 0], 32, axis=0)
        np.testing.assert_array_equal(scales, rows.astype(np.float16))
        # Channels i and i + 16 of a head of 32 are a pair, in adjacent rows.
        found = tensors[f"blk.{layer}.attn_k.weight"].data.reshape(64, -1, 34)
        codes = found[..., 2:].view(np.int8).reshape(2, 16, 2, 64).swapaxes(1, 2)
        keys = [qkv.codes[layer, 0, start : start + 32] for start in (64, 192)]
        np.testing.assert_array_equal(codes.reshape(2, 32, 64), keys)
    # Other matrices are in the model's dtype, and vectors in float32.
    table = np.asarray(variables["params"]["embed"]["embedding"], jnp.bfloat16)
    found = tensors["token_embd.weight"]
    assert found.tensor_type == gguf.GGMLQuantizationType.BF16
    np.testing.assert_array_equal(found.data, table.view(np.uint8))
    scale = variables["params"]["layers"]["mlp"]["norm"]["scale"][1]
    np.testing.assert_array_equal(tensors["blk.1.ffn_norm.weight"].data, scale)
    stored = entries(reader)
    assert stored["general.architecture"] == "llama"
    assert stored["llama.attention.head_count_kv"] == 2
    assert stored["llama.rope.freq_base"] == 10000
    assert stored["tokenizer.ggml.pre"] == "gpt-2"
    assert stored["tokenizer.ggml.eos_token_id"] == 1
    assert stored["tokenizer.ggml.add_bos_token"] is False
    assert stored["tokenizer.chat_template"] == "{{ 'a' }}"
    tokens, kinds = (
        stored[f"tokenizer.ggml.{key}"] for key in ("tokens", "token_type")
    )
    assert (len(tokens), tokens[2], kinds[2]) == (320, "<|end|>", 3)
    assert (tokens[-1], kinds[-1]) == ("[PAD319]", 5)


def test_tokens_beside_the_tokenizer_are_written(tmp_path):
    tokenizer = bytewise()
    tokenizer.enable_padding(direction="left", pad_token="<s>", length=8)
    tokenizer.enable_truncation(1)
    folder = source(tmp_path / "like", small_config(**SIZES), "llama", tokenizer)
    strings = {"bos_token": "<s>", "pad_token": "<pad>", "chat_template": "unused"}
    (folder / "tokenizer_config.json").write_text(json.dumps(strings))
    (folder / "chat_template.jinja").write_text("é", encoding="utf-8")
    writer = gguf.GGUFWriter(tmp_path / "file", "llama")
    loaded = gguf_tokenizer.read_tokenizer(folder, 320)
    gguf_tokenizer.add_tokenizer(writer, loaded, folder, 320)
    stored = {name: entry.value for name, entry in writer.kv_data[0].items()}
    last = tokenizer.get_vocab_size()
    assert stored["tokenizer.ggml.tokens"][last] == b"<pad>"
    assert stored["tokenizer.ggml.padding_token_id"] == last
    assert stored["tokenizer.ggml.add_bos_token"] is False
    assert stored["tokenizer.chat_template"] == "é"
    with pytest.raises(ExportError, match=f"has a token {last}, the model has {last}"):
        gguf_tokenizer.read_tokenizer(folder, last)
    (folder / "chat_template.jinja").unlink()
    strings["chat_template"] = 5
    (folder / "tokenizer_config.json").write_text(json.dumps(strings))
    with pytest.raises(ExportError, match="like has a chat template that is not text"):
        gguf_tokenizer.read_tokenizer(folder, 320)


@pytest.mark.exhaustive
def test_a_full_disk_leaves_nothing_and_a_file_needs_no_tokenizer(
    tmp_path, monkeypatch
):
    def fill_disk(*_):
        raise OSError("disk full")

    model, variables = trained(saved_bits=10)
    with monkeypatch.context() as patch:
        patch.setattr(gguf.GGUFWriter, "write_tensors_to_file", fill_disk)
        with pytest.raises(OSError, match="gguf cannot be written: disk full"):
            hf.export(tmp_path / "gguf", "gguf", model, variables)
    assert list(tmp_path.iterdir()) == []
    hf.export(tmp_path / "gguf", "gguf", model, variables)
    stored = entries(gguf.GGUFReader(tmp_path / "gguf" / FILE))
    assert stored["tokenizer.ggml.model"] == "no_vocab"
    assert "tokenizer.ggml.tokens" not in stored


SLIDING_GEMMA = GEMMA | {"attn_softcap": 5.0, "logit_softcap": 9.0}
SLIDING_GEMMA |= {"sliding_layers": (0,)}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sliding_window": 6}, "llama has no sliding windows"),
        ({"qk_norm": True, "rope_scaling": LLAMA3}, "qwen3 does not scale RoPE as"),
        (
            {"rope_scaling": dataclasses.replace(YARN, beta_fast=8.0)},
            "llama takes YaRN without settings beside its factor",
        ),
        ({"nope_layers": (0,)}, r"smollm3 rotates in all layers but \(\), not \(0,\)"),
        (
            SLIDING_GEMMA | {"sliding_layers": (1,)},
            r"gemma2 has sliding windows in all layers but 2, 4, \.\.\.",
        ),
        (
            SLIDING_GEMMA | {"query_pre_attn_scalar": 5, "attn_softcap": None},
            r"gemma2 divides scores by sqrt\(32\), and caps scores and logits",
        ),
        (
            SLIDING_GEMMA | {"rope_scaling": YARN},
            "gemma2 does not scale RoPE as YaRN does",
        ),
        (
            SLIDING_GEMMA | {"tie_embeddings": False},
            "gemma2 shares the embeddings with the head",
        ),
        (
            EXPERTS | {"qk_norm": True, "renormalize": False},
            "qwen3moe divides the weights of a token's experts by their sum",
        ),
        ({"qkv_bias": True}, "qwen2 has heads of hidden_size / heads channels"),
    ],
)
def test_what_llama_cpp_computes_otherwise_is_refused(tmp_path, changes, message):
    model = Llama(small_config(**(SIZES | {"saved_bits": None} | changes)), DOT)
    with pytest.raises(ExportError, match=message):
        hf.export(tmp_path / "out", "gguf", model, {"params": {}})
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("tokenizer", "vocab_size", "message"),
    [
        (bytewise(pre_tokenizers.Whitespace()), 320, "tokenizers are not known to"),
        (
            *(bytewise(pre_tokenizers.Split(Regex(r"\d+"), "isolated")), 320),
            "with the splits of gpt-2, smollm, qwen2, llama-bpe",
        ),
        (tokenizers.Tokenizer(models.WordLevel({"a": 0}, "a")), 320, "takes BPE"),
        (bytewise(), 100, "has a token 299, the model has 100 tokens"),
    ],
)
def test_tokenizers_that_llama_cpp_lacks_are_refused(
    tmp_path, tokenizer, vocab_size, message
):
    model = Llama(small_config(**SIZES, vocab_size=vocab_size), DOT)
    like = source(tmp_path / "like", model.config, "llama", tokenizer)
    with pytest.raises(ExportError, match=message):
        hf.check_exportable("gguf", model, like=like)


# Models of each family, as changes of `SIZES`.
MODELS = [
    ("llama", {}),
    ("llama", {"num_kv_heads": 4, "head_dim": 64, "tie_embeddings": True}),
    ("llama", {"rope_scaling": LLAMA3, "rope_theta": 500.0}),
    ("llama", {"rope_scaling": LinearScaling(factor=4.0)}),
    ("mistral", {"rope_scaling": YARN}),
    ("qwen2", {"qkv_bias": True, "head_dim": 16}),
    ("qwen3", {"qk_norm": True, "rope_scaling": YARN}),
    ("smollm3", {"num_layers": 4, "nope_layers": (3,)}),
    ("phi3", {"head_dim": 16}),
    ("mixtral", EXPERTS),
    ("qwen3_moe", EXPERTS | {"qk_norm": True, "top_k": 3}),
    ("gemma2", SLIDING_GEMMA),
    (
        "gemma3_text",
        GEMMA
        | {"num_layers": 7, "qk_norm": True, "logit_softcap": 9.0}
        | {"sliding_layers": (0, 1, 2, 3, 4, 6), "local_rope_theta": 500.0}
        | {"rope_scaling": LinearScaling(factor=4.0)},
    ),
]


@pytest.mark.exhaustive
@pytest.mark.parametrize(("family", "changes"), MODELS)
def test_llama_cpp_computes_every_family(tmp_path, family, changes):
    xllamacpp = pytest.importorskip("xllamacpp", reason="compares with llama.cpp")
    sizes = {"vocab_size": 320, "max_seq_len": 256, "saved_bits": None}
    model, variables = trained(**(sizes | {"dtype": jnp.float32} | changes))
    tokenizer = bytewise()
    like = source(tmp_path / "like", model.config, family, tokenizer)
    frozen = fbq_jax.freeze(model, variables, TOKENS)
    hf.export(tmp_path / "gguf", "gguf", model, frozen, like=like)
    tokens = np.random.default_rng(0).integers(320, size=(1, 48))
    params = float_params(frozen, variables["params"])
    logits = jax.jit(Llama(model.config).apply)({"params": params}, tokens)[0, -1]
    server = start(xllamacpp, tmp_path / "gguf" / FILE)
    # A piece of a character would have no probabilities.  The bias is not part of them.
    bias = [[tokenizer.token_to_id("a"), 100]]
    asked = {"prompt": tokens[0].tolist(), "n_predict": 1, "n_probs": 320}
    found = server.handle_completions(asked | {"logit_bias": bias})
    found = json.loads(found) if isinstance(found, str) else found
    (choice,) = found["choices"]
    top = choice["logprobs"]["content"][0]["top_logprobs"]
    assert len(top) == 320
    expected = np.asarray(jax.nn.log_softmax(logits.astype(jnp.float32)))
    errors = [entry["logprob"] - expected[entry["id"]] for entry in top]
    # llama.cpp quantizes activations to 8 bits.
    assert np.std(errors) < 0.06 * np.std(expected)


def splitting(name):
    """A byte-level tokenizer that splits text as the one with this name does."""
    (split, ignores) = next(
        key for key, known in gguf_tokenizer._SPLITS.items() if known == name
    )
    if split is None:
        return bytewise()
    if split == "digits":
        return bytewise(pre_tokenizers.Digits(individual_digits=True))
    step = pre_tokenizers.Split(Regex(split), "isolated")
    return bytewise(step, ignore_merges=ignores)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "name", [*gguf_tokenizer._SPLITS.values(), "sentencepiece", "bytes"]
)
def test_llama_cpp_encodes_text_as_the_tokenizer_does(tmp_path, name):
    xllamacpp = pytest.importorskip("xllamacpp", reason="compares with llama.cpp")
    others = {"sentencepiece": sentencepiece, "bytes": byte_tokenizer}
    tokenizer = others[name]() if name in others else splitting(name)
    model, variables = trained(vocab_size=320, num_layers=1, saved_bits=None)
    like = source(tmp_path / "like", model.config, "llama", tokenizer)
    hf.export(tmp_path / "gguf", "gguf", model, variables, like=like)
    server = start(xllamacpp, tmp_path / "gguf" / FILE)
    for text in TEXT:
        asked = {"content": text, "add_special": True, "parse_special": True}
        request = urllib.request.Request(
            f"{server.listening_address}/tokenize", json.dumps(asked).encode()
        )
        with urllib.request.urlopen(request) as answer:
            found = json.load(answer)["tokens"]
        assert found == tokenizer.encode(text).ids, text


def start(xllamacpp, file):
    params = xllamacpp.CommonParams()
    params.model.path = str(file)
    params.n_ctx, params.n_parallel, params.warmup = 256, 1, False
    return xllamacpp.Server(params)
