"""The files of a checkpoint, read with errors that name them."""

import json
import reprlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import safetensors
import safetensors.numpy

CONFIG = "config.json"
WEIGHTS = "model.safetensors"
_INDEX = "model.safetensors.index.json"
# The files that generation needs beside the model.
GENERATION = (
    "generation_config.json",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
)
# The dtypes of weights in floats, as safetensors names them.
FLOATS = ("F32", "F16", "BF16")
# The size above which weights are written in shards, as transformers does.
_SHARD_BYTES = 5 * 10**9


class CheckpointError(ValueError):
    """A checkpoint is damaged, or its model is not supported."""


def read_json(file: Path) -> dict[str, Any]:
    """Reads a file that holds a JSON object.

    Raises:
        CheckpointError: The file does not exist or holds something else.
    """
    try:
        value = json.loads(file.read_bytes())
    except FileNotFoundError:
        text = f"{file} does not exist"
        if not file.parent.exists():
            text = (
                f"{file.parent} does not exist; a model is a folder on this machine, "
                "such as 'hf download NAME --local-dir DIR' makes of one on the Hub"
            )
        raise CheckpointError(text) from None
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{file} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{file} does not hold a JSON object")
    return value


def weight_files(folder: Path) -> dict[Path, set[str] | None]:
    """Returns the safetensors files of a checkpoint.

    Returns:
        The tensors that the index assigns to each file; None for the only file of a
        checkpoint without an index, which holds all of them.

    Raises:
        CheckpointError: A file does not exist, or the index is malformed.
    """
    if (folder / WEIGHTS).exists():
        return {folder / WEIGHTS: None}
    index = folder / _INDEX
    if not index.exists():
        raise CheckpointError(f"{folder} has neither {WEIGHTS} nor {_INDEX}")
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict):
        raise CheckpointError(f"{index} lacks weight_map, an object")
    files: dict[Path, set[str] | None] = {}
    for file in sorted({_beside(index, name) for name in weight_map.values()}):
        if not file.is_file():
            raise CheckpointError(f"{file} does not exist; {_INDEX} lists it")
        files[file] = {t for t, name in weight_map.items() if name == file.name}
    return files


def _beside(index: Path, name: Any) -> Path:
    """The file that an index names, which must lie beside it."""
    plain = isinstance(name, str) and name == Path(name).name and "\0" not in name
    if not plain or name in ("", ".."):
        raise CheckpointError(
            f"{index}: weight_map takes names of files beside it, got "
            f"{reprlib.repr(name)}"
        )
    return index.with_name(name)


def open_tensors(file: Path) -> Any:
    """Opens a safetensors file.

    Raises:
        CheckpointError: The file is damaged.
    """
    try:
        return safetensors.safe_open(file, framework="numpy")
    except (safetensors.SafetensorError, OSError) as error:
        raise CheckpointError(f"{file} is not a safetensors file: {error}") from error


def read_tensor(
    file: Path, opened: Any, name: str, dtypes: tuple[str, ...] = FLOATS
) -> np.ndarray:
    """Reads a tensor of one of the dtypes from an open file.

    Raises:
        CheckpointError: The tensor has another dtype.
    """
    dtype = opened.get_slice(name).get_dtype()
    if dtype not in dtypes:
        raise CheckpointError(
            f"{file}: {name} is {dtype}, supported are {', '.join(dtypes)}"
        )
    return opened.get_tensor(name)


def write_tensors(folder: Path, tensors: Mapping[str, np.ndarray]) -> None:
    """Writes the weights of a checkpoint: one file, or shards and their index.

    Args:
        folder: The folder of the checkpoint.
        tensors: The tensors by name.
    """
    shards: list[dict[str, np.ndarray]] = [{}]
    size = 0
    for name, tensor in tensors.items():
        if shards[-1] and size + tensor.nbytes > _SHARD_BYTES:
            shards.append({})
            size = 0
        shards[-1][name] = np.ascontiguousarray(tensor)
        size += tensor.nbytes
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        file = WEIGHTS
        if len(shards) > 1:
            file = f"model-{number:05}-of-{len(shards):05}.safetensors"
        # transformers rejects weights without this metadata.
        safetensors.numpy.save_file(shard, folder / file, {"format": "pt"})
        weight_map |= dict.fromkeys(shard, file)
    if len(shards) > 1:
        total = sum(tensor.nbytes for tensor in tensors.values())
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (folder / _INDEX).write_text(json.dumps(index, indent=2) + "\n")
