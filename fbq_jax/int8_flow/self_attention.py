"""Self-attention as an operator of the INT8 data flow, with a floating-point core."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fbq_jax.int8_flow.operators import (
    FloatOperator,
    FloatResult,
    Linear,
    Params,
    SavedLinear,
    grad_to_codes,
    to_codes,
)
from fbq_jax.kernels import rounding
from fbq_jax.quantized import Quantized

# The noise of dQKV; dX draws from the operator's seed itself.
_CORE_STREAM = 1


class _SavedAttention(NamedTuple):
    qkv: SavedLinear
    core_vjp: Callable[[jax.Array], tuple[jax.Array, jax.Array, jax.Array]]
    out: SavedLinear


@dataclasses.dataclass(frozen=True)
class SelfAttention(FloatOperator):
    """Multi-head self-attention with two projections, ``qkv`` and ``out``.

    The projections multiply INT8 values.  The core between them stays in floating
    point, as in the paper: it reads unquantized q, k and v, and in the backward pass
    the unquantized gradient of its output.  ``attention_fn`` decides what the core
    saves.

    Attributes:
      num_heads: H, a divisor of C.
      length: T, the tokens in a sequence; x is ``[1, B T, C]``.
      dtype: dtype of the core.
      attention_fn: the core, which maps q, k and v ``[B, T, H, C/H]`` to an output of
        that shape.
      use_bias: whether the projections have biases.
    """

    num_heads: int
    length: int
    dtype: Any = jnp.bfloat16
    attention_fn: Callable[..., jax.Array] = jax.nn.dot_product_attention
    use_bias: bool = True

    def compute(self, params: Params, x: Quantized, seed: jax.Array) -> FloatResult:
        """Returns the output and the residuals of all three parts."""
        projection = Linear(self.use_bias)
        qkv, saved_qkv = projection.compute(params["qkv"], x, seed)
        heads = (self._split_heads(part) for part in jnp.split(qkv, 3, axis=-1))
        attended, core_vjp = jax.vjp(self.attention_fn, *heads)
        attended = attended.reshape(x.shape).astype(jnp.float32)
        codes = to_codes(attended, x.sides[0])
        y, saved_out = projection.compute(params["out"], codes, seed)
        return y, _SavedAttention(saved_qkv, core_vjp, saved_out)

    def gradients(
        self, saved: _SavedAttention, dy: Quantized, seed: jax.Array
    ) -> FloatResult:
        """Returns the gradients of x and of both projections."""
        projection = Linear(self.use_bias)
        dattended, out_grads = projection.gradients(saved.out, dy, seed)
        parts = saved.core_vjp(self._split_heads(dattended))
        dqkv = jnp.concatenate(
            [part.reshape(dy.shape).astype(jnp.float32) for part in parts], axis=-1
        )
        codes = grad_to_codes(dqkv, dy.sides[0], rounding.fold(seed, _CORE_STREAM))
        dx, qkv_grads = projection.gradients(saved.qkv, codes, seed)
        return dx, {"qkv": qkv_grads, "out": out_grads}

    def _split_heads(self, x: jax.Array) -> jax.Array:
        sequences = math.prod(x.shape[:-1]) // max(self.length, 1)
        head_width = x.shape[-1] // self.num_heads
        shape = (sequences, self.length, self.num_heads, head_width)
        return x.reshape(shape).astype(self.dtype)
