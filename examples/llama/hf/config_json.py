"""The translation between config.json and `LlamaConfig`."""

import copy
import dataclasses
import reprlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from examples.llama.fields import FromOne, Size, check_value
from examples.llama.hf.families import FAMILIES, Family
from examples.llama.hf.files import CONFIG, CheckpointError, named_errors
from examples.llama.model_config import LlamaConfig
from examples.llama.rotary import LinearScaling, Llama3Scaling, RopeScaling, YarnScaling

Json = Mapping[str, Any]

# Fields of LlamaConfig and their keys in config.json.
_FIELDS = {"vocab_size": "vocab_size", "hidden_size": "hidden_size"}
_FIELDS |= {"intermediate_size": "intermediate_size", "num_layers": "num_hidden_layers"}
_FIELDS |= {"num_heads": "num_attention_heads", "num_kv_heads": "num_key_value_heads"}
_FIELDS |= {"head_dim": "head_dim", "norm_eps": "rms_norm_eps"}
_FIELDS |= {"max_seq_len": "max_position_embeddings"}
# Models without grouped queries omit the first, models whose heads share hidden_size
# the second.
_OPTIONAL = ("num_key_value_heads", "head_dim")
# The values that the model implements; any other value means another architecture.
_ACCEPTED: dict[str, Any] = dict.fromkeys(("attention_bias", "mlp_bias"), (None, False))
_ACCEPTED |= {"partial_rotary_factor": (None, 1.0)}
_ACCEPTED |= {"dual_chunk_attention_config": (None,)}
# The scalings of the rotary frequencies, by their type in config.json.
_SCALINGS = {"linear": LinearScaling, "llama3": Llama3Scaling, "yarn": YarnScaling}
_FULL, _SLIDING = "full_attention", "sliding_attention"
# The fields of LlamaConfig that config.json does not store, and those that only count
# through the kinds of layers and the scale of scores.
_NOT_COMPARED = (
    *("dtype", "remat", "unroll", "saved_bits", "invariant", "quantize_head"),
    *("rope_theta", "rope_scaling", "local_rope_theta", "nope_layers"),
    *("sliding_window", "sliding_layers", "query_pre_attn_scalar"),
)
# Not part of a model; `save` takes them from a checkpoint.
SPECIAL_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")


def from_json(stored: Json, file: Path, tensors: int) -> LlamaConfig:
    """Builds the configuration of a config.json, or raises CheckpointError.

    transformers reads it, and knows what a family assumes for missing entries. Errors
    name its ``file``. The number of ``tensors`` in the checkpoint limits the layers and
    experts.
    """
    family = family_of(stored, file)
    # Takes a second to import, as PyTorch does, which it imports if it is there.
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    try:
        for key in _FIELDS.values():
            if key not in stored and key not in _OPTIONAL:
                raise ValueError(f"lacks {key}")
        # Before anything of this length is built.
        check_number("num_hidden_layers", stored["num_hidden_layers"], tensors)
        with named_errors("transformers cannot read it"):
            config = CONFIG_MAPPING[family.model_type]
            found = config.from_dict(copy.deepcopy(dict(stored)))
        return _read(family, stored, found, tensors)
    except ValueError as error:
        raise CheckpointError(f"{file}: {error}") from error


def family_of(stored: Json, file: Path) -> Family:
    """Returns the family that a config.json names, or raises CheckpointError."""
    name = stored.get("model_type")
    if not isinstance(name, str) or name not in FAMILIES:
        got, known = reprlib.repr(name), ", ".join(FAMILIES)
        message = f"{file}: model_type is {got}, supported: {known}"
        if name is None:  # as in the options of a run
            message += "; a run has its model in the subfolder hf, by --export hf"
        raise CheckpointError(message)
    return FAMILIES[name]


def to_json(config: LlamaConfig, family: Family | None = None) -> dict[str, Any]:
    """Returns the content of config.json; without a family, of the first that fits.

    Raises CheckpointError if the family, or every family, lacks a setting of the model.
    """
    lacking = ""
    for candidate in FAMILIES.values() if family is None else (family,):
        stored = _write(config, candidate)
        if not (lacking := _lacking(config, stored)):
            return stored
    if family is None:
        raise CheckpointError(
            f"none of the families has all settings of the model: {', '.join(FAMILIES)}"
        )
    raise CheckpointError(f"a {family.model_type} does not have the model's {lacking}")


def check_number(key: str, number: Any, tensors: int) -> None:
    """Raises ValueError if a number of layers, or experts, exceeds that of tensors."""
    if check_value(key, number, Size) > tensors:
        raise ValueError(
            f"{key} asks for {number}, the checkpoint has {tensors} tensors"
        )


def _read(family: Family, stored: Json, found: Any, tensors: int) -> LlamaConfig:
    """Translates what transformers ``found`` in a config.json."""
    rope = found.rope_parameters
    local: Json = {"rope_theta": None, "rope_type": "default"}
    if (local_key := family.local_rope_key) is not None:
        rope, local = rope[_FULL], rope[_SLIDING]
        check_value(local_key, local["rope_theta"], FromOne)
    _check_supported(family, found, rope, local)
    keys = {**_FIELDS, **family.keys}
    fields = {name: getattr(found, key, None) for name, key in keys.items()}
    if (key := keys.get("num_experts")) is not None:
        check_number(key, fields["num_experts"], tensors)
    layers = range(found.num_hidden_layers)
    window = found.sliding_window if family.window else None
    types = [_FULL if window is None else _SLIDING] * len(layers)
    if family.layer_types:
        types = found.layer_types
    elif stored.get("layer_types") is not None:  # transformers does not read it
        _check_list("layer_types", stored["layer_types"], layers, types[:1])
    rotates = found.no_rope_layers if family.nope else [1] * len(layers)
    _check_list("layer_types", types, layers, [_FULL, _SLIDING])
    _check_list("no_rope_layers", rotates, layers, [0, 1])
    slides = tuple(layer for layer in layers if types[layer] == _SLIDING)
    return LlamaConfig(
        **{**fields, **family.settings},
        rope_theta=rope["rope_theta"],
        rope_scaling=_rope_scaling(family, rope),
        local_rope_theta=local["rope_theta"],
        tie_embeddings=found.tie_word_embeddings,
        embed_scale=found.hidden_size**0.5 if family.scales_embeddings else 1.0,
        nope_layers=tuple(layer for layer in layers if not rotates[layer]),
        sliding_window=window if slides else None,
        sliding_layers=None if len(slides) in (0, len(layers)) else slides,
    )


def _check_list(key: str, listed: Any, layers: range, values: list[Any]) -> None:
    """Raises ValueError if a list does not have one of the values for each layer."""
    is_list = isinstance(listed, list) and len(listed) == len(layers)
    if not is_list or any(value not in values for value in listed):
        accepted, n = " or ".join(map(repr, values)), len(layers)
        got = f"{n} layers, got {reprlib.repr(listed)}"
        raise ValueError(f"{key} takes {accepted} for each of the {got}")


def _check_supported(family: Family, found: Any, rope: Json, local: Json) -> None:
    accepted = {
        **_ACCEPTED,
        **{key: (value,) for key, value in family.constants.items()},
        **dict.fromkeys(family.unsupported, (None, False)),
    }
    for key, values in accepted.items():
        if (value := rope.get(key, getattr(found, key, None))) not in values:
            supported = " or ".join(map(repr, values))
            raise ValueError(f"{key} is {reprlib.repr(value)}, supported: {supported}")
    if not rope.keys().isdisjoint((_FULL, _SLIDING)):
        rotation = "takes one rotation for all layers"
        raise ValueError(f"rope_parameters {rotation} of a {family.model_type}")
    if (
        local["rope_type"] != "default"
        or local.get("partial_rotary_factor", 1.0) != 1.0
    ):
        rotation, got = f"the default rotation for {_SLIDING}", reprlib.repr(local)
        raise ValueError(f"rope_parameters takes {rotation}, got {got}")


def _rope_scaling(family: Family, rope: Json) -> RopeScaling | None:
    rope_type = rope["rope_type"]
    if rope_type not in family.rope_types:
        given, supported = reprlib.repr(rope_type), ", ".join(family.rope_types)
        raise ValueError(
            f"RoPE type {given} is not supported in a {family.model_type}, supported: "
            f"{supported}"
        )
    if rope_type == "default":
        return None
    scaling, entries = _SCALINGS[rope_type], dict(rope)
    if scaling is YarnScaling:
        if rope.get("mscale") and rope.get("mscale_all_dim"):
            keys = "mscale and mscale_all_dim"
            raise ValueError(f"{keys} are not supported: set attention_factor")
        entries = {"truncate": True, **rope}
        entries["beta_fast"] = rope.get("beta_fast") or 32.0
        entries["beta_slow"] = rope.get("beta_slow") or 1.0
    names = (field.name for field in dataclasses.fields(scaling))
    return scaling(**{name: entries.get(name) for name in names})


def _write(config: LlamaConfig, family: Family) -> dict[str, Any]:
    """The content of config.json, as far as the family has the settings."""
    stored = {
        "architectures": [family.architecture],
        "model_type": family.model_type,
        **{key: getattr(config, name) for name, key in _FIELDS.items()},
        **family.constants,
        **{key: getattr(config, name) for name, key in family.keys.items()},
        "rope_theta": config.rope_theta,
        "rope_scaling": None,
        "tie_word_embeddings": config.tie_embeddings,
        "torch_dtype": "float32",
        # transformers would default to ids of the family's own tokenizer.
        **dict.fromkeys(SPECIAL_TOKENS),
    }
    if (scaling := config.rope_scaling) is not None:
        rope_type = next(name for name, k in _SCALINGS.items() if type(scaling) is k)
        stored["rope_scaling"] = {"rope_type": rope_type, **dataclasses.asdict(scaling)}
    if (key := family.keys.get("query_pre_attn_scalar")) and stored[key] is None:
        stored[key] = config.head_dim
    kinds = config.layer_kinds()
    if family.window:
        stored["sliding_window"] = config.sliding_window
    if family.window == "switched":
        stored["use_sliding_window"] = config.sliding_window is not None
    if family.layer_types:
        stored["layer_types"] = [_SLIDING if kind.window else _FULL for kind in kinds]
    if family.local_rope_key is not None:
        stored[family.local_rope_key] = config.local_rope_theta or config.rope_theta
    if family.nope:
        stored["no_rope_layers"] = [int(kind.rope is not None) for kind in kinds]
    return stored


def _lacking(config: LlamaConfig, stored: Json) -> str:
    """What a config.json of `_write` lacks of a model; empty if it is complete."""
    try:
        tensors = max(config.num_layers, config.num_experts or 0)
        described = _settings(from_json(stored, Path(CONFIG), tensors))
    except CheckpointError as error:
        return f"settings ({error})"
    own = _settings(config)
    return ", ".join(name for name, value in described.items() if value != own[name])


def _settings(config: LlamaConfig) -> dict[str, Any]:
    names = (field.name for field in dataclasses.fields(config))
    return {
        **{name: getattr(config, name) for name in names if name not in _NOT_COMPARED},
        "kinds of layers": config.layer_kinds(),
        "query_pre_attn_scalar": config.score_scale(),
    }
