"""Independence of the noise of devices, lanes, layers and steps, all in one training.

Each draw has the same data: the gradient of a kernel is ``X' . C`` for every device,
lane, layer and step, whatever the kernel.  Its errors differ by noise only.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from jax.sharding import PartitionSpec as P

from fbq_jax import FallbackDot, Recipe, fallback_stats
from tests.fbq_jax.sharding.tools import mesh_of, needs_devices

pytestmark = needs_devices

DEVICES, LANES, SCANNED, STEPS = 2, 2, 2, 3
ROWS, K, N = 64, 64, 32
X = jax.random.normal(jax.random.key(0), (ROWS, K))
C = jax.random.normal(jax.random.key(1), (ROWS, N))
EXACT = np.asarray(X).T @ np.asarray(C)
# The largest of 630 correlations is 0.09.  It is 0.5 where the noise of X or that of dY
# repeats, and 1 where both do.
LARGEST_CORRELATION = 0.3


class Layers(nn.Module):
    """Layers that have one input: a stack, and a layer of its own."""

    @nn.compact
    def __call__(self, x):
        dot = FallbackDot(Recipe(block=32, criterion=None))
        dense = functools.partial(nn.Dense, N, use_bias=False, dot_general=dot)
        stack = nn.scan(
            lambda layer, x, _: (x, layer(x)),
            variable_axes={"params": 0, "fallback": 0},
            split_rngs={"params": True},
            length=SCANNED,
        )
        _, ys = stack(dense(name="stack"), x, None)
        return jnp.sum(ys, 0) + dense(name="alone")(x)


MODEL = nn.vmap(
    Layers,
    variable_axes={"params": 0, "fallback": 0},
    split_rngs={"params": False},
    axis_size=LANES,
)()
BATCH = jnp.broadcast_to(X, (DEVICES, LANES, ROWS, K))


def train_step(variables, x):
    """The variables after a step, and each device's own gradients."""

    def loss(params):
        state = {"fallback": variables["fallback"]}
        y, updates = MODEL.apply({"params": params, **state}, x[0], mutable="fallback")
        return jnp.sum(y * C[None]), updates

    grads, updates = jax.grad(loss, has_aux=True)(variables["params"])
    mean, updates = jax.lax.pmean((grads, updates), "data")
    params = jax.tree.map(lambda w, g: w - 1e-3 * g, variables["params"], mean)
    return {"params": params, **updates}, jax.tree.map(lambda g: g[None], grads)


def errors():
    """The errors of the kernels' gradients: a row for each draw."""
    specs = {"in_specs": (P(), P("data")), "out_specs": (P(), P("data"))}
    mesh = mesh_of(data=DEVICES)
    step = jax.jit(jax.shard_map(train_step, mesh=mesh, check_vma=False, **specs))
    variables = jax.jit(MODEL.init)(jax.random.key(2), BATCH[0])
    rows = []
    for _ in range(STEPS):
        variables, grads = step(variables, BATCH)
        for grad in jax.tree.leaves(grads):
            rows.append(np.reshape(np.asarray(grad) - EXACT, (-1, K * N)))
    assert all(np.all(s.count == STEPS) for s in fallback_stats(variables).values())
    return np.concatenate(rows)


def largest_correlation():
    correlations = np.abs(np.corrcoef(errors()))
    assert len(correlations) == DEVICES * LANES * (SCANNED + 1) * STEPS
    return np.max(correlations - np.eye(len(correlations)))


@pytest.mark.exhaustive  # test_manual_axes.py compares devices
def test_no_two_draws_have_the_same_noise():
    assert largest_correlation() < LARGEST_CORRELATION
