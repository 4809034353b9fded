"""The files of a checkpoint, read with errors that name them."""

import contextlib
import json
import re
import reprlib
import shutil
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import safetensors
import safetensors.numpy
from tokenizers import Tokenizer

from examples.llama.errors import UserError

CONFIG = "config.json"
TOKENIZER = "tokenizer.json"
WEIGHTS = "model.safetensors"
# What transformers reads, and a processor's chat template.
_TOKENIZER_FILES: tuple[str, ...] = (TOKENIZER, "tokenizer_config.json")
_TOKENIZER_FILES += ("special_tokens_map.json", "added_tokens.json")
_TOKENIZER_FILES += ("chat_template.json",)
_INDEX = "model.safetensors.index.json"
Folder = str | Path
# The dtypes of weights in floats, as safetensors names them.
FLOATS = ("F32", "F16", "BF16")
# The size above which weights are written in shards, as transformers does.
_SHARD_BYTES = 5 * 10**9


class CheckpointError(UserError):
    """A checkpoint is damaged, or its model is not supported."""


@contextlib.contextmanager
def named_errors(what: str) -> Iterator[None]:
    """Makes an error in the block, also a panic in Rust, one that says what failed."""
    try:
        yield
    except (KeyboardInterrupt, SystemExit, UserError):
        raise
    except BaseException as error:
        why = str(getattr(error, "strerror", None) or error)
        raise CheckpointError(f"{what}: {' '.join(why.split())}") from error


def exists(file: Path) -> bool:
    """Whether a file exists; a name that the system refuses is a CheckpointError."""
    with named_errors(f"{file} cannot be read"):
        try:
            return bool(file.stat())
        except (FileNotFoundError, NotADirectoryError):
            return False


def read_json(file: Path, default: dict[str, Any] | None = None) -> dict[str, Any]:
    """Reads a JSON object from a file, or raises CheckpointError.

    A ``default`` takes the place of a file that does not exist.
    """
    if not exists(file.parent):
        raise CheckpointError(
            f"{file.parent} does not exist; a model is a folder on this machine, such "
            "as 'hf download NAME --local-dir DIR' makes of one on the Hub"
        )
    if not exists(file):
        if default is None:
            raise CheckpointError(f"{file} does not exist")
        return default
    with named_errors(f"{file} cannot be read"):
        content = file.read_bytes()
    with named_errors(f"{file} is not JSON"):
        value = json.loads(content)
    if not isinstance(value, dict):
        raise CheckpointError(f"{file} does not hold a JSON object")
    return value


def open_tokenizer(folder: Folder) -> Any:
    """Loads the tokenizer of a folder with transformers; None if it has none.

    It neither truncates nor pads, and knows the chat template and the tokens in the
    files beside ``tokenizer.json``.
    """
    folder = Path(folder)
    if not exists(folder / TOKENIZER):
        return None
    found = [name for name in _TOKENIZER_FILES if exists(folder / name)]
    for name in found:
        read_json(folder / name)
    named = folder.glob("additional_chat_templates/*.jinja")
    for file in (*folder.glob("chat_template.jinja"), *named):
        with named_errors(f"{file} is not a chat template"):
            file.read_text(encoding="utf-8")
    from transformers import PreTrainedTokenizerFast  # takes a while to import

    with named_errors(f"{folder}: transformers cannot read {', '.join(found)}"):
        loaded = PreTrainedTokenizerFast.from_pretrained(folder, local_files_only=True)
    loaded.backend_tokenizer.no_truncation()
    loaded.backend_tokenizer.no_padding()
    for index, token in loaded.init_kwargs["added_tokens_decoder"].items():
        if (given := loaded.convert_tokens_to_ids(token.content)) != index:
            what = f"has the id {index} in its files, and {given} in transformers"
            print(f"warning: {folder}: {token.content!r} {what}", file=sys.stderr)
    if loaded.chat_template is None:  # transformers gives this one to processors
        stored = read_json(folder / "chat_template.json", {})
        loaded.chat_template = stored.get("chat_template")
    return loaded


def ends(loaded: Any) -> list[int]:
    """The tokens that end a text, and a turn of a chat, in a loaded tokenizer."""
    found = (loaded.eos_token_id, getattr(loaded, "eot_token_id", None))
    return [token for token in found if token is not None]


def vocab_size(tokenizer: Tokenizer) -> int:
    """The size of a vocabulary, whose ids may have gaps: its largest id + 1."""
    return 1 + max(tokenizer.get_vocab().values(), default=-1)


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
    if exists(folder / WEIGHTS):
        return _open(folder / WEIGHTS)
    index = folder / _INDEX
    if not exists(index):
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
        if not exists(file := folder / name):
            raise CheckpointError(f"{file} does not exist; {_INDEX} lists it")
        held = _open(file)
        if missing := {t for t in weight_map if weight_map[t] == name} - held.keys():
            raise CheckpointError(f"{file} lacks {min(missing)}, see the index")
        found |= {t: held[t] for t in held if weight_map.get(t, name) == name}
    return found


def _open(file: Path) -> dict[str, Stored]:
    with named_errors(f"{file} is not a safetensors file"):
        opened = safetensors.safe_open(file, framework="numpy")
    return {name: Stored(file, opened, name) for name in opened.keys()}  # noqa: SIM118


def check_names(where: object, expected: Iterable[str], found: Iterable[str]) -> None:
    """Raises CheckpointError if names are missing, or are not expected."""
    missing, extra = set(expected) - set(found), set(found) - set(expected)
    for problem, names in ("lacks", missing), ("has the unexpected", extra):
        if names:
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            raise CheckpointError(f"{where} {problem} {min(names)}{more}")


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
    from huggingface_hub import split_state_dict_into_shards_factory

    plan = split_state_dict_into_shards_factory(
        dict(tensors),
        get_storage_size=lambda tensor: tensor.nbytes,
        filename_pattern="model{suffix}.safetensors",
        max_shard_size=_SHARD_BYTES,
    )
    for file, names in plan.filename_to_tensors.items():
        shard = {name: np.ascontiguousarray(tensors[name]) for name in names}
        # transformers rejects weights without this metadata.
        safetensors.numpy.save_file(shard, folder / file, {"format": "pt"})
    if plan.is_sharded:
        index = {"metadata": plan.metadata, "weight_map": plan.tensor_to_filename}
        (folder / _INDEX).write_text(
            json.dumps(index, indent=2) + "\n", encoding="utf-8"
        )
