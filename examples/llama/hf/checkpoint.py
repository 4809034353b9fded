"""Reads and writes checkpoints in Hugging Face's format."""

import contextlib
import json
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import flax.traverse_util
import jax.numpy as jnp
import numpy as np
import safetensors
import tokenizers

from examples.llama.hf.config_json import (
    SPECIAL_TOKENS,
    family_of,
    from_json,
    to_json,
)
from examples.llama.hf.families import FAMILIES
from examples.llama.hf.files import (
    CONFIG,
    GENERATION,
    CheckpointError,
    open_tensors,
    read_json,
    read_tensor,
    weight_files,
    write_tensors,
)
from examples.llama.hf.quantized import find_weights, read_weight, scheme_of
from examples.llama.hf.tensor_views import (
    HEAD,
    TABLE,
    TensorView,
    parameter_shapes,
    tensor_views,
)
from examples.llama.model_config import LlamaConfig

# Rows of a tensor that are copied at once: when transposed, they fill cache lines,
# which single rows do not.
_ROWS_PER_COPY = 16


def load(folder: str | Path) -> tuple[LlamaConfig, dict[str, Any]]:
    """Reads a checkpoint.

    Args:
        folder: The folder of the checkpoint, in the format of transformers'
            ``save_pretrained`` and of `save`. The weights are float32, float16 or
            bfloat16, or INT8 as `export` writes them in the formats "blockwise_int8"
            and "compressed-tensors", which are multiplied by their scales.

    Returns:
        The configuration, and the parameters of ``Llama`` as float32 NumPy arrays.
        ``dtype``, ``remat``, ``unroll`` and ``saved_bits`` of the configuration have
        their defaults; ``dataclasses.replace`` changes them.

    Raises:
        CheckpointError: A file or a tensor is missing, unreadable, unexpected or has
            the wrong shape, or the model is not supported. The message names it.
    """
    folder = Path(folder)
    stored = _read_config(folder)
    family = family_of(stored, folder / CONFIG)
    scheme = scheme_of(stored, folder / CONFIG)
    with contextlib.ExitStack() as stack:
        files = _open_files(folder, stack)
        config = from_json(stored, folder / CONFIG, len(files))
        flat = _empty_parameters(config, folder / CONFIG)
        expected = tensor_views(config, family, flat)
        # Early checkpoints of Llama 2 also store the rotary frequencies.
        found = {name for name in files if not name.endswith("rotary_emb.inv_freq")}
        quantized = {} if scheme is None else find_weights(scheme, found)
        found = (found - set().union(*quantized.values())) | quantized.keys()
        if config.tie_embeddings and {TABLE, HEAD} <= found:
            _check_tied(folder, files)
            found.remove(HEAD)
        _check_names(folder, expected, found)
        for name in sorted(found):
            if scheme is not None and name in quantized:
                tensor, file = read_weight(scheme, files, name), folder
            else:
                tensor, file = read_tensor(*files[name], name), files[name][0]
            _fill(expected[name], tensor, f"{file}: {name}")
    return config, flax.traverse_util.unflatten_dict(flat, sep="/")


def is_checkpoint(folder: str | Path) -> bool:
    """Whether a folder holds a model in Hugging Face's format, or as a GGUF file."""
    folder = Path(folder)
    if not (folder / CONFIG).exists():
        return any(folder.glob("*.gguf"))
    return "model_type" in _read_config(folder)


def quantization(folder: str | Path) -> str | None:
    """The format of the INT8 weights of a checkpoint; None if they are floats.

    Raises:
        CheckpointError: `load` does not know it.
    """
    folder = Path(folder)
    scheme = scheme_of(_read_config(folder), folder / CONFIG)
    return None if scheme is None else scheme.name


def save(
    folder: str | Path,
    config: LlamaConfig,
    params: Mapping[str, Any],
    *,
    like: str | Path | None = None,
) -> None:
    """Writes a float32 checkpoint that `load` and transformers can read.

    The folder appears atomically.

    Args:
        folder: The folder to write. It must not exist or must be empty.
        config: The configuration of the model. ``dtype``, ``remat``, ``unroll`` and
            ``saved_bits`` are not stored.
        params: The parameters of ``Llama(config)``, float32 arrays.
        like: The folder of a checkpoint, such as the one that ``config`` was loaded
            from. It provides the family, the ids of special tokens, and copies of the
            files of the tokenizer and of generation. None takes the first family that
            has the model's settings, and writes neither ids nor these files.

    Raises:
        FileExistsError: ``folder`` is a file or is not empty.
        CheckpointError: ``params`` do not belong to ``Llama(config)``; the family lacks
            a setting of ``config``; or ``like`` is damaged.
    """
    folder = Path(folder)
    check_new(folder)
    flat = flax.traverse_util.flatten_dict(dict(params), sep="/")
    _check_parameters(config, flat)
    stored = config_json(config, like)
    family = FAMILIES[stored["model_type"]]
    host = {path: np.asarray(array) for path, array in flat.items()}
    tensors = {
        name: tensor.join()
        for name, tensor in tensor_views(config, family, host).items()
    }
    write_folder(folder, stored, tensors, like)


def check_new(folder: Path) -> None:
    """Raises FileExistsError if a checkpoint cannot be written to a folder."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise FileExistsError(f"{folder} already exists; save takes a new folder")


def write_folder(
    folder: Path,
    stored: Mapping[str, Any],
    tensors: Mapping[str, np.ndarray],
    like: str | Path | None,
) -> None:
    """Writes a checkpoint, which appears when it is complete.

    Args:
        folder: The folder.
        stored: The content of config.json.
        tensors: The tensors by name.
        like: The checkpoint that provides the files of the tokenizer and of generation.
    """
    with new_folder(folder) as complete:
        (complete / CONFIG).write_text(json.dumps(stored, indent=2) + "\n")
        if like is not None:
            _copy_generation(Path(like), complete)
        write_tensors(complete, tensors)


@contextlib.contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """Yields a folder to write, which becomes ``folder`` if no error is raised.

    Raises:
        OSError: A file cannot be written.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(
        dir=folder.parent, prefix=f".{folder.name}."
    ) as scratch:
        complete = Path(scratch) / "checkpoint"
        complete.mkdir()
        try:
            yield complete
        except (OSError, safetensors.SafetensorError) as error:
            raise OSError(f"{folder} cannot be written: {error}") from error
        complete.rename(folder)


def load_tokenizer(folder: str | Path) -> tokenizers.Tokenizer | None:
    """Reads the checkpoint's ``tokenizer.json``; None if it has none.

    Raises:
        CheckpointError: The file is damaged.
    """
    file = Path(folder) / "tokenizer.json"
    if not file.exists():
        return None
    try:
        return tokenizers.Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises no narrower one
        raise CheckpointError(f"{file} is not a tokenizer: {error}") from error


def _read_config(folder: Path) -> dict[str, Any]:
    if not (folder / CONFIG).exists() and any(folder.glob("*.gguf")):
        raise CheckpointError(
            f"{folder} holds a GGUF file, which is not read: take the checkpoint that "
            "it was exported from, or an export in another format"
        )
    return read_json(folder / CONFIG)


def config_json(config: LlamaConfig, like: str | Path | None) -> dict[str, Any]:
    """The content of config.json, with the ids of special tokens of ``like``."""
    if like is None:
        return to_json(config)
    file = Path(like) / CONFIG
    source = read_json(file)
    stored = to_json(config, family_of(source, file))
    return stored | {key: source.get(key) for key in SPECIAL_TOKENS}


def _copy_generation(source: Path, target: Path) -> None:
    """Copies the files of the tokenizer and of generation that a checkpoint has."""
    for name in GENERATION:
        if (source / name).is_file():
            shutil.copyfile(source / name, target / name)


def _open_files(
    folder: Path, stack: contextlib.ExitStack
) -> dict[str, tuple[Path, Any]]:
    """Opens the file of each tensor.

    A tensor that several files hold is in the file that the index assigns it to.
    """
    files: dict[str, tuple[Path, Any]] = {}
    assigned = weight_files(folder)
    names_elsewhere = set().union(*(names or () for names in assigned.values()))
    for file, names in assigned.items():
        opened = stack.enter_context(open_tensors(file))
        held = set(opened.keys())
        if names is not None:
            if missing := names - held:
                raise CheckpointError(f"{file} lacks {min(missing)}, see the index")
            held -= names_elsewhere - names
        files.update(dict.fromkeys(held, (file, opened)))
    return files


def _empty_parameters(config: LlamaConfig, file: Path) -> dict[str, np.ndarray]:
    """Allocates the parameters by path, float32."""
    try:
        shapes = parameter_shapes(config)
        return {path: np.empty(shape, np.float32) for path, shape in shapes.items()}
    except (MemoryError, OverflowError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"{file} asks for arrays that cannot be allocated: {error}"
        ) from error


def _fill(view: TensorView, tensor: np.ndarray, name: str) -> None:
    """Copies a tensor into its view."""
    if tensor.shape != view.shape:
        raise CheckpointError(
            f"{name} has shape {tensor.shape}, {CONFIG} asks for {view.shape}"
        )
    for part, piece in zip(view.parts, view.split(tensor), strict=True):
        for start in range(0, part.shape[-2], _ROWS_PER_COPY):
            rows = slice(start, start + _ROWS_PER_COPY)
            part[..., rows, :] = piece[..., rows, :]


def _check_tied(folder: Path, files: Mapping[str, tuple[Path, Any]]) -> None:
    """Checks that a shared table stored under two names is the same."""
    table, head = (read_tensor(*files[name], name) for name in (TABLE, HEAD))
    if not np.array_equal(table, head):
        raise CheckpointError(
            f"{folder}: {HEAD} differs from {TABLE}, but {CONFIG} says "
            "tie_word_embeddings"
        )


def _check_parameters(config: LlamaConfig, flat: Mapping[str, Any]) -> None:
    shapes = parameter_shapes(config)
    _check_names("params", shapes, flat)
    for path, shape in shapes.items():
        if flat[path].shape != shape or flat[path].dtype != jnp.float32:
            raise CheckpointError(
                f"params: {path} takes float32 {shape}, "
                f"got {flat[path].dtype} {flat[path].shape}"
            )


def _check_names(where: object, expected: Iterable[str], found: Iterable[str]) -> None:
    missing, extra = set(expected) - set(found), set(found) - set(expected)
    for problem, names in ("lacks", missing), ("has the unexpected", extra):
        if names:
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            raise CheckpointError(f"{where} {problem} {min(names)}{more}")
