"""Every layer kind and every recipe: with 64-bit types, and without ``jit``."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx

import fbq_jax
from fbq_jax import (
    FallbackConv,
    FallbackDot,
    FallbackEinsum,
    Fp8Dot,
    Recipe,
    Routing,
    recipes,
)
from tests.kernels.quantize_cases import heavy
from tests.marks import with_first_fast

X, IMAGES = heavy((64, 32)), heavy((4, 4, 4, 32))
ROUTING = Routing(4, 2, bias_update_rate=1e-3)
OWG = "_overwrite_with_gradient"
RECIPES = {
    name: dataclasses.replace(recipe, block=32)
    for name, recipe in recipes.NAMED.items()
} | {name: Recipe(block=32, criterion=name) for name in ("l1", "l1_rel")}
HEADS = (32, 4, 8), "bd,dhk->bhk"

LINEN = {
    "Dense": lambda r: nn.Dense(32, dot_general=FallbackDot(r)),
    "bfloat16": lambda r: nn.Dense(32, dtype=jnp.bfloat16, dot_general=FallbackDot(r)),
    "overwritten": lambda r: nn.Dense(32, dot_general=FallbackDot(r, OWG)),
    "DenseGeneral": lambda r: nn.DenseGeneral((4, 8), dot_general=FallbackDot(r)),
    "Einsum": lambda r: fbq_jax.Einsum(*HEADS, FallbackEinsum(FallbackDot(r))),
    "Conv": lambda r: nn.Conv(
        32, (2, 2), conv_general_dilated=FallbackConv(FallbackDot(r))
    ),
    "NormDense": lambda r: fbq_jax.NormDense(32, dot_general=FallbackDot(r)),
    "GatedMLP": lambda r: fbq_jax.GatedMLP(32, dot_general=FallbackDot(r)),
    "MoEMLP": lambda r: fbq_jax.MoEMLP(ROUTING, 32, dot_general=FallbackDot(r)),
}
# The kinds of other recipes than ``fallback``: a fused one for each granularity.
OTHERS = dict.fromkeys(["row_block_lhs", "fp8_row_block"], ("Dense", "GatedMLP"))
#: Layers whose numerics no recipe sets.
LINEN_ALONE = {
    "Fp8Dot": nn.Dense(32, dot_general=Fp8Dot(history=4)),
    "current Fp8Dot": nn.Dense(32, dot_general=Fp8Dot("current")),
    "LlmInt8Dot": nn.Dense(32, dot_general=fbq_jax.LlmInt8Dot()),
    "SmoothSwiGLU": fbq_jax.SmoothSwiGLU(32, dot_general=Fp8Dot("current")),
    "Int8MLP": fbq_jax.Int8MLP(32),
    "Int8Attention": nn.Sequential([lambda x: x[None], fbq_jax.Int8Attention(2)]),
    "LayerNorm": fbq_jax.LayerNorm(),
    "RMSNorm": fbq_jax.RMSNorm(),
}


def nnx_dot(recipe, rngs):
    return fbq_jax.nnx.FallbackDot(recipe, rngs=rngs)


NNX = {
    "Linear": lambda r, rngs: nnx.Linear(
        32, 32, dot_general=nnx_dot(r, rngs), rngs=rngs
    ),
    "LinearGeneral": lambda r, rngs: nnx.LinearGeneral(
        32, (4, 8), dot_general=nnx_dot(r, rngs), rngs=rngs
    ),
    "Einsum": lambda r, rngs: nnx.Einsum(
        *reversed(HEADS), einsum_op=fbq_jax.nnx.FallbackEinsum(r, rngs=rngs), rngs=rngs
    ),
    "Conv": lambda r, rngs: nnx.Conv(
        *(32, 32, (2, 2)),
        conv_general_dilated=fbq_jax.nnx.FallbackConv(r, rngs=rngs),
        rngs=rngs,
    ),
    "MoEMLP": lambda r, rngs: fbq_jax.nnx.MoEMLP(32, ROUTING, 32, recipe=r, rngs=rngs),
}
NNX_ALONE = {
    "Fp8Dot": lambda rngs: nnx.Linear(
        32, 32, dot_general=fbq_jax.nnx.Fp8Dot(4), rngs=rngs
    ),
    "Int8MLP": lambda rngs: fbq_jax.nnx.Int8MLP(32, 32, rngs=rngs),
    "LayerNorm": lambda rngs: fbq_jax.nnx.LayerNorm(32, rngs=rngs),
    "RMSNorm": lambda rngs: fbq_jax.nnx.RMSNorm(32, rngs=rngs),
}


def total(y):
    """A loss with a gradient that does not depend on how y is rounded."""
    weights = np.sin(np.arange(y.size, dtype=np.float32)).reshape(y.shape)
    return jnp.sum(y.astype(jnp.float32) * weights)


def linen_step(layer, x):
    """Makes a training step: the output, the gradients and the new state."""
    variables = dict(jax.jit(layer.init)(jax.random.key(0), x))
    differentiated = {k: variables.pop(k) for k in ("params", OWG) if k in variables}

    def loss(differentiated, x):
        given = {**variables, **differentiated}
        y, updates = layer.apply(given, x, mutable=[*variables])
        return total(y), (y, updates)

    grad = jax.grad(loss, (0, 1), has_aux=True)
    return lambda: jax.jit(grad)(differentiated, x)


def nnx_step(make, x):
    """The same of an NNX layer."""
    split = nnx.split(make(nnx.Rngs(0)))
    wrt = nnx.DiffState(0, (nnx.Param, fbq_jax.nnx.Fp8Scaling))

    @nnx.jit
    def step(model, x):
        def loss(model, x):
            y = model(x)
            return total(y), y

        grads, y = nnx.grad(loss, argnums=(wrt, 1), has_aux=True)(model, x)
        return *grads, y

    def run():
        model = nnx.merge(*split, copy=True)
        grads = step(model, x)
        return grads, nnx.state(model, nnx.Not(nnx.RngState))

    return run


def ragged_step(recipe, x):
    """The same of the raw function, whose rate and threshold are a layer's state."""
    w = heavy((3, 32, 32), 1)
    sizes = jnp.array([40, 0, 20])
    key = jax.random.key(0)

    def loss(x, w):
        y, stats = fbq_jax.ragged_dot(x, w, sizes, recipe=recipe, key=key)
        return total(y), (y, stats)

    return lambda: jax.jit(jax.grad(loss, (0, 1), has_aux=True))(x, w)


def cases():
    """What makes the step of each layer kind with one recipe, and of some with all."""
    for name, recipe in RECIPES.items():
        is_first = name == "fallback"
        for kind in LINEN if is_first else OTHERS.get(name, ("Dense",)):
            x, make = IMAGES if kind == "Conv" else X, LINEN[kind]
            yield f"{kind}-{name}", lambda m=make, r=recipe, x=x: linen_step(m(r), x)
        for kind, make in NNX.items() if is_first else ():
            x, make = IMAGES if kind == "Conv" else X, functools.partial(make, recipe)
            yield f"nnx {kind}-{name}", functools.partial(nnx_step, make, x)
        yield f"ragged_dot-{name}", functools.partial(ragged_step, recipe, X)
    for kind, layer in LINEN_ALONE.items():
        yield kind, functools.partial(linen_step, layer, X)
    for kind, make in NNX_ALONE.items():
        yield f"nnx {kind}", functools.partial(nnx_step, make, X)


CASES = dict(cases())


def leaves_of(run):
    return jax.device_get(jax.tree.leaves(run()))


def dtypes_of(leaves):
    return [leaf.dtype for leaf in leaves]


@pytest.mark.parametrize("name", with_first_fast(CASES))
def test_in_other_modes_it_computes_the_same(name):
    """With 64-bit types bit for bit; without ``jit`` up to the rounding of sums."""
    run = CASES[name]()
    ordinary = leaves_of(run)
    with jax.enable_x64(True):
        with_x64 = leaves_of(CASES[name]())
    with jax.disable_jit():
        without_jit = leaves_of(run)
    assert dtypes_of(with_x64) == dtypes_of(without_jit) == dtypes_of(ordinary)
    for x, y, want in zip(with_x64, without_jit, ordinary, strict=True):
        np.testing.assert_array_equal(x, want)
        if jnp.issubdtype(want.dtype, jnp.floating):
            y, want = (np.asarray(a, np.float64) for a in (y, want))
            assert np.linalg.norm(y - want) <= 1e-4 * np.linalg.norm(want)
        else:
            np.testing.assert_array_equal(y, want)
