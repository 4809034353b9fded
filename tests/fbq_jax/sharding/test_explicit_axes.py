"""Layers over explicit mesh axes, other than those with a ``FallbackDot``."""

import jax
import jax.numpy as jnp
import pytest
from flax import linen as nn
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from fbq_jax import (
    FallbackDot,
    Fp8Dot,
    GatedMLP,
    Int8Attention,
    Int8MLP,
    Int8Sequential,
    MoEMLP,
    NormDense,
    Recipe,
    Routing,
    SmoothSwiGLU,
    fp8_dot,
    freeze,
    llm_int8_dot,
    nonlinear,
)
from tests.fbq_jax.sharding.tools import assert_close, mesh_of, needs_devices
from tests.marks import with_first_fast

pytestmark = needs_devices

X = jax.random.normal(jax.random.key(0), (4, 32, 128))
W = jax.random.normal(jax.random.key(1), (128, 64))
DOT = FallbackDot(Recipe(block=32))


def grads_of(layer, variables, x):
    """The gradients of all floats."""

    def loss(args):
        return jnp.sum(jnp.sin(layer.apply(*args, mutable=["fallback"])[0]))

    grads = jax.jit(jax.grad(loss, allow_int=True))((variables, x))
    return jax.tree.map(lambda g: g if g.dtype == jnp.float32 else None, grads)


EXPLICIT = AxisType.Explicit, AxisType.Explicit
MIXED = AxisType.Explicit, AxisType.Auto
LAYERS = {
    "dense": (MIXED, nn.Dense(32, dot_general=DOT)),
    "norm_dense": (MIXED, NormDense(32, dot_general=DOT)),
    "gated_mlp": (MIXED, GatedMLP(64, dot_general=DOT)),
    "llm_int8": (EXPLICIT, nn.Dense(32, dot_general=llm_int8_dot)),
    "fp8": (EXPLICIT, nn.Dense(32, dot_general=fp8_dot)),
    "int8_mlp": (EXPLICIT, Int8MLP(48)),
    "int8_mlp mixed": (MIXED, Int8MLP(48)),
    "int8_attention": (EXPLICIT, Int8Sequential([Int8Attention(4), Int8MLP(48)])),
    "smooth_swiglu": (EXPLICIT, SmoothSwiGLU(48, smooth="per_token")),
}


@pytest.mark.parametrize("name", with_first_fast(LAYERS, fast=5))
def test_a_sharded_batch(name):
    """Also over a mesh with an automatic axis."""
    types, layer = LAYERS[name]
    variables = jax.jit(layer.init)(jax.random.key(2), X)
    want = grads_of(layer, variables, X)
    with jax.set_mesh(jax.make_mesh((2, 2), ("data", "tensor"), axis_types=types)):
        x = jax.device_put(X, P("data", None, None))
        got = grads_of(layer, variables, x)
        assert jax.typeof(got[1]).sharding.spec == P("data", None, None)
    assert_close(got, want)


@pytest.mark.parametrize("dot", [llm_int8_dot, Fp8Dot(scaling="current")])
def test_sharded_columns_and_a_sharded_contraction(dot):
    dims = (((2,), (0,)), ((), ()))
    mesh = mesh_of(AxisType.Explicit, data=2, tensor=2)
    with jax.set_mesh(mesh):
        x = jax.device_put(X, P("data", None, None))
        w = jax.device_put(W, P(None, "tensor"))
        y = jax.jit(lambda x, w: dot(x, w, dims))(x, w)
        assert jax.typeof(y).sharding.spec == P("data", None, "tensor")
        x = jax.device_put(X, P("data", None, "tensor"))
        w = jax.device_put(W, P("tensor", None))
        z = jax.jit(lambda x, w: dot(x, w, dims, out_sharding=P("data", None, None)))(
            x, w
        )
        assert jax.typeof(z).sharding.spec == P("data", None, None)
    want = dot(X, W, dims)
    assert_close((y, z), (want, want))


@pytest.mark.parametrize("channels", with_first_fast([384, 96, 512]))
@pytest.mark.parametrize(
    ("function", "specs"),
    [
        (nonlinear.gelu, [P("data", "tensor")]),
        (nonlinear.silu_gate, [P("data", "tensor"), P("data", None)]),
        (nonlinear.rms_norm, [P("data", "tensor"), P(None)]),
        (nonlinear.rms_norm, [P("data", None), P("tensor")]),
        (nonlinear.layer_norm, [P(None, "tensor"), P("data"), P("tensor")]),
    ],
    ids=["gelu", "gate", "norm", "sharded_scale", "layer_norm"],
)
def test_norms_and_gates_of_sharded_channels(function, specs, channels):
    """Also where devices do not hold whole groups of 128 channels."""

    def loss(*operands):
        return jnp.sin(function(*operands)).sum()

    of = jax.jit(jax.value_and_grad(loss, argnums=range(len(specs))))
    keys = jax.random.split(jax.random.key(0), len(specs))
    shapes = [(8, channels)[-len(spec) :] for spec in specs]
    operands = [jax.random.normal(*args) for args in zip(keys, shapes, strict=True)]
    want = of(*operands)
    with jax.set_mesh(mesh_of(AxisType.Explicit, data=2, tensor=2)):
        got = of(*map(jax.device_put, operands, specs))
        for gradient, spec in zip(got[1], specs, strict=True):
            assert jax.typeof(gradient).sharding.spec == spec
    # Sums in another order can change a code of 10 bits.
    assert_close(got, want, rtol=1e-3)


def test_a_frozen_norm_and_dense():
    layer = NormDense(64, dot_general=FallbackDot(Recipe(block=32)))
    x = X.reshape(128, 128)
    variables = jax.jit(layer.init)(jax.random.key(2), x)
    _, state = jax.jit(lambda v: layer.apply(v, x, mutable=["fallback"]))(variables)
    frozen = freeze(layer, {**variables, **state}, x)
    want = jax.jit(layer.apply)(frozen, x)
    with jax.set_mesh(mesh_of(AxisType.Explicit, data=2, tensor=2)):
        sharded = jax.device_put(x, P("data", None))
        got = jax.jit(layer.apply)(frozen, sharded)
        assert jax.typeof(got).sharding.spec == P("data", None)
    assert_close(got, want)


def test_tokens_of_experts_are_named():
    layer = MoEMLP(Routing(4), 32)
    with jax.set_mesh(mesh_of(AxisType.Explicit, data=2, tensor=2)):
        x = jax.device_put(X, P("data", None, None))
        with pytest.raises(ValueError, match=r"not sharded over explicit .*32\[4@data"):
            jax.eval_shape(layer.init, jax.random.key(0), x)
