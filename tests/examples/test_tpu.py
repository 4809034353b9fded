"""The training step compiles for meshes of TPUs."""

import re
from functools import partial

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding

from examples.llama import generate, mesh
from examples.llama.config import RECIPES, Config
from examples.llama.generate import Sampling
from examples.llama.model import Llama, empty_cache
from examples.llama.model_config import LlamaConfig
from examples.llama.step import make_initializer, make_optimizer, make_train_step
from tests.kernels import tpu_tools
from tests.kernels.tpu_tools import needs_compiler, on_tpu  # noqa: F401 (a fixture)

pytestmark = [
    needs_compiler,
    pytest.mark.usefixtures("on_tpu"),
    pytest.mark.exhaustive,
    pytest.mark.filterwarnings("ignore:norms and gates pack"),
    # Over several TPUs, XLA partitions what has scales of whole rows.
    pytest.mark.filterwarnings("ignore:.* runs as jax.numpy code in this program"),
]
CONFIG = LlamaConfig(
    vocab_size=1024,
    hidden_size=512,
    intermediate_size=1024,
    num_layers=2,
    num_heads=4,
    num_kv_heads=4,
    max_seq_len=512,
    dtype=jnp.bfloat16,
    saved_bits=10,
)


def place(devices, x, spec):
    sharding = NamedSharding(devices, spec)
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)


@pytest.mark.parametrize(
    ("generation", "sizes"),
    [("v5e", {"data": 2, "fsdp": 2, "tensor": 2}), ("v6e", {"data": 2, "fsdp": 4})],
)
def test_the_step_compiles(generation, sizes):
    devices = tpu_tools.mesh_of(generation, sizes)
    model = Llama(CONFIG, RECIPES["rowwise"])
    optimizer, schedule = make_optimizer(Config(steps=10))
    step = make_train_step(model, optimizer, schedule)
    # A mesh of devices that are not here cannot be set.
    with jax.sharding.use_abstract_mesh(devices.abstract_mesh):
        key = jax.eval_shape(lambda: jax.random.key(0))
        state = jax.eval_shape(make_initializer(model, optimizer), key, None)
        tokens = jax.ShapeDtypeStruct((1, 8, 513), jnp.int32)
        specs = mesh.specs(state), mesh.spec(tokens.shape, (None, "batch", None))
        arguments = jax.tree.map(partial(place, devices), (state, tokens), specs)
        with jax.numpy_dtype_promotion("standard"):  # optax needs it
            text = step.lower(*arguments).compile().as_text()
    assert "%splash_mha" in text
    assert "highest" not in text
    gathered = re.findall(r" = (\w+)\[[\d,]*\]\S* all-gather(?:-start)?\(", text)
    assert "s8" in gathered


def test_generating_compiles():
    devices = tpu_tools.mesh_of("v5e", {"data": 4, "tensor": 2})
    model, how = Llama(CONFIG, RECIPES["rowwise"]), Sampling()
    with jax.sharding.use_abstract_mesh(devices.abstract_mesh):
        key = jax.eval_shape(lambda: jax.random.key(0))
        tokens = jax.ShapeDtypeStruct((1, 128), jnp.int32)
        variables = jax.eval_shape(model.init, key, tokens)
        specs = mesh.specs(variables)
        variables = jax.tree.map(partial(place, devices), variables, specs)
        cache = jax.eval_shape(lambda: empty_cache(CONFIG, 1, 256))
        for text in (tokens, jax.ShapeDtypeStruct((1, 1), jnp.int32)):
            program = generate.draw.lower(model, how, variables, text, cache, key)
            program = program.compile().as_text()
            assert "s8[" in program
            assert "highest" not in program
