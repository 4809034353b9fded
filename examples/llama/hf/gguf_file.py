"""Writes models as GGUF files, which llama.cpp loads.

llama.cpp computes a model by its architecture, and most of what `LlamaConfig` can vary
is fixed there. `check` refuses a model that the architecture of its family would
compute otherwise.
"""

import contextlib
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from examples.llama.hf.families import Family
from examples.llama.hf.gguf_tokenizer import add_tokenizer, read_tokenizer
from examples.llama.model_config import LlamaConfig
from examples.llama.rope_scaling import LinearScaling, Llama3Scaling, YarnScaling
from fbq_jax.export import ExportError

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
# The number of an expert in the name of its tensor.
_EXPERT = re.compile(r"\.experts\.\d+\.")
# The version of the layout of quantized blocks.
_QUANTIZATION_VERSION = 2


def check(config: LlamaConfig, family: Family, like: str | Path | None) -> None:
    """Checks that llama.cpp computes the model, before anything is written.

    Args:
        config: The configuration of the model.
        family: The family that it is exported as.
        like: As for `write`.

    Raises:
        ExportError: llama.cpp would compute something else.
    """
    if problems := _problems(config, family.gguf):
        raise ExportError(f"llama.cpp's {family.gguf} {', and '.join(problems)}")
    if like is not None:
        read_tokenizer(Path(like), config.vocab_size)


def write(
    file: Path,
    config: LlamaConfig,
    family: Family,
    blocks: Mapping[str, np.ndarray],
    floats: Mapping[str, np.ndarray],
    like: str | Path | None,
) -> None:
    """Writes a GGUF file.

    Args:
        file: The file to write.
        config: The configuration of the model, which `check` has accepted. Matrices in
            ``floats`` are stored in its dtype, vectors and routers in float32.
        family: The family that it is exported as.
        blocks: The blocks of Q8_0 of projections, uint8 [N, K / 32 * 34], by the names
            of their tensors in transformers. The experts of a layer become one tensor.
        floats: The other tensors, float32, by the same names.
        like: The folder of a checkpoint that provides the tokenizer and the chat
            template; without it, or without a tokenizer.json there, the file is for
            programs that pass ids of tokens to llama.cpp's library.
    """
    with contextlib.closing(gguf.GGUFWriter(file, family.gguf)) as writer:
        writer.add_quantization_version(_QUANTIZATION_VERSION)
        writer.add_file_type(gguf.LlamaFileType.MOSTLY_Q8_0)
        _add_sizes(writer, config)
        _add_rotation(writer, config)
        tokenizer = None
        if like is not None:
            tokenizer = read_tokenizer(Path(like), config.vocab_size)
        if like is None or tokenizer is None:
            writer.add_tokenizer_model("no_vocab")
        else:
            add_tokenizer(writer, tokenizer, Path(like), config.vocab_size)
        _add_tensors(writer, config, blocks, floats)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()


def _problems(config: LlamaConfig, architecture: str) -> list[str]:
    """What the architecture does otherwise than the model."""
    problems = []
    layers, kinds = range(config.num_layers), config.layer_kinds()
    interval = _WINDOW_INTERVAL.get(architecture, 1)
    slides = [(kind.window or np.inf) < config.max_seq_len for kind in kinds]
    if any(slides) and slides != [bool((layer + 1) % interval) for layer in layers]:
        problems.append(
            f"has sliding windows in all layers but {interval}, {2 * interval}, ..."
            if interval > 1
            else "has no sliding windows"
        )
    nope: tuple[int, ...] = ()
    if interval := _NOPE_INTERVAL.get(architecture, 0):
        nope = tuple(range(interval - 1, config.num_layers, interval))
    if config.nope_layers != nope:
        problems.append(f"rotates in all layers but {nope}, not {config.nope_layers}")
    width = config.head_dim
    if architecture in _SHARED_WIDTH and width * config.num_heads != config.hidden_size:
        problems.append("has heads of hidden_size / heads channels")
    if config.num_layers == _LARGEST.get(architecture):
        width = config.hidden_size // config.num_heads
    if not np.isclose(config.score_scale(), width**-0.5):
        problems.append(f"divides scores by sqrt({width})")
    if architecture == "gemma2":
        if config.attn_softcap is None or config.logit_softcap is None:
            problems.append("caps scores and logits")
        if not config.tie_embeddings:
            problems.append("shares the embeddings with the head")
    if config.num_experts is not None and not config.renormalize:
        problems.append("divides the weights of a token's experts by their sum")
    scaling = config.rope_scaling
    if isinstance(scaling, Llama3Scaling) and architecture != "llama":
        problems.append("does not scale RoPE as Llama 3 does")
    if isinstance(scaling, YarnScaling) and architecture in _WINDOW_INTERVAL:
        problems.append("does not scale RoPE as YaRN does")
    if isinstance(scaling, YarnScaling) and scaling != _usual_yarn(scaling):
        problems.append("takes YaRN without settings beside its factor and context")
    return problems


def _add_sizes(writer: Any, config: LlamaConfig) -> None:
    writer.add_context_length(config.max_seq_len)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_heads)
    writer.add_head_count_kv(config.num_kv_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_vocab_size(config.vocab_size)
    writer.add_layer_norm_rms_eps(config.norm_eps)
    if config.num_experts is not None:
        writer.add_expert_count(config.num_experts)
        writer.add_expert_used_count(config.top_k)
        writer.add_expert_feed_forward_length(config.intermediate_size)
    if config.attn_softcap is not None:
        writer.add_attn_logit_softcapping(config.attn_softcap)
    if config.logit_softcap is not None:
        writer.add_final_logit_softcapping(config.logit_softcap)
    if writer.arch in _WINDOW_INTERVAL:  # without an entry, it would be a default
        writer.add_sliding_window(config.sliding_window or config.max_seq_len)


def _add_rotation(writer: Any, config: LlamaConfig) -> None:
    """The entries, and the tensor, that describe RoPE."""
    scaling = config.rope_scaling
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(config.rope_theta)
    if config.local_rope_theta is not None:
        writer.add_rope_freq_base_swa(config.local_rope_theta)
    # Phi-3's architecture asks for it in every model.
    original = getattr(scaling, "original_max_position_embeddings", config.max_seq_len)
    writer.add_rope_scaling_orig_ctx_len(original)
    if isinstance(scaling, Llama3Scaling):
        channels = np.arange(0, config.head_dim, 2)
        frequencies = config.rope_theta ** -(channels / config.head_dim)
        divisors = (frequencies / scaling.scale(frequencies)).astype(np.float32)
        writer.add_tensor("rope_freqs.weight", divisors)
    elif isinstance(scaling, LinearScaling):
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(scaling.factor)
    elif isinstance(scaling, YarnScaling):
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(scaling.factor)


def _usual_yarn(scaling: YarnScaling) -> YarnScaling:
    """The YaRN that llama.cpp computes: the paper's with this factor and context."""
    return YarnScaling(
        factor=scaling.factor,
        original_max_position_embeddings=scaling.original_max_position_embeddings,
    )


def _add_tensors(
    writer: Any,
    config: LlamaConfig,
    blocks: Mapping[str, np.ndarray],
    floats: Mapping[str, np.ndarray],
) -> None:
    architectures = {name: arch for arch, name in gguf.MODEL_ARCH_NAMES.items()}
    names = gguf.get_tensor_name_map(architectures[writer.arch], config.num_layers)
    blocks = _join_experts(blocks)
    for tensor, array in {**floats, **blocks}.items():
        if writer.arch in _INTERLEAVED:
            array = _interleave(array, tensor, config.head_dim)
        if config.unit_offset_norms and tensor.endswith("norm.weight"):
            array = array + 1
        if tensor in blocks:
            kind = gguf.GGMLQuantizationType.Q8_0
        elif array.ndim == 1 or config.dtype == np.float32 or _is_router(tensor):
            kind, array = gguf.GGMLQuantizationType.F32, array.astype(np.float32)
        else:
            kind = gguf.GGMLQuantizationType.BF16
            array = array.astype(config.dtype).view(np.uint8)
        name = names.get_name(tensor, try_suffixes=(".weight", ".bias"))
        writer.add_tensor(name, np.ascontiguousarray(array), raw_dtype=kind)


def _join_experts(blocks: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Joins the experts of a layer, ``"....experts.3.w1.weight"``, in one tensor."""
    joined: dict[str, list[np.ndarray]] = {}
    for tensor, array in blocks.items():
        joined.setdefault(_EXPERT.sub(".experts.", tensor), []).append(array)
    return {
        tensor: np.stack(arrays) if ".experts." in tensor else arrays[0]
        for tensor, arrays in joined.items()
    }


def _is_router(tensor: str) -> bool:
    """Whether a tensor is a router of experts, which llama.cpp keeps in float32."""
    return tensor.endswith(".gate.weight")


def _interleave(array: np.ndarray, tensor: str, head_dim: int) -> np.ndarray:
    """Reorders the outputs of q and k from halves of a head to pairs of channels."""
    if ".q_proj." not in tensor and ".k_proj." not in tensor:
        return array
    halves = array.reshape(-1, 2, head_dim // 2, *array.shape[1:])
    return halves.swapaxes(1, 2).reshape(array.shape)
