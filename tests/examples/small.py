"""A small Llama."""

import jax
import jax.numpy as jnp
import numpy as np

from examples.llama.model import Llama
from examples.llama.model_config import LlamaConfig

SIZES = {
    "vocab_size": 40,
    "hidden_size": 32,
    "intermediate_size": 24,
    "num_layers": 3,
    "num_heads": 4,
    "num_kv_heads": 2,
}


def small_config(**changes):
    return LlamaConfig(**(SIZES | changes))


def random_params(config):
    """Parameters that need no compiled initializer."""
    tokens = jax.ShapeDtypeStruct((1, 1), jnp.int32)
    shapes = jax.eval_shape(Llama(config).init, jax.random.key(0), tokens)["params"]
    draw = np.random.default_rng(0).normal
    params = jax.tree.map(lambda x: draw(0, 0.2, x.shape).astype(x.dtype), shapes)
    return jax.device_put(params)
