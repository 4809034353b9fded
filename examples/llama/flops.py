"""Model FLOPs and the peaks of devices, for the model FLOP utilization.

FLOPs are counted as in PaLM (arXiv 2204.02311, appendix B): the matrix products of the
model, without the work that a recipe or rematerialization adds.
"""

import jax

from examples.llama.model_config import LlamaConfig

# Dense bfloat16 peaks in FLOP/s, from the vendor's data sheets. The first entry whose
# words a device's name begins with applies.
PEAKS = {"NVIDIA B200": 2250e12, "NVIDIA GH200": 989.4e12}
PEAKS |= {"NVIDIA H200 NVL": 835.5e12, "NVIDIA H200": 989.4e12}
PEAKS |= {"NVIDIA H100 NVL": 835.5e12, "NVIDIA H100 PCIe": 756.5e12}
PEAKS |= {"NVIDIA H100 80GB HBM3": 989.4e12, "NVIDIA A100": 312e12}
PEAKS |= {"NVIDIA L40S": 362.05e12, "NVIDIA L4": 121e12}
PEAKS |= {"NVIDIA GeForce RTX 4090": 165.2e12}


def per_token(config: LlamaConfig, seq_len: int) -> int:
    """Returns the FLOPs per token of a training step, forward and backward.

        6 * (parameters of matrix products) + 12 * heads * head_dim * (keys of a query)

    The keys are the mean number that are not masked, summed over the layers; PaLM
    counts the whole sequence. The head counts even if it shares the embedding table.
    Of experts, those that a token selects count.
    """
    heads = config.num_heads * config.head_dim
    kv_heads = config.num_kv_heads * config.head_dim
    attention = config.hidden_size * (2 * heads + 2 * kv_heads)
    mlp = 3 * config.hidden_size * config.intermediate_size
    if config.num_experts is not None:
        mlp = config.top_k * mlp + config.hidden_size * config.num_experts
    head = config.hidden_size * config.vocab_size
    parameters = config.num_layers * (attention + mlp) + head
    twice_keys = 0
    for kind in config.layer_kinds():
        window = min(kind.window or seq_len, seq_len)
        # The queries before the window is full see half of it on average.
        twice_keys += 2 * window - window**2 // max(seq_len, 1)
    return 6 * parameters + 6 * heads * twice_keys


def peak() -> float | None:
    """Returns the first device's dense bfloat16 peak in FLOP/s; None if unknown."""
    # With a trailing space "NVIDIA L40" does not match "NVIDIA L4 ".
    kind = jax.devices()[0].device_kind.replace("-", " ") + " "
    matching = (peak for name, peak in PEAKS.items() if kind.startswith(name + " "))
    return next(matching, None)
