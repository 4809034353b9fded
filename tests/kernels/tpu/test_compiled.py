"""Layers compile for TPUs, which multiply INT8."""

import functools
import re

import jax
import jax.numpy as jnp
import pytest

import fbq_jax
from fbq_jax import ops, recipes
from fbq_jax.ops import dispatch
from fbq_jax.sharding import layer_names
from tests.fbq_jax.core.test_dot_general import product
from tests.kernels.tpu_tools import (
    TOPOLOGIES,
    lower_for,
    needs_compiler,
    on_tpu,  # noqa: F401 (a fixture)
)

pytestmark = needs_compiler

GEMMS = 3  # of a layer
IN_BLOCKS = [
    name
    for name, recipe in recipes.NAMED.items()
    if recipe.in_blocks and set(recipe.block_shape) <= {128, 256}
]
BY_VECTOR = ["rowwise", "per_tensor", "switchback", "aqt_int8"]


def compiled_layer(generation, name):
    """The HLO of a layer's output and gradients."""
    x, w, dy = ((1024, 384), (384, 640), (1024, 640))
    shapes = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in (x, w, dy)]

    def layer(x, w, dy):
        key = jax.random.key(0)
        return product(x, w, dy, recipe=recipes.NAMED[name], theta=1.0, key=key)

    return compile_for(generation, layer, *shapes)


def compile_for(generation, function, *shapes):
    """The HLO of a function compiled for a TPU."""
    return lower_for(generation, jax.jit(function), *shapes).compile().as_text()


def products(text):
    """The operands' dtypes of the products that XLA computes."""
    dtypes = dict(re.findall(r"%(\S+) = (\w+)\[", text))
    found = re.findall(r" (?:convolution|dot)\(%([\w.-]+), %([\w.-]+)\)", text)
    return [{dtypes[x] for x in operands} for operands in found]


@pytest.mark.usefixtures("on_tpu")
@pytest.mark.parametrize("generation", TOPOLOGIES)
@pytest.mark.parametrize("name", IN_BLOCKS)
def test_recipes_in_blocks_run_the_kernels(generation, name):
    text = compiled_layer(generation, name)
    assert len(re.findall(r"%fbq_matmul\S* = ", text)) == GEMMS
    assert "%fbq_quantize" in text
    assert not products(text)


@pytest.mark.usefixtures("on_tpu")
@pytest.mark.parametrize("generation", TOPOLOGIES)
@pytest.mark.parametrize("name", BY_VECTOR)
def test_recipes_by_vector_multiply_int8(generation, name):
    text = compiled_layer(generation, name)
    found = products(text)
    assert found.count({"s8"}) >= 1
    assert {"f32"} not in found
    assert "highest" not in text


@pytest.mark.usefixtures("on_tpu")
@pytest.mark.parametrize("generation", TOPOLOGIES)
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
@pytest.mark.parametrize("columns", [16384, 53248])
@pytest.mark.parametrize("block", [128, 256])
def test_rows_of_any_length_are_quantized(generation, dtype, columns, block):
    """A program takes a part of them that fits into its memory."""
    x = jax.ShapeDtypeStruct((1, 1024, columns), dtype)
    theta, seeds = (jax.ShapeDtypeStruct((1,), t) for t in (jnp.float32, jnp.uint32))
    quantize = functools.partial(
        ops.quantize_fallback,
        block=(block, block),
        criterion="absmax",
        colwise="stochastic",
    )
    assert "%fbq_quantize" in compile_for(generation, quantize, x, theta, seeds)


@pytest.mark.usefixtures("on_tpu")
@pytest.mark.parametrize("generation", TOPOLOGIES)
def test_maxima_of_rows_beyond_the_last_tile_compile(generation):
    x = jax.ShapeDtypeStruct((1, 1024, 5632), jnp.bfloat16)
    seeds = jax.ShapeDtypeStruct((1,), jnp.uint32)
    quantize = functools.partial(
        ops.quantize_vectors, rowwise="nearest", colwise="stochastic"
    )
    assert "%fbq_find_amax" in compile_for(generation, quantize, x, seeds)


@pytest.mark.usefixtures("on_tpu")
@pytest.mark.parametrize("generation", TOPOLOGIES)
def test_experts_run_the_kernels(generation):
    """And warn of nothing."""
    x, w, dy = ((1024, 384), (4, 384, 640), (1024, 640))
    shapes = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in (x, w, dy)]
    sizes = jax.ShapeDtypeStruct((4,), jnp.int32)

    def layer(x, w, dy, sizes):
        def product(x, w):
            key = jax.random.key(0)
            return fbq_jax.ragged_dot(x, w, sizes, theta=1.0, key=key)[0]

        return jax.vjp(product, x, w)[1](dy)

    text = compile_for(generation, layer, *shapes, sizes)
    assert len(re.findall(r"%fbq_matmul\S* = ", text)) == 1  # Y is unused
    assert len(re.findall(r"%fbq_contract\S* = ", text)) == 1
    assert "%fbq_quantize" in text
    assert not products(text)


@pytest.mark.usefixtures("on_tpu")
def test_fused_layers_run_the_kernels(monkeypatch):
    """A norm, its quantization and two products.  XLA packs what the norm saves."""
    monkeypatch.setattr(layer_names, "_warned", {})
    norm = fbq_jax.NormDense(256, dtype=jnp.bfloat16, dot_general=fbq_jax.fallback_dot)
    x = jax.ShapeDtypeStruct((1024, 384), jnp.bfloat16)
    with pytest.warns(UserWarning, match="norms and gates pack"):  # once
        variables = jax.eval_shape(norm.init, jax.random.key(0), x)
    leaves, structure = jax.tree.flatten(variables)

    def layer(x, *leaves):
        state = jax.tree.unflatten(structure, leaves)

        def loss(params):
            variables = state | {"params": params}
            y, updates = norm.apply(variables, x, mutable=["fallback"])
            return y.astype(jnp.float32).sum(), updates

        return jax.grad(loss, has_aux=True)(state["params"])

    text = compile_for("v5e", layer, x, *leaves)
    assert "%fbq_quantize" in text
    assert len(re.findall(r"%fbq_matmul\S* = ", text)) == 2
    assert "highest" not in text


def test_dispatch_prefers_kernels_on_a_tpu(monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
    choice = dispatch.choose("matmul", (128, 128, 128))
    assert (choice.implementation, choice.backend) == ("tpu", "tpu")
    assert dispatch.choose("matmul", ()).backend == "xla"
    assert dispatch.choose("quantize_vectors", ()).backend == "tpu"
    assert dispatch.choose("rms_norm_quantize", (128, 128)).backend == "tpu"
    assert dispatch.choose("ragged_matmul", (128, 128, 128)).backend == "tpu"
    small = dispatch.choose("matmul", (32, 32, 32))
    assert small.implementation == "reference"
    assert small.reason == "not tpu: its blocks have sides of 128 or 256, not 32"
