"""The attention core: cuDNN flash attention where it is available, else XLA."""

import re
from typing import Any, Literal

import jax
import jax.numpy as jnp


def attend(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """Causal grouped-query attention, ``softmax(q k' / sqrt(head_dim)) v``.

    `implementation` chooses between cuDNN and XLA. Both accumulate in float32, and
    their results differ by rounding. For the backward pass cuDNN saves its operands,
    its output and a float32 statistic per row; XLA saves the probabilities,
    [B, heads, S, S].

    Args:
        q: Queries, bfloat16 or float32 [B, S, heads, head_dim].
        k: Keys, [B, S, kv_heads, head_dim] of the dtype of ``q``; ``kv_heads`` divides
            ``heads``.
        v: Values, with the shape and dtype of ``k``.

    Returns:
        An array [B, S, heads * head_dim] of the dtype of ``q``.
    """
    # JAX's attention relies on implicit promotion, which strict promotion forbids.
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
    """Chooses the implementation of attention on JAX's default backend.

    Args:
        dtype: The dtype of q, k and v.
        seq: The length of the sequences.
        head_dim: The width of one head.

    Returns:
        ``"cudnn"`` if all of the following hold, else ``"xla"``: the device is an
        NVIDIA GPU of compute capability 8.0 or above; the dtype is bfloat16 or float16;
        ``head_dim`` is a multiple of 8 up to 128, which cuDNN supports on all of these
        GPUs; ``seq`` is even, as JAX requires to differentiate cuDNN's attention.
    """
    supported = (
        dtype in (jnp.bfloat16, jnp.float16)
        and head_dim % 8 == 0 < head_dim <= 128
        and seq % 2 == 0
    )
    if not supported or jax.default_backend() != "gpu":
        return "xla"
    # An AMD GPU has a name here, such as "gfx942".
    capability = getattr(jax.devices()[0], "compute_capability", "")
    digits = re.fullmatch(r"(\d+)\.\d+", capability)
    return "cudnn" if digits is not None and int(digits[1]) >= 8 else "xla"
