"""The attention core: flash attention by cuDNN or for TPUs, or XLA."""

import functools
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
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
) -> jax.Array:
    """Causal grouped-query attention, ``softmax(q k' * scale) v``.

    `implementation` chooses between cuDNN, JAX's Splash attention for TPUs, and XLA.
    All accumulate in float32, and their results differ by rounding. For the backward
    pass cuDNN and Splash save their operands, their output and a float32 statistic per
    row; XLA saves the probabilities, [B, heads, S, S]. cuDNN has no soft cap. On a TPU,
    and on a GPU that has cuDNN, a warning says why XLA computes attention.

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
    if problem := _problem(q, chosen, softcap):
        warnings.warn(
            "attention runs as XLA ops, which save the probabilities, [B, heads, S, "
            f"S], for the backward pass: {problem}",
            stacklevel=2,
        )
    if chosen == "splash":
        return _splash(q, k, v, scale=scale, window=window, softcap=softcap)
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
            implementation=chosen,
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


def implementation(
    dtype: Any, seq: int, head_dim: int
) -> Literal["cudnn", "splash", "xla"]:
    """Chooses the implementation of attention on JAX's default backend.

    Args:
        dtype: The dtype of q, k and v.
        seq: The length of the sequences.
        head_dim: The width of one head.

    Returns:
        ``"cudnn"`` if all of the following hold: the device is an NVIDIA GPU of compute
        capability 8.0 or above; the dtype is bfloat16 or float16; ``head_dim`` is a
        multiple of 8 up to 128, which cuDNN supports on all of these GPUs; ``seq`` is
        even, as JAX requires to differentiate cuDNN's attention. ``"splash"`` on a TPU
        if ``seq`` is a multiple of 128 and the dtype is not float16. Else ``"xla"``.
    """
    if jax.default_backend() == "tpu":
        fits = seq % _LANES == 0 and dtype != jnp.float16
        return "splash" if fits else "xla"
    fits = head_dim % 8 == 0 < head_dim <= 128 and seq % 2 == 0
    return "cudnn" if fits and _has_cudnn(dtype) else "xla"


def _problem(q: jax.Array, chosen: str, softcap: float | None) -> str | None:
    """What keeps the device's own attention from being used; None if it has none."""
    _, seq, _, head_dim = q.shape
    if seq == 1:  # as in the trace of parameters
        return None
    if jax.default_backend() == "tpu":
        if chosen == "splash":
            return None
        return (
            "JAX's attention for TPUs takes bfloat16 or float32, and multiples of "
            f"{_LANES} tokens, got {q.dtype} and {seq} tokens"
        )
    if not _has_cudnn(q.dtype):
        return None
    if softcap is not None:
        return "JAX's cuDNN attention has no soft cap"
    if chosen == "cudnn":
        return None
    return (
        "JAX's cuDNN attention takes heads of up to 128 channels, a multiple of 8, and "
        f"an even number of tokens, got {head_dim} channels and {seq} tokens"
    )


def _splash(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    scale: float | None,
    window: int | None,
    softcap: float | None,
) -> jax.Array:
    """`attend` by JAX's kernels for TPUs, on each device's sequences and heads."""
    _, _, heads, head_dim = q.shape
    q = (q * (scale or head_dim**-0.5)).astype(q.dtype)
    names = "batch", None, "heads", None
    specs = [mesh.spec(x.shape, names) for x in (q, k)]
    if specs[0] != specs[1]:  # Devices do not divide the heads of keys.
        specs = [mesh.spec(x.shape, ("batch", None, None, None)) for x in (q, k)]
    attend_shard = functools.partial(_splash_shard, window=window, softcap=softcap)
    if not jax.sharding.get_abstract_mesh().empty:
        attend_shard = jax.shard_map(
            attend_shard,
            in_specs=(specs[0], specs[1], specs[1]),
            out_specs=specs[0],
            check_vma=False,
        )
    return attend_shard(q, k, v).reshape(*q.shape[:2], heads * head_dim)


def _splash_shard(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    window: int | None,
    softcap: float | None,
) -> jax.Array:
    """Attention of scaled queries, of the shape and dtype of ``q``."""
    _, seq, heads, _ = q.shape
    side = next(side for side in (512, 256, _LANES) if seq % side == 0)
    mask: splash.Mask = splash.CausalMask((seq, seq))
    if window is not None:
        mask = splash.LocalMask((seq, seq), (window - 1, 0), 0)
    kernel = splash.make_splash_mha_single_device(
        splash.MultiHeadMask([mask] * heads),
        block_sizes=splash.BlockSizes(
            block_q=side,
            block_kv=side,
            block_q_dkv=side,
            block_kv_dkv=side,
            block_q_dq=side,
            block_kv_dq=side,
        ),
        attn_logits_soft_cap=softcap,
    )
    by_head = (x.swapaxes(1, 2) for x in (q, k, v))
    out: jax.Array = jax.vmap(kernel)(*by_head)
    return out.swapaxes(1, 2)


def _has_cudnn(dtype: Any) -> bool:
    """Whether cuDNN computes attention in a dtype on JAX's default backend."""
    if dtype not in (jnp.bfloat16, jnp.float16) or jax.default_backend() != "gpu":
        return False
    # An AMD GPU has a name here, such as "gfx942".
    capability = getattr(jax.devices()[0], "compute_capability", "")
    digits = re.fullmatch(r"(\d+)\.\d+", capability)
    return digits is not None and int(digits[1]) >= 8
