"""The Llama of the example is served as it was trained."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

import fbq_jax
from examples.llama import checkpoint
from examples.llama.model import Llama, LlamaConfig
from fbq_jax import FallbackDot, Recipe

CONFIG = LlamaConfig(
    vocab_size=64,
    hidden_size=64,
    intermediate_size=96,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    qkv_bias=True,
    saved_bits=10,
    remat="codes",
)
TOKENS = jnp.arange(24).reshape(2, 12)


def test_a_llama_freezes_is_saved_and_serves_the_same_logits(tmp_path: Path) -> None:
    model = Llama(CONFIG, FallbackDot(Recipe(block=32)))
    variables = jax.jit(model.init)(jax.random.key(0), TOKENS)
    forward = jax.jit(lambda v: model.apply(v, TOKENS, mutable=["fallback"]))
    variables = {**variables, **forward(variables)[1]}
    logits, _ = forward(variables)

    def abstract() -> dict:
        return fbq_jax.freeze(model, model.init(jax.random.key(0), TOKENS), TOKENS)

    like = jax.eval_shape(abstract)
    frozen = fbq_jax.freeze(model, variables, TOKENS)
    checkpoint.save(tmp_path, 1, frozen)
    loaded = checkpoint.restore(tmp_path, like)
    np.testing.assert_array_equal(jax.jit(model.apply)(loaded, TOKENS), logits)
    floats = {path[0].key for path, _ in jax.tree.leaves_with_path(frozen["params"])}
    assert floats == {"embed", "layers", "lm_head", "norm"}
    kernels = jax.tree.leaves(frozen["params"]["layers"]["mlp"]["down"])
    assert not kernels
