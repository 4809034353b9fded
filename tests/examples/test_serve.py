"""A frozen Llama computes what it did in training, in half the bytes of bfloat16."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.traverse_util import flatten_dict
from safetensors import flax as safetensors

import fbq_jax
from examples.llama import checkpoint
from examples.llama.model import Llama
from fbq_jax import FallbackDot, Recipe
from fbq_jax.core.frozen_weight import FrozenKernel
from tests.examples.small import small_config
from tests.fbq_jax.linen.test_freezing import as_trained

# test_llama_export.py freezes a Llama, and linen/test_freezing.py smaller models.
pytestmark = pytest.mark.exhaustive

SIZES = {"hidden_size": 64, "intermediate_size": 96}  # whole blocks
CONFIG = small_config(**SIZES, qkv_bias=True, saved_bits=10, remat="codes")
MODEL = Llama(CONFIG, FallbackDot(Recipe(block=32)))
TOKENS = jnp.arange(24).reshape(2, 12)


class Case(NamedTuple):
    variables: dict
    frozen: dict


@pytest.fixture(scope="module")
def case():
    variables = as_trained(MODEL, TOKENS)
    return Case(variables, fbq_jax.freeze(MODEL, variables, TOKENS))


@pytest.fixture(scope="module")
def like():
    key = jax.random.key(0)
    return jax.eval_shape(
        lambda: fbq_jax.freeze(MODEL, MODEL.init(key, TOKENS), TOKENS)
    )


def test_a_saved_llama_serves_the_same_logits(case, like, tmp_path):
    checkpoint.save(tmp_path, 1, case.frozen)
    loaded = checkpoint.restore(tmp_path, like)
    logits = jax.jit(MODEL.apply)(loaded, TOKENS)
    assert np.isfinite(logits).all()
    training = jax.jit(lambda v: MODEL.apply(v, TOKENS, mutable=["fallback"])[0])
    np.testing.assert_array_equal(logits, training(case.variables))


def test_safetensors(case, like, tmp_path):
    name = jax.tree_util.keystr
    leaves = jax.tree.leaves_with_path(case.frozen)
    safetensors.save_file({name(path): x for path, x in leaves}, tmp_path / "frozen")
    arrays = safetensors.load_file(tmp_path / "frozen")
    loaded = jax.tree.map_with_path(lambda path, _: arrays[name(path)], like)
    assert jax.tree.structure(loaded) == jax.tree.structure(case.frozen)
    jax.tree.map(np.testing.assert_array_equal, loaded, case.frozen)


def test_projections_take_half_the_bytes_of_bfloat16(case):
    floats = flatten_dict(case.variables["params"])
    params = flatten_dict(case.frozen["params"])
    state = flatten_dict(case.frozen["fallback"])
    for path, kernel in floats.items():
        if path[-1] == "kernel" and path[0] == "layers":
            shape = params[path].shape
            assert isinstance(params[path], FrozenKernel)
            assert not jax.tree.leaves(params[path])
            assert (CONFIG.num_layers, *shape) == kernel.shape
            codes = jax.tree.leaves(state[(*path[:-1], "dot_general", "weight")])
            nbytes = sum(array.nbytes for array in codes)
            # A scale is 4 bytes, for the 32 x 32 codes of a block.
            assert 0.5 < nbytes / (2 * kernel.size) < 0.504
        else:
            assert params[path] is kernel


def test_statistics_match_training(case):
    before, after = map(fbq_jax.fallback_stats, (case.variables, case.frozen))
    assert jax.tree.all(jax.tree.map(jnp.array_equal, before, after))


def test_a_frozen_llama_does_not_train(case):
    with pytest.raises(ValueError, match="is frozen and does not train"):
        MODEL.apply(case.frozen, TOKENS, mutable=["fallback"])


def test_what_is_in_float_trains_through_a_frozen_llama(case):
    def loss(params):
        return jnp.mean(MODEL.apply({**case.frozen, "params": params}, TOKENS) ** 2)

    with jax.numpy_dtype_promotion("standard"):  # for the head, in float
        grads = flatten_dict(jax.jit(jax.grad(loss))(case.frozen["params"]), sep="/")
    for path, grad in grads.items():
        for leaf in jax.tree.leaves(grad):
            assert float(jnp.linalg.norm(leaf)) > 0, path
