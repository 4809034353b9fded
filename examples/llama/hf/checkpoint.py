"""Reads and writes checkpoints in Hugging Face's format."""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import flax.traverse_util
import jax.numpy as jnp
import numpy as np
from tokenizers import Tokenizer

from examples.llama.hf import files, gguf_reader
from examples.llama.hf.config_json import SPECIAL_TOKENS, family_of, from_json, to_json
from examples.llama.hf.families import FAMILIES, Family
from examples.llama.hf.files import CONFIG, CheckpointError, Folder
from examples.llama.hf.quantized import scheme_of
from examples.llama.hf.tensor_views import TensorView, parameter_shapes, tensor_views
from examples.llama.model_config import LlamaConfig

_TABLE, _HEAD = "model.embed_tokens.weight", "lm_head.weight"
# The files that generation needs beside the model.
_GENERATION = (
    *("generation_config.json", "tokenizer.json", "tokenizer.model"),
    *("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("vocab.json", "merges.txt", "chat_template.jinja", "chat_template.json"),
    "additional_chat_templates/*.jinja",
)
# Rows that are copied at once: when transposed, they fill cache lines.
_ROWS_PER_COPY = 16


def load(folder: Folder) -> tuple[LlamaConfig, dict[str, Any]]:
    """Reads a checkpoint of transformers, of `save` or of `export`, or a GGUF file.

    The weights are float32, float16 or bfloat16, or INT8 in the formats
    "blockwise_int8" and "compressed-tensors", which are multiplied by their scales. In
    a GGUF file, they are of any type that gguf dequantizes.

    Returns:
        The configuration, with the default ``dtype``, ``remat``, ``unroll`` and
        ``saved_bits``, and the parameters of ``Llama`` as float32 NumPy arrays.

    Raises CheckpointError, which names what is damaged or not supported.
    """
    folder = Path(folder)
    if gguf_reader.is_gguf(folder):
        return _load_gguf(folder)
    stored, file = _read_config(folder), folder / CONFIG
    family, scheme = family_of(stored, file), scheme_of(stored, file)
    tensors = files.open_tensors(folder)
    config = from_json(stored, file, len(tensors))
    flat = _allocate(config, file)
    # Early checkpoints of Llama 2 also store the rotary frequencies.
    found = {name for name in tensors if not name.endswith("rotary_emb.inv_freq")}
    quantized = {} if scheme is None else scheme.find(found)
    found = found.difference(*quantized.values()) | quantized.keys()
    if config.tie_embeddings and {_TABLE, _HEAD} <= found:
        if not np.array_equal(tensors[_TABLE].read(), tensors[_HEAD].read()):
            but = f"but {CONFIG} says tie_word_embeddings"
            raise CheckpointError(f"{folder}: {_HEAD} differs from {_TABLE}, {but}")
        found.remove(_HEAD)
    expected = tensor_views(config, family, flat)
    files.check_names(folder, expected, found)
    for name in sorted(found):
        if scheme is not None and name in quantized:
            array = scheme.read(tensors, name)
            _fill(expected[name], array, f"{folder}: {name}", CONFIG)
        else:
            tensor = tensors[name]
            _fill(expected[name], tensor.read(), f"{tensor.file}: {name}", CONFIG)
    return config, flax.traverse_util.unflatten_dict(flat, sep="/")


def is_checkpoint(folder: Folder) -> bool:
    """Whether a path is that of a model in Hugging Face's format, or of a GGUF file."""
    if gguf_reader.is_gguf(folder):
        return True
    if not files.exists(Path(folder) / CONFIG):
        return any(Path(folder).glob("*.gguf"))
    return "model_type" in files.read_json(Path(folder) / CONFIG)


def quantization(folder: Folder) -> str | None:
    """The format of the quantized weights of a model; None if they are floats."""
    if gguf_reader.is_gguf(folder):
        return gguf_reader.quantization(folder)
    scheme = scheme_of(_read_config(Path(folder)), Path(folder) / CONFIG)
    return None if scheme is None else scheme.name


def open_tokenizer(folder: Folder) -> Any:
    """Loads the tokenizer of a model with transformers; None if it has none."""
    reader = gguf_reader if gguf_reader.is_gguf(folder) else files
    return reader.open_tokenizer(folder)


def load_tokenizer(folder: Folder) -> Tokenizer | None:
    """Returns what turns text into ids in the tokenizer of `open_tokenizer`."""
    loaded = open_tokenizer(folder)
    return None if loaded is None else loaded.backend_tokenizer


def save(
    folder: Folder,
    config: LlamaConfig,
    params: Mapping[str, Any],
    *,
    like: Folder | None = None,
) -> None:
    """Writes a float32 checkpoint that `load` and transformers can read.

    Args:
        folder: A new or an empty folder, which appears when it is complete.
        config: The configuration of the model.
        params: The parameters of ``Llama(config)``, float32 arrays.
        like: The folder of a checkpoint that provides the family, the ids of special
            tokens, and the files of the tokenizer and of generation. None takes the
            first family that has the model's settings, and writes none of the others.

    Raises FileExistsError, or CheckpointError if the arguments do not fit.
    """
    folder = Path(folder)
    files.check_new(folder)
    flat = flax.traverse_util.flatten_dict(dict(params), sep="/")
    shapes = parameter_shapes(config)
    files.check_names("params", shapes, flat)
    for path, shape in shapes.items():
        if flat[path].shape != shape or flat[path].dtype != jnp.float32:
            got = f"{flat[path].dtype} {flat[path].shape}"
            raise CheckpointError(f"params: {path} takes float32 {shape}, got {got}")
    stored, family = config_json(config, like)
    host = {path: np.asarray(array) for path, array in flat.items()}
    views = tensor_views(config, family, host)
    write_folder(folder, stored, {name: x.join() for name, x in views.items()}, like)


def write_folder(
    folder: Path,
    stored: Mapping[str, Any],
    tensors: Mapping[str, np.ndarray],
    like: Folder | None,
) -> None:
    """Writes config.json, tensors, and the files for generation of ``like``."""
    with files.new_folder(folder) as complete:
        (complete / CONFIG).write_text(
            json.dumps(stored, indent=2) + "\n", encoding="utf-8"
        )
        for pattern in () if like is None else _GENERATION:
            for file in Path(like or "").glob(pattern):
                copy = complete / file.relative_to(like or "")
                copy.parent.mkdir(exist_ok=True)
                shutil.copyfile(file, copy)
        files.write_tensors(complete, tensors)


def config_json(config: LlamaConfig, like: Folder | None) -> tuple[Any, Family]:
    """The content of config.json, with ``like``'s ids of special tokens; its family."""
    if like is None:
        stored = to_json(config)
        return stored, FAMILIES[stored["model_type"]]
    source = files.read_json(Path(like) / CONFIG)
    family = family_of(source, Path(like) / CONFIG)
    ids = {key: source.get(key) for key in SPECIAL_TOKENS}
    return to_json(config, family) | ids, family


def _read_config(folder: Path) -> dict[str, Any]:
    if not files.exists(folder / CONFIG) and (found := sorted(folder.glob("*.gguf"))):
        raise CheckpointError(f"{folder} holds a GGUF file: give its path, {found[0]}")
    return files.read_json(folder / CONFIG)


def _load_gguf(file: Path) -> tuple[LlamaConfig, dict[str, Any]]:
    config, family = gguf_reader.read_config(file)
    flat = _allocate(config, file)
    views = tensor_views(config, family, flat)
    for name, stored, array in gguf_reader.read_tensors(file, config, family, views):
        _fill(views[name], array, f"{file}: {stored}", "its metadata")
    return config, flax.traverse_util.unflatten_dict(flat, sep="/")


def _allocate(config: LlamaConfig, file: Path) -> dict[str, np.ndarray]:
    try:
        shapes = parameter_shapes(config)
        return {path: np.empty(shape, np.float32) for path, shape in shapes.items()}
    except (MemoryError, OverflowError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"{file} asks for arrays that cannot be allocated: {error}"
        ) from error


def _fill(view: TensorView, tensor: np.ndarray, name: str, source: str) -> None:
    """Copies a tensor into its view, whose shape is that of the source."""
    if (found := tensor.shape) != (asked := view.shape):
        raise CheckpointError(f"{name} has shape {found}, {source} asks for {asked}")
    for part, piece in zip(view.parts, view.split(tensor), strict=True):
        for start in range(0, part.shape[-2], _ROWS_PER_COPY):
            rows = slice(start, start + _ROWS_PER_COPY)
            part[..., rows, :] = piece[..., rows, :]
