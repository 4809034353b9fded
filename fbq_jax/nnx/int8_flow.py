"""Flax NNX modules of Transformer blocks with INT8 between their operators."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from fbq_jax import recipes
from fbq_jax.core import threshold
from fbq_jax.int8_flow import blocks
from fbq_jax.int8_flow.operators import Operator
from fbq_jax.kernels import rounding
from fbq_jax.nnx.dot import FallbackDot

Initializer = nnx.initializers.Initializer
Params = dict[str, Any]


class _Norm(nnx.Module):
    """The parameters of ``nnx.LayerNorm``, under their names."""

    def __init__(self, size: int, param_dtype: Any, rngs: nnx.Rngs):
        ones, zeros = nnx.initializers.ones, nnx.initializers.zeros
        self.scale = nnx.Param(ones(rngs.params(), (size,), param_dtype))
        self.bias = nnx.Param(zeros(rngs.params(), (size,), param_dtype))


class _Dense(nnx.Module):
    """The parameters of ``nnx.Linear``, under their names."""

    def __init__(
        self,
        size: int,
        features: int,
        use_bias: bool,
        kernel_init: Initializer,
        param_dtype: Any,
        rngs: nnx.Rngs,
    ):
        kernel = kernel_init(rngs.params(), (size, features), param_dtype)
        self.kernel = nnx.Param(kernel)
        if use_bias:
            zeros = nnx.initializers.zeros
            self.bias = nnx.Param(zeros(rngs.params(), (features,), param_dtype))


class _Projections(nnx.Module):
    """The parameters of ``int8_operators.SelfAttention``."""

    def __init__(self, size: int, *options: Any):
        self.qkv = _Dense(size, 3 * size, *options)
        self.out = _Dense(size, size, *options)


class _Block(nnx.Module):
    """What the blocks have in common: the state of their noise, and how they run."""

    def __init__(self, block: int, dropout_rate: float, rngs: nnx.Rngs):
        blocks.check_dropout(dropout_rate)
        recipe = dataclasses.replace(recipes.jetfire, block=block)
        self.block = block
        self.dot_general = FallbackDot(recipe, rngs=rngs)
        # Only for its rate, its stream, and what eval() and train() do to it.
        drops = dropout_rate > 0.0
        self.dropout = nnx.Dropout(dropout_rate, rngs=rngs if drops else None)

    def parameters(self) -> Params:
        """The parameters, as ``int8_flow.apply`` takes them."""
        return nnx.to_pure_dict(nnx.state(self, nnx.Param))

    def dropout_rate(self, deterministic: bool | None) -> float:
        """The one of a call: 0 where nothing is dropped."""
        if deterministic is None:
            deterministic = self.dropout.deterministic
        return 0.0 if deterministic else self.dropout.rate

    def operator(self, x: jax.Array, deterministic: bool | None) -> Operator:
        """What computes with the parameters."""
        raise NotImplementedError

    def __call__(self, x: jax.Array, *, deterministic: bool | None = None) -> jax.Array:
        """Maps ``[..., T, C]`` to the same.

        Args:
          x: bfloat16, float16 or float32.
          deterministic: whether nothing is dropped out; None leaves it to ``eval()``
            and ``train()``.
        """
        operator = self.operator(x, deterministic)
        return _run([self], operator, self.parameters(), x, deterministic)


class Int8MLP(_Block):
    """A Transformer's MLP with an INT8 data flow (Jetfire, arXiv 2403.12422).

    ``fbq_jax.Int8MLP`` for NNX: the same operations on parameters of the same names,
    those of ``nnx.LayerNorm`` and two ``nnx.Linear``.  Its state is that of the
    ``FallbackDot`` that it has as ``dot_general``: each call in training has noise of
    its own, and ``eval()`` leaves the state where it is.

    Args:
      features: C, the width of the input.
      hidden: the width between the two projections.
      dropout_rate: the probability of a zero; above 0 it takes the stream ``"dropout"``
        of rngs.
      block: the side of a block that shares a scale: 32, 64, 128 or 256.
      epsilon: added to the norm's variance.
      use_bias: whether the projections have biases.
      param_dtype: of the parameters.
      kernel_init: the kernels' initializer.
      rngs: for the parameters, the noise and dropout.

    >>> layer = Int8MLP(16, 64, rngs=nnx.Rngs(0))
    >>> layer(jnp.ones((2, 8, 16))).shape
    (2, 8, 16)
    >>> int(layer.dot_general.count[...])
    1
    """

    def __init__(
        self,
        features: int,
        hidden: int,
        *,
        dropout_rate: float = 0.0,
        block: int = 32,
        epsilon: float = 1e-6,
        use_bias: bool = True,
        param_dtype: Any = jnp.float32,
        kernel_init: Initializer = nnx.initializers.lecun_normal(),  # noqa: B008
        rngs: nnx.Rngs,
    ):
        self.epsilon, self.use_bias = epsilon, use_bias
        options = use_bias, kernel_init, param_dtype, rngs
        self.norm = _Norm(features, param_dtype, rngs)
        self.up = _Dense(features, hidden, *options)
        self.down = _Dense(hidden, features, *options)
        super().__init__(block, dropout_rate, rngs)

    def operator(self, x: jax.Array, deterministic: bool | None) -> Operator:
        """What computes with the parameters."""
        del x
        return blocks.mlp(
            epsilon=self.epsilon,
            use_bias=self.use_bias,
            dropout_rate=self.dropout_rate(deterministic),
        )


class Int8Attention(_Block):
    """Self-attention with an INT8 data flow (Jetfire, arXiv 2403.12422).

    ``fbq_jax.Int8Attention`` for NNX, with state as ``Int8MLP`` has it.

    Args:
      features: C, the width of the input.
      num_heads: H, which divides C.
      attention_fn: q, k and v ``[B, T, H, C/H]`` to the output, likewise; causal is
        ``functools.partial(jax.nn.dot_product_attention, is_causal=True)``.
      dropout_rate: of the output, as in ``Int8MLP``.
      block: likewise.
      epsilon: likewise.
      use_bias: likewise.
      dtype: of attention's core; None takes that of the input.
      param_dtype: as in ``Int8MLP``.
      kernel_init: likewise.
      rngs: likewise.

    >>> layer = Int8Attention(16, 4, rngs=nnx.Rngs(0))
    >>> layer.attention.qkv.kernel.shape
    (16, 48)
    """

    def __init__(
        self,
        features: int,
        num_heads: int,
        *,
        attention_fn: Callable[..., jax.Array] = jax.nn.dot_product_attention,
        dropout_rate: float = 0.0,
        block: int = 32,
        epsilon: float = 1e-6,
        use_bias: bool = True,
        dtype: Any = None,
        param_dtype: Any = jnp.float32,
        kernel_init: Initializer = nnx.initializers.lecun_normal(),  # noqa: B008
        rngs: nnx.Rngs,
    ):
        blocks.check_heads(num_heads, features)
        self.num_heads, self.attention_fn, self.dtype = num_heads, attention_fn, dtype
        self.epsilon, self.use_bias = epsilon, use_bias
        options = use_bias, kernel_init, param_dtype, rngs
        self.norm = _Norm(features, param_dtype, rngs)
        self.attention = _Projections(features, *options)
        super().__init__(block, dropout_rate, rngs)

    def operator(self, x: jax.Array, deterministic: bool | None) -> Operator:
        """What computes with the parameters."""
        return blocks.attention(
            self.num_heads,
            x.shape[-2],
            dtype=self.dtype or x.dtype,
            attention_fn=self.attention_fn,
            epsilon=self.epsilon,
            use_bias=self.use_bias,
            dropout_rate=self.dropout_rate(deterministic),
        )


class Int8Sequential(nnx.Module):
    """Blocks one after another with INT8 between them too.

    ``fbq_jax.Int8Sequential`` for NNX.  The state is the blocks' own: all of it moves
    in a training call, and the noise is of the first one's seed.

    Args:
      layers: ``Int8MLP`` and ``Int8Attention``, of one ``block``.

    >>> rngs = nnx.Rngs(0)
    >>> blocks = Int8Sequential(
    ...     [Int8Attention(16, 4, rngs=rngs), Int8MLP(16, 64, rngs=rngs)])
    >>> blocks(jnp.ones((2, 8, 16))).shape
    (2, 8, 16)
    """

    def __init__(self, layers: Sequence[Int8MLP | Int8Attention]):
        blocks.field_of_all(layers, "block")
        self.layers = nnx.List(layers)

    def __call__(self, x: jax.Array, *, deterministic: bool | None = None) -> jax.Array:
        """Maps ``[..., T, C]`` to the same, as its layers do."""
        layers = list(self.layers)
        names = [f"layers_{i}" for i in range(len(layers))]
        operators = [layer.operator(x, deterministic) for layer in layers]
        operator = blocks.Chain(tuple(zip(names, operators, strict=True)))
        params = {
            name: layer.parameters() for name, layer in zip(names, layers, strict=True)
        }
        return _run(layers, operator, params, x, deterministic)


def _run(
    layers: Sequence[_Block],
    operator: Operator,
    params: Params,
    x: jax.Array,
    deterministic: bool | None,
) -> jax.Array:
    """The operator of some layers, with the noise of their state, which it moves."""
    states = [
        threshold.canonicalize_state(layer.dot_general.state()) for layer in layers
    ]
    seed = threshold.call_seed(states[0])
    for layer in layers:
        if layer.dropout_rate(deterministic) > 0.0:
            bits = jax.random.bits(layer.dropout.rngs(), (), jnp.uint32)
            seed = rounding.fold(seed, bits)
    y = blocks.apply(operator, params, x, seed=seed, block=layers[0].block)
    no_metric = jnp.zeros((0,), jnp.float32)
    for layer, state in zip(layers, states, strict=True):
        dot = layer.dot_general
        dot.commit(threshold.update(state, no_metric, state["theta"], dot.recipe))
    return y
