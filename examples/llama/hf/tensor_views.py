"""The tensors of a checkpoint as views into the parameters of `Llama`.

Reading and writing share the views: `load` fills them and `save` stores them. A
parameter has one or several tensors: its layers, and the tensors that it joins.
"""

import math
from collections.abc import Mapping
from typing import NamedTuple

import flax.traverse_util
import jax
import jax.numpy as jnp
import numpy as np

from examples.llama.hf.families import Family
from examples.llama.model import Llama
from examples.llama.model_config import LlamaConfig

ROUTER = "layers/mlp/experts/router/kernel"


class TensorView(NamedTuple):
    """A tensor as views into parameters, which it joins along its first axis.

    A view has two axes there if the parameter splits the tensor into groups.
    """

    shape: tuple[int, ...]  # of the tensor
    parts: tuple[np.ndarray, ...]

    def split(self, tensor: np.ndarray) -> list[np.ndarray]:
        """Returns a tensor of this shape in parts of the shapes of the views."""
        width = tensor.size // len(tensor)
        ends = np.cumsum([math.prod(part.shape) // width for part in self.parts])
        pieces = zip(np.split(tensor, ends[:-1]), self.parts, strict=True)
        return [piece.reshape(part.shape) for piece, part in pieces]

    def join(self) -> np.ndarray:
        """Returns the tensor."""
        tail = self.shape[1:]
        rows = [np.ascontiguousarray(part).reshape(-1, *tail) for part in self.parts]
        return rows[0] if len(rows) == 1 else np.concatenate(rows)


def parameter_shapes(config: LlamaConfig) -> dict[str, tuple[int, ...]]:
    """Returns the shapes of the parameters of ``Llama(config)``, by path."""
    tokens = jax.ShapeDtypeStruct((1, 1), jnp.int32)
    variables = jax.eval_shape(Llama(config).init, jax.random.key(0), tokens)
    flat = flax.traverse_util.flatten_dict(variables["params"], sep="/")
    return {path: leaf.shape for path, leaf in flat.items()}


def tensor_views(
    config: LlamaConfig, family: Family, flat: Mapping[str, np.ndarray]
) -> dict[str, TensorView]:
    """Returns the tensors of a checkpoint, by name, in parameters by path.

    A parameter stacks its layers, then their experts; kernels are transposed.
    """
    views: dict[str, TensorView] = {}
    for path, parameter in flat.items():
        stack = parameter if path.startswith("layers/") else parameter[None]
        is_kernel = path.endswith("kernel")
        of_experts = path.startswith("layers/mlp/experts/") and path != ROUTER
        matrices = stack.shape[: 2 if of_experts else 1]
        if is_kernel:  # joins the axes of gate_up
            stack = stack.reshape(*stack.shape[: len(matrices) + 1], -1)
        # The columns have the first group of each tensor, then the second, and so on.
        groups, widths = 1, [stack.shape[-1]]
        if path.startswith("layers/attention/qkv/dense/"):
            groups, dim = config.num_kv_heads, config.head_dim
            widths = [config.num_heads // groups * dim, dim, dim]
        elif path.endswith("gate_up/kernel"):
            widths = [stack.shape[-1] // 2] * 2
        stack = stack.reshape(*stack.shape[:-1], groups, sum(widths))
        start = 0
        for name, width in zip(family.tensors_of(path), widths, strict=True):
            for index in np.ndindex(matrices):
                view = stack[index][..., start : start + width]
                shape: tuple[int, ...] = (*view.shape[:-2], groups * width)
                if is_kernel:
                    view = view.transpose(1, 2, 0)
                    shape = (groups * width, *view.shape[2:])
                tensor = name.format(*index)
                # Tensors of one name are one tensor.
                (size, *_), parts = views.get(tensor, ((0,), ()))
                rows = (size + shape[0], *shape[1:])
                views[tensor] = TensorView(rows, (*parts, view))
            start += width
    return views
