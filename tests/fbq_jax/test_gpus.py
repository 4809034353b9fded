"""A layer on all GPUs of a machine is the one of a single GPU, by each recipe."""

import jax
import jax.numpy as jnp
import pytest

from fbq_jax import recipes
from tests.fbq_jax.test_dot_general import product
from tests.fbq_jax.test_sharding import assert_close, mesh_of, place
from tests.kernels.test_reference import heavy

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(jax.device_count() < 2, reason="needs several devices"),
]


@pytest.mark.parametrize("name", recipes.NAMED)
@pytest.mark.parametrize("blocks", ["whole", "shared"])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.filterwarnings("ignore:quantize.*agree on its scales:UserWarning")
def test_layer(name, blocks, dtype):
    """FSDP, whose devices have whole blocks of W's rows or agree on shared ones."""
    devices = jax.device_count()
    rows = {"whole": 2 * 128, "shared": 128 + 64}[blocks]
    tokens, inputs, outputs = devices * 256, devices * rows, 384
    operands = [
        heavy(shape, seed).astype(dtype)
        for seed, shape in enumerate(
            [(tokens, inputs), (inputs, outputs), (tokens, outputs)]
        )
    ]
    mesh = mesh_of(fsdp=devices)
    sharded = [place(mesh, x, "fsdp") for x in operands]

    def step(x, w, dy):
        recipe = recipes.NAMED[name]
        return product(x, w, dy, recipe=recipe, theta=100.0, key=jax.random.key(0))

    shardings = tuple(sharded[i].sharding for i in (2, 0, 1))
    got = jax.jit(step, out_shardings=shardings)(*sharded)
    # What each device adds to dW is rounded to bfloat16, if that is the dtype.
    rtol = {jnp.float32: 1e-5, jnp.bfloat16: 1e-2}[dtype]
    assert_close(got, jax.jit(step)(*operands), rtol=rtol)
