"""The attention core: flash attention by cuDNN or for TPUs, or XLA."""

import re
import warnings
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu import splash_attention as splash

from examples.llama import mesh

_LANES = 128  # of a TPU's vectors


def attend(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    start: jax.Array | None = None,
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
) -> jax.Array:
    """Causal grouped-query attention, ``softmax(q k' * scale) v``.

    `choose` takes cuDNN, JAX's Splash attention for TPUs, or XLA. All accumulate in
    float32. For the backward pass cuDNN and Splash save their operands, their output
    and a float32 statistic per row; XLA saves the probabilities, [B, heads, S, S]. A
    warning says why XLA computes attention on a device that has another implementation.

    Args:
        q: Queries, bfloat16 or float32 [B, S, heads, head_dim].
        k: Keys, [B, T, kv_heads, head_dim]; ``kv_heads`` divides ``heads``.
        v: Values, with the shape and dtype of ``k``.
        start: The position of the first query, with keys and values in a cache, as XLA
            ops. None without a cache: T is S.
        scale: Multiplies the scores; None means ``1 / sqrt(head_dim)``.
        window: The keys that a query sees, up to and including its own; None means all.
        softcap: Scaled scores become ``softcap * tanh(score / softcap)``.

    Returns:
        An array [B, S, heads * head_dim] of the dtype of ``q``.
    """
    if start is not None:
        return _as_xla_ops(q, k, v, start, scale, window, softcap)
    chosen, problem = choose(q.dtype, q.shape[1], q.shape[-1], softcap)
    if problem is not None and q.shape[1] > 1:  # not in the trace of parameters
        saved = "which save the probabilities for the backward pass"
        warnings.warn(f"attention runs as XLA ops, {saved}: {problem}", stacklevel=2)
    if chosen == "splash":
        return _splash(q, k, v, scale, window, softcap)
    if softcap is not None:
        return _as_xla_ops(q, k, v, 0, scale, window, softcap)
    # JAX's attention relies on implicit promotion, which strict promotion forbids.
    with jax.numpy_dtype_promotion("standard"):
        out = jax.nn.dot_product_attention(
            *(q, k, v),
            scale=scale,
            is_causal=True,
            local_window_size=None if window is None else (window - 1, 0),
            implementation=chosen,
        )
    return out.reshape(*q.shape[:2], -1)


def _as_xla_ops(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    start: jax.Array | int,
    scale: float | None,
    window: int | None,
    softcap: float | None,
) -> jax.Array:
    """`attend` for queries from ``start`` on; keys of later positions are not seen."""
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
    product, dtype = "bkgqs,bskd->bqkgd", jnp.float32
    out = jnp.einsum(product, probabilities, v, preferred_element_type=dtype)
    return out.reshape(batch, seq, heads * head_dim).astype(v.dtype)


def choose(
    dtype: Any, seq: int, head_dim: int, softcap: float | None = None
) -> tuple[Literal["cudnn", "splash", "xla"], str | None]:
    """Chooses the implementation of attention on JAX's default backend.

    Also says why it is not the one that the device has; None if it is, or if the device
    has none for the dtype.
    """
    if jax.default_backend() == "tpu":
        if seq % _LANES == 0 and dtype != jnp.float16:
            return "splash", None
        return "xla", (
            "JAX's attention for TPUs takes bfloat16 or float32, and multiples of "
            f"{_LANES} tokens, got {dtype} and {seq} tokens"
        )
    # An AMD GPU has a name in place of numbers, such as "gfx942".
    capability = getattr(jax.devices()[0], "compute_capability", "")
    digits = re.fullmatch(r"(\d+)\.\d+", capability)
    has_cudnn = jax.default_backend() == "gpu" and digits and int(digits[1]) >= 8
    if not has_cudnn or dtype not in (jnp.bfloat16, jnp.float16):
        return "xla", None
    if softcap is not None:
        return "xla", "JAX's cuDNN attention has no soft cap"
    # JAX differentiates cuDNN's attention for even lengths only.
    if head_dim % 8 == 0 < head_dim <= 128 and seq % 2 == 0:
        return "cudnn", None
    return "xla", (
        "JAX's cuDNN attention takes heads of up to 128 channels, a multiple of 8, and "
        f"an even number of tokens, got {head_dim} channels and {seq} tokens"
    )


def _splash(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    scale: float | None,
    window: int | None,
    softcap: float | None,
) -> jax.Array:
    """`attend` by JAX's kernels for TPUs, on each device's sequences and heads."""
    _, seq, heads, head_dim = q.shape
    q = (q * (scale or head_dim**-0.5)).astype(q.dtype)
    names: mesh.Names = "batch", None, "heads", None
    if mesh.spec(q.shape, names) != mesh.spec(k.shape, names):
        names = "batch", None, None, None  # devices do not divide the heads of keys
    mask: splash.Mask = splash.CausalMask((seq, seq))
    if window is not None:
        mask = splash.LocalMask((seq, seq), (window - 1, 0), 0)
    side = next(side for side in (512, 256, _LANES) if seq % side == 0)
    sides = ("q", "kv", "q_dkv", "kv_dkv", "q_dq", "kv_dq")
    blocks: dict[str, Any] = {f"block_{name}": side for name in sides}

    def attend_shard(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        kernel = splash.make_splash_mha_single_device(
            splash.MultiHeadMask([mask] * q.shape[2]),
            block_sizes=splash.BlockSizes(**blocks),
            attn_logits_soft_cap=softcap,
        )
        out: jax.Array = jax.vmap(kernel)(*(x.swapaxes(1, 2) for x in (q, k, v)))
        return out.swapaxes(1, 2)

    run = mesh.on_shards(attend_shard, [names] * 3, names)
    return run(q, k, v).reshape(*q.shape[:2], heads * head_dim)
