"""Programs for several devices that are compiled ahead of time and stored."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from jax.experimental import serialize_executable

from fbq_jax import FallbackDot, recipes
from tests.fbq_jax.sharding.tools import mesh_of, needs_devices, place
from tests.marks import with_first_fast

pytestmark = needs_devices


@pytest.mark.parametrize(
    "name", with_first_fast(["fallback", "block", "rowwise", "fp8_row_block_lhs"])
)
def test_a_stored_training_step_returns_the_same(name):
    layer = nn.Dense(256, dot_general=FallbackDot(getattr(recipes, name)))
    x = jax.random.normal(jax.random.key(0), (512, 256))
    variables = jax.jit(layer.init)(jax.random.key(1), x)

    def step(variables, x):
        def loss(variables):
            y, state = layer.apply(variables, x, mutable=["fallback"])
            return jnp.sum(y**2), state

        return jax.value_and_grad(loss, has_aux=True, allow_int=True)(variables)

    operands = variables, place(mesh_of(), x, "data", "tensor")
    compiled = jax.jit(step).lower(*operands).compile()
    stored = serialize_executable.serialize(compiled)
    loaded = serialize_executable.deserialize_and_load(*stored)
    jax.tree.map(np.testing.assert_array_equal, loaded(*operands), compiled(*operands))
