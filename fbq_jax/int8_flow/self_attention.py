"""Self-attention as an operator of the INT8 data flow; its core is in floats."""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fbq_jax.core.qtensor import QTensor
from fbq_jax.int8_flow.operators import (
    Params,
    SavedLinear,
    grad_to_codes,
    linear,
    linear_grads,
    to_codes,
    unit,
)
from fbq_jax.kernels import rounding

# Of the noise of dQKV; dX draws from the operator's own seed.
_CORE_STREAM = 1


class _SavedAttention(NamedTuple):
    qkv: SavedLinear
    core: Callable[[jax.Array], tuple[jax.Array, jax.Array, jax.Array]]
    out: SavedLinear


@dataclasses.dataclass(frozen=True)
class SelfAttention:
    """Multi-head self-attention with its two projections, ``qkv`` and ``out``.

    The projections multiply INT8.  Between them is the core in floats: as in the paper,
    what enters it is not quantized, q, k and v forward and its output's gradient
    backward; and it keeps for its own backward pass what its function does.

    Attributes:
      num_heads: H, which divides C.
      length: T, of a sequence; x is ``[1, B T, C]``.
      dtype: of the core.
      attention_fn: the core: q, k and v ``[B, T, H, C/H]`` to the output, likewise.
      use_bias: whether the projections have biases.
    """

    num_heads: int
    length: int
    dtype: Any = jnp.bfloat16
    attention_fn: Callable[..., jax.Array] = jax.nn.dot_product_attention
    use_bias: bool = True

    @unit
    def forward(
        self, params: Params, x: QTensor, seed: jax.Array
    ) -> tuple[QTensor, _SavedAttention]:
        """The output's codes."""
        del seed
        qkv, saved_qkv = linear(params["qkv"], x, use_bias=self.use_bias)
        heads = (self._heads(part) for part in jnp.split(qkv, 3, axis=-1))
        attended, core = jax.vjp(self.attention_fn, *heads)
        attended = attended.reshape(x.shape).astype(jnp.float32)
        codes = to_codes(attended, x.block[0])
        y, saved_out = linear(params["out"], codes, use_bias=self.use_bias)
        saved = _SavedAttention(saved_qkv, core, saved_out)
        return to_codes(y, x.block[0]), saved

    @unit
    def backward(
        self, saved: _SavedAttention, dy: QTensor, seed: jax.Array
    ) -> tuple[QTensor, dict[str, dict[str, jax.Array]]]:
        """The gradients of x and of both projections."""
        dattended, out_grads = linear_grads(saved.out, dy, use_bias=self.use_bias)
        parts = saved.core(self._heads(dattended))
        dqkv = jnp.concatenate(
            [part.reshape(dy.shape).astype(jnp.float32) for part in parts], axis=-1
        )
        codes = grad_to_codes(dqkv, dy.block[0], rounding.fold(seed, _CORE_STREAM))
        dx, qkv_grads = linear_grads(saved.qkv, codes, use_bias=self.use_bias)
        grads = {"qkv": qkv_grads, "out": out_grads}
        return grad_to_codes(dx, dy.block[0], seed), grads

    def _heads(self, x: jax.Array) -> jax.Array:
        shape = (-1, self.length, self.num_heads, x.shape[-1] // self.num_heads)
        return x.reshape(shape).astype(self.dtype)
