"""The tensors of a checkpoint as views into the parameters of `Llama`.

Reading and writing share the views: `load` fills them and `save` stores them.
"""

from collections.abc import Iterator, Mapping
from typing import NamedTuple

import flax.traverse_util
import jax
import jax.numpy as jnp
import numpy as np

from examples.llama.model import Llama
from examples.llama.model_config import LlamaConfig

TABLE = "model.embed_tokens.weight"
HEAD = "lm_head.weight"
_LAYER = "model.layers.{}"


class _Parameter(NamedTuple):
    """The tensors that one parameter joins along its last axis.

    Attributes:
        groups: The number of groups that the tensors are split into; the parameter
            has the first group of each tensor, then the second, and so on.
        widths: The width of a group of each tensor, by the tensor's name.
    """

    groups: int
    widths: dict[str, int]


def parameter_shapes(config: LlamaConfig) -> dict[str, tuple[int, ...]]:
    """Returns the shapes of the parameters of ``Llama(config)``, by path."""
    tokens = jax.ShapeDtypeStruct((1, 1), jnp.int32)
    variables = jax.eval_shape(Llama(config).init, jax.random.key(0), tokens)
    flat = flax.traverse_util.flatten_dict(variables["params"], sep="/")
    return {path: leaf.shape for path, leaf in flat.items()}


def tensor_views(
    config: LlamaConfig, flat: Mapping[str, np.ndarray]
) -> Iterator[tuple[str, np.ndarray, tuple[int, ...]]]:
    """Yields the name, the view and the shape of each tensor of a checkpoint.

    A view has two axes where its tensor has one, if the parameter splits the tensor
    into groups. Layers are stacked along the first axis of a parameter, and kernels are
    transposed.

    Args:
        config: The sizes of the model.
        flat: The parameters by path.
    """
    for path, (groups, widths) in _parameters(config).items():
        stack = flat[path] if path.startswith("layers/") else flat[path][None]
        is_kernel = path.endswith("kernel")
        if is_kernel:
            stack = stack.reshape(*stack.shape[:2], -1)  # joins the axes of gate_up
        stack = stack.reshape(*stack.shape[:-1], groups, sum(widths.values()))
        start = 0
        for name, width in widths.items():
            for index, array in enumerate(stack):
                view = array[..., start : start + width]
                if is_kernel:
                    view = view.transpose(1, 2, 0)
                    shape = (groups * width, *view.shape[2:])
                else:
                    shape = (*view.shape[:-2], groups * width)
                yield name.format(index), view, shape
            start += width


def _parameters(config: LlamaConfig) -> dict[str, _Parameter]:
    """The tensors that each parameter joins, by the path of the parameter."""
    hidden, mlp = config.hidden_size, config.intermediate_size
    single = {
        "embed/embedding": (TABLE, hidden),
        "layers/attention/qkv/norm/scale": (f"{_LAYER}.input_layernorm.weight", hidden),
        "layers/attention/out/kernel": (f"{_LAYER}.self_attn.o_proj.weight", hidden),
        "layers/mlp/norm/scale": (f"{_LAYER}.post_attention_layernorm.weight", hidden),
        "layers/mlp/down/kernel": (f"{_LAYER}.mlp.down_proj.weight", hidden),
        "norm/scale": ("model.norm.weight", hidden),
    }
    if not config.tie_embeddings:
        single["lm_head/kernel"] = HEAD, config.vocab_size
    joined = {
        path: _Parameter(1, {name: width}) for path, (name, width) in single.items()
    }
    joined["layers/mlp/gate_up/kernel"] = _Parameter(
        1, {f"{_LAYER}.mlp.{name}_proj.weight": mlp for name in ("gate", "up")}
    )
    for name in ("kernel", "bias") if config.qkv_bias else ("kernel",):
        joined[f"layers/attention/qkv/dense/{name}"] = _qkv(
            config, "weight" if name == "kernel" else "bias"
        )
    return joined


def _qkv(config: LlamaConfig, kind: str) -> _Parameter:
    """Q, K and V, grouped by key-value head."""
    kv_heads, dim = config.num_kv_heads, config.head_dim
    widths = {"q": config.num_heads // kv_heads * dim, "k": dim, "v": dim}
    return _Parameter(
        kv_heads,
        {f"{_LAYER}.self_attn.{n}_proj.{kind}": width for n, width in widths.items()},
    )
