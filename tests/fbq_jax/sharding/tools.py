"""What tests on several devices share."""

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

needs_devices = pytest.mark.skipif(
    jax.device_count() < 8, reason="needs eight devices, or none but CPUs"
)


def mesh_of(kind=AxisType.Auto, **sizes):
    sizes = sizes or {"data": 2, "fsdp": 2, "tensor": 2}
    kinds = (kind,) * len(sizes)
    return jax.make_mesh(tuple(sizes.values()), tuple(sizes), axis_types=kinds)


def place(mesh, x, *spec):
    return jax.device_put(x, NamedSharding(mesh, P(*spec)))


def assert_close(got, want, rtol=1e-5):
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        a, b = (np.asarray(leaf, np.float64) for leaf in (a, b))
        np.testing.assert_allclose(a, b, rtol=rtol, atol=rtol * np.abs(b).max())
