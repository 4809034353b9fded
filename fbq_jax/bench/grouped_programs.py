"""The programs that ``grouped`` measures, and what their results must be."""

import functools
import importlib
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from fbq_jax import ops, recipes
from fbq_jax.bench import data, layers
from fbq_jax.core.ragged_dot import ragged_dot
from fbq_jax.kernels.grouped_reference import (
    GroupedRows,
    Tiles,
    assign_tiles,
    from_tiles,
    to_tiles,
)
from fbq_jax.kernels.reference import Layouts, Quantized, dequantize
from fbq_jax.ops import dispatch

RATE = 0.2  # the share of X's blocks that fall back
BLOCK = 128
BLOCK_SHAPE = (BLOCK, BLOCK, BLOCK)
PRODUCTS = ("Y", "dX", "dW")
LAYER = "Y, dX, dW"
LOADS = ("balanced", "Zipf", "one hot")
LAYER_LOADS = ("balanced", "Zipf")
_DENSE = {
    "Y": (((1,), (0,)), ((), ())),
    "dX": (((1,), (1,)), ((), ())),
    "dW": (((0,), (0,)), ((), ())),
}


class Operands(NamedTuple):
    """X ``[M, K]``, W ``[E, K, N]``, dY ``[M, N]`` and the sizes ``[E]`` of a load."""

    x: jax.Array
    w: jax.Array
    dy: jax.Array
    sizes: jax.Array


class Codes(NamedTuple):
    """The operands of a load in INT8.

    Attributes:
      lhs: X in both layouts.
      residual: the second term of a fifth of X's blocks.
      rhs: W in both layouts.
      grad: dY in both layouts.
      tiles: where each row lies among the tiles.
    """

    lhs: Layouts
    residual: Quantized
    rhs: Layouts
    grad: Layouts
    tiles: Tiles


class Program(NamedTuple):
    """A program to measure.

    Attributes:
      product: ``"Y"``, ``"dX"``, ``"dW"``, or all three of a layer.
      what: its name.
      backend: what computes it.
      function: takes what ``args`` returns.
      args: makes the arguments from the operands and the codes of a load.
      loads: the loads to measure; none for a program that does not depend on it.
      fallback: the share of X's blocks that fall back; None without fallback.
      is_codes: whether the operands are codes.
      compiles_alone: whether XLA may take most of the memory to tune it, as it does for
        ``lax.ragged_dot``, of which it makes a dense product for each group.
    """

    product: str
    what: str
    backend: str
    function: Callable[..., Any]
    args: Callable[[Operands, Codes], tuple[Any, ...]]
    loads: tuple[str, ...] = ()
    fallback: float | None = None
    is_codes: bool = False
    compiles_alone: bool = False


def make_operands(
    shape: tuple[int, ...], sizes: Mapping[str, np.ndarray]
) -> dict[str, Operands]:
    """The operands ``(M, K, N, E)`` of each load, which differ in the sizes."""
    M, K, N, E = shape
    keys = jax.random.split(jax.random.key(0), 3)
    x = data.activation(keys[0], (M, K))
    w = jax.random.normal(keys[1], (E, K, N), jnp.bfloat16) * K**-0.5
    dy = jax.random.normal(keys[2], (M, N), jnp.bfloat16)
    return {name: Operands(x, w, dy, jnp.asarray(of)) for name, of in sizes.items()}


@functools.partial(jax.jit, static_argnums=1)
def quantized(operands: Operands, implementation: str) -> Codes:
    """Codes as a layer makes them; random blocks of X fall back."""
    x, w, dy, sizes = operands
    tiles = assign_tiles(sizes, len(x), BLOCK)
    seeds = jnp.arange(len(tiles.groups), dtype=jnp.uint32)
    rows_of = functools.partial(
        GroupedRows, first_rows=tiles.first_rows, row_counts=tiles.row_counts
    )
    options: dict[str, Any] = {
        "block": (BLOCK, BLOCK),
        "implementation": implementation,
    }
    # Only the kernel in Mosaic reads sums.
    bounds = implementation == "mosaic"
    lhs = ops.ragged_quantize_fallback(
        rows_of(x),
        jnp.zeros(len(seeds)),
        seeds,
        criterion="absmax",
        colwise="stochastic",
        **options,
    )
    residual = lhs.residual
    assert residual is not None
    falls_back = jax.random.bernoulli(jax.random.key(1), RATE, residual.scales.shape)
    rhs = ops.quantize(
        w,
        jnp.arange(len(w), dtype=jnp.uint32),
        rowwise="nearest",
        colwise="nearest",
        sums=("rowwise", "colwise") if bounds else (),
        **options,
    )
    grad = ops.ragged_quantize(
        rows_of(dy),
        seeds,
        rowwise="stochastic",
        colwise="stochastic",
        sums=("colwise",) if bounds else (),
        **options,
    )
    scales = jnp.where(falls_back, residual.scales, 0.0)
    return Codes(
        Layouts(lhs.main, lhs.colwise),
        residual._replace(scales=scales),
        rhs,
        grad,
        tiles,
    )


def without_residual(codes: Codes) -> Codes:
    """The codes of an X of which no block falls back."""
    residual = codes.residual
    return codes._replace(
        residual=residual._replace(scales=jnp.zeros_like(residual.scales))
    )


def make_programs(
    operands: dict[str, Operands], choice: dispatch.Choice
) -> list[Program]:
    """The programs; of each product, the dense one comes first."""
    return [
        *_dense_programs(),
        *_library_programs("lax.ragged_dot", "xla", lax.ragged_dot),
        *_tokamax_programs(),
        *_int8_programs(choice),
        *_layer_programs(operands["balanced"], choice),
    ]


def _dense_programs() -> Iterator[Program]:
    def product(name: str, lhs: jax.Array, rhs: jax.Array) -> jax.Array:
        return lax.dot_general(lhs, rhs, _DENSE[name])

    def layer(x: jax.Array, w: jax.Array, dy: jax.Array) -> tuple[jax.Array, ...]:
        return product("Y", x, w), product("dX", dy, w), product("dW", x, dy)

    args: dict[str, Callable[[Operands, Codes], tuple[Any, ...]]] = {
        "Y": lambda given, _: (given.x, given.w[0]),
        "dX": lambda given, _: (given.dy, given.w[0]),
        "dW": lambda given, _: (given.x, given.dy),
        LAYER: lambda given, _: (given.x, given.w[0], given.dy),
    }
    for name in PRODUCTS:
        function = functools.partial(product, name)
        yield Program(name, "dense bf16", "xla", function, args[name])
    yield Program(LAYER, "dense bf16", "xla", layer, args[LAYER])


def _library_programs(
    what: str, backend: str, dot: Callable[..., jax.Array]
) -> Iterator[Program]:
    """Another library's ``dot(x, w, sizes)``, and with its gradients, on even loads."""

    def product(x: jax.Array, w: jax.Array, _: jax.Array, sizes: jax.Array) -> Any:
        return dot(x, w, sizes)

    def step(x: jax.Array, w: jax.Array, dy: jax.Array, sizes: jax.Array) -> Any:
        y, vjp = jax.vjp(lambda x, w: dot(x, w, sizes), x, w)
        return y, *vjp(dy)

    def args(given: Operands, _: Codes) -> tuple[Any, ...]:
        return tuple(given)

    for name, function in (("Y", product), (LAYER, step)):
        loads = ("balanced",)
        yield Program(name, what, backend, function, args, loads, compiles_alone=True)


def _tokamax_programs() -> Iterator[Program]:
    dot = tokamax_ragged_dot()
    if dot is not None:
        yield from _library_programs("Tokamax ragged_dot", "tokamax", dot)


def tokamax_ragged_dot() -> Callable[..., jax.Array] | None:
    """Tokamax's product of groups; None, and a line on stderr, if it is missing."""
    try:
        dot: Callable[..., jax.Array] = importlib.import_module("tokamax").ragged_dot
    except ImportError as error:
        print(f"without tokamax: {error}", file=sys.stderr)
        return None
    return dot


def _int8_programs(choice: dispatch.Choice) -> Iterator[Program]:
    """The GEMMs of codes; those of Y and dX leave their rows in tiles."""
    options: dict[str, Any] = {
        "block_shape": BLOCK_SHAPE,
        "dtype": jnp.bfloat16,
        "implementation": choice.implementation,
    }

    def multiply(
        lhs: Quantized, residual: Quantized | None, rhs: Quantized, tiles: Tiles
    ) -> jax.Array:
        return ops.ragged_matmul(lhs, residual, rhs, tiles.groups, **options)

    def contract(
        lhs: Quantized, rhs: Quantized, tiles: Tiles, like: jax.Array
    ) -> jax.Array:
        return ops.ragged_contraction(lhs, rhs, tiles.groups, size=len(like), **options)

    args: dict[str, Callable[[Operands, Codes], tuple[Any, ...]]] = {
        "Y": lambda _, c: (c.lhs.rowwise, None, c.rhs.colwise, c.tiles),
        "dX": lambda _, c: (c.grad.rowwise, None, c.rhs.rowwise, c.tiles),
        "dW": lambda given, c: (c.lhs.colwise, c.grad.colwise, c.tiles, given.sizes),
    }

    def with_residual(_: Operands, c: Codes) -> tuple[Any, ...]:
        return c.lhs.rowwise, c.residual, c.rhs.colwise, c.tiles

    int8 = functools.partial(
        Program, what="INT8", backend=choice.backend, loads=LOADS, is_codes=True
    )
    yield int8("Y", function=multiply, args=args["Y"], fallback=0.0)
    yield int8("Y", function=multiply, args=with_residual, fallback=RATE)
    yield int8("dX", function=multiply, args=args["dX"])
    yield int8("dW", function=contract, args=args["dW"])


def _layer_programs(operands: Operands, choice: dispatch.Choice) -> Iterator[Program]:
    """The recipes, with quantization, a threshold and a key."""
    x, w, _, sizes = operands
    for name in layers.RECIPES:
        dot = functools.partial(
            ragged_dot,
            recipe=recipes.NAMED[name],
            implementation=choice.implementation,
        )
        theta = fallback = None
        if recipes.NAMED[name].criterion is not None:
            _, stats = jax.jit(dot)(x, w, sizes)
            theta, fallback = stats.theta, float(stats.rate)

        def step(
            x: jax.Array,
            w: jax.Array,
            dy: jax.Array,
            sizes: jax.Array,
            theta: jax.Array | None,
            key: jax.Array,
            dot: Any = dot,
        ) -> Any:
            y, vjp = jax.vjp(
                lambda x, w: dot(x, w, sizes, theta=theta, key=key)[0], x, w
            )
            return y, *vjp(dy)

        def args(
            given: Operands, _: Codes, theta: jax.Array | None = theta
        ) -> tuple[Any, ...]:
            return *given, theta, jax.random.key(2)

        yield Program(LAYER, name, choice.backend, step, args, LAYER_LOADS, fallback)


def _ends(x: jax.Array, axis: int) -> jax.Array:
    """The first and the last ``BLOCK`` entries along an axis."""
    first = lax.slice_in_dim(x, 0, BLOCK, axis=axis)
    size = x.shape[axis]
    last = lax.slice_in_dim(x, size - BLOCK, size, axis=axis)
    return lax.concatenate([first, last], axis)


def ends_of(name: str, result: jax.Array) -> jax.Array:
    """The part of a product that is compared."""
    ends = _ends(result, result.ndim - 1)
    return _ends(ends, 1) if name == "dW" else ends


@jax.jit
def exact_ends(operands: Operands) -> tuple[jax.Array, ...]:
    """The ends of Y, dX and dW in float32."""
    x, w, dy, sizes = operands
    tiles = assign_tiles(sizes, len(x), BLOCK)

    def tiled(rows: jax.Array) -> jax.Array:
        grouped = GroupedRows(rows, tiles.first_rows, tiles.row_counts)
        return to_tiles(grouped, BLOCK).astype(jnp.float32)

    return _ends_of_products(tiled(x), tiled(dy), tiled(x), tiled(dy), w, w, tiles)


@jax.jit
def dequantized_ends(codes: Codes) -> tuple[jax.Array, ...]:
    """The ends of the products of the codes, in float32."""

    def of(x: Quantized | None) -> jax.Array:
        assert x is not None
        return dequantize(x, (BLOCK, BLOCK))

    lhs, residual, rhs, grad, tiles = codes
    return _ends_of_products(
        of(lhs.rowwise) + of(residual),
        of(grad.rowwise),
        of(lhs.colwise).mT,
        of(grad.colwise).mT,
        of(rhs.colwise).mT,
        of(rhs.rowwise),
        tiles,
    )


def _ends_of_products(
    x: jax.Array,
    dy: jax.Array,
    x_columns: jax.Array,
    dy_columns: jax.Array,
    w: jax.Array,
    w_of_grad: jax.Array,
    tiles: Tiles,
) -> tuple[jax.Array, ...]:
    """The ends of Y, dX and dW from tiles ``[T, m, C]`` and matrices ``[E, K, N]``."""
    E = len(w)
    is_used = (tiles.row_counts > 0)[:, None, None]
    groups = jnp.minimum(tiles.groups, E - 1)
    einsum = functools.partial(
        jnp.einsum,
        precision=lax.Precision.HIGHEST,
        preferred_element_type=jnp.float32,
    )

    def multiply(rows: jax.Array, matrices: jax.Array) -> jax.Array:
        products = einsum("tmk,tkn->tmn", rows, matrices.astype(jnp.float32)[groups])
        return from_tiles(jnp.where(is_used, products, 0.0), tiles)

    contraction = einsum("tmk,tmn->tkn", _ends(x_columns, 2), _ends(dy_columns, 2))
    contraction = jnp.where(is_used, contraction, 0.0)
    return (
        multiply(x, _ends(w, 2)),
        multiply(dy, _ends(w_of_grad, 1).mT),
        jax.ops.segment_sum(contraction, groups, E),
    )
