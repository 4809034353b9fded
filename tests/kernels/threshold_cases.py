"""Cases for implementations of ``move_threshold``."""

import functools
import types

import jax
import jax.numpy as jnp
import numpy as np

from fbq_jax.kernels import threshold_reference

THETAS = (-1.0, 0.0, 1e-3, 1.0, 1e9, np.inf, np.nan)
OPTIONS = {"target_rate": (0.1, 0.3), "alpha": 1.3}


def _ordinary(rng: np.random.Generator, shape: tuple[int, int]) -> np.ndarray:
    return np.exp(rng.normal(size=shape))


def _with_nan(rng: np.random.Generator, shape: tuple[int, int]) -> np.ndarray:
    metric = _ordinary(rng, shape)
    metric[0, rng.integers(shape[1])] = np.nan
    return metric


def _mostly_zero(rng: np.random.Generator, shape: tuple[int, int]) -> np.ndarray:
    return np.where(rng.random(shape) < 0.9, 0.0, _ordinary(rng, shape))


def _few(rng: np.random.Generator, shape: tuple[int, int]) -> np.ndarray:
    """A different number of blocks that are not zero for each threshold."""
    count = np.minimum(np.arange(shape[0]) ** 2, shape[1])[:, None]
    return np.where(np.arange(shape[1]) < count, _ordinary(rng, shape), 0.0)


def _tied(rng: np.random.Generator, shape: tuple[int, int]) -> np.ndarray:
    return np.where(rng.random(shape) < 0.25, 6.0, np.minimum(_ordinary(rng, shape), 5))


METRICS = {
    "ordinary": _ordinary,
    "with a NaN": _with_nan,
    "mostly zero": _mostly_zero,
    "few": _few,
    "tied": _tied,
    "subnormal": lambda rng, shape: 2.0**-126 * rng.random(shape).round(2) * 2,
    "zero": lambda _, shape: np.zeros(shape),
    "equal": lambda _, shape: np.ones(shape),
    "largest": lambda rng, shape: 3.4e38 * rng.random(shape),
}


_reference = jax.jit(functools.partial(threshold_reference.move_threshold, **OPTIONS))


def check(ops: types.ModuleType, name: str, size: int) -> None:
    """Compares every threshold of ``THETAS`` with the reference."""
    rng = np.random.default_rng(0)
    shape = len(THETAS), size
    metric = jnp.asarray(METRICS[name](rng, shape), jnp.float32)
    scales = jnp.asarray(rng.random(shape), jnp.float32)
    theta = jnp.asarray(THETAS, jnp.float32)
    blocks = jnp.full(len(THETAS), size, jnp.int32)
    above = jnp.full(len(THETAS), min(round(0.2 * size), size - 1), jnp.int32)
    count = jnp.arange(len(THETAS), dtype=jnp.uint32)
    operands = metric, scales, theta, blocks, above, count
    want = _reference(*operands)
    for rate in (None, jnp.full(len(THETAS), 0.5)):
        got = ops.move_threshold(*operands, rate, **OPTIONS)
        jax.tree.map(np.testing.assert_array_equal, got, want)
