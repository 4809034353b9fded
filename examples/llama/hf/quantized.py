"""Reads the INT8 weights of exported checkpoints as floats.

A checkpoint in one of the formats of ``fbq_jax.export`` stores a weight as codes and
scales, under other names.
"""

import functools
import reprlib
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from examples.llama.hf.files import FLOATS, CheckpointError, Stored


class Scheme(NamedTuple):
    """How the weights of a checkpoint are quantized.

    Attributes:
        name: The name of the format.
        parts: The tensors of a weight, by what follows its name, and their dtypes.
        dequantize: Maps these tensors to the weight, float32 [N, K].
    """

    name: str
    parts: Mapping[str, tuple[str, ...]]
    dequantize: Callable[..., np.ndarray]

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
    scheme = (_blockwise(entry) or _packed(entry)) if isinstance(entry, dict) else None
    if scheme is None:
        raise CheckpointError(
            f"{file}: quantization_config is {reprlib.repr(entry)}, supported are the "
            "entries that --export writes: blockwise_int8 with weight_block_size, and "
            "compressed-tensors with symmetric groups of 8 bits in pack-quantized"
        )
    return scheme


def _blockwise(entry: Mapping[str, Any]) -> Scheme | None:
    """SGLang's ``blockwise_int8``: int8 codes and a float32 scale per block."""
    name, block = "blockwise_int8", entry.get("weight_block_size")
    if entry.get("quant_method") != name or not isinstance(block, list):
        return None
    if len(block) != 2 or not all(map(_is_size, block)):
        return None
    parts = {"": ("I8",), "_scale_inv": ("F32",)}
    return Scheme(name, parts, functools.partial(_multiply, tuple(block)))


def _packed(entry: Mapping[str, Any]) -> Scheme | None:
    """compressed-tensors: codes of 8 bits, four in an int32, and a scale per group."""
    name, groups = "compressed-tensors", entry.get("config_groups")
    if not isinstance(groups, dict) or len(groups) != 1:
        return None
    (group,) = groups.values()
    weights = group.get("weights") if isinstance(group, dict) else None
    expected = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "group"}
    if (
        (entry.get("quant_method"), entry.get("format")) != (name, "pack-quantized")
        or not isinstance(weights, dict)
        or any(weights.get(key) != value for key, value in expected.items())
        or weights.get("actorder")
        or not _is_size(weights.get("group_size"))
    ):
        return None
    parts = {"_packed": ("I32",), "_scale": FLOATS, "_shape": ("I64",)}
    return Scheme(name, parts, functools.partial(_unpack, weights["group_size"]))


def _is_size(value: Any) -> bool:
    return type(value) is int and value > 0


def _multiply(
    block: tuple[int, int], codes: np.ndarray, scales: np.ndarray
) -> np.ndarray:
    blocks = tuple(-(-size // of) for size, of in zip(codes.shape, block, strict=True))
    if scales.shape != blocks:
        raise ValueError(f"takes scales {blocks}, got {scales.shape}")
    every = scales.astype(np.float32).repeat(block[0], 0).repeat(block[1], 1)
    return codes * every[: codes.shape[0], : codes.shape[1]]


def _unpack(
    group: int, packed: np.ndarray, scales: np.ndarray, shape: np.ndarray
) -> np.ndarray:
    n, k = (int(size) for size in shape)
    if packed.shape != (n, -(-k // 4)):
        raise ValueError(f"takes codes {(n, -(-k // 4))}, got {packed.shape}")
    unsigned = np.ascontiguousarray(packed).astype("<i4").view(np.uint8)
    return _multiply(
        (1, group), (unsigned ^ np.uint8(128)).view(np.int8)[:, :k], scales
    )
