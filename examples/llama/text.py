"""Text to tokens and back, for generation, with what a checkpoint says about them."""

import functools
import json
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Protocol

import tokenizers

from examples.llama.config import ConfigError
from examples.llama.data import SEPARATOR
from examples.llama.hf.files import CheckpointError, read_json


class ChatError(ValueError):
    """A prompt cannot be put into the form of a chat."""


def to_bytes(text: str) -> bytes:
    """Returns the bytes of a text, in which Python escapes those that are no UTF-8."""
    return text.encode(errors="surrogateescape")


class Codec(Protocol):
    """Turns text into tokens and back.

    Attributes:
        stops: The tokens that end a text.
    """

    stops: frozenset[int]

    def encode(self, text: str) -> list[int]:
        """Returns the tokens of a text, with those that begin a document.

        Raises:
            ConfigError: The text has bytes that are no UTF-8, which tokenizers do not
                take.
        """

    def encode_chat(self, text: str) -> list[int]:
        """Returns the tokens of a user's message, up to where the answer begins.

        Raises:
            ChatError: There is no chat template, or it cannot be used.
            ConfigError: As of `encode`.
        """

    def decode(self, tokens: list[int]) -> str:
        """Returns the text of tokens."""


class Bytes:
    """The tokens of models that were trained on bytes."""

    stops = frozenset(SEPARATOR)

    def encode(self, text: str) -> list[int]:
        """Returns the bytes of a text."""
        return list(to_bytes(text))

    def encode_chat(self, text: str) -> list[int]:
        """Raises ChatError."""
        del text
        raise ChatError("--chat takes a model with a chat template, not one of bytes")

    def decode(self, tokens: list[int]) -> str:
        """Returns the text; bytes that are no UTF-8 become U+FFFD."""
        return bytes(tokens).decode(errors="replace")


class TokenizerOf:
    """The tokenizer of a checkpoint's folder, with its stop tokens and template."""

    def __init__(self, folder: Path, tokenizer: tokenizers.Tokenizer):
        self._folder, self._tokenizer = folder, tokenizer
        self.stops = _stops(folder, tokenizer, self._tokens)

    @functools.cached_property
    def _config(self) -> dict[str, Any]:
        return _read_optional(self._folder / "tokenizer_config.json")

    @functools.cached_property
    def _tokens(self) -> dict[str, str]:
        """The texts of special tokens by their role, such as "bos_token"."""
        tokens = {}
        for role, token in self._config.items():
            if role.endswith("_token"):
                token = token.get("content") if isinstance(token, dict) else token
                if isinstance(token, str):
                    tokens[role] = token
        return tokens

    def encode(self, text: str) -> list[int]:
        """Returns the tokens of a text, with those that begin a document."""
        _check_characters(text)
        encoding = self._tokenizer.encode(text)
        ids, added = encoding.ids, encoding.special_tokens_mask
        # Some tokenizers also end a document, which is to be continued here.
        while ids and added[len(ids) - 1]:
            ids.pop()
        return ids

    def encode_chat(self, text: str) -> list[int]:
        """Returns the tokens of a user's message, up to where the answer begins."""
        _check_characters(text)
        messages = [{"role": "user", "content": text}]
        prompt = _render(self._template(), messages, self._tokens)
        return self._tokenizer.encode(prompt, add_special_tokens=False).ids

    def decode(self, tokens: list[int]) -> str:
        """Returns the text of tokens, without special ones."""
        return self._tokenizer.decode(tokens)

    def _template(self) -> str:
        file = self._folder / "chat_template.jinja"
        if file.is_file():
            return file.read_text()
        template = _read_optional(self._folder / "chat_template.json").get(
            "chat_template", self._config.get("chat_template")
        )
        if isinstance(template, list):  # several, by name
            named = {entry.get("name"): entry.get("template") for entry in template}
            template = named.get("default")
        if not isinstance(template, str):
            raise ChatError(
                f"{self._folder} has no chat template: leave --chat out, or add "
                "chat_template.jinja"
            )
        return template


def _check_characters(text: str) -> None:
    """Raises ConfigError if a text has bytes that are no characters."""
    try:
        to_bytes(text).decode()
    except UnicodeError as error:
        raise ConfigError(
            f"the prompt is not UTF-8 ({error}), as the tokenizer requires"
        ) from error


def _read_optional(file: Path) -> dict[str, Any]:
    return read_json(file) if file.is_file() else {}


def _stops(
    folder: Path, tokenizer: tokenizers.Tokenizer, tokens: dict[str, str]
) -> frozenset[int]:
    """The tokens that end a text: those of generation_config.json, or of the model."""
    for name in ("generation_config.json", "config.json"):
        file = folder / name
        ids = _read_optional(file).get("eos_token_id")
        ids = [ids] if isinstance(ids, int) else ids
        if ids is None:
            continue
        if not isinstance(ids, list) or not all(type(i) is int for i in ids):
            raise CheckpointError(
                f"{file}: eos_token_id takes a token or a list of them, got "
                f"{json.dumps(ids)}"
            )
        return frozenset(ids)
    end = tokenizer.token_to_id(tokens.get("eos_token", ""))
    return frozenset() if end is None else frozenset({end})


def _render(
    template: str, messages: Iterable[dict[str, str]], tokens: dict[str, str]
) -> str:
    """Fills in a chat template as transformers does.

    Raises:
        ChatError: Jinja is not installed, or the template cannot be filled in.
    """
    try:
        import jinja2
        import jinja2.ext
        import jinja2.sandbox
    except ModuleNotFoundError as error:
        raise ChatError(
            "--chat takes the package jinja2: pip install 'fbq-jax[examples]'"
        ) from error

    def refuse(message: str) -> None:
        raise jinja2.TemplateError(message)

    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols]
    )
    environment.globals["raise_exception"] = refuse
    environment.globals["strftime_now"] = time.strftime
    try:
        return environment.from_string(template).render(
            messages=messages, add_generation_prompt=True, **tokens
        )
    except Exception as error:  # templates are programs
        raise ChatError(f"the chat template cannot be filled in: {error}") from error
