"""The weights of frozen layers as serving engines store them."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from flax import nnx
from flax.core import unfreeze
from flax.traverse_util import flatten_dict

from fbq_jax.core.frozen_weight import FrozenWeight, rhs_axes
from fbq_jax.experts.ragged_dot import DIMENSIONS
from fbq_jax.linen.state import WEIGHT


class ExportError(ValueError):
    """A model cannot be exported in a format."""


@dataclass(frozen=True)
class BlockWeight:
    """An INT8 weight of a linear layer, ``y = x . W'``.

    Its values are ``codes[n, k] * scales[n, k // group]``.

    Attributes:
      codes: int8 ``[N, K]``, where N are outputs and K inputs; or a stack of layers,
        of experts, or of the experts of layers.
      scales: float32 ``[N, ceil(K / group)]``; or such a stack.
      group: the inputs that have a scale in common.
      parts: the outputs of each weight that this one joins, which an engine may take
        apart; empty for a single one.
    """

    codes: np.ndarray
    scales: np.ndarray
    group: int
    parts: tuple[int, ...] = ()


def frozen_weights(variables: Mapping[str, Any]) -> dict[str, BlockWeight]:
    """Reads the codes of every layer that ``freeze`` froze.

    Args:
      variables: the variables of a Linen model that ``fbq_jax.freeze`` returned.

    Returns:
      A mapping from the path of a layer's kernel, such as ``"mlp/down/kernel"``, to its
      codes as the layer multiplies by them, on the host.  The outputs of a kernel with
      several axes of outputs are joined.  A layer of experts has a stack of them.

    Raises:
      TypeError: ``variables`` is no mapping, or the state of an NNX model.
      ExportError: no layer is frozen; or a layer multiplies by a stack of matrices that
        are no experts, has no scales per block, or has codes in FP8.
    """
    if not isinstance(variables, Mapping) or isinstance(variables, nnx.State):
        raise TypeError(
            "frozen_weights takes the variables of a Linen model, as fbq_jax.freeze "
            f"returns them; got {type(variables).__name__}"
        )
    flat = flatten_dict(
        unfreeze(dict(variables)), is_leaf=lambda _, x: isinstance(x, FrozenWeight)
    )
    weights = {
        "/".join((*path[1:-2], weight.parameter)): weight
        for path, weight in flat.items()
        if path[-1] == WEIGHT and isinstance(weight, FrozenWeight)
    }
    if not weights:
        raise ExportError("the variables have no frozen layer: pass those of freeze")
    return {path: _block_weight(path, weight) for path, weight in weights.items()}


def _block_weight(path: str, weight: FrozenWeight) -> BlockWeight:
    if weight.recipe.fwd.scales[1] != "block":
        raise ExportError(
            f"{path} has no scales per block: train with a recipe whose forward pass "
            "has block scales for weights, such as fallback or block"
        )
    if weight.recipe.codes != "int8":
        raise ExportError(
            f"{path} has codes in {weight.recipe.codes}, and the formats are of INT8: "
            "train with a recipe of INT8 codes, such as row_block"
        )
    codes, scales = (np.asarray(x) for x in weight.codes.main[:2])
    experts = weight.axes == rhs_axes(DIMENSIONS)
    if codes.shape[-3] != 1 and not experts:
        raise ExportError(f"{path} is a stack of matrices; export takes linear layers")
    rows, group = weight.codes.sides
    # Each row gets the scales of its block.
    row_scales = np.repeat(scales, rows, axis=-2)[..., : codes.shape[-2], :]
    if not experts:
        codes, row_scales = codes[..., 0, :, :], row_scales[..., 0, :, :]
    return BlockWeight(codes, row_scales, group)
