"""The files of a checkpoint, read with errors that name them."""

import contextlib
import json
import operator
import re
import reprlib
import shutil
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import safetensors
import safetensors.numpy
from tokenizers import AddedToken, Tokenizer

from examples.llama.errors import UserError

CONFIG = "config.json"
TOKENIZER = "tokenizer.json"
WEIGHTS = "model.safetensors"
_TOKENIZER_CONFIG = "tokenizer_config.json"
_DECODER = "added_tokens_decoder"
# The roles of special tokens, in the order in which transformers adds them.
_ROLES: tuple[str, ...] = ("bos_token", "eos_token", "unk_token", "sep_token")
_ROLES += ("pad_token", "cls_token", "mask_token")
_LISTS = ("additional_special_tokens", "extra_special_tokens")
_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")
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
        why = getattr(error, "strerror", None) or error
        raise CheckpointError(f"{what}: {why}") from error


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


def load_tokenizer(folder: Folder) -> Tokenizer | None:
    """Reads the tokenizer of a folder as transformers does; None if it has none.

    It neither truncates nor pads, and knows the tokens that only the files beside
    ``tokenizer.json`` name.
    """
    file = Path(folder) / TOKENIZER
    if not exists(file):
        return None
    with named_errors(f"{file} is not a tokenizer"):
        tokenizer = Tokenizer.from_file(str(file))
        ids = {x["content"]: x["id"] for x in read_json(file).get("added_tokens") or ()}
    tokenizer.no_truncation()
    tokenizer.no_padding()
    config, roles, others = _read_tokens(file.parent)
    tokenizer.encode_special_tokens = bool(config.get("split_special_tokens"))
    known = tokenizer.get_added_tokens_decoder()
    if (added := config.get(_DECODER)) is None:
        older = file.with_name("added_tokens.json")
        special, added = {x.content for x in (*roles.values(), *others)}, {}
        with named_errors(f"{older} does not hold ids of tokens"):
            for text, index in read_json(older, {}).items():
                flags = {"special": text in special, "normalized": text not in special}
                added[operator.index(index)] = AddedToken(text, **flags)
        added |= known
    same = {repr(token) for token in known.values()}
    tokens = [token for _, token in sorted(added.items()) if repr(token) not in same]
    contents = {token.content for token in (*known.values(), *tokens)}
    tokens += [x for x in (*roles.values(), *others) if x.content not in contents]
    for token in tokens:
        token.special |= token.content in {x.content for x in roles.values()}
    with named_errors(f"{file} cannot take the tokens that the files beside it add"):
        tokenizer.add_tokens(tokens)
    for text, index in (ids | {x.content: i for i, x in added.items()}).items():
        if (given := tokenizer.token_to_id(text)) != index:
            what = f"has the id {index} in its files, and {given} in transformers"
            print(f"warning: {folder}: {text!r} {what}", file=sys.stderr)
    return tokenizer


def vocab_size(tokenizer: Tokenizer) -> int:
    """The size of a vocabulary, whose ids may have gaps: its largest id + 1."""
    return 1 + max(tokenizer.get_vocab().values(), default=-1)


def special_tokens(folder: Folder) -> dict[str, str]:
    """The texts of special tokens by their role, such as ``bos_token``."""
    _, roles, _ = _read_tokens(Path(folder))
    return {role: token.content for role, token in roles.items()}


def _read_tokens(
    folder: Path,
) -> tuple[dict[str, Any], dict[str, AddedToken], list[AddedToken]]:
    """The settings of a tokenizer, and the special tokens with and without a role."""
    stored: dict[str, Any] = {}
    for file in folder / _TOKENIZER_CONFIG, folder / "special_tokens_map.json":
        if stored.get(_DECODER) is None:  # transformers then reads no other file
            for key, value in read_json(file, {}).items():
                with named_errors(f"{file} has other than tokens as {key}"):
                    stored[key] = value if value is None else _tokens(key, value)
    others: list[AddedToken] = []
    for found in [stored.get(key) or [] for key in _LISTS]:
        if isinstance(found, dict):
            stored |= found
        else:
            others += found
    order = dict.fromkeys((*_ROLES, *stored))
    roles = {x: stored[x] for x in order if isinstance(stored.get(x), AddedToken)}
    return stored, roles, others


def _tokens(key: str, value: Any) -> Any:
    """An entry of a JSON file of transformers, whose tokens become AddedToken."""
    if key == _DECODER:
        return {int(index): _token(x) for index, x in value.items()}
    if key in _LISTS and isinstance(value, dict):
        return {role: _token(x) for role, x in value.items()}
    if key in _LISTS:
        return [_token(x) for x in value]
    is_role = key.endswith("_token") and isinstance(value, str | dict)
    return _token(value) if is_role or key in _ROLES else value


def _token(stored: str | dict[str, Any]) -> AddedToken:
    if isinstance(stored, str):
        return AddedToken(stored, special=True)
    flags = {name: stored[name] for name in _FLAGS if name in stored}
    return AddedToken(stored["content"], **flags)


def chat_template(folder: Folder) -> str | None:
    """Reads the default chat template of a folder; None if it has none."""
    folder = Path(folder)
    named = sorted((folder / "additional_chat_templates").glob("*.jinja"))
    for file in (*named, folder / "chat_template.jinja"):
        if file.name in ("default.jinja", "chat_template.jinja") and exists(file):
            with named_errors(f"{file} is not a chat template"):
                return file.read_text(encoding="utf-8")
    if named:
        names = ", ".join(file.stem for file in named)
        raise CheckpointError(f"{folder} has no default chat template, but {names}")
    for file in folder / _TOKENIZER_CONFIG, folder / "chat_template.json":
        if (found := read_json(file, {}).get("chat_template")) is None:
            continue
        with named_errors(f"{file} has chat templates without names"):
            if isinstance(found, list):
                found = {entry["name"]: entry["template"] for entry in found}
        found = found.get("default") if isinstance(found, dict) else found
        if not isinstance(found, str):
            got = f"or texts of which one is named default, got {reprlib.repr(found)}"
            raise CheckpointError(f"{file}: chat_template takes text, {got}")
        return found
    return None


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
        (folder / _INDEX).write_text(
            json.dumps(index, indent=2) + "\n", encoding="utf-8"
        )
