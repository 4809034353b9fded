"""The tokenizer of a checkpoint as the metadata of a GGUF file, written and read.

Two of llama.cpp's tokenizers read what ``tokenizer.json`` holds: ``gpt2``, byte-level
BPE, which knows how text is split by a name; and ``llama``, SentencePiece's BPE, in
which the scores of tokens order the merges. Their tokens are those of ``tokenizers``,
except that ``llama`` also puts a space after special tokens.
"""

import json
import reprlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
)

from examples.llama.hf import files
from fbq_jax.export import ExportError

Json = dict[str, Any]

_SPACE = "\N{LOWER ONE EIGHTH BLOCK}"
_BYTES = {f"<0x{byte:02X}>" for byte in range(256)}
# llama.cpp refuses byte-level BPE without merges. UTF-8 has no byte 0xFF to merge.
_NO_MERGE = "ÿ ÿ"
_KEYS, _TYPES = gguf.Keys.Tokenizer, gguf.TokenType
# Of special tokens in llama.cpp: the last ends a turn of a chat.
_ROLES = ("bos", "eos", "unk", "sep", "pad", "mask", "eot")
_ID_KEYS = {role: getattr(_KEYS, f"{role.upper()}_ID") for role in _ROLES}
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
    tokens = [f"[PAD{index}]" for index in range(vocab_size)]
    kinds = [_TYPES.UNUSED] * vocab_size
    for token, index in model["vocab"].items():
        tokens[index] = token
        kinds[index] = _TYPES.BYTE if spaces and token in _BYTES else _TYPES.NORMAL
    for added in stored["added_tokens"]:
        tokens[added["id"]] = added["content"]
        kinds[added["id"]] = _TYPES.CONTROL if added["special"] else _TYPES.USER_DEFINED
    if spaces and (unknown := model.get("unk_token")) in model["vocab"]:
        kinds[model["vocab"][unknown]] = _TYPES.UNKNOWN
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
    for role, key in _ID_KEYS.items():
        index = known.get(f"{role}_token_id")
        if type(index) is int and 0 <= index < vocab_size:
            writer.add_uint32(key, index)
    ids = tokenizer.encode("a").ids
    writer.add_add_bos_token(ids[:1] == [known.get("bos_token_id")])
    writer.add_add_eos_token(ids[-1:] == [known.get("eos_token_id")])
    if (template := _chat_template(loaded)) is not None:
        writer.add_chat_template(template)


def build_tokenizer(file: files.Folder, entries: Mapping[str, Any]) -> Any:
    """Builds a tokenizer of transformers from the entries of a file; None without one.

    Text becomes the tokens that llama.cpp makes of it. Raises CheckpointError if the
    tokenizer is of another kind than `read_tokenizer` takes.
    """
    if (tokens := entries.get(_KEYS.LIST)) is None:
        return None
    from transformers import PreTrainedTokenizerFast  # takes a while to import

    model, split = entries.get(_KEYS.MODEL), str(entries.get(_KEYS.PRE))
    splits, spaces = {name: how for how, name in _SPLITS.items()}, model == "llama"
    if not spaces and (model != "gpt2" or split not in splits):
        got = f"{_KEYS.MODEL} is {model!r} and {_KEYS.PRE} is {split!r}"
        known = f"llama, or gpt2 with {', '.join(splits)}"
        raise files.CheckpointError(f"{file}: {got}, supported: {known}")
    roles = {f"{role}_token": entries.get(key) for role, key in _ID_KEYS.items()}
    with files.named_errors(f"{file}: its tokenizer cannot be built"):
        kinds = dict(zip(tokens, entries[_KEYS.TOKEN_TYPE], strict=True))
        vocab = {x: i for i, x in enumerate(tokens) if kinds[x] != _TYPES.UNUSED}
        if spaces:
            tokenizer = _sentencepiece(vocab, kinds, entries)
        else:
            tokenizer = _byte_level(vocab, entries[_KEYS.MERGES], *splits[split])
        tokenizer.add_tokens(
            [
                AddedToken(x, special=kinds[x] != _TYPES.USER_DEFINED, normalized=False)
                for x in vocab
                if kinds[x] not in (_TYPES.NORMAL, _TYPES.BYTE)
            ]
        )
        return PreTrainedTokenizerFast(
            tokenizer_object=tokenizer,
            add_bos_token=entries.get(_KEYS.ADD_BOS, spaces or split == "llama-bpe"),
            add_eos_token=entries.get(_KEYS.ADD_EOS, False),
            chat_template=entries.get(_KEYS.CHAT_TEMPLATE),
            **{role: tokens[i] for role, i in roles.items() if i is not None},
        )


def _byte_level(
    vocab: dict[str, int], merges: list[str], split: str | None, whole: bool
) -> Tokenizer:
    pairs: Any = [tuple(pair.split(" ")) for pair in merges if pair != _NO_MERGE]
    tokenizer = Tokenizer(models.BPE(vocab, pairs, ignore_merges=whole))
    own = split in (None, "digits")
    steps: list[Any] = [pre_tokenizers.Split(Regex(split or ""), "isolated")]
    if own:
        steps = [pre_tokenizers.Digits(individual_digits=True)] if split else []
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=own))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentencepiece(
    vocab: dict[str, int], kinds: dict[str, int], entries: Mapping[str, Any]
) -> Tokenizer:
    merges, scores = [], entries[_KEYS.SCORES]
    for token in sorted(vocab, key=lambda token: -scores[vocab[token]]):
        if kinds[token] in (_TYPES.NORMAL, _TYPES.USER_DEFINED):
            pairs = ((token[:n], token[n:]) for n in range(1, len(token)))
            merges += [pair for pair in pairs if vocab.keys() >= set(pair)]
    unknown = entries[_KEYS.LIST][entries.get(_KEYS.UNK_ID, 0)]
    options: Any = {"unk_token": unknown, "byte_fallback": True, "fuse_unk": True}
    tokenizer = Tokenizer(models.BPE(vocab, merges, **options))
    steps: list[Any] = [normalizers.Replace(" ", _SPACE)]
    back: list[Any] = [decoders.Replace(_SPACE, " "), decoders.ByteFallback()]
    back.append(decoders.Fuse())
    if entries.get(_KEYS.ADD_PREFIX, True):
        steps.insert(0, normalizers.Prepend(_SPACE))
        back.append(decoders.Strip(" ", 1, 0))
    tokenizer.normalizer = normalizers.Sequence(steps)
    tokenizer.decoder = decoders.Sequence(back)
    return tokenizer


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
