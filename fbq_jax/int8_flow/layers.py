"""Functions that the Linen and NNX layers of the INT8 data flow share."""

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp

from fbq_jax import recipes
from fbq_jax.core import threshold
from fbq_jax.int8_flow import blocks
from fbq_jax.int8_flow.operators import Operator, Params
from fbq_jax.kernels import rounding
from fbq_jax.recipes.schema import Recipe

Initializer = Callable[..., jax.Array]
T = TypeVar("T")


class ParamSpec(NamedTuple):
    """The initializer and shape of one parameter."""

    init: Initializer
    shape: tuple[int, ...]


ParamSpecs = Mapping[str, "ParamSpec | ParamSpecs"]


class MLPBlock:
    """What Linen's and NNX's ``Int8MLP`` share; they define these attributes."""

    hidden: int
    epsilon: float
    use_bias: bool

    def param_specs(self, size: int, kernel_init: Initializer) -> dict[str, ParamSpecs]:
        """The parameters of ``blocks.mlp`` for inputs of width ``size``."""
        return {
            "norm": _norm_params(size),
            "up": _dense_params(size, self.hidden, self.use_bias, kernel_init),
            "down": _dense_params(self.hidden, size, self.use_bias, kernel_init),
        }

    def _operator_of(self, x: jax.Array, dropout_rate: float) -> Operator:
        """The operator for an input like ``x``."""
        del x
        return blocks.mlp(
            epsilon=self.epsilon, use_bias=self.use_bias, dropout_rate=dropout_rate
        )


class AttentionBlock:
    """What both ``Int8Attention`` classes share; they define these attributes."""

    num_heads: int
    attention_fn: Callable[..., jax.Array]
    epsilon: float
    use_bias: bool
    dtype: Any

    def param_specs(self, size: int, kernel_init: Initializer) -> dict[str, ParamSpecs]:
        """The parameters of ``blocks.attention`` for inputs of width ``size``.

        Raises:
          ValueError: ``num_heads`` does not divide ``size``.
        """
        if self.num_heads < 1 or size % self.num_heads:
            raise ValueError(
                "num_heads must be at least 1 and divide the width of the input; got "
                f"{self.num_heads} heads and a width of {size}"
            )
        projections = {
            "qkv": _dense_params(size, 3 * size, self.use_bias, kernel_init),
            "out": _dense_params(size, size, self.use_bias, kernel_init),
        }
        return {"norm": _norm_params(size), "attention": projections}

    def _operator_of(self, x: jax.Array, dropout_rate: float) -> Operator:
        """The operator for an input like ``x``; raises ValueError if it has no T."""
        if x.ndim < 2:
            raise ValueError(
                f"attention takes x [..., T, C], with T tokens; got shape {x.shape}"
            )
        return blocks.attention(
            self.num_heads,
            x.shape[-2],
            dtype=self.dtype or x.dtype,
            attention_fn=self.attention_fn,
            epsilon=self.epsilon,
            use_bias=self.use_bias,
            dropout_rate=dropout_rate,
        )


def _norm_params(size: int) -> ParamSpecs:
    """The parameters of ``nn.LayerNorm``, in the order in which Flax draws them."""
    ones, zeros = jax.nn.initializers.ones, jax.nn.initializers.zeros
    return {"scale": ParamSpec(ones, (size,)), "bias": ParamSpec(zeros, (size,))}


def _dense_params(
    size: int, features: int, use_bias: bool, kernel_init: Initializer
) -> ParamSpecs:
    """The parameters of ``nn.Dense``, in the order in which Flax draws them."""
    specs = {"kernel": ParamSpec(kernel_init, (size, features))}
    if use_bias:
        specs["bias"] = ParamSpec(jax.nn.initializers.zeros, (features,))
    return specs


def named(values: Iterable[T]) -> dict[str, T]:
    """The values of an ``Int8Sequential``'s layers, under ``layers_0`` and so on."""
    return {f"layers_{i}": value for i, value in enumerate(values)}


def common_field(layers: Sequence[Any], field: str) -> Any:
    """The value of a field that all layers of an ``Int8Sequential`` must share.

    Raises:
      TypeError: a layer is neither an ``Int8MLP`` nor an ``Int8Attention``.
      ValueError: there are no layers, or their values differ.
    """
    others = {type(layer).__name__ for layer in layers if not hasattr(layer, field)}
    if others:
        raise TypeError(
            "Int8Sequential takes Int8MLP and Int8Attention layers; got "
            f"{', '.join(sorted(others))}"
        )
    values = {getattr(layer, field) for layer in layers}
    if len(values) != 1:
        raise ValueError(
            f"Int8Sequential takes one or more layers with the same {field}; got "
            f"{sorted(values)}"
        )
    return values.pop()


def recipe_of(block: int) -> Recipe:
    """The recipe of a layer's state: Jetfire with square blocks of this side."""
    return dataclasses.replace(recipes.jetfire, block=block)


def run(
    operator: Operator,
    params: Params,
    x: jax.Array,
    state: threshold.State,
    dropout_keys: Iterable[jax.Array],
    *,
    block: int,
) -> jax.Array:
    """``blocks.apply`` with noise from a layer's state and from its dropout streams.

    Args:
      operator: the layer's operator.
      params: its parameters.
      x: float ``[..., C]``.
      state: gives the seed of the call.
      dropout_keys: one PRNG key for each layer that drops values in this call.
      block: the side of the blocks.
    """
    seed = threshold.call_seed(state)
    for key in dropout_keys:
        seed = rounding.fold(seed, jax.random.bits(key, (), jnp.uint32))
    return blocks.apply(operator, params, x, seed=seed, block=block)


def next_state(state: threshold.State) -> threshold.State:
    """The state after a training call: its count grows; there is no fallback."""
    stats = threshold.without_fallback(threshold.scalars_of(state), 0)
    return threshold.next_state(state, stats)
