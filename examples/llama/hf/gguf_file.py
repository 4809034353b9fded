"""Writes models as GGUF files, which llama.cpp loads; gguf_reader.py reads them.

llama.cpp computes a model by its architecture, where most of what `LlamaConfig` can
vary is fixed. `check` refuses a model that its architecture would compute otherwise.
"""

import contextlib
import re
from collections.abc import Iterable, Iterator, Mapping
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
# Fields of LlamaConfig and their keys, without the architecture before them.
ENTRIES = {"max_seq_len": "context_length", "hidden_size": "embedding_length"}
ENTRIES |= {"num_layers": "block_count", "intermediate_size": "feed_forward_length"}
ENTRIES |= {"num_heads": "attention.head_count"}
ENTRIES |= {"num_kv_heads": "attention.head_count_kv"}
ENTRIES |= {"head_dim": "attention.key_length", "vocab_size": "vocab_size"}
ENTRIES |= {"norm_eps": "attention.layer_norm_rms_epsilon"}
ENTRIES |= {"num_experts": "expert_count", "top_k": "expert_used_count"}
ENTRIES |= {"attn_softcap": "attn_logit_softcapping"}
ENTRIES |= {"logit_softcap": "final_logit_softcapping"}
ENTRIES |= {"sliding_window": "attention.sliding_window"}
ENTRIES |= {"rope_theta": "rope.freq_base", "local_rope_theta": "rope.freq_base_swa"}
# Further keys: two that are head_dim, too, the intermediate_size of experts, and of the
# scaling of RoPE.
HEAD_DIMS = ("attention.value_length", "rope.dimension_count")
EXPERT_SIZE = "expert_feed_forward_length"
SCALING, SCALING_FACTOR = "rope.scaling.type", "rope.scaling.factor"
SCALING_LENGTH = "rope.scaling.original_context_length"
ROPE_DIVISORS = "rope_freqs.weight"  # the tensor of Llama 3's scaling
# The architectures that rotate channel 2i with channel 2i + 1, where transformers has
# i and i + head_dim / 2.
_INTERLEAVED = ("llama", "smollm3")
# In these architectures every n-th layer does not rotate, or has no sliding window.
NOPE_INTERVAL = {"smollm3": 4}
WINDOW_INTERVAL = {"gemma2": 2, "gemma3": 6}
# Heads share hidden_size.
_SHARED_WIDTH = ("qwen2", "phi3")
# With so many layers, scores are divided by sqrt(hidden_size / heads), not by
# sqrt(head_dim).
LARGEST = {"gemma2": 46, "gemma3": 62}


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
    n = WINDOW_INTERVAL.get(architecture, 1)
    windows = [kind.window or np.inf for kind in config.layer_kinds()]
    slides = [window < config.max_seq_len for window in windows]
    if any(slides) and slides != [bool((layer + 1) % n) for layer in layers]:
        every_nth = f"has sliding windows in all layers but {n}, {2 * n}, ..."
        yield every_nth if n > 1 else "has no sliding windows"
    interval = NOPE_INTERVAL.get(architecture, config.num_layers + 1)
    if config.nope_layers != (nope := tuple(layers[interval - 1 :: interval])):
        yield f"rotates in all layers but {nope}, not {config.nope_layers}"
    shared = config.hidden_size // config.num_heads
    heads = config.head_dim * config.num_heads
    if architecture in _SHARED_WIDTH and heads != config.hidden_size:
        yield "has heads of hidden_size / heads channels"
    is_largest = config.num_layers == LARGEST.get(architecture)
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


def rope_divisors(config: LlamaConfig, scaling: Llama3Scaling) -> np.ndarray:
    """What the scaling divides rotary frequencies by, float32 [head_dim / 2]."""
    channels = np.arange(0, config.head_dim, 2)
    frequencies = config.rope_theta ** -(channels / config.head_dim)
    return (frequencies / scaling.scale(frequencies)).astype(np.float32)


def stored_names(
    tensors: Iterable[str], architecture: str, config: LlamaConfig
) -> dict[str, str]:
    """The names of tensors of transformers in a file; a layer's experts share one."""
    architectures = {name: arch for arch, name in gguf.MODEL_ARCH_NAMES.items()}
    names = gguf.get_tensor_name_map(architectures[architecture], config.num_layers)
    shared = {tensor: re.sub(r"(\.experts)\.\d+", r"\1", tensor) for tensor in tensors}
    suffixes = (".weight", ".bias")
    return {tensor: str(names.get_name(shared[tensor], suffixes)) for tensor in shared}


def convert(
    name: str, tensor: np.ndarray, config: LlamaConfig, arch: str, *, back: bool = False
) -> np.ndarray:
    """Converts a tensor of transformers to what llama.cpp stores, or ``back``."""
    if arch in _INTERLEAVED and (".q_proj." in name or ".k_proj." in name):
        # Halves of a head become pairs of channels.
        groups, tail = config.head_dim // 2 if back else 2, tensor.shape[1:]
        heads = tensor.reshape(-1, groups, config.head_dim // groups, *tail)
        tensor = heads.swapaxes(1, 2).reshape(tensor.shape)
    if config.unit_offset_norms and name.endswith("norm.weight"):
        tensor = tensor - 1 if back else tensor + 1
    return tensor


def _add_entries(writer: Any, config: LlamaConfig) -> None:
    """Adds the entries, and the tensor, that describe the model."""
    scaling, is_mixture = config.rope_scaling, config.num_experts is not None
    length = "original_max_position_embeddings"
    entries = {key: getattr(config, field) for field, key in ENTRIES.items()}
    window = None
    if writer.arch in WINDOW_INTERVAL:  # where it would have a default
        window = config.sliding_window or config.max_seq_len
    entries |= {
        ENTRIES["sliding_window"]: window,
        ENTRIES["top_k"]: config.top_k if is_mixture else None,
        EXPERT_SIZE: config.intermediate_size if is_mixture else None,
        **dict.fromkeys(HEAD_DIMS, config.head_dim),
        # Phi-3's architecture asks for it in every model.
        SCALING_LENGTH: getattr(scaling, length, config.max_seq_len),
    }
    if scaling is not None and not isinstance(scaling, Llama3Scaling):
        is_linear = isinstance(scaling, LinearScaling)
        kind = gguf.RopeScalingType.LINEAR if is_linear else gguf.RopeScalingType.YARN
        writer.add_string(f"{writer.arch}.{SCALING}", kind.value)
        entries[SCALING_FACTOR] = scaling.factor
    for key, value in entries.items():
        if value is not None:
            is_float = isinstance(value, float)
            add = writer.add_float32 if is_float else writer.add_uint32
            add(f"{writer.arch}.{key}", value)
    if isinstance(scaling, Llama3Scaling):
        writer.add_tensor(ROPE_DIVISORS, rope_divisors(config, scaling))


def _add_tensors(
    writer: Any, config: LlamaConfig, blocks: Arrays, floats: Arrays
) -> None:
    """Adds matrices in the dtype of the model, vectors and routers in float32."""
    joined: dict[str, list[np.ndarray]] = {}  # the experts of a layer are one tensor
    for tensor, array in blocks.items():
        name = re.sub(r"\.experts\.\d+\.", ".experts.", tensor)
        joined.setdefault(name, []).append(array)
    blocks = {t: np.stack(x) if ".experts." in t else x[0] for t, x in joined.items()}
    names = stored_names([*floats, *blocks], writer.arch, config)
    for tensor, array in {**floats, **blocks}.items():
        array = convert(tensor, array, config, writer.arch)
        # llama.cpp keeps the routers of experts in float32.
        keeps = array.ndim == 1 or tensor.endswith(".gate.weight")
        if tensor in blocks:
            kind = gguf.GGMLQuantizationType.Q8_0
        elif keeps or config.dtype == np.float32:
            kind, array = gguf.GGMLQuantizationType.F32, array.astype(np.float32)
        else:
            kind = gguf.GGMLQuantizationType.BF16
            array = array.astype(config.dtype).view(np.uint8)
        writer.add_tensor(names[tensor], np.ascontiguousarray(array), raw_dtype=kind)
