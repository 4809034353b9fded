"""Reads the INT8 weights of exported checkpoints as floats.

A checkpoint in one of the formats of ``fbq_jax.export`` stores a weight as codes and
scales, under other names. `find_weights` finds them, and `read_weight` multiplies them.
"""

import dataclasses
import reprlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from examples.llama.hf.files import FLOATS, CheckpointError, read_tensor

Dtypes = tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class BlockwiseInt8:
    """SGLang's ``blockwise_int8``: int8 codes and a float32 scale per block.

    Attributes:
        block: The outputs and the inputs of a block.
    """

    name: ClassVar[str] = "blockwise_int8"
    # The tensors of a weight, by what follows its name, and their dtypes.
    parts: ClassVar[Mapping[str, Dtypes]] = {"": ("I8",), "_scale_inv": ("F32",)}
    block: tuple[int, int]

    def dequantize(self, codes: np.ndarray, scales: np.ndarray) -> np.ndarray:
        """Returns the weight, float32 [N, K]."""
        rows, columns = self.block
        blocks = (-(-codes.shape[0] // rows), -(-codes.shape[1] // columns))
        if scales.shape != blocks:
            raise ValueError(f"takes scales {blocks}, got {scales.shape}")
        every = scales.repeat(rows, 0).repeat(columns, 1)
        return codes * every[: codes.shape[0], : codes.shape[1]]


@dataclasses.dataclass(frozen=True)
class PackedInt8:
    """``pack-quantized`` of compressed-tensors with 8 bits and a scale per group.

    Attributes:
        group: The inputs of a group.
    """

    name: ClassVar[str] = "compressed-tensors"
    parts: ClassVar[Mapping[str, Dtypes]] = {
        "_packed": ("I32",),
        "_scale": FLOATS,
        "_shape": ("I64",),
    }
    group: int

    def dequantize(
        self, packed: np.ndarray, scales: np.ndarray, shape: np.ndarray
    ) -> np.ndarray:
        """Returns the weight, float32 [N, K]."""
        n, k = (int(size) for size in shape)
        shapes = (n, -(-k // 4)), (n, -(-k // self.group))
        if (packed.shape, scales.shape) != shapes:
            raise ValueError(
                f"takes codes and scales {shapes}, got {packed.shape}, {scales.shape}"
            )
        unsigned = np.ascontiguousarray(packed).astype("<i4").view(np.uint8)
        codes = (unsigned ^ np.uint8(128)).view(np.int8)[:, :k]
        return codes * scales.astype(np.float32).repeat(self.group, 1)[:, :k]


Scheme = BlockwiseInt8 | PackedInt8


def scheme_of(stored: Mapping[str, Any], file: Path) -> Scheme | None:
    """How the weights of a checkpoint are quantized, None if they are floats.

    Args:
        stored: The content of config.json.
        file: The file, for error messages.

    Raises:
        CheckpointError: They are quantized in another way than `export` writes.
    """
    entry = stored.get("quantization_config")
    if entry is None:
        return None
    if isinstance(entry, dict):
        scheme = _blockwise(entry) or _packed(entry)
        if scheme is not None:
            return scheme
    raise CheckpointError(
        f"{file}: quantization_config is {reprlib.repr(entry)}, supported are the "
        f"entries that --export writes: {BlockwiseInt8.name} with weight_block_size, "
        f"and {PackedInt8.name} with symmetric groups of 8 bits in pack-quantized"
    )


def _blockwise(entry: Mapping[str, Any]) -> BlockwiseInt8 | None:
    block = entry.get("weight_block_size")
    if entry.get("quant_method") != BlockwiseInt8.name or not (
        isinstance(block, list) and len(block) == 2 and all(map(_is_size, block))
    ):
        return None
    return BlockwiseInt8((block[0], block[1]))


def _packed(entry: Mapping[str, Any]) -> PackedInt8 | None:
    groups = entry.get("config_groups")
    if not isinstance(groups, dict) or len(groups) != 1:
        return None
    (group,) = groups.values()
    weights = group.get("weights") if isinstance(group, dict) else None
    expected = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "group"}
    if (
        entry.get("quant_method") != PackedInt8.name
        or entry.get("format") != "pack-quantized"
        or not isinstance(weights, dict)
        or any(weights.get(key) != value for key, value in expected.items())
        or weights.get("actorder")
        or not _is_size(weights.get("group_size"))
    ):
        return None
    return PackedInt8(weights["group_size"])


def _is_size(value: Any) -> bool:
    return type(value) is int and value > 0


def find_weights(scheme: Scheme, names: Iterable[str]) -> dict[str, tuple[str, ...]]:
    """Returns the tensors that each quantized weight consists of, by its name."""
    mark = list(scheme.parts)[-1]
    weights = (name.removesuffix(mark) for name in names if name.endswith(mark))
    return {name: tuple(f"{name}{part}" for part in scheme.parts) for name in weights}


def read_weight(
    scheme: Scheme,
    files: Mapping[str, tuple[Path, Any]],
    name: str,
) -> np.ndarray:
    """Reads a quantized weight as float32.

    Args:
        scheme: How it is quantized.
        files: The file that each tensor is in, and the opened file.
        name: The name of the weight.

    Raises:
        CheckpointError: A tensor is missing, or has another dtype or shape.
    """
    tensors = []
    for part, dtypes in scheme.parts.items():
        if (tensor := f"{name}{part}") not in files:
            raise CheckpointError(f"the quantized weight {name} lacks {tensor}")
        tensors.append(read_tensor(*files[tensor], tensor, dtypes))
    try:
        return scheme.dequantize(*tensors)
    except ValueError as error:
        raise CheckpointError(f"{files[tensor][0]}: {name} {error}") from error
