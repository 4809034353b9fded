"""The reference quantizes to the same bits on a GPU and on a CPU."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fbq_jax.kernels import reference
from tests.kernels.test_reference import heavy

SEEDS = jnp.asarray([1, 2**32 - 1], jnp.uint32)
THETA = jnp.asarray([20.0, 2.0], jnp.float32)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("block", [(128, 128), (32, 256)])
@pytest.mark.parametrize("scale", [1.0, 2.0**-10])
def test_codes_and_scales_equal_those_of_the_cpu(dtype, block, scale):
    x = (heavy((2, 1000, 1500)) * scale).astype(dtype)
    ops = [
        functools.partial(
            reference.quantize, x, SEEDS, block=block, rowwise=mode, colwise=mode
        )
        for mode in ("nearest", "stochastic")
    ]
    ops.append(
        functools.partial(
            reference.quantize_vectors,
            x,
            SEEDS,
            rowwise="nearest",
            colwise="stochastic",
        )
    )
    ops.append(
        functools.partial(
            reference.quantize_fallback,
            x,
            THETA * scale,
            SEEDS,
            block=block,
            criterion="absmax",
            colwise="stochastic",
        )
    )
    for op in ops:
        results = {}
        for platform in ("cpu", "gpu"):
            device = jax.devices(platform)[0]
            with jax.default_device(device):
                function = jax.jit(functools.partial(op.func, **op.keywords))
                results[platform] = function(*jax.device_put(op.args, device))
        jax.tree.map(np.testing.assert_array_equal, results["gpu"], results["cpu"])
