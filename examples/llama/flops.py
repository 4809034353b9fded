"""What a step computes, over what the device could: model FLOP utilization.

The count is that of PaLM (arXiv 2204.02311, appendix B): the matrix products that the
model asks for, and nothing that a recipe or a remat policy adds to them.
"""

import jax

from examples.llama.model import LlamaConfig

# Dense bfloat16 peaks by the vendor's data sheets, in FLOP/s. The first name that a
# device's begins with, word by word, counts.
PEAKS = {
    "NVIDIA B200": 2250e12,
    "NVIDIA GH200": 989.4e12,
    "NVIDIA H200 NVL": 835.5e12,
    "NVIDIA H200": 989.4e12,
    "NVIDIA H100 NVL": 835.5e12,
    "NVIDIA H100 PCIe": 756.5e12,
    "NVIDIA H100 80GB HBM3": 989.4e12,
    "NVIDIA A100": 312e12,
    "NVIDIA L40S": 362.05e12,
    "NVIDIA L4": 121e12,
    "NVIDIA GeForce RTX 4090": 165.2e12,
}


def per_token(config: LlamaConfig, seq_len: int) -> int:
    """FLOPs of a training step per token, forward and backward.

        6 * (parameters of matrix products) + 6 * layers * heads * head_dim * seq_len

    Each parameter multiplies and adds once forward and twice backward. Attention's
    two products do so over the positions; PaLM counts all of them (12 where this has
    6), this the half that is not masked. The embedding's look-up counts nothing, the
    head does even if it shares the embedding's table.

    Args:
        config: the model's sizes.
        seq_len: tokens in a sequence.
    """
    heads = config.num_heads * config.head_dim
    kv_heads = config.num_kv_heads * config.head_dim
    attention = config.hidden_size * (2 * heads + 2 * kv_heads)
    mlp = 3 * config.hidden_size * config.intermediate_size
    head = config.hidden_size * config.vocab_size
    parameters = config.num_layers * (attention + mlp) + head
    return 6 * parameters + 6 * config.num_layers * heads * seq_len


def peak() -> float | None:
    """The first device's dense bfloat16 peak in FLOP/s, None where it is not known."""
    # "NVIDIA A100-SXM4-80GB" is an "NVIDIA A100 ", and an "NVIDIA L40" no "NVIDIA L4 ".
    kind = jax.devices()[0].device_kind.replace("-", " ") + " "
    matching = (peak for name, peak in PEAKS.items() if kind.startswith(name + " "))
    return next(matching, None)
