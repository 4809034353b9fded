"""The text of the experiments: what the installed Python packages consist of.

Models learn Python and its documentation; C++, in the packages' headers, is the domain
that they have not seen. Both are written once, as token ids of one byte-level BPE, into
folders that the trainer reads.
"""

import hashlib
import json
import sysconfig
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from examples.llama.data import HELD_OUT

DOMAINS = {
    "python": (".py", ".pyi", ".pyx", ".pxd", ".md", ".rst", ".txt"),
    "cpp": (".h", ".hpp", ".hh", ".cuh", ".inl", ".cu", ".cpp", ".cc", ".c"),
}
LONGEST = 2**20  # bytes of a file; longer ones are tables that a program wrote
SAMPLE = 2**25  # bytes that the tokenizer learns from
_CHUNK = 2**26  # bytes that are encoded at once
END = "<|end|>"  # stands after each document


def prepare(folder: Path, vocab_size: int, roots: Sequence[Path] | None = None) -> None:
    """Writes `folder/<domain>/{train.bin,val.bin,tokenizer.json}`, if not yet there.

    Every 20th file is held out. A file that repeats another is left out, so that
    nothing held out is trained on.

    Args:
        folder: Where to; it appears whole or not at all.
        vocab_size: Token ids that the tokenizer has, at most 65536.
        roots: Folders to read; by default the standard library and the packages of
            the running Python.
    """
    if folder.exists():
        return
    if roots is None:
        names = "stdlib", "purelib", "platlib"
        roots = sorted({Path(sysconfig.get_path(name)) for name in names})
    texts = {domain: _read(roots, suffixes) for domain, suffixes in DOMAINS.items()}
    tokenizer = _learn(texts["python"], vocab_size)
    part = folder.with_suffix(".part")
    facts = {}
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
    (part / "facts.json").write_text(json.dumps(facts, indent=2) + "\n")
    part.rename(folder)


def _read(roots: Sequence[Path], suffixes: Sequence[str]) -> list[str]:
    """The files of these kinds that are UTF-8, each text once, in sorted order."""
    texts: dict[bytes, str] = {}
    for root in roots:
        for file in sorted(root.rglob("*")):
            if file.suffix not in suffixes or not file.is_file():
                continue
            data = file.read_bytes()
            if not 0 < len(data) <= LONGEST:
                continue
            try:
                text = data.decode()
            except UnicodeDecodeError:
                continue
            texts.setdefault(hashlib.sha256(data).digest(), text)
    return list(texts.values())


def _learn(texts: list[str], vocab_size: int) -> Tokenizer:
    """A byte-level BPE of an evenly spaced sample of the documents."""
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


def _encode(texts: list[str], tokenizer: Tokenizer, file: Path) -> dict[str, int]:
    """Writes the texts' ids as uint16; returns how much of what there was."""
    end, tokens = tokenizer.token_to_id(END), 0
    with file.open("wb") as out:
        for chunk in _chunks(texts):
            for encoding in tokenizer.encode_batch_fast(chunk):
                ids = np.array([*encoding.ids, end], np.uint16)
                tokens += len(ids)
                out.write(ids.tobytes())
    size = sum(len(text.encode()) for text in texts)
    return {"files": len(texts), "bytes": size, "tokens": tokens}


def _chunks(texts: list[str]) -> Iterator[list[str]]:
    chunk: list[str] = []
    size = 0
    for text in texts:
        chunk.append(text)
        size += len(text)
        if size >= _CHUNK:
            yield chunk
            chunk, size = [], 0
    if chunk:
        yield chunk
