"""Layers compile for TPUs, which multiply INT8."""

import functools
import itertools
import re

import jax
import jax.numpy as jnp
import pytest

import fbq_jax
from fbq_jax import ops, recipes
from fbq_jax.ops import dispatch
from fbq_jax.sharding import layer_names
from tests.fbq_jax.core.test_dot_general import product
from tests.kernels.quantize_cases import near, noisy
from tests.kernels.tpu_tools import (
    TOPOLOGIES,
    lower_for,
    needs_compiler,
    on_tpu,  # noqa: F401 (a fixture)
)

pytestmark = [needs_compiler, pytest.mark.usefixtures("on_tpu")]

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


each_generation = pytest.mark.parametrize("generation", TOPOLOGIES)


@each_generation
@pytest.mark.parametrize("name", IN_BLOCKS)
def test_recipes_in_blocks_run_the_kernels(generation, name):
    text = compiled_layer(generation, name)
    assert len(re.findall(r"%fbq_matmul\S* = ", text)) == GEMMS
    assert "%fbq_quantize" in text
    assert not products(text)


@each_generation
@pytest.mark.parametrize("name", BY_VECTOR)
def test_recipes_by_vector_multiply_int8(generation, name):
    text = compiled_layer(generation, name)
    found = products(text)
    assert found.count({"s8"}) >= 1
    assert {"f32"} not in found
    assert "highest" not in text


@each_generation
@pytest.mark.parametrize(
    ("dtype", "columns", "layouts", "options", "kernel"),
    [
        # A program takes a part of the rows that fits into its memory.
        *(
            (
                *(dtype, columns, (near(side, side), noisy(side, side))),
                *({"criterion": "absmax"}, "%fbq_quantize"),
            )
            for dtype, columns, side in itertools.product(
                [jnp.bfloat16, jnp.float32], [16384, 53248], [128, 256]
            )
        ),
        # The last tile of a row extends beyond the matrix.
        (jnp.bfloat16, 5632, (near(1, None), noisy(None, 1)), {}, "%fbq_find_amax"),
    ],
)
def test_rows_of_any_length_are_quantized(
    generation, dtype, columns, layouts, options, kernel
):
    x = jax.ShapeDtypeStruct((1, 1024, columns), dtype)
    theta, seeds = (jax.ShapeDtypeStruct((1,), t) for t in (jnp.float32, jnp.uint32))
    options |= dict(zip(("rowwise", "colwise"), layouts, strict=True))
    quantize = functools.partial(ops.quantize, **options)
    operands = (x, seeds, theta) if "criterion" in options else (x, seeds)
    assert kernel in compile_for(generation, quantize, *operands)


@each_generation
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


@pytest.mark.parametrize(
    ("op", "block_shape", "width", "backend"),
    [
        ("matmul", (128, 128, 128), None, "tpu"),
        ("matmul", (), None, "xla"),
        ("quantize", (), None, "tpu"),
        ("quantize", (128, 128), 384, "tpu"),
        ("contract", (128, 128, 128), None, "tpu"),
        ("matmul", (32, 32, 32), None, "reference"),
    ],
)
def test_dispatch_prefers_kernels_on_a_tpu(op, block_shape, width, backend):
    choice = dispatch.choose(op, block_shape, width=width)
    assert choice.backend == backend
    if backend == "reference":
        assert choice.reason == "not tpu: its blocks have sides of 128 or 256, not 32"
