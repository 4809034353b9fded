"""Writes hf_fixture: small random checkpoints and the logits PyTorch gives them.

    python tests/examples/make_hf_fixture.py

Needs torch and transformers, which are imported where they are used: pytest imports
every module under tests, also where they are not installed.
"""

from pathlib import Path

import numpy as np
import safetensors.numpy

FIXTURE = Path(__file__).with_name("hf_fixture")
BATCH, SEQ_LEN = 2, 24

SIZES = {
    "vocab_size": 48,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}
# Of the families below, enough layers for a pattern and narrow ones.
NARROW = SIZES | {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 3}
DEFAULT_ROPE = {"rope_type": "default", "rope_theta": 500.0}
# With heads of 8, the four rotations fall on both sides of, and between, the limits.
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 500.0,
    "factor": 4.0,
    "beta_fast": 8.0,
    "beta_slow": 0.5,
    "original_max_position_embeddings": 128,
}
GEMMA = NARROW | {
    "head_dim": 8,
    "query_pre_attn_scalar": 5,
    "sliding_window": 6,
    "final_logit_softcapping": 3.0,
}
# The arguments of each family's configuration, by the prefix of its classes.
CONFIGS = {
    "Llama": SIZES | {"rope_parameters": LLAMA3_ROPE},
    "Qwen2": SIZES | {"tie_word_embeddings": True, "rope_parameters": DEFAULT_ROPE},
    "Mistral": NARROW | {"sliding_window": 5, "rope_parameters": DEFAULT_ROPE},
    "Qwen3": NARROW
    | {"head_dim": 8, "use_sliding_window": True, "sliding_window": 7}
    | {"max_window_layers": 2, "rope_parameters": YARN_ROPE},
    "SmolLM3": NARROW | {"no_rope_layer_interval": 2, "rope_parameters": DEFAULT_ROPE},
    "Gemma2": GEMMA | {"attn_logit_softcapping": 2.0, "rope_parameters": DEFAULT_ROPE},
    "Gemma3": GEMMA
    | {
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "rope_parameters": {
            "full_attention": DEFAULT_ROPE | {"rope_type": "linear", "factor": 4.0},
            "sliding_attention": DEFAULT_ROPE | {"rope_theta": 50.0},
        },
    },
    "Phi3": NARROW | {"sliding_window": 9, "rope_parameters": DEFAULT_ROPE},
    "Mixtral": NARROW
    | {"num_hidden_layers": 2, "num_local_experts": 5, "sliding_window": 11}
    | {"router_aux_loss_coef": 0.02, "rope_parameters": DEFAULT_ROPE},
    "Qwen3Moe": NARROW
    | {"num_hidden_layers": 2, "head_dim": 8, "moe_intermediate_size": 12}
    | {"num_experts": 6, "num_experts_per_tok": 3, "norm_topk_prob": True}
    | {"rope_parameters": DEFAULT_ROPE},
}


def random_model(family, config, seed):
    """Builds a model of a family, a key of `CONFIGS`, with random float32 weights.

    The weights are large enough for every part of the model to show in the logits,
    which the usual initialization (norms of 1, biases of 0) would not do.
    """
    import torch
    import transformers

    # Gemma 3's own configuration is that of the model that also reads images.
    name = "Gemma3TextConfig" if family == "Gemma3" else f"{family}Config"
    # The tokens that transformers assumes lie beyond the small vocabulary.
    special = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
    model_config = getattr(transformers, name)(**special, **config)
    model = getattr(transformers, f"{family}ForCausalLM")(model_config).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            # Gemma's norms multiply by 1 + weight.
            mean = 1.0 if "norm" in name and "Gemma" not in family else 0.0
            parameter.normal_(mean, 0.3, generator=generator)
    return model


def reference(model, seed):
    """Returns random tokens, int32 [B, S], and PyTorch's logits, float32 [B, S, V]."""
    import torch

    shape = (BATCH, SEQ_LEN)
    tokens = np.random.default_rng(seed).integers(model.config.vocab_size, size=shape)
    with torch.no_grad():
        logits = model(torch.from_numpy(tokens)).logits.numpy()
    return {"tokens": tokens.astype(np.int32), "logits": logits}


def main():
    """Writes one folder for each family that has none."""
    for family, config in CONFIGS.items():
        folder = FIXTURE / family.lower()
        if folder.exists():
            continue
        model = random_model(family, config, seed=0)
        model.save_pretrained(folder)
        (folder / "generation_config.json").unlink(missing_ok=True)
        safetensors.numpy.save_file(
            reference(model, seed=0), folder / "reference.safetensors"
        )


if __name__ == "__main__":
    main()
