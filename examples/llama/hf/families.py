"""What differs between the families of models, as data.

`FAMILIES` describes the families that `load` and `save` know. The code that reads the
descriptions, in config_json.py and tensor_views.py, names no family.
"""

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

_LAYER = "model.layers.{}."

# The tensors of each parameter of `Llama`, by the parameter's path. A parameter joins
# its tensors along its last axis. The first "{}" stands for the layer; the second, in
# tensors of experts, for the expert.
_QKV = tuple(f"{_LAYER}self_attn.{name}_proj." for name in "qkv")
_TENSORS: dict[str, tuple[str, ...]] = {
    "embed/embedding": ("model.embed_tokens.weight",),
    "layers/attention/qkv/norm/scale": (f"{_LAYER}input_layernorm.weight",),
    "layers/attention/qkv/dense/kernel": tuple(f"{name}weight" for name in _QKV),
    "layers/attention/qkv/dense/bias": tuple(f"{name}bias" for name in _QKV),
    "layers/attention/q_norm/scale": (f"{_LAYER}self_attn.q_norm.weight",),
    "layers/attention/k_norm/scale": (f"{_LAYER}self_attn.k_norm.weight",),
    "layers/attention/out/kernel": (f"{_LAYER}self_attn.o_proj.weight",),
    "layers/mlp/norm/scale": (f"{_LAYER}post_attention_layernorm.weight",),
    "layers/mlp/gate_up/kernel": (
        f"{_LAYER}mlp.gate_proj.weight",
        f"{_LAYER}mlp.up_proj.weight",
    ),
    "layers/mlp/down/kernel": (f"{_LAYER}mlp.down_proj.weight",),
    "layers/mlp/experts/router/kernel": (f"{_LAYER}mlp.gate.weight",),
    "layers/mlp/experts/gate_up/kernel": (
        f"{_LAYER}mlp.experts.{{}}.gate_proj.weight",
        f"{_LAYER}mlp.experts.{{}}.up_proj.weight",
    ),
    "layers/mlp/experts/down/kernel": (f"{_LAYER}mlp.experts.{{}}.down_proj.weight",),
    "norm/scale": ("model.norm.weight",),
    "lm_head/kernel": ("lm_head.weight",),
}
_GEMMA_NORMS = {
    "layers/post_attention_norm/scale": (f"{_LAYER}post_attention_layernorm.weight",),
    "layers/mlp/norm/scale": (f"{_LAYER}pre_feedforward_layernorm.weight",),
    "layers/post_mlp_norm/scale": (f"{_LAYER}post_feedforward_layernorm.weight",),
}
_MIXTRAL = f"{_LAYER}block_sparse_moe."
_MIXTRAL_EXPERTS = {
    "layers/mlp/experts/router/kernel": (f"{_MIXTRAL}gate.weight",),
    "layers/mlp/experts/gate_up/kernel": (
        f"{_MIXTRAL}experts.{{}}.w1.weight",
        f"{_MIXTRAL}experts.{{}}.w3.weight",
    ),
    "layers/mlp/experts/down/kernel": (f"{_MIXTRAL}experts.{{}}.w2.weight",),
}


class Family(NamedTuple):
    """One family of models.

    Attributes:
        model_type: The name of the family in config.json.
        architecture: The class of transformers.
        gguf: The architecture of llama.cpp.
        settings: The fields of `LlamaConfig` that all models of the family share.
        keys: The keys of config.json for further fields of `LlamaConfig`, by field.
        required: Fields of `keys` that no model of the family is without.
        aliases: The keys under which newer versions of transformers store others.
        defaults: What transformers assumes for keys that config.json lacks.
        constants: Keys of config.json with the only value that the model implements.
        unsupported: Keys that take null or false only, beside those of every family.
        rope_types: The supported scalings of the rotary frequencies.
        window: Which layers have a sliding window if config.json does not list them in
            ``layer_types``: no layer; every layer; all but every n-th layer, where
            ``sliding_window_pattern`` is n; or, if ``use_sliding_window`` is true,
            every layer, those from ``max_window_layers`` on or those that do not
            rotate.
        layer_types: Whether transformers reads ``layer_types``.
        local_rope_key: The key of the rotary base of layers with a sliding window.
        nope: Whether some layers do not rotate; ``no_rope_layers`` has a 0 for them.
        scales_embeddings: Whether embeddings are multiplied by sqrt(hidden_size).
        tensors: The names of tensors that differ from those of a Llama, by the path of
            the parameter. Tensors of one name are one tensor, joined along the rows.
    """

    model_type: str
    architecture: str
    gguf: str
    settings: Mapping[str, Any] = {}
    keys: Mapping[str, str] = {}
    required: tuple[str, ...] = ()
    aliases: Mapping[str, str] = {}
    defaults: Mapping[str, Any] = {}
    constants: Mapping[str, Any] = {"hidden_act": "silu"}
    unsupported: tuple[str, ...] = ()
    rope_types: tuple[str, ...] = ("default", "linear", "llama3", "yarn")
    window: Literal["none", "every", "pattern", "switched", "last", "unrotated"] = (
        "none"
    )
    layer_types: bool = False
    local_rope_key: str | None = None
    nope: bool = False
    scales_embeddings: bool = False
    tensors: Mapping[str, tuple[str, ...]] = {}

    def tensors_of(self, parameter: str) -> tuple[str, ...]:
        """The tensors that the parameter with this path joins."""
        return self.tensors.get(parameter) or _TENSORS[parameter]


_GEMMA: dict[str, Any] = {
    "constants": {"hidden_activation": "gelu_pytorch_tanh"},
    "window": "pattern",
    "layer_types": True,
    "scales_embeddings": True,
    "tensors": _GEMMA_NORMS,
}
_GEMMA_KEYS = {
    "query_pre_attn_scalar": "query_pre_attn_scalar",
    "logit_softcap": "final_logit_softcapping",
}
_GEMMA_SETTINGS: dict[str, Any] = {"activation": "gelu_tanh"}
_GEMMA_SETTINGS |= dict.fromkeys(("unit_offset_norms", "post_norms"), True)
_GEMMA_DEFAULTS = {"num_key_value_heads": 4, "head_dim": 256, "sliding_window": 4096}
_GEMMA_DEFAULTS |= {"query_pre_attn_scalar": 256, "tie_word_embeddings": True}
_QWEN_DEFAULTS = {"num_key_value_heads": 32, "sliding_window": 4096}
_QWEN_DEFAULTS |= {"max_window_layers": 28}
_EXPERT_KEYS = {
    "top_k": "num_experts_per_tok",
    "router_aux_loss_coef": "router_aux_loss_coef",
}

# `save` takes the first family that has all settings of a model.
_FAMILIES = (
    Family("llama", "LlamaForCausalLM", gguf="llama"),
    Family(
        "qwen2",
        "Qwen2ForCausalLM",
        gguf="qwen2",
        settings={"qkv_bias": True},
        defaults=_QWEN_DEFAULTS,
        window="last",
        layer_types=True,
    ),
    Family(
        "mistral",
        "MistralForCausalLM",
        gguf="llama",
        defaults={"num_key_value_heads": 8, "sliding_window": 4096},
        window="every",
    ),
    Family(
        "qwen3",
        "Qwen3ForCausalLM",
        gguf="qwen3",
        settings={"qk_norm": True},
        defaults={**_QWEN_DEFAULTS, "head_dim": 128},
        window="last",
        layer_types=True,
    ),
    Family(
        "smollm3",
        "SmolLM3ForCausalLM",
        gguf="smollm3",
        defaults={"num_key_value_heads": 4, "no_rope_layer_interval": 4}
        | {"rope_theta": 2e6, "tie_word_embeddings": True},
        window="unrotated",
        layer_types=True,
        nope=True,
    ),
    Family(
        "gemma2",
        "Gemma2ForCausalLM",
        gguf="gemma2",
        settings=_GEMMA_SETTINGS,
        keys={**_GEMMA_KEYS, "attn_softcap": "attn_logit_softcapping"},
        defaults={**_GEMMA_DEFAULTS, "sliding_window_pattern": 2}
        | {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
        unsupported=("use_bidirectional_attention",),
        **_GEMMA,
    ),
    Family(
        "gemma3_text",
        "Gemma3ForCausalLM",
        gguf="gemma3",
        settings={**_GEMMA_SETTINGS, "qk_norm": True},
        keys=_GEMMA_KEYS,
        defaults={**_GEMMA_DEFAULTS, "sliding_window_pattern": 6}
        | {"rope_theta": 1e6, "rope_local_base_freq": 1e4},
        unsupported=("use_bidirectional_attention", "attn_logit_softcapping"),
        local_rope_key="rope_local_base_freq",
        **_GEMMA,
    ),
    Family(
        "phi3",
        "Phi3ForCausalLM",
        gguf="phi3",
        rope_types=("default",),
        window="every",
        tensors={
            "layers/attention/qkv/dense/kernel": (f"{_LAYER}self_attn.qkv_proj.weight",)
            * 3,
            "layers/mlp/gate_up/kernel": (f"{_LAYER}mlp.gate_up_proj.weight",) * 2,
        },
    ),
    Family(
        "mixtral",
        "MixtralForCausalLM",
        gguf="llama",
        keys={**_EXPERT_KEYS, "num_experts": "num_local_experts"},
        required=("num_experts",),
        defaults={"num_key_value_heads": 8, "rope_theta": 1e6, "num_local_experts": 8}
        | {"num_experts_per_tok": 2, "router_aux_loss_coef": 0.001},
        unsupported=("router_jitter_noise",),
        window="every",
        tensors=_MIXTRAL_EXPERTS,
    ),
    Family(
        "qwen3_moe",
        "Qwen3MoeForCausalLM",
        gguf="qwen3moe",
        settings={"qk_norm": True},
        # Its intermediate_size is the width of layers without experts, which are not
        # supported.
        keys={**_EXPERT_KEYS, "num_experts": "num_experts"}
        | {"intermediate_size": "moe_intermediate_size"}
        | {"renormalize": "norm_topk_prob"},
        required=("num_experts",),
        aliases={"num_local_experts": "num_experts"},
        defaults={"num_key_value_heads": 4, "sliding_window": 4096, "num_experts": 128}
        | {"num_experts_per_tok": 8, "moe_intermediate_size": 768}
        | {"norm_topk_prob": False, "router_aux_loss_coef": 0.001}
        | {"decoder_sparse_step": 1, "mlp_only_layers": []},
        # Otherwise some layers have an MLP in place of experts.
        constants={"hidden_act": "silu", "decoder_sparse_step": 1}
        | {"mlp_only_layers": []},
        window="switched",
    ),
)
FAMILIES = {family.model_type: family for family in _FAMILIES}
