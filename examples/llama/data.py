"""Reads text or token ids and serves batches.

Batch i is a pure function of (seed, i): a run that resumes at step i reads batch i, and
no iterator state has to be saved.
"""

import contextlib
import sysconfig
import zlib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import grain
import numpy as np
from tokenizers import Tokenizer

from examples.llama.errors import UserError
from examples.llama.hf.files import load_tokenizer
from examples.llama.progress import interruptible

# Separates documents. Text contains no NUL byte, so 256 token ids suffice.
SEPARATOR = b"\0"

HELD_OUT = 20  # every 20th file, or with fewer files, the last 20th of the text

_CHUNK = 256  # texts to encode at once, which takes seconds
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
    texts, skipped = [], _NOT_SOURCE if path is None else set()
    # Files that are UTF-8 and not hidden, sorted by their path.
    for file in sorted(root.rglob("*" if path else "*.py")):
        parts = file.relative_to(root).parts
        is_hidden = any(part.startswith(".") for part in parts)
        if file.is_file() and not is_hidden and skipped.isdisjoint(parts):
            data = file.read_bytes()
            with contextlib.suppress(UnicodeDecodeError):
                data.decode()
                texts.append(data)
    return _from_texts(texts, root, tokenizer)


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
        raise UserError(f"data: {found}, fewer than one window of {seq + 1}")
    # Adjacent windows share one token.
    windows = np.lib.stride_tricks.sliding_window_view(tokens, seq + 1)[::seq]
    shuffled = grain.MapDataset.source(windows).seed(seed).shuffle().repeat()
    return shuffled.batch(batch).map(lambda tokens: tokens.astype(np.int32))


def _from_texts(texts: list[bytes], path: Path, tokenizer: Tokenizer | None) -> Corpus:
    if not any(texts):
        raise UserError(f"data: {path} holds no text (non-empty UTF-8 files)")
    vocab_size = tokenizer.get_vocab_size() if tokenizer else 256
    held_out = texts[HELD_OUT - 1 :: HELD_OUT]
    del texts[HELD_OUT - 1 :: HELD_OUT]
    train = _encode(texts, path, tokenizer)
    if not held_out:
        return Corpus(*_split_tail(train), vocab_size)
    return Corpus(train, _encode(held_out, path, tokenizer), vocab_size)


def _encode(texts: list[bytes], path: Path, tokenizer: Tokenizer | None) -> np.ndarray:
    if tokenizer is None:
        return np.frombuffer(SEPARATOR.join(texts), np.uint8)
    ids = []
    try:
        decoded = [text.decode() for text in texts]
        for start in interruptible(range(0, len(texts), _CHUNK)):
            chunk = tokenizer.encode_batch(decoded[start : start + _CHUNK])
            ids += [np.array(encoding.ids, np.uint32) for encoding in chunk]
    except UnicodeDecodeError as error:
        why = f"({error}), as the tokenizer requires"
        raise UserError(f"data: {path} is not UTF-8 {why}") from error
    except Exception as error:  # the library raises no narrower one
        raise UserError(f"data: the tokenizer cannot encode {path}: {error}") from error
    return np.concatenate(ids)


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
    vocab_size = 1 + max(int(train.max()), int(val.max(initial=0)))
    corpus = Corpus(train, val, vocab_size)
    if (tokenizer := load_tokenizer(path if path.is_dir() else path.parent)) is None:
        return corpus
    corpus.check_fits(tokenizer.get_vocab_size())
    return replace(corpus, vocab_size=tokenizer.get_vocab_size())
