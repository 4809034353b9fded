"""The keys and values of past tokens, which generation keeps."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from examples.llama.model_config import LlamaConfig


class KVCache(NamedTuple):
    """The keys and values of all layers, for the tokens so far.

    Attributes:
        keys: An array [L, B, S, kv_heads, head_dim] of the model's dtype, rotated.
        values: An array of the shape and dtype of ``keys``.
        length: The number of tokens so far, int32 []. Later positions have no meaning.
    """

    keys: jax.Array
    values: jax.Array
    length: jax.Array


def empty_cache(config: LlamaConfig, batch: int, size: int) -> KVCache:
    """Returns a cache for ``size`` tokens in each of ``batch`` sequences."""
    shape = config.num_layers, batch, size, config.num_kv_heads, config.head_dim
    keys, values = jnp.zeros((2, *shape), config.dtype)
    return KVCache(keys, values, jnp.zeros((), jnp.int32))
