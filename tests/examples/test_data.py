"""Corpora and batches: determinism, splits by document, errors for bad data."""

import os
import signal
import subprocess
import sys
import sysconfig
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from examples.llama import data as data_module
from examples.llama.data import (
    HELD_OUT,
    SEPARATOR,
    Corpus,
    batches,
    load_corpus,
    token_ids_folder,
)
from examples.llama.errors import UserError
from examples.llama.progress import interruptible


def write_folder(root, count):
    """Files whose sorted order differs from the order of creation."""
    for index in reversed(range(count)):
        file = root / f"{index % 2}" / f"{index:03}.txt"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"document {index}")
    return root


def word_tokenizer():
    """A tokenizer of words that puts <s> before each document."""
    vocabulary = {"<s>": 0, "a": 1, "b": 2, "<unk>": 3}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 0)]
    )
    return tokenizer


def counting(train, val=0):
    return Corpus(np.arange(train, dtype=np.uint16), np.arange(val), train)


def test_the_standard_library_is_the_default(tmp_path, monkeypatch):
    corpus = load_corpus()
    assert corpus.vocab_size == 256
    # Of the bytes, 5 % are held out in some Pythons, and 11 % in others.
    parts = corpus.train.tobytes(), corpus.val.tobytes()
    train, val = (part.count(SEPARATOR) + 1 for part in parts)
    assert val == (train + val) // HELD_OUT
    assert min(len(corpus.train), 10 * len(corpus.val)) > 1_000_000
    # Without packages and tests.
    for name in "site-packages/x.py", "json/test/x.py", "notes.txt", "b.py", "a/c.py":
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    monkeypatch.setattr(sysconfig, "get_path", lambda _: str(tmp_path))
    assert load_corpus().train.tobytes() == b"a/c.py\0b.py"


def test_folder_is_split_by_whole_files_in_sorted_order(tmp_path):
    corpus = load_corpus(write_folder(tmp_path, 40))
    order = [*range(0, 40, 2), *range(1, 40, 2)]
    documents = [f"document {index}".encode() for index in order]
    held_out = [documents.pop(39), documents.pop(19)][::-1]
    assert corpus.train.tobytes() == b"\0".join(documents)
    assert corpus.val.tobytes() == b"\0".join(held_out)


def test_few_files_hold_out_their_tail(tmp_path):
    folder = write_folder(tmp_path / "texts.bin", 19)  # a folder is no token ids
    (folder / ".git").mkdir()
    (folder / ".git" / "index").write_text("hidden")
    (folder / "image.png").write_bytes(b"\x89PNG\xff")
    assert token_ids_folder(folder) is None
    corpus = load_corpus(folder)
    text = corpus.train.tobytes() + corpus.val.tobytes()
    order = [*range(0, 19, 2), *range(1, 19, 2)]
    assert text == b"\0".join(b"document %d" % index for index in order)
    assert len(corpus.val) == len(text) // 20
    # So does a single file, of any bytes.
    file, content = tmp_path / "any.bytes", bytes(range(256)) * 5
    file.write_bytes(content)
    corpus = load_corpus(file)
    assert corpus.train.tobytes() == content[:1216]
    assert corpus.val.tobytes() == content[1216:]


def test_links_are_followed_and_each_file_is_read_once(tmp_path):
    data, other = tmp_path / "data", tmp_path / "other"
    for file in data / "z" / "1", other / "2", other / ".hidden" / "3", tmp_path / "4":
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(file.name)
    links = {
        "a": data / "z",
        "b": other,
        "z/c": other,
        "loop": data,
        "z/up": data.parent,
    }
    links |= {"d": tmp_path / "4", "e": tmp_path / "4", "none": tmp_path / "none"}
    links |= {".f": tmp_path / "4", "other": other / ".hidden", "self": data / "self"}
    for name, target in links.items():
        (data / name).symlink_to(target)
    (other / "back").symlink_to(data)
    corpus = load_corpus(data)
    # b/2, d, other/3, and z/1, which is not read as a/1
    assert corpus.train.tobytes() == b"2\x004\x003\x001"


def test_a_folder_that_cannot_be_read_is_told(tmp_path, monkeypatch, capsys):
    scan, private = os.scandir, tmp_path / "lost+found"

    def refuse(path):
        if Path(path) == private:
            raise PermissionError(13, "Permission denied", str(path))
        return scan(path)

    private.mkdir()
    (tmp_path / "a").write_text("a" * 20)
    monkeypatch.setattr("os.scandir", refuse)
    assert len(load_corpus(tmp_path).train) == 19
    told = f"warning: {private} is skipped: Permission denied\n"
    assert capsys.readouterr().err == told


def test_bins_hold_uint16_token_ids(tmp_path):
    np.arange(1000, 1100, dtype=np.uint16).tofile(tmp_path / "train.bin")
    corpus = load_corpus(tmp_path / "train.bin")
    assert corpus.train.tolist() == list(range(1000, 1095))
    assert corpus.val.tolist() == list(range(1095, 1100))
    assert corpus.vocab_size == 1100
    np.array([7, 1300], np.uint16).tofile(tmp_path / "val.bin")
    corpus = load_corpus(tmp_path)
    assert (len(corpus.train), corpus.val.tolist()) == (100, [7, 1300])
    assert corpus.vocab_size == 1301
    # A tokenizer beside token ids sets the vocabulary.
    for name in "train.bin", "val.bin":
        np.arange(3, dtype=np.uint16).tofile(tmp_path / name)
    word_tokenizer().save(str(tmp_path / "tokenizer.json"))
    for path in tmp_path, tmp_path / "train.bin":
        assert load_corpus(path).vocab_size == 4


@pytest.mark.parametrize(
    ("files", "path", "tokenizer", "message"),
    [
        ({"train.bin": bytes(200), "readme": b"a"}, ".", None, "no val.bin"),
        ({"val.bin": bytes(200), "readme": b"a"}, ".", None, "no train.bin"),
        ({}, "nowhere", None, "nowhere does not exist"),
        ({}, ".", None, "holds no text"),
        ({"file": b""}, ".", None, "holds no text"),
        ({"file": b"\xff"}, ".", None, "holds no text"),
        ({"ids.bin": b""}, "ids.bin", None, r"ids.bin has 0 bytes; .* uint16"),
        ({"ids.bin": bytes(3)}, "ids.bin", None, r"ids.bin has 3 bytes; .* uint16"),
        (
            {"text": b"xyz"},
            "text",
            Tokenizer(models.WordLevel({"a": 0}, unk_token="lost")),
            "the tokenizer cannot encode .*text: ",
        ),
        ({"latin": b"caf\xe9"}, "latin", word_tokenizer(), "encode .*latin: 'utf-8'"),
    ],
)
def test_data_that_cannot_be_read_is_named(tmp_path, files, path, tokenizer, message):
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=message):
        load_corpus(tmp_path / path, tokenizer)


def test_tokenizer_marks_where_documents_begin(tmp_path):
    for name, text in ("1", "a b"), ("2", "b"), ("3", "a a"):
        (tmp_path / name).write_text(text)
    corpus = load_corpus(tmp_path, word_tokenizer())
    assert corpus.train.tolist() == [0, 1, 2, 0, 2, 0, 1, 1]
    assert corpus.vocab_size == 4


def test_ids_may_have_gaps(tmp_path):
    vocabulary = {"a": 1, "<unk>": 3, "b": 20}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    for name in "train.bin", "val.bin":
        np.array([1, 20, 3], np.uint16).tofile(tmp_path / name)
    assert load_corpus(tmp_path).vocab_size == 21
    (tmp_path / "text").write_text("b")
    assert load_corpus(tmp_path / "text", tokenizer).vocab_size == 21
    np.array([21], np.uint16).tofile(tmp_path / "val.bin")
    with pytest.raises(UserError, match=r"token id 21; .* accepts 0 to 20"):
        load_corpus(tmp_path)


def test_documents_of_any_length_are_encoded_in_order(tmp_path, monkeypatch):
    """Windows of long ones have no ends of their own."""
    monkeypatch.setattr(data_module, "_WINDOW", 2**9)
    monkeypatch.setattr(data_module, "_OVERLAP", 2**6)
    monkeypatch.setattr(data_module, "_TOGETHER", 2**10)
    vocabulary = {"<s>": 0, "</s>": 1} | {f"w{i}": i + 2 for i in range(200)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<s>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 1)]
    )
    expected = []
    for index, words in enumerate((3, 900, 0, 200, 1, 40, 40, 300)):
        numbers = [(7 * i * i + index) % 200 for i in range(words)]
        (tmp_path / f"{index}").write_text(" ".join(f"w{i}" for i in numbers))
        expected += [0, *(i + 2 for i in numbers), 1]
    corpus = load_corpus(tmp_path, tokenizer)
    assert corpus.train.dtype == corpus.val.dtype == np.uint32
    assert [*corpus.train, *corpus.val] == expected


@pytest.mark.exhaustive
def test_memory_does_not_grow_with_a_text_file(tmp_path):
    program = """if True:
        import resource, sys
        from pathlib import Path
        from examples.llama.data import load_corpus
        from tests.examples.real_tokenizers import llama3
        tokenizer, _ = llama3()
        def peak():
            return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        load_corpus(Path(sys.argv[1]), tokenizer)
        before = peak()
        load_corpus(Path(sys.argv[2]), tokenizer)
        print(peak() - before)
    """
    line = "The quick brown fox jumps over lazy dog number {}.\n"
    for name, lines in ("short", 60_000), ("long", 200_000):
        text = "".join(map(line.format, range(lines)))
        (tmp_path / name).write_text(text)
    command = [sys.executable, "-c", program, tmp_path / "short", tmp_path / "long"]
    printed = subprocess.run(command, check=True, capture_output=True, text=True)
    assert int(printed.stdout.splitlines()[-1]) < 5 * len(text)


def test_a_corpus_that_does_not_fit_is_named():
    corpus = Corpus(np.array([1, 47]), np.array([48]), 256)
    corpus.check_fits(49)
    with pytest.raises(UserError, match=r"token id 48; .* accepts 0 to 47"):
        corpus.check_fits(48)
    with pytest.raises(UserError, match=r"has 16 tokens, .* window of 17: add text"):
        batches(counting(16), "train", seq=16, batch=1, seed=0)
    with pytest.raises(UserError, match="val part has 0 tokens"):
        batches(counting(17), "val", seq=16, batch=1, seed=0)
    assert len(batches(counting(17), "train", seq=16, batch=1, seed=0)[0]) == 1


def test_fingerprint_sees_every_token_of_a_small_corpus():
    corpus = counting(100, 10)
    assert corpus.fingerprint() == counting(100, 10).fingerprint()
    for part in corpus.train, corpus.val:
        part[3] += 1
        assert corpus.fingerprint() != counting(100, 10).fingerprint()
        part[3] -= 1


def test_each_epoch_visits_every_window_once_in_a_new_order():
    data = batches(counting(64 * 4 + 1), "train", seq=4, batch=16, seed=0)
    epochs = [
        np.concatenate([data[index] for index in range(start, start + 4)])
        for start in (0, 4)
    ]
    for epoch in epochs:
        assert sorted(epoch[:, 0].tolist()) == list(range(0, 256, 4))
        np.testing.assert_array_equal(epoch - epoch[:, :1], [list(range(5))] * 64)
        assert epoch.dtype == np.int32
    assert epochs[0][:, 0].tolist() != epochs[1][:, 0].tolist()


def test_batch_is_a_function_of_seed_and_step():
    corpus = counting(1000)
    data = batches(corpus, "train", seq=8, batch=4, seed=1)
    in_order = [data[step] for step in range(50)]
    again = batches(corpus, "train", seq=8, batch=4, seed=1)
    for step in 49, 7, 0:
        np.testing.assert_array_equal(again[step], in_order[step])
    other = batches(corpus, "train", seq=8, batch=4, seed=2)
    assert not np.array_equal(other[0], in_order[0])


def test_a_signal_between_items_is_not_lost():
    def items():
        yield 0
        signal.raise_signal(signal.SIGTERM)  # a handler that raises would do so here
        yield 1

    before = signal.getsignal(signal.SIGTERM)
    seen = []
    with pytest.raises(KeyboardInterrupt):
        seen.extend(interruptible(items()))
    assert signal.getsignal(signal.SIGTERM) is before
