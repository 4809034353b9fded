"""The formats: tensors and ``quantization_config`` of a Hugging Face folder.

A format takes the weights by the name of their tensor, ``"<module>.weight"``, and the
dtype of the model.  It returns the tensors that replace the weights, and the entry of
config.json.  Codes never change.  GGUF files have no config.json: the format returns
the blocks of each tensor, and whoever writes the file knows the names in it.
"""

import warnings
from collections.abc import Callable, Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np

from fbq_jax.export.weights import BlockWeight, ExportError

Tensors = dict[str, np.ndarray]
Format = Callable[[Mapping[str, BlockWeight], np.dtype], tuple[Tensors, dict[str, Any]]]

# The rows of a block in blockwise_int8, largest first.  The engine's kernel multiplies
# tiles of at least 16 rows.
_BLOCK_ROWS = (128, 64, 32, 16)

# A block of Q8_0 is a scale, float16, and this many codes.
_Q8_0_CODES = 32


def _blockwise_int8(
    weights: Mapping[str, BlockWeight], _dtype: np.dtype
) -> tuple[Tensors, dict[str, Any]]:
    """SGLang's ``blockwise_int8``.

    ``<module>.weight`` is int8 ``[N, K]``.  ``<module>.weight_scale_inv`` is float32
    ``[N / rows, K / group]`` and multiplies, despite its name.  All weights have blocks
    of one size: if a weight was split between two blocks, as QKV is with heads of 64,
    blocks have fewer rows, with scales repeated.  Every weight is divided into whole
    blocks, which SGLang needs to join weights and to shard them.

    Raises:
      ExportError: the weights have no such block in common, or other names.
    """
    _check_weights(weights)
    _check_names(weights)
    group = _common_group(weights)
    rows = next(
        (n for n in _BLOCK_ROWS if all(_fits(w, n) for w in weights.values())), 0
    )
    if not rows:
        worst = next(
            name for name, w in weights.items() if not _fits(w, _BLOCK_ROWS[-1])
        )
        raise ExportError(
            f"blockwise_int8 takes blocks of at least {_BLOCK_ROWS[-1]} outputs; "
            f"{worst} cannot be divided into them"
        )
    tensors: Tensors = {}
    for name, weight in weights.items():
        tensors[name] = weight.codes
        tensors[f"{name}_scale_inv"] = weight.scales[::rows]
    config = {
        "quant_method": "blockwise_int8",
        "activation_scheme": "dynamic",
        "weight_block_size": [rows, group],
    }
    return tensors, config


def _compressed_tensors(
    weights: Mapping[str, BlockWeight], dtype: np.dtype
) -> tuple[Tensors, dict[str, Any]]:
    """The format ``pack-quantized`` of compressed-tensors, for INT8 weights in groups.

    ``<module>.weight_packed`` is int32 ``[N, K / 4]``: four codes plus 128 in a word,
    the first in the lowest byte.  ``<module>.weight_scale`` is ``[N, K / group]`` in
    the dtype of the model, as the engines compute (``_round_scales``).
    ``<module>.weight_shape`` is int64 ``(N, K)``.  Activations are not quantized.

    Raises:
      ExportError: the weights have no groups of one size, or other names; or a scale is
        out of the range of the dtype.
    """
    _check_weights(weights)
    _check_names(weights)
    group = _common_group(weights)
    tensors: Tensors = {}
    instead = "export the model in bfloat16 or float32"
    scales = _round_scales(weights, dtype, instead)
    for name, weight in weights.items():
        unsigned = np.ascontiguousarray(weight.codes).view(np.uint8) ^ np.uint8(128)
        tensors[f"{name}_packed"] = unsigned.view("<i4")
        tensors[f"{name}_scale"] = scales[name]
        tensors[f"{name}_shape"] = np.array(weight.codes.shape, np.int64)
    config = {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": {
                    "num_bits": 8,
                    "type": "int",
                    "symmetric": True,
                    "strategy": "group",
                    "group_size": group,
                    "dynamic": False,
                },
                "input_activations": None,
                "output_activations": None,
            }
        },
        # The head of Hugging Face's models, which is linear and not quantized.
        "ignore": ["lm_head"],
    }
    return tensors, config


def _gguf(
    weights: Mapping[str, BlockWeight], _dtype: np.dtype
) -> tuple[Tensors, dict[str, Any]]:
    """The blocks of llama.cpp's ``Q8_0``.

    A tensor is uint8 ``[N, K / 32 * 34]``: for every 32 inputs, a scale in float16
    (``_round_scales``) and 32 codes.  Larger blocks repeat their scale.

    Raises:
      ExportError: the inputs of a weight are not whole blocks, or a scale is out of the
        range of float16.
    """
    _check_weights(weights)
    tensors: Tensors = {}
    instead = "use compressed-tensors in bfloat16, or blockwise_int8"
    scales = _round_scales(weights, np.dtype("<f2"), instead)
    for name, weight in weights.items():
        rows, inputs = weight.codes.shape
        for size in (inputs, weight.group):
            if size % _Q8_0_CODES:
                raise ExportError(
                    f"Q8_0 takes weights whose inputs are multiples of {_Q8_0_CODES}, "
                    f"as are their blocks; {name} has {inputs} in blocks of "
                    f"{weight.group}"
                )
        repeated = scales[name].repeat(weight.group // _Q8_0_CODES, axis=1)
        repeated = repeated[:, : inputs // _Q8_0_CODES]
        tensors[name] = np.concatenate(
            [
                repeated[..., None].view(np.uint8),
                weight.codes.reshape(rows, -1, _Q8_0_CODES).view(np.uint8),
            ],
            axis=-1,
        ).reshape(rows, -1)
    return tensors, {}


def _round_scales(
    weights: Mapping[str, BlockWeight], dtype: np.dtype, instead: str
) -> dict[str, np.ndarray]:
    """Rounds the scales of all weights to the dtype of a format.

    A scale of at least the dtype's smallest normal number changes by less than half a
    unit in the last place: one part in 2048 in float16, one in 256 in bfloat16.  Below,
    the dtype is coarse, and a warning says how much weights change.

    Args:
      weights: the weights by name.
      dtype: the dtype of the stored scales.
      instead: what to do if the dtype cannot hold them.

    Raises:
      ExportError: a scale would become zero or infinite, and with it the weights.
    """
    smallest = float(jnp.finfo(dtype).smallest_normal)
    rounded, coarse, blocks, worst = {}, 0, 0, 0.0
    for name, weight in weights.items():
        with np.errstate(over="ignore", under="ignore"):
            rounded[name] = weight.scales.astype(dtype)
        values = rounded[name].astype(np.float32)
        lost = ((values == 0) != (weight.scales == 0)) | ~np.isfinite(values)
        if np.any(lost):
            raise ExportError(
                f"{name} has scales that {dtype} cannot hold, such as "
                f"{weight.scales[lost][0]:g}: {instead}"
            )
        low = (weight.scales != 0) & (weight.scales < smallest)
        error = np.abs(values[low] / weight.scales[low] - 1)
        coarse, blocks = coarse + error.size, blocks + low.size
        worst = max(worst, float(error.max(initial=0)))
    if coarse:
        warnings.warn(
            f"{coarse} of {blocks} blocks have scales below {smallest:.2g}, where "
            f"{dtype} is coarse: their weights change by up to {worst:.2g} of their "
            "value",
            stacklevel=4,
        )
    return rounded


def _check_weights(weights: Mapping[str, BlockWeight]) -> None:
    """Checks what the format is to hold."""
    for name, weight in weights.items():
        if not isinstance(weight, BlockWeight):
            raise ExportError(
                "the format takes the BlockWeights of export.frozen_weights; got "
                f"{type(weight).__name__} for {name!r}"
            )
        if weight.codes.ndim != 2:
            raise ExportError(
                f"the format takes matrices [N, K]; {name!r} is a stack "
                f"{list(weight.codes.shape)}: pass a BlockWeight of each matrix"
            )
        if not np.all(np.isfinite(weight.scales)):
            raise ExportError(
                f"{name!r} has scales that are not finite: the trained weight has a "
                "NaN or an Inf"
            )


def _check_names(weights: Mapping[str, BlockWeight]) -> None:
    """Checks the names that an engine's loader finds codes and scales by."""
    for name in weights:
        if not name.endswith(".weight"):
            raise ExportError(
                f"the format takes weights by the names of their tensors, "
                f"'<module>.weight'; got {name!r}"
            )


def _fits(weight: BlockWeight, rows: int) -> bool:
    """Whether each part consists of blocks of this many rows with common scales."""
    if any(size % rows for size in weight.parts or (len(weight.scales),)):
        return False
    blocks = weight.scales.reshape(-1, rows, weight.scales.shape[1])
    return bool(np.all(blocks == blocks[:, :1]))


def _common_group(weights: Mapping[str, BlockWeight]) -> int:
    """The size of the groups, which divide the inputs of every weight."""
    groups = {weight.group for weight in weights.values()}
    if len(groups) != 1:
        raise ExportError(
            f"the format takes one size of blocks for all layers, got {sorted(groups)}"
        )
    group = groups.pop()
    for name, weight in weights.items():
        if (inputs := weight.codes.shape[1]) % group:
            raise ExportError(
                f"the format takes weights whose inputs are multiples of {group}; "
                f"{name} has {inputs}"
            )
    return group


#: The formats by name.  Each takes a mapping from tensor names to ``BlockWeight`` and
#: the model's dtype, and returns arrays by name and the ``quantization_config`` for
#: ``config.json``.  It raises ``ExportError``, a ``ValueError``, for weights that it
#: cannot hold.
FORMATS: dict[str, Format] = {
    "blockwise_int8": _blockwise_int8,
    "compressed-tensors": _compressed_tensors,
    "gguf": _gguf,
}
