"""A frozen Llama computes what it did in training, in half the bytes of bfloat16."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.traverse_util import flatten_dict

import fbq_jax
from examples.llama import checkpoint
from examples.llama.model import Llama
from fbq_jax import FallbackDot, Recipe
from fbq_jax.core.frozen_weight import FrozenKernel
from tests.examples.small import small_config
from tests.fbq_jax.linen.test_freezing import as_trained

SIZES = {"hidden_size": 64, "intermediate_size": 96}  # whole blocks
CONFIG = small_config(**SIZES, qkv_bias=True, saved_bits=10, remat="codes")
MODEL = Llama(CONFIG, FallbackDot(Recipe(block=32)))
TOKENS = jnp.arange(24).reshape(2, 12)


# test_llama_export.py freezes a Llama, and linen/test_freezing.py smaller models.
@pytest.mark.exhaustive
def test_a_saved_frozen_llama_serves_the_same_logits_and_trains_its_floats(tmp_path):
    variables = as_trained(MODEL, TOKENS)
    frozen = fbq_jax.freeze(MODEL, variables, TOKENS)
    assert isinstance(frozen["params"]["layers"]["mlp"]["down"]["kernel"], FrozenKernel)
    stats = map(fbq_jax.fallback_stats, (variables, frozen))
    assert jax.tree.all(jax.tree.map(jnp.array_equal, *stats))

    checkpoint.save(tmp_path, 1, frozen)
    key = jax.random.key(0)
    like = jax.eval_shape(
        lambda: fbq_jax.freeze(MODEL, MODEL.init(key, TOKENS), TOKENS)
    )
    loaded = checkpoint.restore(tmp_path, like)
    logits = jax.jit(MODEL.apply)(loaded, TOKENS)
    assert np.isfinite(logits).all()
    training = jax.jit(lambda v: MODEL.apply(v, TOKENS, mutable=["fallback"])[0])
    np.testing.assert_array_equal(logits, training(variables))

    def loss(params):
        return jnp.mean(MODEL.apply({**frozen, "params": params}, TOKENS) ** 2)

    with jax.numpy_dtype_promotion("standard"):  # for the head, in float
        grads = flatten_dict(jax.jit(jax.grad(loss))(frozen["params"]), sep="/")
    for path, grad in grads.items():
        for leaf in jax.tree.leaves(grad):
            assert float(jnp.linalg.norm(leaf)) > 0, path
