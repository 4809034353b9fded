"""Writes models as GGUF files, which llama.cpp loads.

llama.cpp computes a model by its architecture, where most of what `LlamaConfig` can
vary is fixed. `check` refuses a model that its architecture would compute otherwise.
"""

import contextlib
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from examples.llama.hf.families import Family
from examples.llama.hf.gguf_tokenizer import add_tokenizer, read_tokenizer
from examples.llama.model_config import LlamaConfig
from examples.llama.rotary import LinearScaling, Llama3Scaling, YarnScaling
from fbq_jax.export import ExportError

Arrays = Mapping[str, np.ndarray]
# The architectures that rotate channel 2i with channel 2i + 1, where transformers has
# i and i + head_dim / 2.
_INTERLEAVED = ("llama", "smollm3")
# In these architectures every n-th layer does not rotate, or has no sliding window.
_NOPE_INTERVAL = {"smollm3": 4}
_WINDOW_INTERVAL = {"gemma2": 2, "gemma3": 6}
# Heads share hidden_size.
_SHARED_WIDTH = ("qwen2", "phi3")
# With so many layers, scores are divided by sqrt(hidden_size / heads), not by
# sqrt(head_dim).
_LARGEST = {"gemma2": 46, "gemma3": 62}


def check(config: LlamaConfig, family: Family, like: str | Path | None) -> None:
    """Raises ExportError if llama.cpp would compute another model or read other text.

    ``like`` is the folder of a checkpoint with the tokenizer.
    """
    if problems := list(_problems(config, family.gguf)):
        raise ExportError(f"llama.cpp's {family.gguf} {', and '.join(problems)}")
    if like is not None:
        read_tokenizer(Path(like), config.vocab_size)


def write(
    file: Path,
    config: LlamaConfig,
    family: Family,
    blocks: Arrays,
    floats: Arrays,
    like: str | Path | None,
) -> None:
    """Writes a GGUF file of a model that `check` has accepted.

    ``blocks`` has the blocks of Q8_0 of projections, uint8 [N, K / 32 * 34], by the
    names of their tensors in transformers, and ``floats`` the other tensors, float32.
    The checkpoint ``like`` provides the tokenizer and the chat template; without one,
    llama.cpp's library takes ids of tokens.
    """
    with contextlib.closing(gguf.GGUFWriter(file, family.gguf)) as writer:
        writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
        writer.add_file_type(gguf.LlamaFileType.MOSTLY_Q8_0)
        _add_entries(writer, config)
        folder = Path(like or "")
        tokenizer = read_tokenizer(folder, config.vocab_size) if like else None
        if tokenizer is None:
            writer.add_tokenizer_model("no_vocab")
        else:
            add_tokenizer(writer, tokenizer, folder, config.vocab_size)
        _add_tensors(writer, config, blocks, floats)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()


def _problems(config: LlamaConfig, architecture: str) -> Iterator[str]:
    """What the architecture does, where the model does otherwise."""
    layers, scaling = range(config.num_layers), config.rope_scaling
    n = _WINDOW_INTERVAL.get(architecture, 1)
    windows = [kind.window or np.inf for kind in config.layer_kinds()]
    slides = [window < config.max_seq_len for window in windows]
    if any(slides) and slides != [bool((layer + 1) % n) for layer in layers]:
        every_nth = f"has sliding windows in all layers but {n}, {2 * n}, ..."
        yield every_nth if n > 1 else "has no sliding windows"
    interval = _NOPE_INTERVAL.get(architecture, config.num_layers + 1)
    if config.nope_layers != (nope := tuple(layers[interval - 1 :: interval])):
        yield f"rotates in all layers but {nope}, not {config.nope_layers}"
    shared = config.hidden_size // config.num_heads
    heads = config.head_dim * config.num_heads
    if architecture in _SHARED_WIDTH and heads != config.hidden_size:
        yield "has heads of hidden_size / heads channels"
    is_largest = config.num_layers == _LARGEST.get(architecture)
    width = shared if is_largest else config.head_dim
    if not np.isclose(config.score_scale(), width**-0.5):
        yield f"divides scores by sqrt({width})"
    if architecture == "gemma2":
        if config.attn_softcap is None or config.logit_softcap is None:
            yield "caps scores and logits"
        if not config.tie_embeddings:
            yield "shares the embeddings with the head"
    if config.num_experts is not None and not config.renormalize:
        yield "divides the weights of a token's experts by their sum"
    if isinstance(scaling, Llama3Scaling) and architecture != "llama":
        yield "does not scale RoPE as Llama 3 does"
    if isinstance(scaling, YarnScaling):
        if n > 1:
            yield "does not scale RoPE as YaRN does"
        sizes = ("factor", "original_max_position_embeddings")
        if scaling != YarnScaling(**{name: getattr(scaling, name) for name in sizes}):
            yield "takes YaRN without settings beside its factor and context"


def _add_entries(writer: Any, config: LlamaConfig) -> None:
    """Adds the entries, and the tensor, that describe the model."""
    scaling, is_mixture = config.rope_scaling, config.num_experts is not None
    length = "original_max_position_embeddings"
    window = None
    if writer.arch in _WINDOW_INTERVAL:  # where it would have a default
        window = config.sliding_window or config.max_seq_len
    entries = {
        "context_length": config.max_seq_len,
        "embedding_length": config.hidden_size,
        "block_count": config.num_layers,
        "feed_forward_length": config.intermediate_size,
        "head_count": config.num_heads,
        "head_count_kv": config.num_kv_heads,
        **dict.fromkeys(("key_length", "value_length"), config.head_dim),
        "vocab_size": config.vocab_size,
        "layer_norm_rms_eps": config.norm_eps,
        "expert_count": config.num_experts,
        "expert_used_count": config.top_k if is_mixture else None,
        "expert_feed_forward_length": config.intermediate_size if is_mixture else None,
        "attn_logit_softcapping": config.attn_softcap,
        "final_logit_softcapping": config.logit_softcap,
        "sliding_window": window,
        "rope_dimension_count": config.head_dim,
        "rope_freq_base": config.rope_theta,
        "rope_freq_base_swa": config.local_rope_theta,
        # Phi-3's architecture asks for it in every model.
        "rope_scaling_orig_ctx_len": getattr(scaling, length, config.max_seq_len),
    }
    for name, value in entries.items():
        if value is not None:
            getattr(writer, f"add_{name}")(value)
    if isinstance(scaling, Llama3Scaling):
        channels = np.arange(0, config.head_dim, 2)
        frequencies = config.rope_theta ** -(channels / config.head_dim)
        divisors = (frequencies / scaling.scale(frequencies)).astype(np.float32)
        writer.add_tensor("rope_freqs.weight", divisors)
    elif scaling is not None:
        is_linear = isinstance(scaling, LinearScaling)
        kind = gguf.RopeScalingType.LINEAR if is_linear else gguf.RopeScalingType.YARN
        writer.add_rope_scaling_type(kind)
        writer.add_rope_scaling_factor(scaling.factor)


def _add_tensors(
    writer: Any, config: LlamaConfig, blocks: Arrays, floats: Arrays
) -> None:
    """Adds matrices in the dtype of the model, vectors and routers in float32."""
    architectures = {name: arch for arch, name in gguf.MODEL_ARCH_NAMES.items()}
    names = gguf.get_tensor_name_map(architectures[writer.arch], config.num_layers)
    joined: dict[str, list[np.ndarray]] = {}  # the experts of a layer are one tensor
    for tensor, array in blocks.items():
        name = re.sub(r"\.experts\.\d+\.", ".experts.", tensor)
        joined.setdefault(name, []).append(array)
    blocks = {t: np.stack(x) if ".experts." in t else x[0] for t, x in joined.items()}
    for tensor, array in {**floats, **blocks}.items():
        rotated = ".q_proj." in tensor or ".k_proj." in tensor
        if rotated and writer.arch in _INTERLEAVED:
            # From halves of a head to pairs of channels.
            halves = array.reshape(-1, 2, config.head_dim // 2, *array.shape[1:])
            array = halves.swapaxes(1, 2).reshape(array.shape)
        if config.unit_offset_norms and tensor.endswith("norm.weight"):
            array = array + 1
        # llama.cpp keeps the routers of experts in float32.
        keeps = array.ndim == 1 or tensor.endswith(".gate.weight")
        if tensor in blocks:
            kind = gguf.GGMLQuantizationType.Q8_0
        elif keeps or config.dtype == np.float32:
            kind, array = gguf.GGMLQuantizationType.F32, array.astype(np.float32)
        else:
            kind = gguf.GGMLQuantizationType.BF16
            array = array.astype(config.dtype).view(np.uint8)
        stored = names.get_name(tensor, try_suffixes=(".weight", ".bias"))
        writer.add_tensor(stored, np.ascontiguousarray(array), raw_dtype=kind)
