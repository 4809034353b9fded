"""Writes hf_fixture: small random checkpoints and the logits PyTorch gives them.

    python tests/examples/make_hf_fixture.py

Needs torch and transformers, which are imported where they are used: pytest imports
every module under tests, also where they are not installed.
"""

from pathlib import Path
from typing import Any

import numpy as np
import safetensors.numpy

FIXTURE = Path(__file__).with_name("hf_fixture")
BATCH, SEQ_LEN = 2, 24

SIZES: dict[str, Any] = {
    "vocab_size": 48,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}
# With heads of 8, the four rotations fall on both sides of, and between, the limits.
LLAMA = SIZES | {
    "rope_parameters": {
        "rope_type": "llama3",
        "rope_theta": 500.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }
}
QWEN2 = SIZES | {
    "tie_word_embeddings": True,
    "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
}


def random_model(family: str, config: dict[str, Any], seed: int) -> Any:
    """Builds a ``family`` model ("Llama" or "Qwen2") with random float32 weights.

    The weights are large enough for every part of the model to show in the logits,
    which the usual initialization (norms of 1, biases of 0) would not do.
    """
    import torch
    import transformers

    model_config = getattr(transformers, f"{family}Config")(**config)
    model = getattr(transformers, f"{family}ForCausalLM")(model_config).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            mean = 1.0 if "norm" in name else 0.0
            parameter.normal_(mean, 0.3, generator=generator)
    return model


def reference(model: Any, seed: int) -> dict[str, np.ndarray]:
    """Returns random tokens, int32 [B, S], and PyTorch's logits, float32 [B, S, V]."""
    import torch

    shape = (BATCH, SEQ_LEN)
    tokens = np.random.default_rng(seed).integers(model.config.vocab_size, size=shape)
    with torch.no_grad():
        logits = model(torch.from_numpy(tokens)).logits.numpy()
    return {"tokens": tokens.astype(np.int32), "logits": logits}


def main() -> None:
    """Writes one folder for each family."""
    for family, config in {"Llama": LLAMA, "Qwen2": QWEN2}.items():
        model = random_model(family, config, seed=0)
        folder = FIXTURE / family.lower()
        model.save_pretrained(folder)
        (folder / "generation_config.json").unlink()
        safetensors.numpy.save_file(
            reference(model, seed=0), folder / "reference.safetensors"
        )


if __name__ == "__main__":
    main()
