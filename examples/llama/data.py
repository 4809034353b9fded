"""Reads text or token ids and serves batches.

Batch i is a pure function of (seed, i): a run that resumes at step i reads batch i, and
no iterator state has to be saved.
"""

import contextlib
import itertools
import os
import sys
import sysconfig
import zlib
from array import array
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import grain
import numpy as np
from tokenizers import Tokenizer

from examples.llama.errors import UserError
from examples.llama.hf import load_tokenizer
from examples.llama.hf.files import named_errors, vocab_size
from examples.llama.progress import interruptible

# Separates documents. Text contains no NUL byte, so 256 token ids suffice.
SEPARATOR = b"\0"

HELD_OUT = 20  # every 20th file, or with fewer files, the last 20th of the text

_TOGETHER = 2**22  # bytes of documents to encode at once, which takes seconds
_WINDOW = 2**19  # bytes of a document to encode at once, in some 160 times the memory
_OVERLAP = 2**15  # characters that two windows share
_TOKEN_IDS = ("train.bin", "val.bin")  # files of a folder
# Folders of the standard library that are not its source.
_NOT_SOURCE = {"site-packages", "dist-packages", "test", "tests", "idle_test"}


@dataclass(frozen=True)
class Corpus:
    """Token ids for training and for validation, of one unsigned integer dtype."""

    train: np.ndarray
    val: np.ndarray
    vocab_size: int  # that a model needs

    def check_fits(self, vocab_size: int) -> None:
        """Raises UserError if a token id is not below `vocab_size`."""
        largest = max(int(part.max(initial=0)) for part in (self.train, self.val))
        if largest >= vocab_size:
            accepts = f"the model's vocabulary accepts 0 to {vocab_size - 1}"
            raise UserError(f"the data has token id {largest}; {accepts}")

    def fingerprint(self) -> dict[str, int]:
        """Returns the sizes in tokens and a checksum, which identify the corpus.

        The checksum covers one to two million evenly spaced tokens of each part.
        """
        crc = 0
        for part in (self.train, self.val):
            sample = part[:: max(1, len(part) >> 20)]
            crc = zlib.crc32(sample.astype(np.uint32).tobytes(), crc)
        return {"train": len(self.train), "val": len(self.val), "crc32": crc}


def load_corpus(path: Path | None = None, tokenizer: Tokenizer | None = None) -> Corpus:
    """Reads a corpus and splits it.

    Args:
        path: One of the following. A text file: its last 20th is held out. A folder
            of UTF-8 files: every 20th file is held out, or the last 20th of the text
            if there are fewer. A nanoGPT `.bin` file of uint16 token ids, or a folder
            with `train.bin` and `val.bin`; a `tokenizer.json` beside them sets the
            vocabulary size. None reads the source of Python's standard library.
        tokenizer: Encodes each document by itself. None uses the bytes as token ids,
            with a NUL between documents.
    """
    root = Path(sysconfig.get_path("stdlib")) if path is None else path
    if not root.exists():
        raise UserError(f"data: {root} does not exist")
    if not root.is_dir():
        if root.suffix == ".bin":
            return _from_ids(root, *_split_tail(_memory_map(root)))
        return _from_texts([root.read_bytes()], root, tokenizer)
    missing = [name for name in _TOKEN_IDS if not (root / name).exists()]
    if len(missing) == 1:
        raise UserError(f"data: {root} has token ids, but no {missing[0]}")
    if not missing:
        return _from_ids(root, *(_memory_map(root / name) for name in _TOKEN_IDS))
    texts = []
    for file in _files(root, set() if path else _NOT_SOURCE):
        if path or file.suffix == ".py":
            data = file.read_bytes()
            with contextlib.suppress(UnicodeDecodeError):
                data.decode()
                texts.append(data)
    return _from_texts(texts, root, tokenizer)


def _files(root: Path, skipped: set[str]) -> list[Path]:
    """The files that are not hidden, sorted by their path, and each once.

    Folders behind symbolic links are read after all others, so that a file has the
    path without a link if there is one.
    """

    def skip(error: OSError) -> None:
        print(
            f"warning: {error.filename} is skipped: {error.strerror}", file=sys.stderr
        )

    found: dict[str, Path] = {}
    folders, entered = [root], set[str]()
    for folder in folders:  # which grows
        for base, inside, names in os.walk(folder, onerror=skip):
            shown = {name for name in inside if name[0] != "."} - skipped
            inside[:] = sorted(shown) if os.path.realpath(base) not in entered else []
            entered.add(os.path.realpath(base))
            folders += [x for name in inside if (x := Path(base, name)).is_symlink()]
            for path in (Path(base, name) for name in names if name[0] != "."):
                if path.is_file():
                    found.setdefault(os.path.realpath(path), path)
    return sorted(found.values())


def token_ids_folder(data: str | Path | None) -> Path | None:
    """Returns the folder of token ids and their tokenizer; None if `data` is text."""
    path = Path(data or "text")
    if path.is_dir():
        return path if (path / "train.bin").exists() else None
    return path.parent if path.suffix == ".bin" else None


def batches(
    corpus: Corpus, part: Literal["train", "val"], *, seq: int, batch: int, seed: int
) -> grain.MapDataset[np.ndarray]:
    """Returns endless batches with random access, shuffled anew in each epoch.

    Item i is batch i: int32 [batch, seq + 1], inputs [:-1] and targets [1:].
    """
    tokens = getattr(corpus, part)
    if len(tokens) <= seq:
        found = f"the {part} part has {len(tokens)} tokens"
        why = f"fewer than one window of {seq + 1}"
        raise UserError(f"data: {found}, {why}: add text, or set a smaller --seq")
    # Adjacent windows share one token.
    windows = np.lib.stride_tricks.sliding_window_view(tokens, seq + 1)[::seq]
    shuffled = grain.MapDataset.source(windows).seed(seed).shuffle().repeat()
    return shuffled.batch(batch).map(lambda tokens: tokens.astype(np.int32))


def _from_texts(texts: list[bytes], path: Path, tokenizer: Tokenizer | None) -> Corpus:
    if not any(texts):
        raise UserError(f"data: {path} holds no text (non-empty UTF-8 files)")
    size = vocab_size(tokenizer) if tokenizer else 256
    held_out = texts[HELD_OUT - 1 :: HELD_OUT]
    del texts[HELD_OUT - 1 :: HELD_OUT]
    train = _encode(texts, path, tokenizer)
    if not held_out:
        return Corpus(*_split_tail(train), size)
    return Corpus(train, _encode(held_out, path, tokenizer), size)


def _encode(texts: list[bytes], path: Path, tokenizer: Tokenizer | None) -> np.ndarray:
    if tokenizer is None:
        return np.frombuffer(SEPARATOR.join(texts), np.uint8)
    ids = array("I")
    with named_errors(f"data: the tokenizer cannot encode {path}"):
        for some in interruptible(_encode_texts(texts, tokenizer)):
            ids.extend(some)
    return np.frombuffer(ids, np.uint32)


def _encode_texts(texts: list[bytes], tokenizer: Tokenizer) -> Iterator[list[int]]:
    """Encodes documents, as many at once as memory should hold."""
    ends = itertools.accumulate(map(len, texts))
    for _, group in itertools.groupby(texts, lambda _: next(ends) // _TOGETHER):
        some = list(group)
        short = [text.decode() for text in some if len(text) <= _WINDOW]
        encoded = iter(tokenizer.encode_batch(short))
        for text in some:
            if len(text) <= _WINDOW:
                yield next(encoded).ids
            else:
                yield from _encode_long(text, tokenizer)


def _encode_long(document: bytes, tokenizer: Tokenizer) -> Iterator[list[int]]:
    """Encodes a document in windows that overlap.

    A window begins with a token of the one before, and takes over from it in the middle
    of the overlap: at the first token of a line, or else at the first token, that both
    have. Without one, the window before grows.
    """
    document.decode()  # raises UnicodeDecodeError
    start, first, size = 0, 0, _WINDOW
    window = _Window(document[:size], tokenizer)
    while start + size < len(document):
        text, begins = window.text, window.begins
        shared = len(text) - _OVERLAP
        skipped = max((x for x in begins if x <= shared), default=0)
        later = start + len(text[:skipped].encode())
        after = _Window(document[later : later + _WINDOW], tokenizer)
        middle = range(shared + _OVERLAP // 4, len(text) - _OVERLAP // 4)
        both = [x for x in begins if x in middle and x - skipped in after.begins]
        if skipped and both:
            place = min(both, key=lambda x: (text[x - 1] != "\n", x))
            yield window.ids[first : begins[place]]
            start, first, size = later, after.begins[place - skipped], _WINDOW
            window = after
        else:
            size *= 2
            window = _Window(document[start : start + size], tokenizer)
    yield window.ids[first:]


class _Window:
    """A part of a document, its tokens, and where tokens begin near its ends."""

    def __init__(self, part: bytes, tokenizer: Tokenizer):
        self.text = part.decode(errors="ignore")  # the last character may be incomplete
        encoding = tokenizer.encode(self.text)
        far = range(_OVERLAP, len(self.text) - 2 * _OVERLAP)
        begins = [(x, i) for i, (x, _) in enumerate(encoding.offsets) if x not in far]
        # The index of the first token that begins at a character.
        self.ids, self.begins = encoding.ids, dict(reversed(begins))


def _memory_map(path: Path) -> np.ndarray:
    if not (size := path.stat().st_size) or size % 2:
        holds = "a .bin file holds uint16 token ids"
        raise UserError(f"data: {path} has {size} bytes; {holds}")
    return np.memmap(path, np.uint16, mode="r")


def _split_tail(ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    end = len(ids) - len(ids) // HELD_OUT
    return ids[:end], ids[end:]


def _from_ids(path: Path, train: np.ndarray, val: np.ndarray) -> Corpus:
    # The file format does not store the vocabulary size.
    largest = max(int(train.max()), int(val.max(initial=0)))
    corpus = Corpus(train, val, largest + 1)
    if (tokenizer := load_tokenizer(path if path.is_dir() else path.parent)) is None:
        return corpus
    corpus.check_fits(size := vocab_size(tokenizer))
    return replace(corpus, vocab_size=size)
