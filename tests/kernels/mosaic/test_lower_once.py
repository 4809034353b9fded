"""Programs share their Mosaic kernels."""

import functools
import re
from concurrent import futures

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

from fbq_jax.kernels.mosaic import gemm, gemm_kernel, lower_once
from fbq_jax.ops.backends import MOSAIC_JAX
from tests.kernels.gemm_cases import shapes

CODES = shapes((1, 256, 256), (128, 128))


def kernels_of(function, *args):
    """The hashes by which XLA knows the kernels of a program."""
    program = jax.jit(function).trace(*args).lower(lowering_platforms=("cuda",))
    return re.findall(r'kernel_hash = ("[^"]*")', program.as_text())


def multiply(lhs, rhs):
    return gemm.matmul(lhs, rhs, dtype=jnp.float32)


@pytest.mark.skipif(jax.__version_info__ < MOSAIC_JAX, reason="needs a newer jax")
def test_programs_share_one_kernel(monkeypatch):
    lowered = []
    produce = gemm_kernel.produce
    monkeypatch.setattr(
        gemm_kernel, "produce", lambda *args: lowered.append(produce(*args))
    )
    monkeypatch.setattr(gemm, "_num_sms", lambda: 4)
    first = kernels_of(lambda x, y: multiply(x, y) + multiply(y, x), CODES, CODES)
    second = kernels_of(multiply, CODES, CODES)
    assert second
    assert set(first) == set(second)
    assert len(lowered) == 1


def test_threads_share_one_kernel():
    shapes = (((4,), jnp.dtype(jnp.float32)),)
    call = jnp.square, jax.tree.structure(0), shapes
    with futures.ThreadPoolExecutor(4) as pool:
        exported = [pool.submit(lower_once._export, *call) for _ in range(4)]
    assert len({id(found.result()) for found in exported}) == 1


@pytest.mark.parametrize("devices", [1, 2])
def test_programs_for_several_devices_have_another_kernel(devices):
    out = jax.ShapeDtypeStruct((4,), jnp.float32)
    mesh, spec = Mesh(np.array(jax.devices()[:devices]), "x"), PartitionSpec("x")

    @jax.jit
    @functools.partial(
        jax.shard_map, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False
    )
    def program(x):
        call = lower_once.call_lowered_once
        return call(jnp.sin, x, out, on_several_devices=jnp.cos)

    x = jax.ShapeDtypeStruct((4 * devices,), jnp.float32)
    text = program.trace(x).lower(lowering_platforms=("cuda",)).as_text()
    assert ("stablehlo.sine" in text) == (devices == 1)
    assert ("stablehlo.cosine" in text) == (devices > 1)


def test_a_kernel_is_for_one_device_in_any_mesh():
    x = jnp.ones(4)
    with jax.set_mesh(Mesh(np.array(jax.devices()), ("data",))):
        shapes = ((x.shape, x.dtype),)
        exported = lower_once._export(jnp.negative, jax.tree.structure(x), shapes)
    assert exported.nr_devices == 1
