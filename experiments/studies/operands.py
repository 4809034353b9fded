"""Records the operands of a model's projections in the forward and backward pass."""

import functools
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax.linen.fp8_ops import OVERWRITE_WITH_GRADIENT
from jax import lax

from examples.llama.loss import cross_entropy
from examples.llama.model import Llama
from examples.llama.model_config import LlamaConfig
from examples.llama.step import PyTree

PROJECTIONS = {
    "qkv": ("attention", "qkv", "dense"),
    "out": ("attention", "out"),
    "gate_up": ("mlp", "gate_up"),
    "down": ("mlp", "down"),
}


class Operands(NamedTuple):
    """The operands of one projection in all layers."""

    x: jax.Array  # activations, [L, M, K]
    w: jax.Array  # weights, [L, K, N]
    dy: jax.Array  # gradients of outputs, [L, M, N]


def operands(
    config: LlamaConfig, params: PyTree, tokens: jax.Array
) -> dict[str, Operands]:
    """Returns the operands by the names in `PROJECTIONS`, in one training step.

    The tokens are int32 [B, S+1], and M is B * S.
    """
    gradients, recorded = _record(config, params, tokens)

    def find(tree: PyTree, path: tuple[str, ...]) -> Any:
        return functools.reduce(lambda tree, name: tree[name], path, tree["layers"])

    def as_matrices(x: jax.Array) -> jax.Array:
        return x.reshape(x.shape[0], -1, x.shape[-1])

    return {
        name: Operands(
            x=as_matrices(find(recorded, path)["x"]),
            w=find(recorded, path)["w"],
            dy=as_matrices(find(gradients, path)["dy"]),
        )
        for name, path in PROJECTIONS.items()
    }


@functools.partial(jax.jit, static_argnums=0)
def _record(
    config: LlamaConfig, params: PyTree, tokens: jax.Array
) -> tuple[PyTree, PyTree]:
    """Returns the gradients of the outputs, and X and W, by layer."""
    recorder = _Recorder()
    model, inputs = Llama(config, recorder.dot_general), tokens[:, :-1]

    def loss(zeros: PyTree) -> tuple[jax.Array, PyTree]:
        logits, recorded = model.apply(
            {"params": params, OVERWRITE_WITH_GRADIENT: zeros},
            inputs,
            mutable=["fallback"],
        )
        return cross_entropy(logits, tokens[:, 1:]), recorded["fallback"]

    with nn.intercept_methods(recorder.intercept):
        shapes = jax.eval_shape(model.init, jax.random.key(0), inputs)
        zeros = jax.tree.map(jnp.zeros_like, shapes[OVERWRITE_WITH_GRADIENT])
        return jax.grad(loss, has_aux=True)(zeros)


class _Recorder:
    """A `dot_general` that stores its operands in the module that calls it.

    It uses the collections that `Llama` stacks over its layers.
    """

    def __init__(self) -> None:
        self._callers: list[nn.Module] = []

    def intercept(self, method: Any, args: Any, kwargs: Any, context: Any) -> Any:
        """Keeps track of the module whose method is running."""
        self._callers.append(context.module)
        try:
            return method(*args, **kwargs)
        finally:
            self._callers.pop()

    def dot_general(
        self, lhs: jax.Array, rhs: jax.Array, dims: Any, *_: Any, **__: Any
    ) -> jax.Array:
        """Multiplies; the perturbation's gradient is the gradient of the output."""
        module = self._callers[-1]
        for name, operand in ("x", lhs), ("w", rhs):
            latest = {"reduce_fn": lambda _, value: value, "init_fn": lambda: None}
            module.sow("fallback", name, operand, **latest)
        out = lax.dot_general(lhs, rhs, dims)
        return module.perturb("dy", out, collection=OVERWRITE_WITH_GRADIENT)
