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
    [B, heads, S, S]. Scores with a soft cap are always computed by XLA. On a GPU that
    has cuDNN, a warning says why XLA computes attention in 16 bits.

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
    if problem := _cudnn_problem(q, softcap):
        warnings.warn(
            "attention runs as XLA ops, which save the probabilities, [B, heads, S, "
            f"S], for the backward pass: JAX's cuDNN attention {problem}",
            stacklevel=2,
        )
    if softcap is not None:
        return attend_cached(q, k, v, 0, scale=scale, window=window, softcap=softcap)
    # JAX's attention relies on implicit promotion, which strict promotion forbids.
    with jax.numpy_dtype_promotion("standard"):
        out = jax.nn.dot_product_attention(
            q,
            k,
            v,
            scale=scale,
            is_causal=True,
            local_window_size=None if window is None else (window - 1, 0),
            implementation=implementation(q.dtype, q.shape[1], q.shape[-1]),
        )
    return out.reshape(*q.shape[:2], -1)


def attend_cached(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    start: jax.Array | int,
    *,
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
) -> jax.Array:
    """`attend` for queries whose keys and values are in a cache, as XLA ops.

    Args:
        q: Queries, [B, S, heads, head_dim], of the positions from ``start`` on.
        k: Keys, [B, T, kv_heads, head_dim], of the positions from 0 on, including those
            of the queries. Later ones are not seen.
        v: Values, with the shape and dtype of ``k``.
        start: The position of the first query, an integer.
        scale: As for `attend`.
        window: As for `attend`.
        softcap: As for `attend`.

    Returns:
        An array [B, S, heads * head_dim] of the dtype of ``q``.
    """
    batch, seq, heads, head_dim = q.shape
    scale = scale or head_dim**-0.5
    q = q.reshape(batch, seq, k.shape[2], -1, head_dim)
    scores = jnp.einsum("bqkgd,bskd->bkgqs", q, k, preferred_element_type=jnp.float32)
    if softcap is None:
        scores = scores * scale
    else:
        scores = softcap * jnp.tanh(scores * (scale / softcap))
    queries, keys = start + jnp.arange(seq), jnp.arange(k.shape[1])
    distance = queries[:, None] - keys[None, :]
    seen = (distance >= 0) & (distance < (window or k.shape[1]))
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
    fits = head_dim % 8 == 0 < head_dim <= 128 and seq % 2 == 0
    return "cudnn" if fits and _has_cudnn(dtype) else "xla"


def _cudnn_problem(q: jax.Array, softcap: float | None) -> str | None:
    """What keeps the device's cuDNN from computing attention; None without cuDNN."""
    if not _has_cudnn(q.dtype) or q.shape[1] == 1:  # as in the trace of parameters
        return None
    if softcap is not None:
        return "has no soft cap"
    if implementation(q.dtype, q.shape[1], q.shape[-1]) == "cudnn":
        return None
    return (
        "takes heads of up to 128 channels, a multiple of 8, and an even number of "
        f"tokens, got {q.shape[-1]} channels and {q.shape[1]} tokens"
    )


def _has_cudnn(dtype: Any) -> bool:
    """Whether cuDNN computes attention in a dtype on JAX's default backend."""
    if dtype not in (jnp.bfloat16, jnp.float16) or jax.default_backend() != "gpu":
        return False
    # An AMD GPU has a name here, such as "gfx942".
    capability = getattr(jax.devices()[0], "compute_capability", "")
    digits = re.fullmatch(r"(\d+)\.\d+", capability)
    return digits is not None and int(digits[1]) >= 8
