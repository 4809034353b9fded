"""Routing of tokens to the experts of a mixture, in float32.

The router's logits ``[T, E]`` become scores, and each token goes to the ``top_k``
experts with the highest ones:

    scores = softmax(logits)  or  sigmoid(logits)
    experts[t] = the top_k of scores[t] + bias
    weights[t] = scores[t, experts[t]], by default divided by their sum

``bias`` balances the experts without a loss (DeepSeek-V3, arXiv 2412.19437): it affects
which experts are selected but not their weights, has no gradient, and after each step
moves towards experts that had less than the mean load.
"""

import dataclasses
import fractions
import math
import numbers
from typing import Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
from jax import lax

from fbq_jax.core.state_dtypes import keep_dtype
from fbq_jax.recipes.numbers_in_float32 import INT32, is_number, is_positive_float32

Scores = Literal["softmax", "sigmoid"]
# Programs compute with symbolic sizes in int32, which larger ratios could overflow.
_MAX_DENOMINATOR = 2**16


@dataclasses.dataclass(frozen=True)
class Routing:
    """How a mixture of experts routes its tokens.

    Attributes:
      num_experts: E, the number of experts.
      top_k: k, the number of experts of each token.
      scores: ``"softmax"`` over the experts, or ``"sigmoid"`` of each logit.
      renormalize: whether the weights of a token are divided by their sum.
      bias_update_rate: the step of the bias that balances the experts; None for no
        bias.
      capacity_factor: an expert computes ``ceil(capacity_factor T k / E)`` of its
        tokens, the first ones, and the others get zeros from it; None drops no token.

    Raises:
      TypeError: ``num_experts`` or ``top_k`` is not an integer, or another value is
        not a number.
      ValueError: a value is out of range (``bias_update_rate`` is computed with in
        float32); or ``top_k`` is 1 with ``renormalize``, which makes all weights 1, so
        that the router has no gradient.

    >>> Routing(8, top_k=9)
    Traceback (most recent call last):
        ...
    ValueError: Routing.top_k takes 1 to num_experts=8; got 9
    """

    num_experts: int
    top_k: int = 2
    scores: Scores = "softmax"
    renormalize: bool = True
    bias_update_rate: float | None = None
    capacity_factor: float | None = None

    def __post_init__(self) -> None:
        for name in ("num_experts", "top_k"):
            value = getattr(self, name)
            if not isinstance(value, numbers.Integral):
                raise TypeError(f"Routing.{name} takes an integer; got {value!r}")
            object.__setattr__(self, name, int(value))
        if not 1 <= self.num_experts <= INT32.max:
            raise ValueError(
                f"Routing.num_experts takes 1 to {INT32.max}; got {self.num_experts}"
            )
        if not 1 <= self.top_k <= self.num_experts:
            raise ValueError(
                f"Routing.top_k takes 1 to num_experts={self.num_experts}; got "
                f"{self.top_k}"
            )
        if self.scores not in get_args(Scores):
            raise ValueError(
                f"Routing.scores takes one of {get_args(Scores)}; got {self.scores!r}"
            )
        if self.renormalize and self.top_k == 1:
            raise ValueError(
                "Routing with top_k=1 takes renormalize=False: the renormalized weight "
                "of one expert is always 1, and the router would have no gradient"
            )
        for name in ("bias_update_rate", "capacity_factor"):
            value = getattr(self, name)
            if value is not None and not is_number(value):
                raise TypeError(
                    f"Routing.{name} takes a positive number or None; got {value!r}"
                )
        factor, rate = self.capacity_factor, self.bias_update_rate
        if factor is not None and not 0 < factor < math.inf:
            raise ValueError(
                "Routing.capacity_factor takes a positive number or None; got "
                f"{factor!r}"
            )
        if rate is not None and not is_positive_float32(rate):
            raise ValueError(
                "Routing.bias_update_rate takes a positive number that float32 can "
                f"represent, or None; got {rate!r}"
            )

    def capacity(self, tokens: int) -> int | None:
        """The most tokens that an expert computes; None for no limit."""
        if self.capacity_factor is None:
            return None
        # In integers, because the number of tokens may be symbolic; 1.1 is 11/10.
        is_ratio = isinstance(self.capacity_factor, numbers.Rational)
        of = self.capacity_factor if is_ratio else str(self.capacity_factor)
        share = fractions.Fraction(of) * self.top_k / self.num_experts
        if share >= 1:  # a token selects an expert once: none computes more
            return tokens
        if share.denominator > _MAX_DENOMINATOR and not isinstance(tokens, int):
            raise ValueError(
                "with a symbolic number of tokens, Routing.capacity_factor takes a "
                "ratio of small integers, such as 1.25 or Fraction(4, 3); got "
                f"{self.capacity_factor!r}"
            )
        return -(-share.numerator * tokens // share.denominator)


def check_routing(routing: object) -> None:
    """Raises TypeError unless ``routing`` is a ``Routing``."""
    if not isinstance(routing, Routing):
        raise TypeError(
            "a mixture of experts takes a Routing, such as Routing(num_experts=8), as "
            f"routing; got {routing!r}"
        )


class Routes(NamedTuple):
    """The experts of each token, and what a training step needs to know about them.

    Attributes:
      experts: int32 ``[T, k]``.
      weights: float32 ``[T, k]``, which multiply the outputs of the experts.
      load: int32 ``[E]``, the number of tokens that selected each expert.
      load_balance_loss: float32 ``[]``, ``E sum_e f[e] p[e]``, where f is each expert's
        share of the load and p the mean of its normalized scores; 1 if both are equal
        for all experts.
      z_loss: float32 ``[]``, the mean of ``logsumexp(logits)^2``.
    """

    experts: jax.Array
    weights: jax.Array
    load: jax.Array
    load_balance_loss: jax.Array
    z_loss: jax.Array


def router_logits(x: jax.Array, kernel: jax.Array) -> jax.Array:
    """The product of the tokens ``[T, D]`` and the router's kernel ``[D, E]``.

    It is float32 in full precision, whatever the operands and JAX's default, because a
    rounding error that selects another expert changes a token's whole output.
    """
    return jnp.dot(
        x.astype(jnp.float32),
        kernel.astype(jnp.float32),
        precision=lax.Precision.HIGHEST,
    )


def route(routing: Routing, logits: jax.Array, bias: jax.Array | None = None) -> Routes:
    """Selects the experts of each token.

    Args:
      routing: the settings.
      logits: float32 ``[T, E]``.
      bias: float32 ``[E]``, added to the scores that select; None for zeros.

    >>> logits = jnp.log(jnp.array([[0.1, 0.1, 0.2, 0.6]]))
    >>> routes = route(Routing(4), logits)
    >>> print(routes.experts, routes.weights.round(2))
    [[3 2]] [[0.75 0.25]]
    """
    if routing.scores == "softmax":
        scores = probabilities = jax.nn.softmax(logits)
    else:
        scores = jax.nn.sigmoid(logits)
        probabilities = _normalize(scores)
    selection = scores if bias is None else scores + bias[None, :]
    experts = lax.top_k(lax.stop_gradient(selection), routing.top_k)[1]
    weights = jnp.take_along_axis(scores, experts, axis=-1)
    if routing.renormalize:
        weights = _normalize(weights)
    load = count_tokens(experts, routing.num_experts)
    # Without tokens there is no load, and both losses are 0.
    tokens = jax.core.max_dim(logits.shape[0], 1)
    share = load.astype(jnp.float32) / (tokens * routing.top_k)
    balance = jnp.vdot(share, jnp.sum(probabilities, axis=0) / tokens)
    z = jax.nn.logsumexp(logits, axis=-1)
    return Routes(
        experts,
        weights,
        load,
        routing.num_experts * balance,
        jnp.vdot(z, z) / tokens,
    )


def count_tokens(experts: jax.Array, num_experts: int) -> jax.Array:
    """How often each expert occurs in an array of experts, int32 ``[E]``.

    Values outside of ``[0, E)`` count for no expert.
    """
    # On a GPU, comparing with all experts is one kernel.
    expert = jnp.arange(num_experts, dtype=experts.dtype)
    return jnp.sum(experts.reshape(-1, 1) == expert[None, :], axis=0, dtype=jnp.int32)


def next_bias(routing: Routing, bias: jax.Array, load: jax.Array) -> jax.Array:
    """The bias after a step: each moves by the update rate towards the mean load.

        bias + bias_update_rate sign(mean(load) - load)

    Args:
      routing: the settings, with a ``bias_update_rate``.
      bias: floats ``[E]``, whose dtype stays.
      load: int32 ``[E]``, the load of the step.
    """
    assert routing.bias_update_rate is not None
    load = load.astype(jnp.float32)
    # Times E on both sides: a mean may be rounded, so that an exact balance is none.
    below_mean = jnp.sign(jnp.sum(load) - routing.num_experts * load)
    moved = bias.astype(jnp.float32) + routing.bias_update_rate * below_mean
    return keep_dtype(bias, moved)


def _normalize(scores: jax.Array) -> jax.Array:
    """Scores divided by their sum along the last axis, which sigmoids may have as 0."""
    # The derivative has the sum's square, which must not be 0.
    largest = lax.stop_gradient(jnp.max(scores, axis=-1, keepdims=True))
    scores = scores / jnp.where(largest > 0.0, largest, 1.0)
    total = jnp.sum(scores, axis=-1, keepdims=True)
    return scores / jnp.where(total > 0.0, total, 1.0)
