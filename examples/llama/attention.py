"""The attention core: cuDNN flash attention where it is available, else XLA."""

import re
import warnings
from typing import Any, Literal

import jax
import jax.numpy as jnp


def attend(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
) -> jax.Array:
    """Causal grouped-query attention, ``softmax(q k' * scale) v``.

    `implementation` chooses between cuDNN and XLA. Both accumulate in float32, and
    their results differ by rounding. For the backward pass cuDNN saves its operands,
    its output and a float32 statistic per row; XLA saves the probabilities,
    [B, heads, S, S]. Scores with a soft cap are always computed by XLA, which a warning
    says where cuDNN would have computed the others.

    Args:
        q: Queries, bfloat16 or float32 [B, S, heads, head_dim].
        k: Keys, [B, S, kv_heads, head_dim] of the dtype of ``q``; ``kv_heads`` divides
            ``heads``.
        v: Values, with the shape and dtype of ``k``.
        scale: Multiplies the scores; None means ``1 / sqrt(head_dim)``.
        window: The keys that a query sees, up to and including its own; None stands for
            all of them.
        softcap: Scaled scores become ``softcap * tanh(score / softcap)``; None leaves
            them.

    Returns:
        An array [B, S, heads * head_dim] of the dtype of ``q``.
    """
    chosen = implementation(q.dtype, q.shape[1], q.shape[-1])
    if softcap is not None:
        if chosen == "cudnn":
            warnings.warn(
                "attention runs as XLA ops, which save the probabilities, [B, heads, "
                "S, S], for the backward pass: JAX's cuDNN attention has no soft cap",
                stacklevel=2,
            )
        return _capped(q, k, v, scale or q.shape[-1] ** -0.5, window, softcap)
    # JAX's attention relies on implicit promotion, which strict promotion forbids.
    with jax.numpy_dtype_promotion("standard"):
        out = jax.nn.dot_product_attention(
            q,
            k,
            v,
            scale=scale,
            is_causal=True,
            local_window_size=None if window is None else (window - 1, 0),
            implementation=chosen,
        )
    return out.reshape(*q.shape[:2], -1)


def _capped(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    scale: float,
    window: int | None,
    softcap: float,
) -> jax.Array:
    """`attend` with a soft cap, as XLA ops."""
    batch, seq, heads, head_dim = q.shape
    q = q.reshape(batch, seq, k.shape[2], -1, head_dim)
    scores = jnp.einsum("bqkgd,bskd->bkgqs", q, k, preferred_element_type=jnp.float32)
    scores = softcap * jnp.tanh(scores * (scale / softcap))
    positions = jnp.arange(seq)
    distance = positions[:, None] - positions[None, :]
    seen = (distance >= 0) & (distance < (window or seq))
    scores = jnp.where(seen[None, None, None], scores, -jnp.inf)
    probabilities = jax.nn.softmax(scores).astype(v.dtype)
    out = jnp.einsum(
        "bkgqs,bskd->bqkgd", probabilities, v, preferred_element_type=jnp.float32
    )
    return out.reshape(batch, seq, heads * head_dim).astype(v.dtype)


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
