"""Reads the INT8 weights of exported checkpoints as floats.

A checkpoint in one of the formats of ``fbq_jax.export`` stores a weight as codes and
scales, under other names.
"""

import reprlib
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from examples.llama.hf.files import FLOATS, CheckpointError, Stored

Array = np.ndarray


class Scheme(NamedTuple):
    """How the weights of a checkpoint are quantized."""

    name: str  # of the format
    # The dtypes of a weight's tensors, by what follows its name in theirs.
    parts: Mapping[str, tuple[str, ...]]
    dequantize: Callable[..., np.ndarray]  # from these tensors to float32 [N, K]

    def find(self, names: Iterable[str]) -> dict[str, list[str]]:
        """Returns the tensors that each quantized weight consists of, by its name."""
        mark = list(self.parts)[-1]
        weights = (name.removesuffix(mark) for name in names if name.endswith(mark))
        return {name: [f"{name}{part}" for part in self.parts] for name in weights}

    def read(self, tensors: Mapping[str, Stored], name: str) -> np.ndarray:
        """Reads a quantized weight as float32, or raises CheckpointError."""
        parts = {f"{name}{part}": dtypes for part, dtypes in self.parts.items()}
        if lacking := parts.keys() - tensors.keys():
            raise CheckpointError(f"the quantized weight {name} lacks {min(lacking)}")
        arrays = [tensors[part].read(dtypes) for part, dtypes in parts.items()]
        try:
            return self.dequantize(*arrays)
        except ValueError as error:
            file = tensors[next(iter(parts))].file
            raise CheckpointError(f"{file}: {name} {error}") from error


def scheme_of(stored: Mapping[str, Any], file: Path) -> Scheme | None:
    """How a checkpoint with this config.json is quantized, None if it is in floats.

    Raises CheckpointError if it is in another way than `export` writes.
    """
    entry = stored.get("quantization_config")
    if entry is None:
        return None
    parts: dict[str, tuple[str, ...]]
    match entry:
        # SGLang's format: int8 codes and a float32 scale per block.
        case {
            "quant_method": "blockwise_int8",
            "weight_block_size": [int(n), int(k)],
        } if min(n, k) > 0:
            parts = {"": ("I8",), "_scale_inv": ("F32",)}
            return Scheme("blockwise_int8", parts, partial(_multiply, (n, k)))
        # Codes of 8 bits, four in an int32, and a scale per group.
        case {
            "quant_method": "compressed-tensors",
            "format": "pack-quantized",
            "config_groups": {**groups},
        } if len(groups) == 1:
            match next(iter(groups.values())):
                case {
                    "weights": {
                        "num_bits": 8,
                        "type": "int",
                        "symmetric": True,
                        "strategy": "group",
                        "group_size": int(group),
                    } as weights
                } if group > 0 and not weights.get("actorder"):
                    parts = {"_packed": ("I32",), "_scale": FLOATS, "_shape": ("I64",)}
                    return Scheme("compressed-tensors", parts, partial(_unpack, group))
    raise CheckpointError(
        f"{file}: quantization_config is {reprlib.repr(entry)}, supported are the "
        "entries that --export writes: blockwise_int8 with weight_block_size, and "
        "compressed-tensors with symmetric groups of 8 bits in pack-quantized"
    )


def _multiply(block: tuple[int, int], codes: Array, scales: Array) -> Array:
    blocks = tuple(-(-size // of) for size, of in zip(codes.shape, block, strict=True))
    if scales.shape != blocks:
        raise ValueError(f"takes scales {blocks}, got {scales.shape}")
    every = scales.astype(np.float32).repeat(block[0], 0).repeat(block[1], 1)
    return codes * every[: codes.shape[0], : codes.shape[1]]


def _unpack(group: int, packed: Array, scales: Array, shape: Array) -> Array:
    n, k = (int(size) for size in shape)
    if packed.shape != (n, -(-k // 4)):
        raise ValueError(f"takes codes {(n, -(-k // 4))}, got {packed.shape}")
    unsigned = np.ascontiguousarray(packed).astype("<i4").view(np.uint8)
    codes = (unsigned ^ np.uint8(128)).view(np.int8)[:, :k]
    return _multiply((1, group), codes, scales)
