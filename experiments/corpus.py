"""The text of the experiments: the files of the installed Python packages.

Models are pretrained on Python and its documentation. C++, from the headers of the
packages, is the unseen domain for fine-tuning. Both are encoded once with the same
byte-level BPE and written to folders that the trainer reads.
"""

import hashlib
import json
import sysconfig
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from examples.llama.data import HELD_OUT
from examples.llama.progress import interruptible

DOMAINS = {
    "python": (".py", ".pyi", ".pyx", ".pxd", ".md", ".rst", ".txt"),
    "cpp": (".h", ".hpp", ".hh", ".cuh", ".inl", ".cu", ".cpp", ".cc", ".c"),
}
MAX_FILE_SIZE = 2**20  # bytes; larger files are generated tables
SAMPLE = 2**25  # bytes that the tokenizer is trained on
FACTS = "facts.json"
_CHUNK = 1024  # texts to encode at once, which takes seconds
END = "<|end|>"  # follows each document


def prepare(folder: Path, vocab_size: int, roots: Sequence[Path] | None = None) -> None:
    """Writes `folder/<domain>/{train.bin,val.bin,tokenizer.json}` once.

    Every 20th file is held out. Duplicate files are skipped, so that no held-out text
    is trained on. The sizes and the SHA-256 digests of the files are written to
    `folder/facts.json`.

    Args:
        folder: The folder to write; it appears atomically.
        vocab_size: The vocabulary size of the tokenizer, at most 65536.
        roots: The folders to read; by default the standard library and the packages of
            the running Python.

    Raises:
        KeyboardInterrupt: A signal arrived.
    """
    if folder.exists():
        return
    if roots is None:
        names = "stdlib", "purelib", "platlib"
        roots = sorted({Path(sysconfig.get_path(name)) for name in names})
    texts = {domain: _read(roots, suffixes) for domain, suffixes in DOMAINS.items()}
    tokenizer = _train_tokenizer(texts["python"], vocab_size)
    part = folder.with_suffix(".part")
    facts: dict[str, Any] = {}
    for domain, documents in texts.items():
        out = part / domain
        out.mkdir(parents=True, exist_ok=True)
        held_out = documents[HELD_OUT - 1 :: HELD_OUT]
        del documents[HELD_OUT - 1 :: HELD_OUT]
        facts[domain] = {
            "train": _encode(documents, tokenizer, out / "train.bin"),
            "val": _encode(held_out, tokenizer, out / "val.bin"),
        }
        tokenizer.save(str(out / "tokenizer.json"))
        facts[domain]["tokenizer"] = _digest(out / "tokenizer.json")
    (part / FACTS).write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")
    part.rename(folder)


def _read(roots: Sequence[Path], suffixes: Sequence[str]) -> list[str]:
    """Reads the UTF-8 files with these suffixes, sorted and without duplicates."""
    texts: dict[bytes, str] = {}
    for root in roots:
        for file in sorted(root.rglob("*")):
            if file.suffix not in suffixes or not file.is_file():
                continue
            data = file.read_bytes()
            if not 0 < len(data) <= MAX_FILE_SIZE:
                continue
            try:
                text = data.decode()
            except UnicodeDecodeError:
                continue
            texts.setdefault(hashlib.sha256(data).digest(), text)
    return list(texts.values())


def _train_tokenizer(texts: list[str], vocab_size: int) -> Tokenizer:
    """Trains a byte-level BPE on an evenly spaced sample of the documents."""
    size = sum(map(len, texts))
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts[:: -(-size // SAMPLE)], trainer)
    return tokenizer


def _encode(texts: list[str], tokenizer: Tokenizer, file: Path) -> dict[str, Any]:
    """Writes the token ids as uint16; returns the text's sizes and the digest."""
    end, tokens = tokenizer.token_to_id(END), 0
    with file.open("wb") as out:
        for start in interruptible(range(0, len(texts), _CHUNK)):
            chunk = texts[start : start + _CHUNK]
            for encoding in tokenizer.encode_batch_fast(chunk):
                ids = np.array([*encoding.ids, end], np.uint16)
                tokens += len(ids)
                out.write(ids.tobytes())
    size = sum(len(text.encode()) for text in texts)
    return {"files": len(texts), "bytes": size, "tokens": tokens} | _digest(file)


def _digest(file: Path) -> dict[str, str]:
    with file.open("rb") as opened:
        return {"sha256": hashlib.file_digest(opened, "sha256").hexdigest()}
