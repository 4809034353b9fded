"""Hugging Face checkpoints of the Llama and Qwen2 families, read and written.

A checkpoint is a folder with ``config.json`` and the weights, in
``model.safetensors`` or in the shards that ``model.safetensors.index.json`` lists.
"""

import contextlib
import json
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import flax.traverse_util
import jax
import jax.numpy as jnp
import numpy as np
import safetensors
import safetensors.numpy
import tokenizers

from examples.llama.model import Llama, LlamaConfig, RopeScaling

_CONFIG = "config.json"
_WEIGHTS = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_TABLE = "model.embed_tokens.weight"
_HEAD = "lm_head.weight"

# Rows of a tensor that are read at once. Transposed they fill whole lines of the cache,
# as single rows do not.
_STRIP = 16

# Fields of LlamaConfig and their names in config.json.
_FIELDS = {
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "intermediate_size": "intermediate_size",
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "norm_eps": "rms_norm_eps",
    "num_kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "max_seq_len": "max_position_embeddings",
}
# Left out where keys and values are not grouped, and where heads share hidden_size.
_OPTIONAL = ("num_key_value_heads", "head_dim")
# What the model computes; a checkpoint that says otherwise is another model.
_ONLY: dict[str, tuple[Any, ...]] = {
    "model_type": ("llama", "qwen2"),
    "hidden_act": ("silu",),
    "attention_bias": (None, False),
    "mlp_bias": (None, False),
    "partial_rotary_factor": (None, 1.0),
    "quantization_config": (None,),
    "dual_chunk_attention_config": (None,),
}
_ROPE_SCALING = (
    "factor",
    "low_freq_factor",
    "high_freq_factor",
    "original_max_position_embeddings",
)


class CheckpointError(ValueError):
    """A checkpoint that is damaged, or of a model that is not supported."""


def load(folder: str | Path) -> tuple[LlamaConfig, dict[str, Any]]:
    """Reads a checkpoint.

    Args:
        folder: the checkpoint's folder, as ``save_pretrained`` of transformers or
            `save` writes it; the weights are float32, float16 or bfloat16.

    Returns:
        The configuration, with the default ``dtype``, ``remat`` and ``saved_bits``
        (``dataclasses.replace`` sets others), and the parameters of ``Llama``:
        float32 NumPy arrays.

    Raises:
        CheckpointError: if a file or a tensor is missing, unreadable, superfluous or
            mis-shaped, or if the model is not supported; names what and where.
    """
    folder = Path(folder)
    config = _config_from(_read_json(folder / _CONFIG), folder / _CONFIG)
    flat = {
        path: np.empty(shape, np.float32) for path, shape in _shapes(config).items()
    }
    expected = {name: (view, shape) for name, view, shape in _tensors(config, flat)}
    with contextlib.ExitStack() as stack:
        files = {}
        for file in _weight_files(folder):
            opened = stack.enter_context(_open(file))
            files.update(dict.fromkeys(opened.keys(), (file, opened)))
        # Llama 2's early checkpoints also store the rotary frequencies.
        found = {name for name in files if not name.endswith("rotary_emb.inv_freq")}
        # Some store a shared table under both of its names.
        if config.tie_embeddings and {_TABLE, _HEAD} <= found:
            table, head = (_read_tensor(*files[n], n) for n in (_TABLE, _HEAD))
            if not np.array_equal(table, head):
                raise CheckpointError(
                    f"{folder}: {_HEAD} differs from {_TABLE}, but "
                    f"{_CONFIG} says tie_word_embeddings"
                )
            found.remove(_HEAD)
        _check_names(folder, expected, found)
        for name in sorted(found):
            file, opened = files[name]
            tensor = _read_tensor(file, opened, name)
            view, shape = expected[name]
            if tensor.shape != shape:
                raise CheckpointError(
                    f"{file}: {name} has shape {tensor.shape}, "
                    f"{_CONFIG} asks for {shape}"
                )
            tensor = tensor.reshape(view.shape)
            for start in range(0, view.shape[-2], _STRIP):
                strip = slice(start, start + _STRIP)
                view[..., strip, :] = tensor[..., strip, :]
    return config, flax.traverse_util.unflatten_dict(flat, sep="/")


def save(folder: str | Path, config: LlamaConfig, params: Mapping[str, Any]) -> None:
    """Writes a float32 checkpoint that `load` and transformers read.

    It is a Qwen2 if ``config.qkv_bias`` is set and a Llama otherwise.  The folder
    appears complete or not at all.  A tokenizer is not part of a model: where there
    is one, copy its files in afterwards.

    Args:
        folder: the folder to write, absent or empty.
        config: the model's configuration; ``dtype``, ``remat`` and
            ``saved_bits`` are not stored.
        params: the parameters of ``Llama(config)``, float32 arrays.

    Raises:
        FileExistsError: if ``folder`` is a file or is not empty.
        CheckpointError: if ``params`` are not those of ``Llama(config)``.
    """
    folder = Path(folder)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise FileExistsError(f"{folder} already exists; save takes a new folder")
    flat = flax.traverse_util.flatten_dict(dict(params), sep="/")
    shapes = _shapes(config)
    _check_names("params", shapes, flat)
    for path, shape in shapes.items():
        if flat[path].shape != shape or flat[path].dtype != jnp.float32:
            raise CheckpointError(
                f"params: {path} takes float32 {shape}, "
                f"got {flat[path].dtype} {flat[path].shape}"
            )
    host = {path: np.asarray(array) for path, array in flat.items()}
    tensors = {
        name: np.ascontiguousarray(view).reshape(shape)
        for name, view, shape in _tensors(config, host)
    }
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(
        dir=folder.parent, prefix=f".{folder.name}."
    ) as scratch:
        complete = Path(scratch) / "checkpoint"
        complete.mkdir()
        text = json.dumps(_config_to(config), indent=2) + "\n"
        (complete / _CONFIG).write_text(text)
        # Readers of transformers refuse weights that do not name their format.
        safetensors.numpy.save_file(tensors, complete / _WEIGHTS, {"format": "pt"})
        complete.rename(folder)


def load_tokenizer(folder: str | Path) -> tokenizers.Tokenizer | None:
    """Returns the tokenizer in the checkpoint's ``tokenizer.json``, None without."""
    file = Path(folder) / "tokenizer.json"
    if not file.exists():
        return None
    try:
        return tokenizers.Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises no narrower one
        raise CheckpointError(f"{file} is no tokenizer: {error}") from error


def _shapes(config: LlamaConfig) -> dict[str, tuple[int, ...]]:
    """Paths and shapes of the parameters of ``Llama(config)``."""
    tokens = jax.ShapeDtypeStruct((1, 1), jnp.int32)
    variables = jax.eval_shape(Llama(config).init, jax.random.key(0), tokens)
    flat = flax.traverse_util.flatten_dict(variables["params"], sep="/")
    return {path: leaf.shape for path, leaf in flat.items()}


def _tensors(
    config: LlamaConfig, flat: Mapping[str, np.ndarray]
) -> Iterator[tuple[str, np.ndarray, tuple[int, ...]]]:
    """The checkpoint's tensors and their shapes, as views into the parameters ``flat``.

    Reading and writing share it: to fill the views is to load, to store them is to
    save.  A parameter joins one or more tensors along its last axis, of which they take
    turns, so that a view has two axes where its tensor has one; those of the layers are
    stacked along their first; kernels are transposed.
    """
    kv_heads, dim = config.num_kv_heads, config.head_dim
    q = config.num_heads // kv_heads * dim
    hidden, mlp = config.hidden_size, config.intermediate_size
    attention, layer = "layers/attention", "model.layers.{}"
    joined: dict[str, tuple[int, dict[str, int]]] = {
        "embed/embedding": (1, {_TABLE: hidden}),
        f"{attention}/qkv/norm/scale": (1, {f"{layer}.input_layernorm.weight": hidden}),
        f"{attention}/qkv/dense/kernel": (
            kv_heads,
            {
                f"{layer}.self_attn.q_proj.weight": q,
                f"{layer}.self_attn.k_proj.weight": dim,
                f"{layer}.self_attn.v_proj.weight": dim,
            },
        ),
        f"{attention}/out/kernel": (1, {f"{layer}.self_attn.o_proj.weight": hidden}),
        "layers/mlp/norm/scale": (
            1,
            {f"{layer}.post_attention_layernorm.weight": hidden},
        ),
        "layers/mlp/gate_up/kernel": (
            1,
            {
                f"{layer}.mlp.gate_proj.weight": mlp,
                f"{layer}.mlp.up_proj.weight": mlp,
            },
        ),
        "layers/mlp/down/kernel": (1, {f"{layer}.mlp.down_proj.weight": hidden}),
        "norm/scale": (1, {"model.norm.weight": hidden}),
    }
    if config.qkv_bias:
        joined[f"{attention}/qkv/dense/bias"] = (
            kv_heads,
            {
                f"{layer}.self_attn.q_proj.bias": q,
                f"{layer}.self_attn.k_proj.bias": dim,
                f"{layer}.self_attn.v_proj.bias": dim,
            },
        )
    if not config.tie_embeddings:
        joined["lm_head/kernel"] = (1, {_HEAD: config.vocab_size})

    for path, (turns, widths) in joined.items():
        stack = flat[path] if path.startswith("layers/") else flat[path][None]
        if path.endswith("kernel"):
            stack = stack.reshape(*stack.shape[:2], -1)  # gate and up have axes
        stack = stack.reshape(*stack.shape[:-1], turns, sum(widths.values()))
        start = 0
        for name, width in widths.items():
            for index, array in enumerate(stack):
                view = array[..., start : start + width]
                if path.endswith("kernel"):
                    view = view.transpose(1, 2, 0)
                    shape = (turns * width, *view.shape[2:])
                else:
                    shape = (*view.shape[:-2], turns * width)
                yield name.format(index), view, shape
            start += width


def _check_names(where: object, expected: Iterable[str], found: Iterable[str]) -> None:
    missing, extra = set(expected) - set(found), set(found) - set(expected)
    for problem, names in ("lacks", missing), ("has the unexpected", extra):
        if names:
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            raise CheckpointError(f"{where} {problem} {min(names)}{more}")


def _config_from(stored: Mapping[str, Any], file: Path) -> LlamaConfig:
    # transformers 5 gathers in rope_parameters what were separate keys before.
    rope_keys = ("rope_theta", "partial_rotary_factor")
    rope = {key: stored[key] for key in rope_keys if key in stored}
    rope |= stored.get("rope_parameters") or stored.get("rope_scaling") or {}
    for key, accepted in _ONLY.items():
        value = stored.get(key, rope.get(key))
        if value not in accepted:
            raise CheckpointError(
                f"{file}: {key} is {value!r}, supported: "
                + " or ".join(map(repr, accepted))
            )
    for key in _FIELDS.values():
        if key not in stored and key not in _OPTIONAL:
            raise CheckpointError(f"{file} lacks {key}")
    if _slides(stored):
        raise CheckpointError(f"{file}: sliding-window attention is not supported")

    rope_type = rope.get("rope_type", rope.get("type", "default"))
    scaling = None
    fields: dict[str, Any] = {name: stored.get(key) for name, key in _FIELDS.items()}
    fields["num_kv_heads"] = fields["num_kv_heads"] or fields["num_heads"]
    try:
        if rope_type == "llama3":
            factors: dict[str, Any] = {key: rope.get(key) for key in _ROPE_SCALING}
            scaling = RopeScaling(**factors)
        elif rope_type != "default":
            raise ValueError(
                f"RoPE type {rope_type!r} is not supported: default and llama3 are"
            )
        return LlamaConfig(
            **fields,
            rope_theta=rope.get("rope_theta", 10000.0),
            rope_scaling=scaling,
            qkv_bias=stored["model_type"] == "qwen2",
            tie_embeddings=stored.get("tie_word_embeddings", False),
        )
    except ValueError as error:
        raise CheckpointError(f"{file}: {error}") from error


def _slides(stored: Mapping[str, Any]) -> bool:
    if stored.get("layer_types") is not None:
        return "sliding_attention" in stored["layer_types"]
    # Older Qwen2: the layers from max_window_layers on, and where it is used at all.
    return bool(
        stored.get("use_sliding_window")
        and stored.get("sliding_window") is not None
        and stored.get("max_window_layers", 0) < stored["num_hidden_layers"]
    )


def _config_to(config: LlamaConfig) -> dict[str, Any]:
    family = "Qwen2" if config.qkv_bias else "Llama"
    stored = {
        "architectures": [f"{family}ForCausalLM"],
        "model_type": family.lower(),
        **{key: getattr(config, name) for name, key in _FIELDS.items()},
        "hidden_act": "silu",
        "rope_theta": config.rope_theta,
        "rope_scaling": None,
        "tie_word_embeddings": config.tie_embeddings,
        "torch_dtype": "float32",
        # Left out, they would take the ids of Llama 2's tokenizer.
        "bos_token_id": None,
        "eos_token_id": None,
    }
    if config.rope_scaling is not None:
        scaling = {key: getattr(config.rope_scaling, key) for key in _ROPE_SCALING}
        stored["rope_scaling"] = {"rope_type": "llama3", **scaling}
    return stored


def _weight_files(folder: Path) -> list[Path]:
    if (folder / _WEIGHTS).exists():
        return [folder / _WEIGHTS]
    if not (folder / _INDEX).exists():
        raise CheckpointError(f"{folder} has neither {_WEIGHTS} nor {_INDEX}")
    weight_map = _read_json(folder / _INDEX).get("weight_map")
    if not isinstance(weight_map, dict):
        raise CheckpointError(f"{folder / _INDEX} lacks weight_map, an object")
    files = [folder / name for name in sorted(set(weight_map.values()))]
    for file in files:
        if not file.exists():
            raise CheckpointError(f"{file} does not exist; {_INDEX} lists it")
    return files


def _read_json(file: Path) -> dict[str, Any]:
    try:
        value = json.loads(file.read_text())
    except FileNotFoundError:
        raise CheckpointError(f"{file} does not exist") from None
    except ValueError as error:
        raise CheckpointError(f"{file} is no JSON: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{file} holds no JSON object")
    return value


def _open(file: Path) -> Any:
    try:
        return safetensors.safe_open(file, framework="numpy")
    except safetensors.SafetensorError as error:
        raise CheckpointError(f"{file} is no safetensors file: {error}") from error


def _read_tensor(file: Path, opened: Any, name: str) -> np.ndarray:
    dtype = opened.get_slice(name).get_dtype()
    if dtype not in ("F32", "F16", "BF16"):
        raise CheckpointError(f"{file}: {name} is {dtype}, supported are floats")
    return opened.get_tensor(name)
