"""Quantization of blocks of any magnitude that float32 has, in units of last place."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fbq_jax.kernels import reference
from fbq_jax.kernels.scales import TINY
from fbq_jax.kernels.sources import Matrix
from tests.kernels import quantize_cases

BLOCK = (32, 32)
EXPONENTS = [
    pytest.param(e, marks=[pytest.mark.exhaustive] * (e not in (-118, -60, 0, 126)))
    for e in range(-118, 127)
]


@jax.jit
def quantize(x):
    seeds, layout = jnp.zeros(1, jnp.uint32), quantize_cases.near(*BLOCK)
    return reference.quantize(Matrix(x), seeds, rowwise=layout, colwise=None).rowwise


def values(exponent):
    """Blocks with magnitudes below ``2**(exponent + 1)``, over 40 binades."""
    rng = np.random.default_rng(exponent + 200)
    x = rng.uniform(1.0, 2.0, (1, 64, 64)) * rng.choice([-1.0, 1.0], (1, 64, 64))
    x *= 2.0 ** -rng.integers(0, 40, x.shape)
    x[:, ::32, ::32] = rng.uniform(1.0, 2.0, (1, 2, 2))
    x = np.asarray(x * 2.0**exponent, np.float32)
    return np.where(np.abs(x) < 2.0**-126, np.float32(0.0), x)


@pytest.mark.parametrize("exponent", EXPONENTS)
def test_scales_are_exact_and_values_within_half_a_step(exponent):
    x = values(exponent)
    main = quantize(x)
    tiles = x.reshape(1, 2, 32, 2, 32).astype(np.float64)
    scales = np.abs(tiles).max((2, 4)) / 127
    ulp = np.spacing(scales.astype(np.float32))
    assert (np.abs(np.asarray(main.scales, np.float64) - scales) <= 0.5 * ulp).all()
    got = np.asarray(main.dequantize(), np.float64)
    # A product may be off by one unit in the last place of a code of 7 bits.
    step = np.repeat(np.repeat(scales, 32, 1), 32, 2)
    assert (np.abs(got - x) <= step * (0.5 + 127 * 2.0**-22)).all()
    assert np.abs(np.asarray(main.codes)).max() == 127


@pytest.mark.parametrize("amax", [np.float32(TINY) * (1 - 2.0**-24), 1e-37, 0.0])
def test_smaller_blocks_are_zero(amax):
    main = quantize(jnp.full((1, 32, 32), amax))
    assert not np.any(main.codes)
    assert not np.any(main.scales)


@pytest.mark.parametrize("criterion", ["l1", "l1_rel"])
def test_large_metrics(criterion):
    options = "criterion", "rowwise", "colwise"
    op = jax.jit(reference.quantize, static_argnames=options)
    quantize_cases.check_large_metrics(op, criterion)
