"""The translation between config.json and `LlamaConfig`."""

import dataclasses
import reprlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from examples.llama.hf.files import CheckpointError
from examples.llama.model_config import LlamaConfig, RopeScaling

# Fields of LlamaConfig and their names in config.json. RopeScaling's are the same.
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
# Models without grouped queries omit the first, models whose heads share hidden_size
# the second.
_OPTIONAL = ("num_key_value_heads", "head_dim")
# The values that the model implements; any other value means another architecture.
_ACCEPTED: dict[str, tuple[Any, ...]] = {
    "model_type": ("llama", "qwen2"),
    "hidden_act": ("silu",),
    "attention_bias": (None, False),
    "mlp_bias": (None, False),
    "partial_rotary_factor": (None, 1.0),
    "quantization_config": (None,),
    "dual_chunk_attention_config": (None,),
}


def from_json(stored: Mapping[str, Any], file: Path) -> LlamaConfig:
    """Builds the configuration that ``config.json`` describes.

    Args:
        stored: The content of the file.
        file: The file, for error messages.

    Raises:
        CheckpointError: A field is missing or out of range, or the model is not
            supported.
    """
    # transformers 5 stores in rope_parameters what older versions store at the top.
    rope_keys = ("rope_theta", "partial_rotary_factor")
    rope = {key: stored[key] for key in rope_keys if key in stored}
    for key in ("rope_scaling", "rope_parameters"):
        value = {} if stored.get(key) is None else stored[key]
        if not isinstance(value, dict):
            raise CheckpointError(
                f"{file}: {key} takes an object, got {reprlib.repr(value)}"
            )
        rope |= value
    _check_supported(stored, rope, file)
    fields: dict[str, Any] = {name: stored.get(key) for name, key in _FIELDS.items()}
    if fields["num_kv_heads"] is None:
        fields["num_kv_heads"] = fields["num_heads"]
    try:
        config = LlamaConfig(
            **fields,
            rope_theta=rope.get("rope_theta", 10000.0),
            rope_scaling=_rope_scaling(rope),
            qkv_bias=stored["model_type"] == "qwen2",
            tie_embeddings=stored.get("tie_word_embeddings", False),
        )
    except ValueError as error:
        raise CheckpointError(f"{file}: {error}") from error
    if _uses_sliding_window(stored, config.num_layers):
        raise CheckpointError(
            f"{file}: sliding-window attention is not supported; layer_types takes "
            "'full_attention' for every layer"
        )
    return config


def to_json(config: LlamaConfig) -> dict[str, Any]:
    """Returns the content of config.json: a Qwen2 if QKV has a bias, else a Llama."""
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
        # transformers would default to the ids of Llama 2's tokenizer.
        "bos_token_id": None,
        "eos_token_id": None,
    }
    if config.rope_scaling is not None:
        scaling = dataclasses.asdict(config.rope_scaling)
        stored["rope_scaling"] = {"rope_type": "llama3", **scaling}
    return stored


def _check_supported(
    stored: Mapping[str, Any], rope: Mapping[str, Any], file: Path
) -> None:
    for key, accepted in _ACCEPTED.items():
        value = rope.get(key, stored.get(key))
        if value not in accepted:
            raise CheckpointError(
                f"{file}: {key} is {reprlib.repr(value)}, supported: "
                + " or ".join(map(repr, accepted))
            )
    for key in _FIELDS.values():
        if key not in stored and key not in _OPTIONAL:
            raise CheckpointError(f"{file} lacks {key}")


def _rope_scaling(rope: Mapping[str, Any]) -> RopeScaling | None:
    rope_type = rope.get("rope_type", rope.get("type", "default"))
    if rope_type == "default":
        return None
    if rope_type != "llama3":
        raise ValueError(
            f"RoPE type {rope_type!r} is not supported: default and llama3 are"
        )
    names = (field.name for field in dataclasses.fields(RopeScaling))
    factors: dict[str, Any] = {name: rope.get(name) for name in names}
    return RopeScaling(**factors)


def _uses_sliding_window(stored: Mapping[str, Any], layers: int) -> bool:
    types = stored.get("layer_types")
    if types is not None:
        return types != ["full_attention"] * layers
    if not stored.get("use_sliding_window") or stored.get("sliding_window") is None:
        return False
    # Older Qwen2: the layers from max_window_layers on, if the window is enabled.
    first = stored.get("max_window_layers")
    return not isinstance(first, int) or first < layers
