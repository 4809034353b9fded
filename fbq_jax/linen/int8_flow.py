"""Flax Linen modules of Transformer blocks with INT8 between their operators."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

from fbq_jax.core import threshold
from fbq_jax.core.threshold import layer_path
from fbq_jax.core.visitors import is_freezing
from fbq_jax.int8_flow import layers as shared
from fbq_jax.int8_flow.blocks import Chain, width
from fbq_jax.int8_flow.layers import Initializer, ParamSpec, ParamSpecs
from fbq_jax.int8_flow.operators import Operator
from fbq_jax.linen.dot import FallbackDot
from fbq_jax.linen.state import state_of

Params = dict[str, Any]


class Block(nn.Module):
    """The forward pass of a module with an operator of the INT8 data flow."""

    def operator(self, x: jax.Array, deterministic: bool) -> Operator:
        """The operator that ``int8_flow.apply`` runs for an input like ``x``."""
        return self._operator_of(x, 0.0 if deterministic else self.dropout_rate)

    @nn.compact
    def parameters(self, size: int) -> Params:
        """Creates or reads the parameters for inputs of width ``size``."""
        specs = self.param_specs(size, self.kernel_init)
        return _create(self, specs, self.param_dtype)

    def __call__(self, x: jax.Array, *, deterministic: bool = False) -> jax.Array:
        """Maps ``[..., C]``, or ``[..., T, C]`` for attention, to the same shape.

        The module's state seeds the noise; a training step updates the state.

        Args:
          x: bfloat16, float16 or float32.
          deterministic: whether to disable dropout.

        Raises:
          TypeError: x has another dtype.
          ValueError: x has too few axes, or the model is being frozen.
        """
        if is_freezing():
            raise ValueError(
                "freeze takes layers that multiply by a FallbackDot; it cannot freeze "
                f"{layer_path(self.path)!r}, of class {type(self).__name__}"
            )
        recipe = shared.recipe_of(self.block)
        dot = FallbackDot(recipe, self.collection)
        params = self.parameters(width(x))
        variable = dot.variable(self, x)
        params = dot.check_moves(self, variable, params)
        state = threshold.canonicalize_state(state_of(variable))
        drops = self.dropout_rate > 0.0 and not deterministic
        dropout_keys = [self.make_rng("dropout")] if drops else []
        operator = self.operator(x, deterministic)
        y = shared.run(operator, params, x, state, dropout_keys, block=self.block)
        return dot.commit(self, variable, y, shared.next_state(state))


class Int8MLP(shared.MLPBlock, Block):
    """A Transformer's MLP block with an INT8 data flow (Jetfire, arXiv 2403.12422).

    Computes ``x + dropout(down(gelu(up(norm(x)))))``.  Operations exchange INT8 values
    with one scale per block, forward and backward, and save only such values for the
    backward pass (``fbq_jax.int8_flow``).  The parameters match one
    ``nn.LayerNorm`` and two ``nn.Dense``, under the names above.

    The state is the same as ``FallbackDot``'s: a training step makes the collection
    mutable, so that each step draws new noise.

    Attributes:
      hidden: the width between the two projections.
      dropout_rate: probability of a zero, at least 0 and below 1; needs the RNG stream
        ``"dropout"`` if it is above 0.
      block: the side of the square blocks that share a scale: 32, 64, 128 or 256.
      epsilon: added to the norm's variance.
      use_bias: whether the projections have biases.
      param_dtype: dtype of the parameters.
      kernel_init: the kernels' initializer.
      collection: name of the state's variable collection.

    >>> layer, x = Int8MLP(16), jnp.ones((2, 8))
    >>> variables = jax.jit(layer.init)(jax.random.key(0), x)
    >>> sorted(variables["params"])
    ['down', 'norm', 'up']
    >>> layer.apply(variables, x).shape
    (2, 8)
    """

    hidden: int
    dropout_rate: float = 0.0
    block: int = 32
    epsilon: float = 1e-6
    use_bias: bool = True
    param_dtype: Any = jnp.float32
    kernel_init: Initializer = nn.initializers.lecun_normal()
    collection: str = "fallback"


class Int8Attention(shared.AttentionBlock, Block):
    """A self-attention block with an INT8 data flow (Jetfire, arXiv 2403.12422).

    Computes ``x + dropout(attention(norm(x)))``, with INT8 between the operations as in
    ``Int8MLP``.  Only the attention core stays in floating point: it reads floats and
    saves what ``attention_fn`` saves (q, k and v with ``jax.checkpoint`` around it).

    Attributes:
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
      collection: name of the state's variable collection.

    >>> layer, x = Int8Attention(4), jnp.ones((2, 8, 16))
    >>> variables = jax.eval_shape(layer.init, jax.random.key(0), x)
    >>> jax.tree.map(jnp.shape, variables["params"]["attention"]["qkv"])
    {'bias': (48,), 'kernel': (16, 48)}
    """

    num_heads: int
    attention_fn: Callable[..., jax.Array] = jax.nn.dot_product_attention
    dropout_rate: float = 0.0
    block: int = 32
    epsilon: float = 1e-6
    use_bias: bool = True
    dtype: Any = None
    param_dtype: Any = jnp.float32
    kernel_init: Initializer = nn.initializers.lecun_normal()
    collection: str = "fallback"


class Int8Sequential(Block):
    """INT8 blocks in sequence, with INT8 between the blocks as well.

    The residual stream and its gradient then never become floats.  The only floats are
    the parameters and the attention cores.

    Attributes:
      layers: ``Int8MLP`` and ``Int8Attention`` modules with the same ``block`` and the
        same ``collection``.

    >>> blocks = Int8Sequential([Int8Attention(4), Int8MLP(64)])
    >>> x = jnp.ones((2, 8, 16))
    >>> variables = jax.eval_shape(blocks.init, jax.random.key(0), x)
    >>> sorted(variables["params"])
    ['layers_0', 'layers_1']
    """

    layers: Sequence[Int8MLP | Int8Attention]

    @property
    def block(self) -> int:
        """The layers' common ``block``."""
        return shared.common_field(self.layers, "block")

    @property
    def collection(self) -> str:
        """The layers' common ``collection``."""
        return shared.common_field(self.layers, "collection")

    @property
    def dropout_rate(self) -> float:
        """The largest of the layers' dropout rates."""
        return max(layer.dropout_rate for layer in self.layers)

    def parameters(self, size: int) -> Params:
        """Creates or reads the layers' parameters, under ``layers_0`` and so on."""
        return shared.named(layer.parameters(size) for layer in self.layers)

    def operator(self, x: jax.Array, deterministic: bool) -> Operator:
        """The layers' operators in a chain."""
        operators = (layer.operator(x, deterministic) for layer in self.layers)
        return Chain(tuple(shared.named(operators).items()))


class _Parameters(nn.Module):
    """A scope that holds the parameters of one layer."""

    param_dtype: Any

    @nn.compact
    def __call__(self, specs: ParamSpecs) -> Params:
        return _create(self, specs, self.param_dtype)


def _create(module: nn.Module, specs: ParamSpecs, param_dtype: Any) -> Params:
    """Creates or reads parameters of the module that is running."""
    return {
        name: module.param(name, *spec, param_dtype)
        if isinstance(spec, ParamSpec)
        else _Parameters(param_dtype, name=name)(spec)
        for name, spec in specs.items()
    }
