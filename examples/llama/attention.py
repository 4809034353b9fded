"""Attention's core: cuDNN's flash attention where it runs, XLA's elsewhere."""

import re
from typing import Any, Literal

import jax
import jax.numpy as jnp


def attend(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """Causal grouped-query attention, ``softmax(q k' / sqrt(head_dim)) v``.

    `implementation` says who computes it. Both accumulate in float32 and differ by
    roundings. For the backward pass cuDNN's keeps its operands, its output and a
    float32 statistic a row, XLA's the probabilities, [B, heads, S, S].

    Args:
        q: bfloat16 or float32 [B, S, heads, head_dim].
        k: [B, S, kv_heads, head_dim], of q's dtype; kv_heads divides heads.
        v: likewise.

    Returns:
        An array [B, S, heads * head_dim] of q's dtype.
    """
    # JAX's attention promotes its dtypes itself, which strict promotion refuses.
    with jax.numpy_dtype_promotion("standard"):
        out = jax.nn.dot_product_attention(
            q,
            k,
            v,
            is_causal=True,
            implementation=implementation(q.dtype, q.shape[1], q.shape[-1]),
        )
    return out.reshape(*q.shape[:2], -1)


def implementation(dtype: Any, seq: int, head_dim: int) -> Literal["cudnn", "xla"]:
    """Who computes attention on JAX's default backend.

    Args:
        dtype: of q, k and v.
        seq: length of the sequences.
        head_dim: width of one head.

    Returns:
        ``"cudnn"`` on an NVIDIA GPU of compute capability 8.0 or above, for bfloat16
        and float16 heads whose width is a multiple of 8 up to 128 (which cuDNN takes
        on all of them) and sequences of even length (JAX differentiates cuDNN's
        attention for no other); else ``"xla"``.
    """
    fits = (
        dtype in (jnp.bfloat16, jnp.float16)
        and head_dim % 8 == 0 < head_dim <= 128
        and seq % 2 == 0
    )
    if not fits or jax.default_backend() != "gpu":
        return "xla"
    # AMD's GPUs have names here, such as "gfx942".
    capability = getattr(jax.devices()[0], "compute_capability", "")
    digits = re.fullmatch(r"(\d+)\.\d+", capability)
    return "cudnn" if digits is not None and int(digits[1]) >= 8 else "xla"
