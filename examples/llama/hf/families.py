"""What differs between the families of models, as data.

`FAMILIES` describes the families that `load` and `save` know. The code that reads the
descriptions, in config_json.py and tensor_views.py, names no family.
"""

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple


def _layer(tensor: str, *parts: str) -> tuple[str, ...]:
    """The tensors of a layer, the first "{}", with each part in place of %s."""
    tensors = [tensor % part for part in parts] or [tensor]
    return tuple(f"model.layers.{{}}.{tensor}" for tensor in tensors)


def _experts(module: str, gate: str, up: str, down: str) -> dict[str, tuple[str, ...]]:
    tensor = f"{module}.experts.{{}}.%s.weight"
    return {
        "layers/mlp/experts/router/kernel": _layer(f"{module}.gate.weight"),
        "layers/mlp/experts/gate_up/kernel": _layer(tensor, gate, up),
        "layers/mlp/experts/down/kernel": _layer(tensor, down),
    }


# The tensors of each parameter of `Llama`, by the parameter's path. A parameter joins
# its tensors along its last axis.
_TENSORS = {
    "embed/embedding": ("model.embed_tokens.weight",),
    "layers/attention/qkv/norm/scale": _layer("input_layernorm.weight"),
    "layers/attention/qkv/dense/kernel": _layer("self_attn.%s_proj.weight", *"qkv"),
    "layers/attention/qkv/dense/bias": _layer("self_attn.%s_proj.bias", *"qkv"),
    "layers/attention/q_norm/scale": _layer("self_attn.q_norm.weight"),
    "layers/attention/k_norm/scale": _layer("self_attn.k_norm.weight"),
    "layers/attention/out/kernel": _layer("self_attn.o_proj.weight"),
    "layers/mlp/norm/scale": _layer("post_attention_layernorm.weight"),
    "layers/mlp/gate_up/kernel": _layer("mlp.%s_proj.weight", "gate", "up"),
    "layers/mlp/down/kernel": _layer("mlp.down_proj.weight"),
    **_experts("mlp", "gate_proj", "up_proj", "down_proj"),
    "norm/scale": ("model.norm.weight",),
    "lm_head/kernel": ("lm_head.weight",),
}


class Family(NamedTuple):
    """One family of models."""

    model_type: str  # its name in config.json
    architecture: str  # the class of transformers
    gguf: str  # the architecture of llama.cpp
    settings: Mapping[str, Any] = {}  # fields of LlamaConfig that all its models share
    keys: Mapping[str, str] = {}  # keys of config.json for further fields, by field
    # Keys with their only value, and keys that take null or false only.
    constants: Mapping[str, Any] = {"hidden_act": "silu"}
    unsupported: tuple[str, ...] = ()
    rope_types: tuple[str, ...] = ("default", "linear", "llama3", "yarn")
    # Whether layers can have a sliding window, always or if use_sliding_window is true.
    window: Literal["", "always", "switched"] = ""
    layer_types: bool = False  # whether config.json lists them; else all have one
    # The key of the rotary base of layers with a sliding window.
    local_rope_key: str | None = None
    nope: bool = False  # some layers do not rotate; no_rope_layers has a 0 for them
    scales_embeddings: bool = False  # by sqrt(hidden_size)
    # The names of tensors that differ from those of a Llama, by the path of the
    # parameter. Tensors of one name are one tensor, joined along the rows.
    tensors: Mapping[str, tuple[str, ...]] = {}

    def tensors_of(self, parameter: str) -> tuple[str, ...]:
        """The tensors that the parameter with this path joins."""
        return self.tensors.get(parameter) or _TENSORS[parameter]


_GEMMA: dict[str, Any] = {
    "constants": {"hidden_activation": "gelu_pytorch_tanh"},
    "window": "always",
    "layer_types": True,
    "scales_embeddings": True,
    "tensors": {
        "layers/post_attention_norm/scale": _layer("post_attention_layernorm.weight"),
        "layers/mlp/norm/scale": _layer("pre_feedforward_layernorm.weight"),
        "layers/post_mlp_norm/scale": _layer("post_feedforward_layernorm.weight"),
    },
}
_GEMMA_KEYS = {"query_pre_attn_scalar": "query_pre_attn_scalar"}
_GEMMA_KEYS |= {"logit_softcap": "final_logit_softcapping"}
_GEMMA_SETTINGS: dict[str, Any] = {"unit_offset_norms": True, "post_norms": True}
_GEMMA_SETTINGS |= {"activation": "gelu_tanh"}
_LISTED: dict[str, Any] = {"window": "switched", "layer_types": True}
_EXPERT_KEYS = {"top_k": "num_experts_per_tok"}
_EXPERT_KEYS |= {"router_aux_loss_coef": "router_aux_loss_coef"}

# `save` takes the first family that has all settings of a model.
_FAMILIES = (
    Family("llama", "LlamaForCausalLM", "llama"),
    Family("qwen2", "Qwen2ForCausalLM", "qwen2", {"qkv_bias": True}, **_LISTED),
    Family("mistral", "MistralForCausalLM", "llama", window="always"),
    Family("qwen3", "Qwen3ForCausalLM", "qwen3", {"qk_norm": True}, **_LISTED),
    Family("smollm3", "SmolLM3ForCausalLM", "smollm3", **_LISTED, nope=True),
    Family(
        *("gemma2", "Gemma2ForCausalLM", "gemma2", _GEMMA_SETTINGS),
        keys={**_GEMMA_KEYS, "attn_softcap": "attn_logit_softcapping"},
        unsupported=("use_bidirectional_attention",),
        **_GEMMA,
    ),
    Family(
        *("gemma3_text", "Gemma3ForCausalLM", "gemma3"),
        settings={**_GEMMA_SETTINGS, "qk_norm": True},
        keys=_GEMMA_KEYS,
        unsupported=("use_bidirectional_attention", "attn_logit_softcapping"),
        local_rope_key="rope_local_base_freq",
        **_GEMMA,
    ),
    Family(
        *("phi3", "Phi3ForCausalLM", "phi3"),
        rope_types=("default",),
        window="always",
        tensors={
            "layers/attention/qkv/dense/kernel": 3
            * _layer("self_attn.qkv_proj.weight"),
            "layers/mlp/gate_up/kernel": 2 * _layer("mlp.gate_up_proj.weight"),
        },
    ),
    Family(
        *("mixtral", "MixtralForCausalLM", "llama"),
        keys={**_EXPERT_KEYS, "num_experts": "num_local_experts"},
        unsupported=("router_jitter_noise",),
        window="always",
        tensors=_experts("block_sparse_moe", "w1", "w3", "w2"),
    ),
    Family(
        *("qwen3_moe", "Qwen3MoeForCausalLM", "qwen3moe", {"qk_norm": True}),
        # Its intermediate_size is the width of layers without experts.
        keys={**_EXPERT_KEYS, "num_experts": "num_experts"}
        | {"intermediate_size": "moe_intermediate_size"}
        | {"renormalize": "norm_topk_prob"},
        # Otherwise some layers have an MLP in place of experts.
        constants={
            "hidden_act": "silu",
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
        },
        window="switched",
    ),
)
FAMILIES = {family.model_type: family for family in _FAMILIES}
