"""Flax NNX modules of Transformer blocks with INT8 between their operators."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from fbq_jax.core import threshold
from fbq_jax.int8_flow import layers as shared
from fbq_jax.int8_flow.blocks import Chain, check_dropout_rate, width
from fbq_jax.int8_flow.layers import ParamSpec, ParamSpecs
from fbq_jax.int8_flow.operators import Operator
from fbq_jax.nnx.dot import FallbackDot
from fbq_jax.nnx.plain_method import PlainMethod

Initializer = nnx.initializers.Initializer
Params = dict[str, Any]


class _Parameters(nnx.Module):
    """A module that holds parameters."""

    def __init__(self, specs: ParamSpecs, param_dtype: Any, rngs: nnx.Rngs):
        for name, spec in specs.items():
            value: Any
            if isinstance(spec, ParamSpec):
                init, shape = spec
                value = nnx.Param(init(rngs.params(), shape, param_dtype))
            else:
                value = _Parameters(spec, param_dtype, rngs)
            setattr(self, name, value)


class Block(_Parameters):
    """The parameters, noise state, dropout and forward pass of a block."""

    def __init__(
        self,
        specs: ParamSpecs,
        param_dtype: Any,
        rngs: nnx.Rngs,
        block: int,
        dropout_rate: float,
    ):
        super().__init__(specs, param_dtype, rngs)
        check_dropout_rate(dropout_rate)
        self.block = block
        self.dot_general = FallbackDot(shared.recipe_of(block), rngs=rngs)
        # Holds the rate and the stream, and follows eval() and train().
        drops = dropout_rate > 0.0
        self.dropout = nnx.Dropout(dropout_rate, rngs=rngs if drops else None)

    @PlainMethod
    def parameters(self) -> Params:
        """The parameters, as ``int8_flow.apply`` takes them."""
        return nnx.to_pure_dict(nnx.state(self, nnx.Param))

    @PlainMethod
    def dropout_rate(self, deterministic: bool | None) -> float:
        """The rate of a call; ``None`` leaves it to ``eval()`` and ``train()``."""
        if deterministic is None:
            deterministic = self.dropout.deterministic
        return 0.0 if deterministic else self.dropout.rate

    @PlainMethod
    def operator(self, x: jax.Array, deterministic: bool | None) -> Operator:
        """The operator that ``int8_flow.apply`` runs for an input like ``x``."""
        return self._operator_of(x, self.dropout_rate(deterministic))

    def _operator_of(self, x: jax.Array, dropout_rate: float) -> Operator:
        """The operator for an input like ``x``; ``shared`` implements it."""
        raise NotImplementedError

    def __call__(self, x: jax.Array, *, deterministic: bool | None = None) -> jax.Array:
        """Maps ``[..., C]``, or ``[..., T, C]`` for attention, to the same shape.

        Args:
          x: bfloat16, float16 or float32.
          deterministic: whether to disable dropout; None leaves it to ``eval()`` and
            ``train()``.
        """
        operator = self.operator(x, deterministic)
        return _run([self], operator, self.parameters(), x, deterministic)


class Int8MLP(shared.MLPBlock, Block):
    """A Transformer's MLP block with an INT8 data flow (Jetfire, arXiv 2403.12422).

    ``fbq_jax.Int8MLP`` for NNX: the same operations and parameter names.  The
    parameters match one ``nnx.LayerNorm`` and two ``nnx.Linear``.  Its attribute
    ``dot_general``, a ``FallbackDot``, holds the state: each training call draws new
    noise, and ``eval()`` freezes the state.

    Args:
      features: C, the width of the input.
      hidden: the width between the two projections.
      dropout_rate: probability of a zero, at least 0 and below 1; takes the stream
        ``"dropout"`` of rngs if it is above 0.
      block: the side of the square blocks that share a scale: 32, 64, 128 or 256.
      epsilon: added to the norm's variance.
      use_bias: whether the projections have biases.
      param_dtype: dtype of the parameters.
      kernel_init: the kernels' initializer.
      rngs: seeds the parameters, the noise and dropout.

    >>> layer = Int8MLP(8, 16, rngs=nnx.Rngs(0))
    >>> layer(jnp.ones((2, 8))).shape
    (2, 8)
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
        self.hidden, self.epsilon, self.use_bias = hidden, epsilon, use_bias
        specs = self.param_specs(features, kernel_init)
        super().__init__(specs, param_dtype, rngs, block, dropout_rate)


class Int8Attention(shared.AttentionBlock, Block):
    """A self-attention block with an INT8 data flow (Jetfire, arXiv 2403.12422).

    ``fbq_jax.Int8Attention`` for NNX, with the state of ``Int8MLP``.

    Args:
      features: C, the width of the input.
      num_heads: H, a divisor of C.
      attention_fn: the core, which maps q, k and v ``[B, T, H, C/H]`` to an output of
        that shape.  For causal attention pass
        ``functools.partial(jax.nn.dot_product_attention, is_causal=True)``.
      dropout_rate: probability of a zero in the output of attention, as in ``Int8MLP``.
      block: the side of the square blocks that share a scale: 32, 64, 128 or 256.
      epsilon: added to the norm's variance.
      use_bias: whether the projections have biases.
      dtype: dtype of the core; None takes the input's.
      param_dtype: dtype of the parameters.
      kernel_init: the kernels' initializer.
      rngs: seeds the parameters, the noise and dropout.

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
        self.num_heads, self.attention_fn, self.dtype = num_heads, attention_fn, dtype
        self.epsilon, self.use_bias = epsilon, use_bias
        specs = self.param_specs(features, kernel_init)
        super().__init__(specs, param_dtype, rngs, block, dropout_rate)


class Int8Sequential(nnx.Module):
    """INT8 blocks in sequence, with INT8 between the blocks as well.

    ``fbq_jax.Int8Sequential`` for NNX.  Each block keeps its own state.  A training
    call updates all of them and draws its noise from the first.

    Args:
      layers: ``Int8MLP`` and ``Int8Attention`` modules with the same ``block``.

    >>> rngs = nnx.Rngs(0)
    >>> blocks = Int8Sequential(
    ...     [Int8Attention(16, 4, rngs=rngs), Int8MLP(16, 64, rngs=rngs)])
    >>> blocks(jnp.ones((2, 8, 16))).shape
    (2, 8, 16)
    """

    def __init__(self, layers: Sequence[Int8MLP | Int8Attention]):
        shared.common_field(layers, "block")
        self.layers = nnx.List(layers)

    def __call__(self, x: jax.Array, *, deterministic: bool | None = None) -> jax.Array:
        """Maps ``[..., C]``, or ``[..., T, C]`` with attention, to the same shape.

        The arguments are as for each of the layers.
        """
        layers = list(self.layers)
        operators = shared.named(layer.operator(x, deterministic) for layer in layers)
        params = shared.named(layer.parameters() for layer in layers)
        operator = Chain(tuple(operators.items()))
        return _run(layers, operator, params, x, deterministic)


def _run(
    layers: Sequence[Block],
    operator: Operator,
    params: Params,
    x: jax.Array,
    deterministic: bool | None,
) -> jax.Array:
    """Runs an operator with noise from the layers' states, and updates the states."""
    states = [
        threshold.canonicalize_state(layer.dot_general.state()) for layer in layers
    ]
    dropout_keys = [
        layer.dropout.rngs()
        for layer in layers
        if layer.dropout_rate(deterministic) > 0.0
    ]
    first = layers[0]  # whose name stands for all of them in warnings
    params = first.dot_general.check_moves(params)
    with first.dot_general.named(f"nnx.{type(first).__name__} of width {width(x)}"):
        y = shared.run(operator, params, x, states[0], dropout_keys, block=first.block)
    for layer, state in zip(layers, states, strict=True):
        y = layer.dot_general.commit(y, shared.next_state(state))
    return y
