"""Reads models from GGUF files, with weights of every type that gguf dequantizes."""

import dataclasses
import functools
import json
import re
import reprlib
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, get_type_hints

import gguf
import numpy as np

from examples.llama.errors import UserError
from examples.llama.fields import check_value
from examples.llama.hf import files, gguf_file, gguf_tokenizer
from examples.llama.hf.config_json import SPECIAL_TOKENS, check_number, to_json
from examples.llama.hf.families import FAMILIES, Family
from examples.llama.hf.files import CheckpointError, Folder, named_errors
from examples.llama.hf.gguf_file import ENTRIES
from examples.llama.model_config import LlamaConfig
from examples.llama.rotary import LinearScaling, Llama3Scaling, RopeScaling, YarnScaling

# The fields for which llama.cpp has no default.
_REQUIRED: tuple[str, ...] = ("max_seq_len", "intermediate_size", "norm_eps")
_REQUIRED += ("hidden_size", "num_heads", "num_layers")


class _File(NamedTuple):
    entries: dict[str, Any]  # by key
    tensors: dict[str, gguf.ReaderTensor]  # by name


def is_gguf(path: Folder) -> bool:
    """Whether a path is that of a GGUF file, and not of a folder."""
    return Path(path).suffix == ".gguf" and not Path(path).is_dir()


def read_config(path: Folder) -> tuple[LlamaConfig, Family]:
    """Reads the configuration of a model, and finds the family that has it.

    Raises CheckpointError, which names an entry that is missing or not supported.
    """
    file = _open(path)
    architecture = file.entries.get("general.architecture")
    known = dict.fromkeys(family.gguf for family in FAMILIES.values())
    got = f"general.architecture is {reprlib.repr(architecture)}"
    problem: Any = f"{got}, supported: {', '.join(known)}"
    for family in FAMILIES.values():
        if family.gguf == architecture:
            try:
                config = _read_config(file, family)
                to_json(config, family)
                return config, family
            except ValueError as error:
                problem = error
    raise CheckpointError(f"{path}: {problem}")


def read_tensors(
    path: Folder, config: LlamaConfig, family: Family, names: Iterable[str]
) -> Iterator[tuple[str, str, np.ndarray]]:
    """Yields the name in transformers, the name in the file, and a tensor in float32.

    Raises CheckpointError if the file lacks a tensor of the ``names``, or has others.
    """
    found = _open(path).tensors
    stored = gguf_file.stored_names(names, family.gguf, config)
    of_config = {gguf_file.ROPE_DIVISORS} & found.keys()
    files.check_names(path, of_config.union(stored.values()), found)
    for name, tensor in ((name, found[key]) for name, key in stored.items()):
        expert = re.search(r"\.experts\.(\d+)", name)
        data = tensor.data if expert is None else tensor.data[int(expert[1])]
        with named_errors(f"{path}: {tensor.name} cannot be read"):
            array = gguf.quants.dequantize(data, tensor.tensor_type)
            array = gguf_file.convert(name, array, config, family.gguf, back=True)
        yield name, tensor.name, array


def quantization(path: Folder) -> str | None:
    """The types of the quantized weights in a file; None if all are floats."""
    kinds = {tensor.tensor_type.name for tensor in _open(path).tensors.values()}
    return ", ".join(sorted(kinds - {"F32", "F16", "BF16"})) or None


def open_tokenizer(path: Folder) -> Any:
    """Builds the tokenizer of a file with transformers; None if it has none."""
    return gguf_tokenizer.build_tokenizer(path, _open(path).entries)


def write_folder(path: Folder, folder: Path) -> None:
    """Writes config.json and, if it can be built, the tokenizer of a file."""
    stored = to_json(*read_config(path))
    try:
        if (loaded := open_tokenizer(path)) is not None:
            stored |= {key: getattr(loaded, key) for key in SPECIAL_TOKENS}
            if len(ends := files.ends(loaded)) > 1:
                stored["eos_token_id"] = ends
            loaded.save_pretrained(folder)
    except CheckpointError as error:
        print(f"warning: no tokenizer is written: {error}", file=sys.stderr)
    text = json.dumps(stored, indent=2) + "\n"
    (folder / files.CONFIG).write_text(text, encoding="utf-8")


def _open(path: Folder) -> _File:
    with named_errors(f"{path} cannot be read"):
        return _open_once(Path(path), Path(path).stat().st_mtime_ns)


@functools.lru_cache(maxsize=1)  # a large vocabulary takes seconds
def _open_once(path: Path, _: int) -> _File:
    with named_errors(f"{path} is not a GGUF file, or is cut short"):
        reader = gguf.GGUFReader(path)
        if reader.byte_order != "I":
            raise ValueError("the byte order is that of another machine")
        entries = {key: field.contents() for key, field in reader.fields.items()}
    if (parts := entries.get(gguf.Keys.Split.LLM_KV_SPLIT_COUNT, 1)) > 1:
        join = "join them with 'llama-gguf-split --merge'"
        raise CheckpointError(f"{path} is one of {parts} parts of a model: {join}")
    return _File(entries, {tensor.name: tensor for tensor in reader.tensors})


def _read_config(file: _File, family: Family) -> LlamaConfig:
    """Raises ValueError, which names the entry that is not accepted."""
    prefix, tensors = f"{family.gguf}.", file.tensors
    found = {  # zeros stand for what a model does not have
        key.removeprefix(prefix): value
        for key, value in file.entries.items()
        if key.startswith(prefix) and (value or value is False)
    }
    hints, fields = get_type_hints(LlamaConfig, include_extras=True), dict[str, Any]()
    for name, key in ENTRIES.items():
        if key in found or name in _REQUIRED:
            value = found.pop(key, None)
            fields[name] = check_value(prefix + key, value, hints[name])
    *_, hidden, heads, number = (fields[name] for name in _REQUIRED)
    check_number(prefix + ENTRIES["num_layers"], number, len(tensors))
    layers, nope = range(number), gguf_file.NOPE_INTERVAL.get(family.gguf, number + 1)
    if (interval := gguf_file.WINDOW_INTERVAL.get(family.gguf)) is not None:
        fields["sliding_layers"] = tuple(x for x in layers if (x + 1) % interval)
    if number == gguf_file.LARGEST.get(family.gguf):
        fields["query_pre_attn_scalar"] = hidden / heads
    if family.local_rope_key is not None:
        fields.setdefault("local_rope_theta", 10000.0)
    if gguf_file.EXPERT_SIZE in found:
        fields["intermediate_size"] = found.pop(gguf_file.EXPERT_SIZE)
    embeddings = tensors.get("token_embd.weight")
    fields |= {
        "num_kv_heads": fields.get("num_kv_heads", heads),
        "vocab_size": len(embeddings.data) if embeddings else 1,
        "nope_layers": tuple(layers[nope - 1 :: nope]),
        "embed_scale": hidden**0.5 if family.scales_embeddings else 1.0,
        "tie_embeddings": "output.weight" not in tensors,
    }
    config = LlamaConfig(**fields, **family.settings)
    scaling = _rope_scaling(config, found, tensors.get(gguf_file.ROPE_DIVISORS))
    for key, value in found.items():
        if key not in gguf_file.HEAD_DIMS or value != config.head_dim:
            got = f"{prefix}{key} is {reprlib.repr(value)}"
            raise UserError(f"{got}, which the example does not compute")
    return dataclasses.replace(config, rope_scaling=scaling)


def _rope_scaling(
    config: LlamaConfig, found: dict[str, Any], divisors: gguf.ReaderTensor | None
) -> RopeScaling | None:
    """Takes the entries of the scaling that it returns from those ``found``."""
    factor = found.pop(gguf_file.SCALING_FACTOR, None)
    original: Any = found.pop(gguf_file.SCALING_LENGTH, None)
    kind = found.get(gguf_file.SCALING, "linear")
    if kind in ("none", "linear", "yarn"):
        found.pop(gguf_file.SCALING, None)
    found.pop("rope.scaling.finetuned", None)  # changes nothing
    if divisors is not None:  # the effect of Llama 3's scaling, not its settings
        scaling = Llama3Scaling(
            factor=float(divisors.data.max()),
            low_freq_factor=1.0,
            high_freq_factor=4.0,
            original_max_position_embeddings=original or 8192,
        )
        expected = gguf_file.rope_divisors(config, scaling)
        is_same_size = divisors.data.shape == expected.shape
        if not is_same_size or not np.allclose(divisors.data, expected, 1e-4):
            raise UserError(f"{divisors.name} is not from the scaling of Llama 3")
        return scaling
    if kind == "yarn":
        original = original or config.max_seq_len
        return YarnScaling(factor=factor, original_max_position_embeddings=original)
    if kind == "linear" and factor is not None:
        return LinearScaling(factor=factor)
    return None
