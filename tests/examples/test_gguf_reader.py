"""GGUF files are read: what the exporter writes, and what other programs do."""

import dataclasses

import flax.traverse_util
import jax.numpy as jnp
import numpy as np
import pytest
import tokenizers

from examples.llama import generate, hf, train
from examples.llama.hf.families import FAMILIES
from examples.llama.hf.tensor_views import tensor_views
from examples.llama.text import TokenizerOf, byte_tokenizer
from tests.examples.small import random_params, small_config
from tests.examples.test_llama_export import SIZES

gguf = pytest.importorskip("gguf", reason="reads and writes the files")
from examples.llama.hf import files, gguf_file, gguf_tokenizer  # noqa: E402
from tests.examples.test_gguf import (  # noqa: E402
    LLAMA3,
    MODELS,
    TEXT,
    sentencepiece,
    source,
    splitting,
)

TYPES = gguf.GGMLQuantizationType
# Numbers that float32 holds as they are, and a dtype in which weights are stored so.
EXACT = {"norm_eps": 2.0**-17, "vocab_size": 320, "max_seq_len": 256}
IN_FLOATS = EXACT | {"dtype": jnp.float32}
RUN = "--recipe bf16 --steps 2 --seq 16 --batch 2 --eval-every 2"


def write(file, family="llama", like=None, **changes):
    """Writes a file in floats, with experts in Q8_0; returns what it is made of."""
    config = small_config(**(SIZES | IN_FLOATS | changes))
    params = random_params(config)
    flat = flax.traverse_util.flatten_dict(params, sep="/")
    floats = {path: np.asarray(array) for path, array in flat.items()}
    views = tensor_views(config, FAMILIES[family], floats)
    tensors = {name: view.join() for name, view in views.items()}
    experts = [name for name in tensors if ".experts." in name]
    blocks = {name: gguf.quantize(tensors.pop(name), TYPES.Q8_0) for name in experts}
    gguf_file.write(file, config, FAMILIES[family], blocks, tensors, like)
    return config, params


def rewrite(file, copy, tensors=(), **entries):
    """Copies a file with other tensors, or entries; None leaves them out."""
    reader, tensors = gguf.GGUFReader(file), dict(tensors)
    entries = {key.replace("__", "."): value for key, value in entries.items()}
    writer = gguf.GGUFWriter(copy, entries.get("general.architecture", "llama"))
    for key, field in reader.fields.items():
        if key not in entries and key.partition(".")[0] in ("llama", "tokenizer"):
            kinds = (field.types[0], field.types[-1] if field.types[1:] else None)
            writer.add_key_value(key, field.contents(), *kinds)
    for key, value in entries.items():
        if value is not None and key != "general.architecture":
            add = writer.add_string if isinstance(value, str) else writer.add_uint32
            add(key, value)
    for tensor in reader.tensors:
        data = tensors.pop(tensor.name, (tensor.data, tensor.tensor_type))
        if data is not None:
            writer.add_tensor(tensor.name, data[0], raw_dtype=data[1])
    for name, (data, kind) in tensors.items():
        writer.add_tensor(name, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return copy


@pytest.mark.parametrize(("family", "changes"), MODELS)
def test_what_is_written_is_read(tmp_path, family, changes):
    config, params = write(tmp_path / "a.gguf", family, **changes)
    found, weights = hf.load(tmp_path / "a.gguf")
    assert dataclasses.replace(found, dtype=jnp.float32) == config
    flat = flax.traverse_util.flatten_dict(weights, sep="/")
    for path, expected in flax.traverse_util.flatten_dict(params, sep="/").items():
        error = np.abs(flat[path] - expected)
        if "experts" in path and "router" not in path:  # Q8_0
            assert 0 < error.max() < 0.01
        elif config.unit_offset_norms and path.endswith("scale"):  # stored as 1 + x
            assert error.max() < 2e-7
        else:
            assert not error.any(), path


@pytest.mark.parametrize("name", ["F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0"])
def test_matrices_are_of_many_types(tmp_path, name):
    kind, file = TYPES[name], tmp_path / "a.gguf"
    write(file, tie_embeddings=True)
    stored = {
        tensor.name: gguf.quantize(tensor.data, kind)
        for tensor in gguf.GGUFReader(file).tensors
        if tensor.data.ndim == 2
    }
    as_kind = {name: (data, kind) for name, data in stored.items()}
    found, weights = hf.load(rewrite(file, tmp_path / "b.gguf", as_kind))
    assert found.tie_embeddings
    down = gguf.dequantize(stored["blk.1.ffn_down.weight"], kind)
    np.testing.assert_array_equal(weights["layers"]["mlp"]["down"]["kernel"][1], down.T)
    quantized = None if name.endswith("F16") else name
    assert hf.quantization(tmp_path / "b.gguf") == quantized


def test_types_of_larger_blocks_are_read_and_types_without_values_refused(tmp_path):
    write(tmp_path / "a.gguf")
    name = "blk.1.ffn_down.weight"
    zeros = {name: (np.zeros((64, 210), np.uint8), TYPES.Q6_K)}
    weights = hf.load(rewrite(tmp_path / "a.gguf", tmp_path / "b.gguf", zeros))[1]
    assert not weights["layers"]["mlp"]["down"]["kernel"][1].any()
    integers = {name: (np.zeros((64, 256), np.int8), TYPES.I8)}
    rewrite(tmp_path / "a.gguf", tmp_path / "c.gguf", integers)
    with pytest.raises(
        hf.CheckpointError, match=rf"c.gguf: {name} cannot be read: .* I8 is"
    ):
        hf.load(tmp_path / "c.gguf")


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        (
            {"general.architecture": "falcon"},
            "general.architecture is 'falcon', supported: llama, qwen2, qwen3",
        ),
        ({"split.count": 3}, "is one of 3 parts of a model: join them with"),
        (
            {"llama.context_length": None},
            "llama.context_length takes an integer from 1 to 2147483647, got None",
        ),
        (
            {"llama.attention.head_count": "4"},
            "llama.attention.head_count takes an integer from 1 to 2147483647, got '4'",
        ),
        (
            {"llama.block_count": 10**6},
            "llama.block_count asks for 1000000, the checkpoint has 21 tensors",
        ),
        (
            {"llama.rope.dimension_count": 8},
            "llama.rope.dimension_count is 8, which the example does not compute",
        ),
        ({"llama.rope.scaling.type": "longrope"}, "llama.rope.scaling.type is 'longr"),
        ({"llama.logit_scale": 3}, "llama.logit_scale is 3, which the example does"),
        ({"llama.expert_count": 4}, "lacks blk.0.ffn_down_exps.weight and 7 more"),
        ({"llama.block_count": 1}, "has the unexpected blk.1.attn_k.weight and 8 more"),
        ({"llama.block_count": 3}, "lacks blk.2.attn_k.weight and 8 more"),
        (
            {"llama.feed_forward_length": 128},
            r"blk.0.ffn_down.weight has shape \(64, 256\), its metadata asks "
            r"for \(64, 128\)",
        ),
    ],
)
def test_entries_that_are_not_supported_are_named(tmp_path, entries, message):
    (tmp_path / "plain").mkdir()
    write(tmp_path / "plain" / "a.gguf")
    file = rewrite(tmp_path / "plain" / "a.gguf", tmp_path / "a.gguf", **entries)
    with pytest.raises(hf.CheckpointError, match=f"a.gguf.* {message}"):
        hf.load(file)


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"blk.1.attn_q.weight": None}, "lacks blk.1.attn_q.weight"),
        ({"token_embd.weight": None}, "lacks token_embd.weight"),
        ({"blk.0.attn_q.bias": np.ones(64)}, "has the unexpected blk.0.attn_q.bias"),
        ({"rope_freqs.weight": np.ones(16) * 9}, "rope_freqs.weight is not from the"),
    ],
)
def test_tensors_that_are_not_supported_are_named(tmp_path, tensors, message):
    write(tmp_path / "plain.gguf")
    given = {
        name: None if data is None else (data.astype(np.float32), TYPES.F32)
        for name, data in tensors.items()
    }
    rewrite(tmp_path / "plain.gguf", tmp_path / "a.gguf", given)
    with pytest.raises(hf.CheckpointError, match=f"a.gguf.* {message}"):
        hf.load(tmp_path / "a.gguf")


def test_files_that_are_not_whole_are_named(tmp_path):
    write(tmp_path / "whole.gguf")
    content = (tmp_path / "whole.gguf").read_bytes()
    file = tmp_path / "a.gguf"
    for end in 0, 3, 100, 2000, len(content) // 2, len(content) - 1:
        file.write_bytes(content[:end])
        with pytest.raises(hf.CheckpointError, match="not a GGUF file, or is cut"):
            hf.load(file)
    file.write_bytes(b"version https://git-lfs.github.com/spec/v1")
    with pytest.raises(hf.CheckpointError, match="is not a GGUF file, or is cut short"):
        hf.load(file)
    with pytest.raises(hf.CheckpointError, match=r"b\.gguf cannot be read: No such"):
        hf.load(tmp_path / "b.gguf")


def test_the_byte_order_of_another_machine_is_named(tmp_path):
    big = gguf.GGUFEndian.BIG
    writer = gguf.GGUFWriter(tmp_path / "a.gguf", "llama", endianess=big)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(hf.CheckpointError, match="byte order is that of another"):
        hf.load(tmp_path / "a.gguf")


def test_entries_have_the_defaults_of_llama_cpp(tmp_path):
    config, _ = write(tmp_path / "a.gguf", head_dim=16, num_kv_heads=4)
    keys = ("attention.head_count_kv", "attention.key_length", "attention.value_length")
    keys += ("vocab_size", "rope.dimension_count", "rope.freq_base")
    missing = {f"llama.{key}": None for key in keys}
    given = {"llama.expert_count": 0, "llama.rope.scaling.finetuned": 1}
    file = rewrite(tmp_path / "a.gguf", tmp_path / "b.gguf", **missing, **given)
    assert dataclasses.replace(hf.load(file)[0], dtype=jnp.float32) == config


def test_llama_3_needs_no_entry_for_its_scaling(tmp_path):
    scaling = dataclasses.replace(LLAMA3, original_max_position_embeddings=8192)
    sizes = {"rope_scaling": scaling, "rope_theta": 500000.0}
    write(tmp_path / "a.gguf", **sizes)
    missing = {"llama.rope.scaling.original_context_length": None}
    found, _ = hf.load(rewrite(tmp_path / "a.gguf", tmp_path / "b.gguf", **missing))
    assert found.rope_scaling == scaling


def without_prefix():
    """A tokenizer such as Gemma's, which puts no space before a text."""
    tokenizer = sentencepiece()
    tokenizer.normalizer = tokenizers.normalizers.Replace(" ", "▁")
    return tokenizer


def with_tokenizer(tmp_path, name):
    """A file with this tokenizer, and the tokenizer."""
    others = {"sentencepiece": sentencepiece, "bytes": byte_tokenizer}
    others["no prefix"] = without_prefix
    tokenizer = others[name]() if name in others else splitting(name)
    like = source(tmp_path / "like", small_config(**SIZES, **EXACT), "llama", tokenizer)
    write(tmp_path / "a.gguf", like=like)
    return tmp_path / "a.gguf", tokenizer


@pytest.mark.parametrize(
    "name", [*gguf_tokenizer._SPLITS.values(), "sentencepiece", "no prefix", "bytes"]
)
def test_a_tokenizer_is_read(tmp_path, name):
    file, tokenizer = with_tokenizer(tmp_path, name)
    (tmp_path / "folder").mkdir()
    hf.write_folder(file, tmp_path / "folder")
    for path in file, tmp_path / "folder":
        loaded = hf.open_tokenizer(path)
        for text in TEXT:
            ids = loaded.backend_tokenizer.encode(text).ids
            assert ids == tokenizer.encode(text).ids, text
            if tokenizer.decoder is not None:
                assert loaded.backend_tokenizer.decode(ids) == tokenizer.decode(ids)
        assert loaded.chat_template == "{{ 'a' }}"
        assert (loaded.bos_token, loaded.eos_token) == ("<s>", "</s>")
        assert files.ends(loaded) == [loaded.eos_token_id]


def test_the_token_that_ends_a_turn_stops_generation(tmp_path):
    file, tokenizer = with_tokenizer(tmp_path, "smollm")
    end = tokenizer.token_to_id("<|end|>")
    rewrite(file, tmp_path / "b.gguf", **{"tokenizer.ggml.eot_token_id": end})
    (tmp_path / "folder").mkdir()
    hf.write_folder(tmp_path / "b.gguf", tmp_path / "folder")
    for path in tmp_path / "b.gguf", tmp_path / "folder":
        assert TokenizerOf(path).stops == {tokenizer.token_to_id("</s>"), end}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.usefixtures("standard_promotion")
def test_other_tokenizers_are_named_and_need_not_be_read(tmp_path, capsys):
    file, _ = with_tokenizer(tmp_path, "smollm")
    rewrite(file, tmp_path / "b.gguf", **{"tokenizer.ggml.pre": "tekken"})
    message = "tokenizer.ggml.pre is 'tekken', supported: llama, or gpt2 with gpt-2,"
    with pytest.raises(hf.CheckpointError, match=f"b.gguf: .* {message}"):
        hf.load_tokenizer(tmp_path / "b.gguf")
    write(tmp_path / "c.gguf")
    assert hf.load_tokenizer(tmp_path / "c.gguf") is None
    ids = tmp_path / "ids.bin"
    np.arange(2000, dtype=np.uint16).clip(max=319).tofile(ids)
    for name in "bc":
        file, out = tmp_path / f"{name}.gguf", tmp_path / name
        argv = f"--from-hf {file} --data {ids} --out {out} {RUN}"
        assert train.main(argv.split()) == 0
        assert hf.load_tokenizer(out / "hf") is None
    assert "warning: no tokenizer is written: " in capsys.readouterr().err


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.usefixtures("standard_promotion")
def test_a_file_is_tuned(tmp_path, text, capsys):
    file, _ = with_tokenizer(tmp_path, "smollm")
    out = tmp_path / "run"
    argv = f"--from-hf {file} --data {text} --out {out} {RUN}"
    assert train.main(argv.split()) == 0
    assert hf.load(out / "hf")[0] == hf.load(file)[0]
    assert hf.open_tokenizer(out / "hf").chat_template == "{{ 'a' }}"
    for model in file, out:
        prompt = ["--prompt", "hello", "--tokens", "2"]
        assert generate.main([str(model), *prompt]) == 0
        printed = capsys.readouterr()
        assert printed.out.splitlines()[-1].startswith("hello")
        assert "bfloat16 weights" in printed.err
    assert generate.main([str(tmp_path), *prompt]) == 1
    assert f"holds a GGUF file: give its path, {file}" in capsys.readouterr().err
