"""Tokenizers give the ids that transformers gives, whatever the size of a text."""

import json
import socket

import pytest
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from examples.llama import data
from examples.llama.errors import UserError
from examples.llama.hf import CheckpointError, load, load_tokenizer
from examples.llama.hf.files import vocab_size
from examples.llama.text import TokenizerOf, byte_tokenizer
from tests.examples.make_hf_fixture import FIXTURE
from tests.examples.real_tokenizers import (
    TEXTS,
    TOKENIZERS,
    gpt2,
    long_document,
    write,
)


@pytest.mark.parametrize("make", TOKENIZERS)
def test_ids_are_those_of_transformers(tmp_path, make):
    folder = write(tmp_path / "tokenizer", make)
    loaded = PreTrainedTokenizerFast.from_pretrained(folder)
    tokenizer = load_tokenizer(folder)
    assert tokenizer.get_vocab() == loaded.get_vocab()
    assert vocab_size(tokenizer) == max(loaded.get_vocab().values()) + 1
    for text in TEXTS:
        for special in True, False:
            found = tokenizer.encode(text, add_special_tokens=special).ids
            assert found == loaded.encode(text, add_special_tokens=special), text
        assert tokenizer.decode(found) == loaded.decode(found, skip_special_tokens=True)


@pytest.mark.parametrize("make", TOKENIZERS)
def test_windows_change_no_ids(tmp_path, make, monkeypatch):
    tokenizer = load_tokenizer(write(tmp_path / "tokenizer", make))
    monkeypatch.setattr(data, "_WINDOW", 2**12)
    monkeypatch.setattr(data, "_OVERLAP", 2**10)
    text = long_document()
    whole = tokenizer.encode(text).ids
    windows = list(data._encode_long(text.encode(), tokenizer))
    assert [index for ids in windows for index in ids] == whole
    assert len(windows) > 10


def test_tokenizers_and_configurations_need_no_network(tmp_path, monkeypatch):
    def connect(*_):
        raise AssertionError("uses the network")

    monkeypatch.setattr(socket.socket, "connect", connect)
    monkeypatch.setattr(socket, "getaddrinfo", connect)
    assert load_tokenizer(write(tmp_path / "tokenizer", gpt2)) is not None
    load(FIXTURE / "llama")


def with_file(folder, name, content):
    byte_tokenizer().save(str(folder / "tokenizer.json"))
    (folder / name).write_text(json.dumps(content))
    return folder


CONFIG, MAP = "tokenizer_config.json", "special_tokens_map.json"


@pytest.mark.parametrize(
    ("name", "content"),
    [
        (CONFIG, {"added_tokens_decoder": []}),
        (CONFIG, {"added_tokens_decoder": {"x": {"content": "a"}}}),
        (CONFIG, {"added_tokens_decoder": {"9": 9}}),
        (CONFIG, {"bos_token": 5}),
        (CONFIG, {"pad_token": "\ud800"}),
        (CONFIG, {"extra_special_tokens": 5}),
        (MAP, {"eos_token": []}),
        ("added_tokens.json", {"\ud800": 1}),
        ("tokenizer.json", {"a": 5}),
    ],
)
def test_files_of_tokens_that_are_damaged_are_named(tmp_path, name, content):
    message = rf"^{tmp_path}: transformers cannot read .*{name}: \S"
    with pytest.raises(CheckpointError, match=message):
        load_tokenizer(with_file(tmp_path, name, content))


@pytest.mark.parametrize(
    ("content", "message"),
    [(b"{", "is not JSON"), (b"\xff", "is not JSON"), (b"[]", "does not hold a JSON")],
)
@pytest.mark.parametrize("name", ["tokenizer.json", CONFIG, MAP, "added_tokens.json"])
def test_files_that_are_no_json_objects_are_named(tmp_path, name, content, message):
    folder = with_file(tmp_path, CONFIG, {})
    (folder / name).write_bytes(content)
    with pytest.raises(CheckpointError, match=f"^{folder / name} {message}"):
        load_tokenizer(folder)


def test_a_tokenizer_that_cannot_encode_is_named(tmp_path):
    tokenizer = Tokenizer(models.WordLevel({"a": 0}, unk_token="lost"))
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(CheckpointError, match="cannot encode the prompt: WordLevel er"):
        TokenizerOf(tmp_path).encode("b")
    # A panic in Rust.
    processor = {"type": "TemplateProcessing", "pair": [], "special_tokens": {}}
    processor["single"] = [{"SpecialToken": {"id": "q", "type_id": 0}}]
    stored = json.loads(byte_tokenizer().to_str()) | {"post_processor": processor}
    (tmp_path / "tokenizer.json").write_text(json.dumps(stored))
    with pytest.raises(CheckpointError, match="tokenizer cannot encode the prompt: no"):
        TokenizerOf(tmp_path).encode("b")
    (tmp_path / "text").write_text("b")
    with pytest.raises(
        UserError, match=r"the tokenizer cannot encode .*text: no entry"
    ):
        data.load_corpus(tmp_path / "text", load_tokenizer(tmp_path))


def test_an_id_that_no_tokenizer_can_give_is_told(tmp_path, capsys):
    folder = with_file(tmp_path, "added_tokens.json", {"<a>": 256, "<b>": 300})
    tokenizer = load_tokenizer(folder)
    assert tokenizer.encode("<a><b>").ids == [256, 257]
    told = "'<b>' has the id 300 in its files, and 257 in transformers"
    assert capsys.readouterr().err == f"warning: {folder}: {told}\n"
