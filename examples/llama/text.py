"""Text to tokens and back, for generation and for the models that runs export."""

import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tokenizers import Encoding, Tokenizer, decoders, models, pre_tokenizers

from examples.llama import hf
from examples.llama.config import Config
from examples.llama.data import SEPARATOR, token_ids_folder
from examples.llama.errors import UserError
from examples.llama.hf import files
from examples.llama.hf.config_json import to_json
from examples.llama.hf.files import TOKENIZER, named_errors
from examples.llama.model_config import LlamaConfig


def to_bytes(text: str) -> bytes:
    """Returns the bytes of a text, in which Python escapes those that are no UTF-8."""
    return text.encode(errors="surrogateescape")


class Bytes:
    """Turns text into bytes, which are the tokens of some models, and back."""

    stops = frozenset(SEPARATOR)  # the tokens that end a text

    def encode(self, text: str) -> list[int]:
        """Returns the bytes of a text."""
        return list(to_bytes(text))

    def encode_chat(self, text: str) -> list[int]:
        """Raises UserError."""
        del text
        raise UserError("--chat takes a model with a chat template, not one of bytes")

    def decode(self, tokens: list[int]) -> str:
        """Returns the text; bytes that are no UTF-8 become U+FFFD."""
        return bytes(tokens).decode(errors="replace")


class TokenizerOf:
    """Turns text into tokens and back with the tokenizer of a checkpoint."""

    def __init__(self, folder: Path):
        if (loaded := hf.open_tokenizer(folder)) is None:
            raise UserError(f"{folder} has no tokenizer, which turns text into tokens")
        self._folder, self._loaded = folder, loaded
        self._tokenizer: Tokenizer = loaded.backend_tokenizer
        self.stops = self._find_stops()  # the tokens that end a text

    def encode(self, text: str) -> list[int]:
        """Returns the tokens of a text, with those that begin a document."""
        encoding = self._encode(_characters(text))
        ids, added = encoding.ids, encoding.special_tokens_mask
        # Some tokenizers also end a document, which is to be continued here.
        while ids and added[len(ids) - 1]:
            ids.pop()
        return ids

    def encode_chat(self, text: str) -> list[int]:
        """Returns the tokens of a user's message, up to where the answer begins."""
        messages = [{"role": "user", "content": _characters(text)}]
        if self._loaded.chat_template is None:
            raise UserError(f"{self._folder} has no chat template: leave --chat out")
        how = {"tokenize": False, "add_generation_prompt": True}
        with named_errors(f"{self._folder}: the chat template cannot be filled in"):
            filled = self._loaded.apply_chat_template(messages, **how)
        what = f"{self._folder}: the filled-in chat template is not UTF-8"
        prompt = _characters(filled, what)
        return self._encode(prompt, add_special_tokens=False).ids

    def decode(self, tokens: list[int]) -> str:
        """Returns the text of tokens, without special ones."""
        return self._tokenizer.decode(tokens)

    def _encode(self, text: str, **how: bool) -> Encoding:
        with named_errors(f"{self._folder}: the tokenizer cannot encode the prompt"):
            return self._tokenizer.encode(text, **how)

    def _find_stops(self) -> frozenset[int]:
        for name in ("generation_config.json", "config.json"):
            ids = files.read_json(self._folder / name, {}).get("eos_token_id")
            listed = ids if isinstance(ids, list) else [ids]
            if ids is not None and all(type(i) is int for i in listed):
                return frozenset(listed)
            if ids is not None:
                got = f"a token or a list of them, got {json.dumps(ids)}"
                raise files.CheckpointError(f"{name}: eos_token_id takes {got}")
        return frozenset(files.ends(self._loaded))


Codec = Bytes | TokenizerOf


def codec_of_run(config: Config) -> Codec:
    """Returns what turns text into the tokens of a run's data."""
    folder = _tokenizer_of(config)
    return Bytes() if folder is None else TokenizerOf(folder)


def _tokenizer_of(config: Config) -> Path | None:
    """What has the tokenizer of a run's data; None if its tokens are bytes."""
    return Path(config.from_hf) if config.from_hf else token_ids_folder(config.data)


def _characters(text: str, what: str = "the prompt is not UTF-8") -> str:
    """Returns the text with characters for the bytes that Python escapes in it."""
    try:
        return to_bytes(text).decode()
    except UnicodeError as error:
        raise UserError(f"{what} ({error}), as the tokenizer requires") from error


@contextmanager
def tokenizer_source(config: Config, model: LlamaConfig) -> Iterator[Path | None]:
    """Yields what `hf.export` takes as ``like``, so that the model can read text.

    It is the checkpoint that the run tunes; or a temporary folder with what the GGUF
    file that it tunes has beside the weights, or with the tokenizer of its data, which
    for text is that of bytes; or None if the data has none.
    """
    folder = _tokenizer_of(config)
    if folder is not None and hf.is_gguf(folder):
        with tempfile.TemporaryDirectory() as temporary:
            hf.write_folder(folder, Path(temporary))
            yield Path(temporary)
        return
    tokenizer = byte_tokenizer() if folder is None else hf.load_tokenizer(folder)
    if config.from_hf is not None or tokenizer is None:
        yield None if config.from_hf is None else folder
        return
    ids = {"eos_token_id": SEPARATOR[0]} if folder is None else {}
    loader = {"tokenizer_class": "PreTrainedTokenizerFast"}  # in transformers
    contents = {"config.json": to_json(model) | ids, "generation_config.json": ids}
    contents["tokenizer_config.json"] = loader
    with tempfile.TemporaryDirectory() as temporary:
        for name, content in contents.items():
            (Path(temporary) / name).write_text(
                json.dumps(content, indent=2) + "\n", encoding="utf-8"
            )
        tokenizer.save(str(Path(temporary) / TOKENIZER))
        yield Path(temporary)


def byte_tokenizer() -> Tokenizer:
    """Returns a tokenizer whose tokens are the bytes of a text, each its own id.

    >>> byte_tokenizer().encode("né").ids, list("né".encode())
    ([110, 195, 169], [110, 195, 169])
    """
    # Printable characters of Latin-1 show themselves, other bytes those from U+0100.
    shown = set(map(ord, pre_tokenizers.ByteLevel.alphabet()))
    others = iter(sorted(code for code in shown if code > 255))
    codes = (byte if byte in shown else next(others) for byte in range(256))
    vocab = {chr(code): byte for byte, code in enumerate(codes)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer
