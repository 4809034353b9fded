"""The files of a checkpoint, read with errors that name them."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import safetensors

CONFIG = "config.json"
WEIGHTS = "model.safetensors"
_INDEX = "model.safetensors.index.json"


class CheckpointError(ValueError):
    """A checkpoint is damaged, or its model is not supported."""


def read_json(file: Path) -> dict[str, Any]:
    """Reads a file that holds a JSON object.

    Raises:
        CheckpointError: The file does not exist or holds something else.
    """
    try:
        value = json.loads(file.read_text())
    except FileNotFoundError:
        raise CheckpointError(f"{file} does not exist") from None
    except ValueError as error:
        raise CheckpointError(f"{file} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{file} does not hold a JSON object")
    return value


def weight_files(folder: Path) -> list[Path]:
    """Returns the safetensors files of a checkpoint.

    Raises:
        CheckpointError: A file does not exist, or the index is malformed.
    """
    if (folder / WEIGHTS).exists():
        return [folder / WEIGHTS]
    if not (folder / _INDEX).exists():
        raise CheckpointError(f"{folder} has neither {WEIGHTS} nor {_INDEX}")
    weight_map = read_json(folder / _INDEX).get("weight_map")
    if not isinstance(weight_map, dict):
        raise CheckpointError(f"{folder / _INDEX} lacks weight_map, an object")
    files = [folder / name for name in sorted(set(weight_map.values()))]
    for file in files:
        if not file.exists():
            raise CheckpointError(f"{file} does not exist; {_INDEX} lists it")
    return files


def open_tensors(file: Path) -> Any:
    """Opens a safetensors file.

    Raises:
        CheckpointError: The file is damaged.
    """
    try:
        return safetensors.safe_open(file, framework="numpy")
    except safetensors.SafetensorError as error:
        raise CheckpointError(f"{file} is not a safetensors file: {error}") from error


def read_tensor(file: Path, opened: Any, name: str) -> np.ndarray:
    """Reads a tensor of floats from an open file.

    Raises:
        CheckpointError: The tensor has another dtype.
    """
    dtype = opened.get_slice(name).get_dtype()
    if dtype not in ("F32", "F16", "BF16"):
        raise CheckpointError(
            f"{file}: {name} is {dtype}, supported are F32, F16 and BF16"
        )
    return opened.get_tensor(name)
