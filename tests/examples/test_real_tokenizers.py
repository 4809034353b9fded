"""Tokenizers give the ids that transformers gives, whatever the size of a text."""

import pytest

from examples.llama import data
from examples.llama.hf.files import load_tokenizer, vocab_size
from tests.examples.real_tokenizers import TEXTS, TOKENIZERS, long_document, write


@pytest.mark.parametrize("make", TOKENIZERS)
def test_ids_are_those_of_transformers(tmp_path, make):
    transformers = pytest.importorskip("transformers", reason="compares with it")
    folder = write(tmp_path / "tokenizer", make)
    loaded = transformers.PreTrainedTokenizerFast.from_pretrained(folder)
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
    assert len(windows) > 20
