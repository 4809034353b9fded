"""The reference quantizes to the same bits on a GPU and on a CPU."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fbq_jax.kernels import reference
from fbq_jax.kernels.quantized import Layout
from fbq_jax.kernels.sources import Matrix
from tests.kernels.quantize_cases import heavy

SEEDS = jnp.asarray([1, 2**32 - 1], jnp.uint32)
THETA = jnp.asarray([20.0, 2.0], jnp.float32)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("block", [(128, 128), (32, 256)])
@pytest.mark.parametrize("scale", [1.0, 2.0**-10])
def test_codes_and_scales_equal_those_of_the_cpu(dtype, block, scale):
    x = (heavy((2, 1000, 1500)) * scale).astype(dtype)
    nearest, stochastic = (Layout(mode, block) for mode in ("nearest", "stochastic"))
    calls = [
        {"rowwise": nearest, "colwise": nearest},
        {"rowwise": stochastic, "colwise": stochastic},
        {
            "rowwise": Layout("nearest", (1, None)),
            "colwise": Layout("stochastic", (None, 1)),
        },
        {"rowwise": nearest, "colwise": stochastic, "criterion": "absmax"},
    ]
    for options in calls:
        theta = THETA * scale if "criterion" in options else None
        results = {}
        for platform in ("cpu", "gpu"):
            device = jax.devices(platform)[0]
            with jax.default_device(device):
                function = jax.jit(functools.partial(reference.quantize, **options))
                operands = jax.device_put((Matrix(x), SEEDS, theta), device)
                results[platform] = function(*operands)
        jax.tree.map(np.testing.assert_array_equal, results["gpu"], results["cpu"])
