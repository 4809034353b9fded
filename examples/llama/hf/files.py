"""The files of a checkpoint, read with errors that name them."""

import contextlib
import json
import re
import reprlib
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import safetensors
import safetensors.numpy
import tokenizers

from examples.llama.errors import UserError

CONFIG = "config.json"
TOKENIZER = "tokenizer.json"
WEIGHTS = "model.safetensors"
_INDEX = "model.safetensors.index.json"
Folder = str | Path
# The dtypes of weights in floats, as safetensors names them.
FLOATS = ("F32", "F16", "BF16")
# The size above which weights are written in shards, as transformers does.
_SHARD_BYTES = 5 * 10**9


class CheckpointError(UserError):
    """A checkpoint is damaged, or its model is not supported."""


def read_json(file: Path) -> dict[str, Any]:
    """Reads a JSON object from a file, or raises CheckpointError."""
    if not file.parent.exists():
        raise CheckpointError(
            f"{file.parent} does not exist; a model is a folder on this machine, such "
            "as 'hf download NAME --local-dir DIR' makes of one on the Hub"
        )
    try:
        value = json.loads(file.read_bytes())
    except FileNotFoundError:
        raise CheckpointError(f"{file} does not exist") from None
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{file} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{file} does not hold a JSON object")
    return value


def load_tokenizer(folder: Folder) -> tokenizers.Tokenizer | None:
    """Reads the ``tokenizer.json`` of a folder; None if it has none."""
    file = Path(folder) / TOKENIZER
    if not file.exists():
        return None
    try:
        return tokenizers.Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises no narrower one
        raise CheckpointError(f"{file} is not a tokenizer: {error}") from error


class Stored(NamedTuple):
    """A tensor in an open safetensors file."""

    file: Path
    opened: Any
    name: str

    def read(self, dtypes: tuple[str, ...] = FLOATS) -> np.ndarray:
        """Reads the tensor; raises CheckpointError if it has another dtype."""
        dtype = self.opened.get_slice(self.name).get_dtype()
        if dtype not in dtypes:
            given = f"{self.file}: {self.name} is {dtype}"
            raise CheckpointError(f"{given}, supported are {', '.join(dtypes)}")
        return self.opened.get_tensor(self.name)


def open_tensors(folder: Path) -> dict[str, Stored]:
    """Returns the tensors of a checkpoint by name, or raises CheckpointError.

    A tensor that several files hold is in the file that the index assigns it to.
    """
    if (folder / WEIGHTS).exists():
        return _open(folder / WEIGHTS)
    index = folder / _INDEX
    if not index.exists():
        raise CheckpointError(f"{folder} has neither {WEIGHTS} nor {_INDEX}")
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict):
        raise CheckpointError(f"{index} lacks weight_map, an object")
    for name in weight_map.values():
        if not re.fullmatch(r"[^/\0]+\.safetensors", str(name)):
            takes = f"takes names of files beside it, got {reprlib.repr(name)}"
            raise CheckpointError(f"{index}: weight_map {takes}")
    found: dict[str, Stored] = {}
    for name in sorted(set(weight_map.values())):
        if not (file := folder / name).is_file():
            raise CheckpointError(f"{file} does not exist; {_INDEX} lists it")
        held = _open(file)
        if missing := {t for t in weight_map if weight_map[t] == name} - held.keys():
            raise CheckpointError(f"{file} lacks {min(missing)}, see the index")
        found |= {t: held[t] for t in held if weight_map.get(t, name) == name}
    return found


def _open(file: Path) -> dict[str, Stored]:
    try:
        opened = safetensors.safe_open(file, framework="numpy")
    except (safetensors.SafetensorError, OSError) as error:
        raise CheckpointError(f"{file} is not a safetensors file: {error}") from error
    return {name: Stored(file, opened, name) for name in opened.keys()}  # noqa: SIM118


def check_new(folder: Path) -> None:
    """Raises FileExistsError if a checkpoint cannot be written to a folder."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise FileExistsError(f"{folder} already exists; save takes a new folder")


@contextlib.contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """Yields a folder to write, which becomes ``folder`` if no error is raised."""
    part = folder.with_name(f"{folder.name}.part")
    try:
        shutil.rmtree(part, ignore_errors=True)  # of a process that was killed
        part.mkdir(parents=True)
        yield part
        part.rename(folder)
    except (OSError, safetensors.SafetensorError) as error:
        raise OSError(f"{folder} cannot be written: {error}") from error
    finally:
        shutil.rmtree(part, ignore_errors=True)


def write_tensors(folder: Path, tensors: Mapping[str, np.ndarray]) -> None:
    """Writes the weights of a checkpoint: one file, or shards and their index."""
    shards: list[dict[str, np.ndarray]] = [{}]
    for name, tensor in tensors.items():
        size = sum(array.nbytes for array in shards[-1].values())
        if shards[-1] and size + tensor.nbytes > _SHARD_BYTES:
            shards.append({})
        shards[-1][name] = np.ascontiguousarray(tensor)
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        file = f"model-{number:05}-of-{len(shards):05}.safetensors"
        weight_map |= dict.fromkeys(shard, file if len(shards) > 1 else WEIGHTS)
        # transformers rejects weights without this metadata.
        path = folder / weight_map[next(iter(shard))]
        safetensors.numpy.save_file(shard, path, {"format": "pt"})
    if len(shards) > 1:
        total = sum(tensor.nbytes for tensor in tensors.values())
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (folder / _INDEX).write_text(json.dumps(index, indent=2) + "\n")
