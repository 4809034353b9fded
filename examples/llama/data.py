"""Text in, batches of token ids out.

A corpus is two runs of token ids, one to train on and one held out. Batch number i
is a pure function of (seed, i): a run that resumes at step i asks for batch i, and
no iterator state needs saving.
"""

import sysconfig
import zlib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import grain
import numpy as np
from tokenizers import Tokenizer

# Stands between documents. Text holds no NUL byte, so the 256 bytes suffice.
SEPARATOR = b"\0"

# Every 20th file is held out for validation, or the last 20th of a few files.
HELD_OUT = 20

# Folders inside the standard library that are not its source.
_NOT_SOURCE = {"site-packages", "dist-packages", "test", "tests", "idle_test"}


class DataError(ValueError):
    """The data cannot be read, or does not fit the model."""


@dataclass(frozen=True)
class Corpus:
    """Token ids to train on and token ids held out.

    Attributes:
        train: Token ids, shape [n], an unsigned integer dtype.
        val: Held-out token ids, shape [m], the same dtype.
        vocab_size: The number of ids a model of this corpus needs.
    """

    train: np.ndarray
    val: np.ndarray
    vocab_size: int

    def check_fits(self, vocab_size: int) -> None:
        """Raises DataError if some token id is not below `vocab_size`."""
        largest = max(int(part.max(initial=0)) for part in (self.train, self.val))
        if largest >= vocab_size:
            raise DataError(
                f"the data has token id {largest}; the model's vocabulary has "
                f"{vocab_size} ids, so it accepts 0 to {vocab_size - 1}"
            )

    def fingerprint(self) -> dict[str, int]:
        """Tells this corpus from another: its sizes in tokens and a checksum.

        The checksum reads a million or two evenly spaced tokens of each part: all
        there is in a small corpus, and quick in a large one.
        """
        crc = 0
        for part in (self.train, self.val):
            sample = part[:: max(1, len(part) >> 20)]
            crc = zlib.crc32(sample.astype(np.uint32).tobytes(), crc)
        return {"train": len(self.train), "val": len(self.val), "crc32": crc}


def load_corpus(path: Path | None = None, tokenizer: Tokenizer | None = None) -> Corpus:
    """Reads a corpus and splits it.

    Args:
        path: A file (its last 20th is held out), a folder (all of its UTF-8 files;
            every 20th is held out, or of fewer than 20 files the last 20th of the
            text), a nanoGPT `.bin` file of uint16 token ids, or a folder with
            `train.bin` and `val.bin` and perhaps their `tokenizer.json`, which then
            says how large the vocabulary is. None reads the source of the running
            Python's standard library.
        tokenizer: Encodes the text, each document by itself: where documents begin
            is marked by what it puts at the start of a text, as Llama's does. None
            takes the bytes themselves, with a NUL between documents.

    Returns:
        The corpus.

    Raises:
        DataError: Nothing is at `path`, or nothing readable.
    """
    if path is None:
        root = Path(sysconfig.get_path("stdlib"))
        files = [file.relative_to(root) for file in root.rglob("*.py")]
        files = [file for file in files if _NOT_SOURCE.isdisjoint(file.parts)]
        return _corpus_of_texts(_read_texts(root, files), root, tokenizer)
    if not path.exists():
        raise DataError(f"data: {path} does not exist")
    if not path.is_dir():
        if path.suffix == ".bin":
            return _corpus_of_ids(*_split_tail(_memory_map(path)))
        return _corpus_of_texts([path.read_bytes()], path, tokenizer)
    train, val = path / "train.bin", path / "val.bin"
    if train.exists() and val.exists():
        corpus = _corpus_of_ids(_memory_map(train), _memory_map(val))
        if not (file := path / "tokenizer.json").exists():
            return corpus
        vocab_size = Tokenizer.from_file(str(file)).get_vocab_size()
        corpus.check_fits(vocab_size)
        return replace(corpus, vocab_size=vocab_size)
    files = [file.relative_to(path) for file in path.rglob("*") if file.is_file()]
    return _corpus_of_texts(_read_texts(path, files), path, tokenizer)


def is_token_ids(path: Path | None) -> bool:
    """Whether `load_corpus` takes `path` for token ids rather than text."""
    return path is not None and (path.suffix == ".bin" or (path / "train.bin").exists())


def batches(
    corpus: Corpus, part: Literal["train", "val"], *, seq: int, batch: int, seed: int
) -> grain.MapDataset[np.ndarray]:
    """Endless shuffled batches with random access; each epoch has its own order.

    Args:
        corpus: The token ids.
        part: Which of them.
        seq: Inputs in a window, in tokens.
        batch: Windows in a batch.
        seed: Seed of the order.

    Returns:
        A dataset whose item i is batch i: int32 of shape [batch, seq + 1], where
        columns [:-1] are inputs and [1:] are their targets.

    Raises:
        DataError: There is not one window.
    """
    windows = _Windows(getattr(corpus, part), seq)
    if not len(windows):
        raise DataError(
            f"data: the {part} part has {len(windows.tokens)} tokens, fewer than one "
            f"window of {seq + 1}; give more data or a smaller --seq"
        )
    return grain.MapDataset.source(windows).seed(seed).shuffle().repeat().batch(batch)


@dataclass(frozen=True)
class _Windows:
    """Windows of seq + 1 tokens; the last of one is the first of the next."""

    tokens: np.ndarray
    seq: int

    def __len__(self) -> int:
        return max(0, len(self.tokens) - 1) // self.seq

    def __getitem__(self, index: int) -> np.ndarray:
        start = index * self.seq
        return self.tokens[start : start + self.seq + 1].astype(np.int32)


def _read_texts(root: Path, files: list[Path]) -> list[bytes]:
    """The files (relative to root) that are UTF-8 and not hidden, in sorted order."""
    texts = []
    for file in sorted(files):
        if any(part.startswith(".") for part in file.parts):
            continue
        data = (root / file).read_bytes()
        try:
            data.decode()
        except UnicodeDecodeError:
            continue
        texts.append(data)
    return texts


def _corpus_of_texts(
    texts: list[bytes], path: Path, tokenizer: Tokenizer | None
) -> Corpus:
    if not any(texts):
        raise DataError(f"data: {path} holds no text (UTF-8 files that are not empty)")
    vocab_size = tokenizer.get_vocab_size() if tokenizer else 256
    if len(texts) < HELD_OUT:
        return Corpus(*_split_tail(_encode(texts, path, tokenizer)), vocab_size)
    held_out = texts[HELD_OUT - 1 :: HELD_OUT]
    del texts[HELD_OUT - 1 :: HELD_OUT]
    train = _encode(texts, path, tokenizer)
    return Corpus(train, _encode(held_out, path, tokenizer), vocab_size)


def _encode(texts: list[bytes], path: Path, tokenizer: Tokenizer | None) -> np.ndarray:
    if tokenizer is None:
        return np.frombuffer(SEPARATOR.join(texts), np.uint8)
    try:
        encodings = tokenizer.encode_batch([text.decode() for text in texts])
    except UnicodeDecodeError as error:
        raise DataError(
            f"data: {path} is not UTF-8 ({error}), which the tokenizer needs"
        ) from error
    return np.concatenate([np.array(item.ids, np.uint32) for item in encodings])


def _memory_map(path: Path) -> np.ndarray:
    size = path.stat().st_size
    if size == 0 or size % 2:
        raise DataError(
            f"data: {path} has {size} bytes; a .bin file is a row of uint16 token ids"
        )
    return np.memmap(path, np.uint16, mode="r")


def _split_tail(ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    cut = len(ids) - len(ids) // HELD_OUT
    return ids[:cut], ids[cut:]


def _corpus_of_ids(train: np.ndarray, val: np.ndarray) -> Corpus:
    # Such a file does not say how large its vocabulary is.
    vocab_size = 1 + max(int(train.max()), int(val.max(initial=0)))
    return Corpus(train, val, vocab_size)
