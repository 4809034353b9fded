"""The tokenizer of a run, for the model that the run exports."""

import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from examples.llama import hf
from examples.llama.config import Config
from examples.llama.data import SEPARATOR, TOKENIZER, is_token_ids, tokenizer_folder
from examples.llama.hf.config_json import to_json
from examples.llama.model_config import LlamaConfig

# What loads tokenizer.json in transformers.
_TOKENIZER_CLASS = {"tokenizer_class": "PreTrainedTokenizerFast"}


@contextmanager
def tokenizer_source(config: Config, model: LlamaConfig) -> Iterator[Path | None]:
    """Yields what `hf.export` takes as ``like``, so that the model can read text.

    It is the checkpoint that the run tunes; or a temporary folder with the tokenizer of
    its data, which for text is that of bytes; or None if the data has none.
    """
    if config.from_hf is not None:
        yield Path(config.from_hf)
        return
    data = None if config.data is None else Path(config.data)
    is_text = not is_token_ids(data)
    tokenizer = (
        byte_tokenizer()
        if data is None or is_text
        else hf.load_tokenizer(tokenizer_folder(data))
    )
    if tokenizer is None:
        yield None
        return
    ids: dict[str, Any] = {"eos_token_id": SEPARATOR[0]} if is_text else {}
    with tempfile.TemporaryDirectory() as folder:
        contents = {
            "config.json": to_json(model) | ids,
            "generation_config.json": ids,
            "tokenizer_config.json": _TOKENIZER_CLASS,
        }
        for name, content in contents.items():
            (Path(folder) / name).write_text(json.dumps(content, indent=2) + "\n")
        tokenizer.save(str(Path(folder) / TOKENIZER))
        yield Path(folder)


def byte_tokenizer() -> Tokenizer:
    """Returns a tokenizer whose tokens are the bytes of a text, each its own id.

    >>> byte_tokenizer().encode("né").ids, list("né".encode())
    ([110, 195, 169], [110, 195, 169])
    """
    vocab = {character: byte for byte, character in enumerate(_characters())}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _characters() -> list[str]:
    """The characters that byte-level tokenizers show bytes as, in the bytes' order.

    Printable ones of Latin-1 show themselves; the other bytes have those from U+0100.
    """
    shown = set(map(ord, pre_tokenizers.ByteLevel.alphabet()))
    others = iter(sorted(code for code in shown if code > 255))
    return [chr(byte if byte in shown else next(others)) for byte in range(256)]
