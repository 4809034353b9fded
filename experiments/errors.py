"""The errors of recipes as outliers grow in X, W or dY, by the reference on a CPU.

``python -m experiments.errors`` writes ``experiments/results/errors-cpu.json``.
"""

import dataclasses
import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from experiments.bench import memory
from fbq_jax import recipes
from fbq_jax.bench import linear, results
from fbq_jax.core.dot_general import dot_general
from fbq_jax.recipes.schema import Recipe

RESULTS = Path(__file__).parent / "results" / "errors-cpu.json"
# X by name: the largest outlier, and the distance between channels with outliers.
# 58, 606 and 6559 are the largest activations reported for GPT2-XL, Llama-3.1 and
# Qwen-2.5. One channel in 1024 reaches an eighth of the blocks of 128, which can all
# fall back; one in 256 reaches half of them.
OUTLIERS = {
    "up to 58": (58.0, 1024),
    "up to 606": (606.0, 1024),
    "up to 6559": (6559.0, 1024),
    "606, 1/2 of blocks": (606.0, 256),
}
SHAPE = (2048, 1024, 512)
# Outliers of W and dY: the largest, and the distance between channels with some.
_OTHER_OUTLIERS = (606.0, 256)
_GAUSSIAN = "Gaussian"
_ALL_TOKENS = "606, all tokens"
_W, _DY = "W up to 606", "dY up to 606"
_UNEVEN, _UNEVEN_ALONE = "uneven W", "only W uneven"
_UNEVEN_POWERS = -4.5, 4.5  # of two, the factors of its rows and columns
_NAMED = (
    "fallback",
    "block",
    "fallback_rowwise_bwd",
    "rowwise",
    "row_block",
    "row_block_lhs",
    "fp8_row_block",
    "fp8_row_block_lhs",
    "jetfire",
)

Operands = tuple[jax.Array, jax.Array, jax.Array]  # X, W and dY


def compared_recipes() -> dict[str, Recipe]:
    """The recipes to measure: some that have a name, and a variant."""
    row_block, replace = recipes.row_block, dataclasses.replace
    return {name: recipes.NAMED[name] for name in _NAMED} | {
        "row_block, columns of W": replace(
            row_block,
            fwd=replace(row_block.fwd, scales="row_block"),
            dlhs=replace(row_block.dlhs, scales="row_block"),
        ),
    }


def main() -> None:
    """Measures all recipes, and writes the file."""
    content = {
        "date": results.today(),
        "device": jax.devices()[0].device_kind,
        "versions": results.versions(),
        "shape": SHAPE,
        "recipe_errors": list(rows(SHAPE)),
    }
    results.write(RESULTS, content)


def rows(shape: tuple[int, int, int]) -> Iterator[dict[str, Any]]:
    """The errors of each recipe on each of the operands ``(M, K, N)``."""
    operands = dict(_operands(shape))
    exact = {name: linear.exact_products(*arrays) for name, arrays in operands.items()}
    for name, recipe in compared_recipes().items():
        print(f"measuring {name}", flush=True)
        for where, (x, w, dy) in operands.items():
            product = jax.jit(functools.partial(_product, recipe))
            y, vjp, rate = jax.vjp(product, x, w, has_aux=True)
            fallback = None if recipe.criterion is None else float(rate)
            yield {
                "what": name,
                "data": where,
                "fallback": fallback,
                "extra_steps": (fallback or 0.0) / 3,
                "saved_bytes": _saved_bytes(product, x, w),
                "errors": _errors((y, *vjp(dy)), exact[where]),
            }


def _product(recipe: Recipe, x: jax.Array, w: jax.Array) -> tuple[jax.Array, jax.Array]:
    """``x @ w``, and the share of x's blocks that fall back."""
    dims = (((1,), (0,)), ((), ()))
    key = jax.random.key(1)
    y, stats = dot_general(
        x, w, dims, recipe=recipe, key=key, implementation="reference"
    )
    return y, stats.rate


def _saved_bytes(product: Any, x: jax.Array, w: jax.Array) -> float:
    """Bytes of X and its scales saved for the backward pass, per token."""
    return memory.saved_bytes(lambda w, x: product(x, w)[0], w, x)


def _operands(shape: tuple[int, int, int]) -> Iterator[tuple[str, Operands]]:
    """X, W and dY by name; all are Gaussian but the one that the name is of."""
    M, K, N = shape
    keys = jax.random.split(jax.random.key(0), 3)
    # In float32, normal values have longer tails than in bfloat16.
    x, w, dy = (
        jax.random.normal(key, sizes).astype(jnp.bfloat16)
        for key, sizes in zip(keys, ((M, K), (K, N), (M, N)), strict=True)
    )
    w *= K**-0.5
    yield _GAUSSIAN, (x, w, dy)
    for name, outliers in OUTLIERS.items():
        yield name, (swiglu(keys[0], (M, K), *outliers), w, dy)
    yield _ALL_TOKENS, (_channel_of_outliers(keys[0], (M, K)), w, dy)
    with_outliers = swiglu(keys[1], (K, N), *_OTHER_OUTLIERS) * K**-0.5
    yield _W, (x, with_outliers, dy)
    yield _DY, (x, w, swiglu(keys[2], (M, N), *_OTHER_OUTLIERS))
    uneven = _uneven(keys[0], x, w, dy)
    yield _UNEVEN, uneven
    yield _UNEVEN_ALONE, (x, uneven[1], dy)


def _uneven(key: jax.Array, x: jax.Array, w: jax.Array, dy: jax.Array) -> Operands:
    """Rows and columns of W of many magnitudes, for which X and dY make up."""
    rows, columns = (
        2.0 ** jax.random.uniform(key, (size,), x.dtype, *_UNEVEN_POWERS)
        for key, size in zip(jax.random.split(key), w.shape, strict=True)
    )
    rows, columns = rows[:, None], columns[None]
    return x / rows.T, w * rows * columns, dy / columns


def _channel_of_outliers(key: jax.Array, shape: tuple[int, int]) -> jax.Array:
    """A SwiGLU output whose first channel has an outlier of 10 to 606 in each token."""
    x = swiglu(key, shape, *OUTLIERS["up to 606"])
    sizes = 10.0 * 60.6 ** jax.random.uniform(key, shape[:1])
    signs = jnp.sign(x[:, 0].astype(jnp.float32))
    return x.at[:, 0].set((signs * sizes).astype(x.dtype))


def _errors(arrays: Any, exact: Any) -> dict[str, float]:
    """The mean errors of rows (tokens; of dW, input channels) and of columns."""
    (y, dx, dw), (exact_y, exact_dx, exact_dw) = arrays, exact
    pairs = {
        "y_token": (y, exact_y),
        "y_channel": (y.T, exact_y.T),
        "dx_token": (dx, exact_dx),
        "dx_channel": (dx.T, exact_dx.T),
        "dw_in": (dw, exact_dw),
        "dw_out": (dw.T, exact_dw.T),
    }
    return {name: float(mean_row_error(*pair)) for name, pair in pairs.items()}


@jax.jit
def mean_row_error(actual: jax.Array, exact: jax.Array) -> jax.Array:
    """The mean of the rows' relative errors.

    Outliers dominate an array's norm and would hide the errors of the other rows.
    """
    difference = actual.astype(jnp.float32) - exact
    errors, norms = (jnp.linalg.norm(x, axis=1) for x in (difference, exact))
    return jnp.mean(errors / jnp.maximum(norms, jnp.finfo(jnp.float32).tiny))


@functools.partial(jax.jit, static_argnums=(1, 3))
def swiglu(
    key: jax.Array, shape: tuple[int, ...], largest: float, channels_apart: int
) -> jax.Array:
    """A SwiGLU output in bf16 with the outliers of large models.

    Every ``channels_apart``-th channel has an outlier in one token of 64. Magnitudes
    start at 10 and are log-uniform up to ``largest``, which the first token reaches.

    Args:
      key: the PRNG key.
      shape: ``[tokens, channels]``.
      largest: the largest magnitude, above 10.
      channels_apart: the distance between channels with outliers.
    """
    gate_key, up_key, place_key, size_key = jax.random.split(key, 4)
    gate = jax.random.normal(gate_key, shape)
    y = jax.nn.silu(gate) * jax.random.normal(up_key, shape)
    tokens, channels = shape
    has_outliers = (jnp.arange(channels) % channels_apart == 0)[None, :]
    drawn = jax.random.uniform(place_key, (tokens, 1)) < 1 / 64
    sizes = 10.0 * (largest / 10.0) ** jax.random.uniform(size_key, shape)
    first = (jnp.arange(tokens) == 0)[:, None]
    outliers = jnp.sign(y) * jnp.where(first, largest, sizes)
    return jnp.where((drawn | first) & has_outliers, outliers, y).astype(jnp.bfloat16)


if __name__ == "__main__":
    main()
