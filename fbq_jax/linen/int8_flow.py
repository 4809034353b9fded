"""Flax Linen modules of Transformer blocks with INT8 between their operators."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

from fbq_jax import recipes
from fbq_jax.core import threshold
from fbq_jax.int8_flow import blocks
from fbq_jax.int8_flow.operators import Operator
from fbq_jax.kernels import rounding
from fbq_jax.linen.dot import FallbackDot

Initializer = Callable[..., jax.Array]
Params = dict[str, Any]


class _Norm(nn.Module):
    """The parameters of ``nn.LayerNorm``, under their names."""

    param_dtype: Any

    @nn.compact
    def __call__(self, size: int) -> Params:
        start = {"scale": nn.initializers.ones, "bias": nn.initializers.zeros}
        return {
            name: self.param(name, init, (size,), self.param_dtype)
            for name, init in start.items()
        }


class _Dense(nn.Module):
    """The parameters of ``nn.Dense``, under their names."""

    use_bias: bool
    kernel_init: Initializer
    param_dtype: Any

    @nn.compact
    def __call__(self, size: int, features: int) -> Params:
        shape, dtype = (size, features), self.param_dtype
        params = {"kernel": self.param("kernel", self.kernel_init, shape, dtype)}
        if self.use_bias:
            zeros = nn.initializers.zeros
            params["bias"] = self.param("bias", zeros, (features,), dtype)
        return params


class _Projections(nn.Module):
    """The parameters of ``int8_operators.SelfAttention``."""

    use_bias: bool
    kernel_init: Initializer
    param_dtype: Any

    @nn.compact
    def __call__(self, size: int) -> Params:
        options = self.use_bias, self.kernel_init, self.param_dtype
        return {
            "qkv": _Dense(*options, name="qkv")(size, 3 * size),
            "out": _Dense(*options, name="out")(size, size),
        }


class Int8MLP(nn.Module):
    """A Transformer's MLP with an INT8 data flow (Jetfire, arXiv 2403.12422).

    ``x + dropout(down(gelu(up(norm(x)))))``, where all that goes from one operation to
    the next, forward and backward, and all that is kept for the backward pass are INT8
    codes with a scale a block (``fbq_jax.int8_flow``).  The parameters are those of
    ``nn.LayerNorm`` and two ``nn.Dense`` with the names above.

    Its state is that of ``FallbackDot``: a training step makes the collection mutable,
    and each then has noise of its own.

    Attributes:
      hidden: the width between the two projections.
      dropout_rate: the probability of a zero; needs the RNG stream ``"dropout"``.
      block: the side of a block that shares a scale: 32, 64, 128 or 256.
      epsilon: added to the norm's variance.
      use_bias: whether the projections have biases.
      param_dtype: of the parameters.
      kernel_init: the kernels' initializer.
      collection: of the state.

    >>> layer, x = Int8MLP(64), jnp.ones((2, 8, 16))
    >>> variables = layer.init(jax.random.key(0), x)
    >>> sorted(variables["params"])
    ['down', 'norm', 'up']
    >>> layer.apply(variables, x).shape
    (2, 8, 16)
    """

    hidden: int
    dropout_rate: float = 0.0
    block: int = 32
    epsilon: float = 1e-6
    use_bias: bool = True
    param_dtype: Any = jnp.float32
    kernel_init: Initializer = nn.initializers.lecun_normal()
    collection: str = "fallback"

    @nn.compact
    def parameters(self, size: int) -> Params:
        """The parameters, for inputs of that width."""
        options = self.use_bias, self.kernel_init, self.param_dtype
        return {
            "norm": _Norm(self.param_dtype, name="norm")(size),
            "up": _Dense(*options, name="up")(size, self.hidden),
            "down": _Dense(*options, name="down")(self.hidden, size),
        }

    def operator(self, x: jax.Array, deterministic: bool) -> Operator:
        """What computes with them."""
        del x
        return blocks.mlp(
            epsilon=self.epsilon,
            use_bias=self.use_bias,
            dropout_rate=0.0 if deterministic else self.dropout_rate,
        )

    def __call__(self, x: jax.Array, *, deterministic: bool = False) -> jax.Array:
        """Maps ``[..., C]`` to the same shape; ``deterministic`` drops nothing out."""
        return _run(self, x, deterministic)


class Int8Attention(nn.Module):
    """Self-attention with an INT8 data flow (Jetfire, arXiv 2403.12422).

    ``x + dropout(attention(norm(x)))``, with INT8 between the operations as in
    ``Int8MLP``, but for the core of attention, which computes in floats, reads them and
    keeps what ``attention_fn`` keeps (with ``jax.checkpoint`` around it: q, k and v).

    Attributes:
      num_heads: H, which divides C.
      attention_fn: q, k and v ``[B, T, H, C/H]`` to the output, likewise; causal is
        ``functools.partial(jax.nn.dot_product_attention, is_causal=True)``.
      dropout_rate: of the output, as in ``Int8MLP``.
      block: likewise.
      epsilon: likewise.
      use_bias: likewise.
      dtype: of the core; None takes that of the input.
      param_dtype: as in ``Int8MLP``.
      kernel_init: likewise.
      collection: likewise.

    >>> layer, x = Int8Attention(4), jnp.ones((2, 8, 16))
    >>> variables = layer.init(jax.random.key(0), x)
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

    @nn.compact
    def parameters(self, size: int) -> Params:
        """The parameters, for inputs of that width."""
        blocks.check_heads(self.num_heads, size)
        options = self.use_bias, self.kernel_init, self.param_dtype
        return {
            "norm": _Norm(self.param_dtype, name="norm")(size),
            "attention": _Projections(*options, name="attention")(size),
        }

    def operator(self, x: jax.Array, deterministic: bool) -> Operator:
        """What computes with them."""
        return blocks.attention(
            self.num_heads,
            x.shape[-2],
            dtype=self.dtype or x.dtype,
            attention_fn=self.attention_fn,
            epsilon=self.epsilon,
            use_bias=self.use_bias,
            dropout_rate=0.0 if deterministic else self.dropout_rate,
        )

    def __call__(self, x: jax.Array, *, deterministic: bool = False) -> jax.Array:
        """Maps ``[..., T, C]`` to the same; ``deterministic`` drops nothing out."""
        return _run(self, x, deterministic)


class Int8Sequential(nn.Module):
    """Blocks one after another with INT8 between them too.

    The residual stream and its gradient then never are floats, and the floats of
    parameters and of attention's core are the only ones.

    Attributes:
      layers: ``Int8MLP`` and ``Int8Attention``, of one ``block`` and
        one ``collection``.

    >>> blocks = Int8Sequential([Int8Attention(4), Int8MLP(64)])
    >>> variables = blocks.init(jax.random.key(0), jnp.ones((2, 8, 16)))
    >>> sorted(variables["params"])
    ['layers_0', 'layers_1']
    """

    layers: Sequence[Int8MLP | Int8Attention]

    @property
    def block(self) -> int:
        """The layers' own."""
        return blocks.field_of_all(self.layers, "block")

    @property
    def collection(self) -> str:
        """The layers' own."""
        return blocks.field_of_all(self.layers, "collection")

    @property
    def dropout_rate(self) -> float:
        """The largest of the layers'."""
        return max(layer.dropout_rate for layer in self.layers)

    def parameters(self, size: int) -> Params:
        """The parameters of each layer, under ``layers_0`` and so on."""
        return {
            f"layers_{i}": layer.parameters(size) for i, layer in enumerate(self.layers)
        }

    def operator(self, x: jax.Array, deterministic: bool) -> Operator:
        """The layers' operators in a chain."""
        return blocks.Chain(
            tuple(
                (f"layers_{i}", layer.operator(x, deterministic))
                for i, layer in enumerate(self.layers)
            )
        )

    def __call__(self, x: jax.Array, *, deterministic: bool = False) -> jax.Array:
        """Maps ``[..., T, C]`` to the same; ``deterministic`` drops nothing out."""
        return _run(self, x, deterministic)


def _run(
    module: Int8MLP | Int8Attention | Int8Sequential,
    x: jax.Array,
    deterministic: bool,
) -> jax.Array:
    """A module's operator on its parameters, with the noise of its state."""
    recipe = dataclasses.replace(recipes.jetfire, block=module.block)
    dot = FallbackDot(recipe, module.collection)
    params = module.parameters(x.shape[-1])
    variable = dot.variable(module)
    state = threshold.canonicalize_state(variable.value)
    seed = threshold.call_seed(state)
    if module.dropout_rate > 0.0 and not deterministic:
        bits = jax.random.bits(module.make_rng("dropout"), (), jnp.uint32)
        seed = rounding.fold(seed, bits)
    y = blocks.apply(
        module.operator(x, deterministic), params, x, seed=seed, block=module.block
    )
    no_metric = jnp.zeros((0,), jnp.float32)
    new = threshold.update(state, no_metric, state["theta"], recipe)
    return dot.commit(module, variable, new, y)
