"""The products of experts alone, each with its own rows, against bf16."""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence

import jax
import jax.numpy as jnp
from jax import lax

from fbq_jax.bench import data, matmuls, measure, moe
from fbq_jax.bench.compare import Comparison, Program, compile_step
from fbq_jax.bench.measure import Effort
from fbq_jax.bench.results import Row, row, with_ratios
from fbq_jax.core import gemms
from fbq_jax.core.dot_general import stateless_scalars
from fbq_jax.core.gemms import SavedMatmul, Spec
from fbq_jax.experts.ragged_dot import ragged_dot
from fbq_jax.experts.rows import TiledRows, tiled_rows
from fbq_jax.kernels.quantized import Layouts, Quantized
from fbq_jax.recipes.schema import Recipe

#: ``(M, K, N, experts)``: ``gate`` or ``up`` of DeepSeek-V3.
SHAPES = ((32768, 7168, 2048, 8),)
# Those without a threshold, which takes a layer.
_RECIPES = "block", "row_block_lhs", "fp8_row_block_lhs"
_LIMITS = dict.fromkeys(("y", "dx", "dw"), 0.1)  # errors against bf16
_PRODUCTS = "Y", "dX", "dW"

# The rows, and X, W and dY in the layouts that the products read.
Codes = tuple[TiledRows, Layouts, Layouts, Layouts]


def rows(
    shapes: Sequence[tuple[int, ...]], *, implementation: str | None, effort: Effort
) -> Iterator[Row]:
    """Measures ``Y``, ``dX`` and ``dW`` of each ``(M, K, N, experts)``, in bf16.

    First come all three, with quantization, and then each product of codes.  The
    experts share the rows evenly.  The baseline is as in ``fbq_jax.bench.moe``.  Work
    counts ``2 M K N`` operations a product.
    """
    for shape in shapes:
        M, K, N, experts = shape
        keys = jax.random.split(jax.random.key(0), 3)
        x = data.activation(keys[0], (M, K))
        w = jax.random.normal(keys[1], (experts, K, N), jnp.bfloat16) * K**-0.5
        dy = jax.random.normal(keys[2], (M, N), jnp.bfloat16)
        sizes = jnp.full(experts, M // experts, jnp.int32).at[0].add(M % experts)
        inputs, work = (x, w, dy, sizes), 2.0 * M * K * N
        measured = Comparison(shape, 3 * work, inputs, _LIMITS).rows(
            list(_programs(inputs, implementation)), effort
        )
        products = _products(shape, work, inputs, implementation, effort)
        yield from with_ratios(itertools.chain(measured, products))


def _programs(
    inputs: tuple[jax.Array, ...], implementation: str | None
) -> Iterator[Program]:
    """All three products: bf16, and each recipe with quantization."""
    name, backend, dot = moe.bf16()
    products = [(name, backend, getattr(dot, "ragged_dot", lax.ragged_dot))]
    for name, recipe, backend in matmuls.supported(_RECIPES, implementation):
        products.append((name, backend, _by_recipe(recipe, implementation)))
    for name, backend, multiply in products:
        step = functools.partial(_step, multiply)
        compiled, seconds = compile_step(step, (), *inputs)
        yield Program(name, backend, compiled, tuple, seconds)


def _by_recipe(recipe: Recipe, implementation: str | None) -> Callable[..., jax.Array]:
    key = jax.random.key(1)

    def multiply(*args: jax.Array) -> jax.Array:
        y, _ = ragged_dot(*args, recipe=recipe, key=key, implementation=implementation)
        return y

    return multiply


def _step(
    multiply: Callable[..., jax.Array],
    state: tuple[()],
    x: jax.Array,
    w: jax.Array,
    dy: jax.Array,
    sizes: jax.Array,
) -> tuple[tuple[()], tuple[jax.Array, ...]]:
    y, vjp = jax.vjp(lambda x, w: multiply(x, w, sizes), x, w)
    return state, (y, *vjp(dy))


def _products(
    shape: tuple[int, ...],
    work: float,
    inputs: tuple[jax.Array, ...],
    implementation: str | None,
    effort: Effort,
) -> Iterator[Row]:
    """Each product of each recipe, from codes to tiles of rows."""
    bf16 = (jnp.bfloat16,) * 3
    for name, recipe, backend in matmuls.supported(_RECIPES, implementation):
        spec = Spec(recipe, *bf16, implementation)
        codes = jax.jit(functools.partial(_quantize, spec))(*inputs)
        for product in _PRODUCTS:
            multiply = jax.jit(functools.partial(_multiply, spec, product))
            yield row(
                measure.timing(multiply, codes, effort=effort),
                work,
                what=f"{name}, codes",
                layer=product,
                implementation=backend,
                shape=shape,
            )


def _quantize(
    spec: Spec, x: jax.Array, w: jax.Array, dy: jax.Array, sizes: jax.Array
) -> Codes:
    tiled = tiled_rows(sizes, len(x), spec.recipe.block_shape[0])
    scalars = stateless_scalars(key=jax.random.key(1))
    seed = scalars.call_seed
    lhs, _ = tiled.quantize_lhs(spec, x, scalars, save=True, frozen=False)
    rhs = gemms.quantize_rhs(spec, w, None, seed, save=True)
    grad = tiled.quantize_grad(spec, dy, seed, frozen=False)
    in_tiles = dataclasses.replace(tiled, lhs_in_tiles=True, out_in_tiles=True)
    lhs, rhs, grad = map(_transpose_scales, (lhs, rhs, grad))
    return in_tiles, lhs, rhs, grad


def _transpose_scales(layouts: Layouts) -> Layouts:
    """Turns scales as products take them into scales as kernels write them, or back.

    Inside of one program, XLA does not move them.
    """

    def transpose(x: Quantized | None) -> Quantized | None:
        if x is None:
            return None
        main = x.main._replace(scales=x.main.scales.mT)
        return dataclasses.replace(x, main=main)

    return Layouts(transpose(layouts.rowwise), transpose(layouts.colwise))


def _multiply(spec: Spec, product: str, codes: Codes) -> jax.Array:
    tiled = codes[0]
    lhs, rhs, grad = map(_transpose_scales, codes[1:])
    assert lhs.rowwise is not None
    assert rhs.rowwise is not None
    assert rhs.colwise is not None
    seed = jnp.zeros((), jnp.uint32)  # no product draws noise
    fwd = spec.recipe.fwd
    y = tiled.multiply(spec, fwd, lhs.rowwise, rhs.colwise, seed, spec.dtype)
    saved = SavedMatmul(lhs.colwise, rhs.rowwise, seed, tiled)
    dx, dw = gemms.backward(spec, saved, grad)
    assert dw is not None
    return {"Y": y, "dX": dx, "dW": dw}[product]
