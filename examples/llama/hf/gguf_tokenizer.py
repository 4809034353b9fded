"""The tokenizer of a checkpoint as the metadata of a GGUF file.

Two of llama.cpp's tokenizers read what ``tokenizer.json`` holds: ``gpt2``, byte-level
BPE, which knows how text is split by a name; and ``llama``, SentencePiece's BPE, in
which the scores of tokens order the merges. Their tokens are those of ``tokenizers``,
except that ``llama`` also puts a space after special tokens.
"""

import json
import reprlib
from pathlib import Path
from typing import Any

import gguf

from examples.llama.hf import files
from fbq_jax.export import ExportError

Json = dict[str, Any]

_SPACE = "\N{LOWER ONE EIGHTH BLOCK}"
_BYTES = {f"<0x{byte:02X}>" for byte in range(256)}
# llama.cpp refuses byte-level BPE without merges. UTF-8 has no byte 0xFF to merge.
_NO_MERGE = "ÿ ÿ"
_ROLES = ("bos", "eos", "unk", "sep", "pad", "mask")  # of special tokens in llama.cpp
# How the byte-level tokenizers that llama.cpp knows split text: the regular expression
# before the bytes, or none where ByteLevel has its own; and whether a word that is in
# the vocabulary needs no merges.
_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
_OTHERS = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_SPLITS = {
    (None, False): "gpt-2",
    ("digits", False): "smollm",
    (_WORDS + _OTHERS, False): "qwen2",
    (_WORDS + "{1,3}" + _OTHERS, True): "llama-bpe",
}


def read_tokenizer(folder: Path, vocab_size: int) -> Any:
    """Reads the tokenizer of a checkpoint with transformers, None if it has none.

    Raises ExportError if llama.cpp has no tokenizer that splits and joins text this
    way, or if the tokenizer has tokens that the model lacks.
    """
    if (loaded := files.open_tokenizer(folder)) is None:
        return None
    tokenizer = loaded.backend_tokenizer
    file, stored = folder / files.TOKENIZER, json.loads(tokenizer.to_str())
    known = _is_sentencepiece(stored) or _split_of(stored) is not None
    if stored["model"]["type"] != "BPE" or not known:
        raise ExportError(
            f"{file}: llama.cpp's tokenizers are not known to read this one; export "
            "takes BPE with SentencePiece's spaces and bytes, or with the splits of "
            f"{', '.join(_SPLITS.values())}"
        )
    if (last := files.vocab_size(tokenizer) - 1) >= vocab_size:
        raise ExportError(
            f"{file} has a token {last}, the model has {vocab_size} tokens"
        )
    if not isinstance(template := _chat_template(loaded), str | None):
        got = reprlib.repr(template)
        raise ExportError(f"{folder} has a chat template that is not text: {got}")
    return loaded


def add_tokenizer(writer: Any, loaded: Any, folder: Path, vocab_size: int) -> None:
    """Adds the tokenizer of `read_tokenizer`, its special tokens and the chat template.

    Of ``vocab_size`` tokens of the model, those that the tokenizer lacks are unused.
    """
    tokenizer = loaded.backend_tokenizer
    stored = json.loads(tokenizer.to_str())
    model, spaces = stored["model"], _is_sentencepiece(stored)
    types = gguf.TokenType
    tokens = [f"[PAD{index}]" for index in range(vocab_size)]
    kinds = [types.UNUSED] * vocab_size
    for token, index in model["vocab"].items():
        tokens[index] = token
        kinds[index] = types.BYTE if spaces and token in _BYTES else types.NORMAL
    for added in stored["added_tokens"]:
        tokens[added["id"]] = added["content"]
        kinds[added["id"]] = types.CONTROL if added["special"] else types.USER_DEFINED
    if spaces and (unknown := model.get("unk_token")) in model["vocab"]:
        kinds[model["vocab"][unknown]] = types.UNKNOWN
    writer.add_tokenizer_model("llama" if spaces else "gpt2")
    writer.add_tokenizer_pre("default" if spaces else _split_of(stored))
    writer.add_token_list([token.encode() for token in tokens])
    writer.add_token_types(kinds)
    if spaces:
        ranks: dict[str, int] = {}
        for rank, pair in enumerate(model["merges"]):
            ranks.setdefault("".join(pair), rank)
        # The earlier the merge that makes a token, the higher its score.
        scores = [-float(ranks.get(token, len(ranks))) for token in tokens]
        writer.add_token_scores(scores)
        first = tokenizer.encode("a", add_special_tokens=False).tokens[0]
        writer.add_add_space_prefix(first.startswith(_SPACE))
    else:
        merges = [" ".join(pair) for pair in model["merges"]]
        writer.add_token_merges(merges or [_NO_MERGE])
    roles, known = loaded.special_tokens_map, files.read_json(folder / files.CONFIG, {})
    known |= {f"{role}_id": tokenizer.token_to_id(roles[role]) for role in roles}
    for role in _ROLES:
        index = known.get(f"{role}_token_id")
        if type(index) is int and 0 <= index < vocab_size:
            getattr(writer, f"add_{role}_token_id")(index)
    ids = tokenizer.encode("a").ids
    writer.add_add_bos_token(ids[:1] == [known.get("bos_token_id")])
    writer.add_add_eos_token(ids[-1:] == [known.get("eos_token_id")])
    if (template := _chat_template(loaded)) is not None:
        writer.add_chat_template(template)


def _chat_template(loaded: Any) -> Any:
    with files.named_errors(f"{loaded.name_or_path} has no default chat template"):
        return loaded.chat_template and loaded.get_chat_template()


def _split_of(stored: Json) -> str | None:
    """llama.cpp's name of how a byte-level tokenizer splits text; None without one."""
    steps = stored.get("pre_tokenizer") or {}
    *before, last = steps.get("pretokenizers") or [steps]
    normalizer = (stored.get("normalizer") or {}).get("type")
    if last.get("type") != "ByteLevel" or normalizer not in (None, "NFC"):
        return None
    split: str | None = None
    match before:
        case [{"type": "Digits", "individual_digits": True}]:
            split = "digits"
        case [{"type": "Split", "behavior": "Isolated", "pattern": {"Regex": split}}]:
            pass
        case [_, *_]:
            return None
    # ByteLevel's own expression follows digits, but no other expression.
    own = last.get("use_regex", True)
    if last.get("add_prefix_space") or own != (split in (None, "digits")):
        return None
    return _SPLITS.get((split, bool(stored["model"].get("ignore_merges"))))


def _is_sentencepiece(stored: Json) -> bool:
    """Whether spaces are a character of their own and unknown characters are bytes."""
    text = json.dumps([stored.get("pre_tokenizer"), stored.get("normalizer")])
    spaces = json.dumps(_SPACE).strip('"') in text
    return spaces and bool(stored["model"].get("byte_fallback"))
