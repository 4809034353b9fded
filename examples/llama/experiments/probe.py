"""What the projections of a model multiply, forward and backward."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax.linen.fp8_ops import OVERWRITE_WITH_GRADIENT
from jax import lax

from examples.llama.model import Llama, LlamaConfig
from examples.llama.step import PyTree, cross_entropy
from fbq_jax.linen.state import calling_module, find_variable

PROJECTIONS = {
    "qkv": ("attention", "qkv", "dense"),
    "out": ("attention", "out"),
    "gate_up": ("mlp", "gate_up"),
    "down": ("mlp", "down"),
}


class Operands(NamedTuple):
    """Of one projection in all layers: X [L, M, K], W [L, K, N], dY [L, M, N]."""

    x: jax.Array
    w: jax.Array
    dy: jax.Array


def operands(
    config: LlamaConfig, params: PyTree, tokens: jax.Array
) -> dict[str, Operands]:
    """What the projections multiply as the model reads tokens and learns from them.

    Args:
        config: The model's; its `dtype` is the operands'.
        params: Its parameters.
        tokens: int32 [B, S+1]; M is B * S.

    Returns:
        By the names in `PROJECTIONS`.
    """
    gradients, kept = _measure(config, params, tokens)

    def find(tree: PyTree, path: tuple[str, ...]) -> Any:
        for name in ("layers", *path, "dot_general"):
            tree = tree[name]
        return tree

    def as_matrices(x: jax.Array) -> jax.Array:
        return x.reshape(x.shape[0], -1, x.shape[-1])

    return {
        name: Operands(
            x=as_matrices(find(kept, path)["x"]),
            w=find(kept, path)["w"],
            dy=as_matrices(find(gradients, path)),
        )
        for name, path in PROJECTIONS.items()
    }


@functools.partial(jax.jit, static_argnums=0)
def _measure(
    config: LlamaConfig, params: PyTree, tokens: jax.Array
) -> tuple[PyTree, PyTree]:
    model, inputs = Llama(config, _multiply), tokens[:, :-1]
    shapes = jax.eval_shape(model.init, jax.random.key(0), inputs)
    zeros = jax.tree.map(jnp.zeros_like, shapes[OVERWRITE_WITH_GRADIENT])

    def loss(zeros: PyTree) -> tuple[jax.Array, PyTree]:
        logits, kept = model.apply(
            {"params": params, OVERWRITE_WITH_GRADIENT: zeros},
            inputs,
            mutable=["fallback"],
        )
        return cross_entropy(logits, tokens[:, 1:]), kept["fallback"]

    return jax.grad(loss, has_aux=True)(zeros)


def _multiply(lhs: jax.Array, rhs: jax.Array, dims: Any, *_: Any, **__: Any) -> Any:
    """A `dot_general` that keeps its operands where layers keep their state.

    What it adds to the output, zeros, has the output's gradient.
    """
    out = lax.dot_general(lhs, rhs, dims)
    module = calling_module()
    assert module is not None
    kept = find_variable(module, "fallback", lambda *_: None)
    kept.value = {"x": lhs, "w": rhs}
    zeros = find_variable(
        module, OVERWRITE_WITH_GRADIENT, lambda *_: jnp.zeros_like(out)
    )
    return out + zeros.value
