"""The errors of recipes as outliers grow in X, W or dY, on any device.

``python -m fbq_jax.bench errors`` writes the file. The section ``recipes`` measures all
recipes on a GPU, with their time; here are variants that have no name, on smaller
operands, by the reference.
"""

import dataclasses
import functools
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from fbq_jax import recipes
from fbq_jax.bench import data, linear, matmuls, report, results
from fbq_jax.bench.recipes import OUTLIERS, mean_row_error
from fbq_jax.kernels import reference
from fbq_jax.recipes.schema import Recipe

DEFAULT_PATH = Path("bench-errors.json")
SHAPE = (2048, 1024, 512)
# Outliers of W and dY: the largest, and the distance between channels with some.
_OTHER_OUTLIERS = (606.0, 256)
_GAUSSIAN = "Gaussian"
_ALL_TOKENS = "606, all tokens"
_W, _DY = "W up to 606", "dY up to 606"
_UNEVEN, _UNEVEN_ALONE = "uneven W", "only W uneven"
_UNEVEN_POWERS = -4.5, 4.5  # of two, the factors of its rows and columns
_ERRORS_OF_CHANNELS = {"Y": "y_channel", "dX": "dx_channel", "dW": "dw_in"}
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

# Second terms that ``row_block_lhs`` gets here, which no kernel multiplies: what they
# would cost, and give.  By name: the operand, the share of its blocks that fall back,
# and the size of these blocks.
_SECOND_TERMS = {
    "row_block_lhs, fallback in Y": ("x", 0.2, (128, 128)),
    "row_block_lhs, fallback in Y by 1x128": ("x", 0.2, (1, 128)),
    "row_block_lhs, W too": ("w", 0.5, (128, 128)),
    "row_block_lhs, dY too in dW": ("dy", 0.5, (128, 128)),
}
# Which of Y, dX and dW multiply them.  X's are in Y only, as in ``fallback``, and dY's
# in dW only, because dX has a scale for each token.
_PRODUCTS_WITH_SECOND_TERMS = {"x": (0,), "w": (0, 1), "dy": (2,)}

Operands = tuple[jax.Array, jax.Array, jax.Array]  # X, W and dY


def names() -> list[str]:
    """The names of all that is compared."""
    return [*compared_recipes(), *_SECOND_TERMS]


def compared_recipes() -> dict[str, Recipe]:
    """The recipes to measure: some that have a name, and their variants."""
    replace = dataclasses.replace
    row_block = recipes.row_block
    return {name: recipes.NAMED[name] for name in _NAMED} | {
        "row_block, columns of W": replace(
            row_block,
            fwd=replace(row_block.fwd, scales="row_block"),
            dlhs=replace(row_block.dlhs, scales="row_block"),
        ),
    }


def run(path: Path) -> None:
    """Measures all recipes, and writes the file.

    Raises:
      ResultsError: if the file cannot be written, or holds something else.
    """
    results.check_own(path, load)
    content = {
        "date": results.today(),
        "device": jax.devices()[0].device_kind,
        "versions": results.versions(),
        "shape": SHAPE,
        "recipe_errors": list(_rows(SHAPE)),
    }
    results.write(path, content)


def _rows(shape: tuple[int, int, int]) -> Iterator[dict[str, Any]]:
    operands = dict(_operands(shape))
    exact = {name: linear.exact_products(*arrays) for name, arrays in operands.items()}
    for name, recipe in compared_recipes().items():
        print(f"measuring {name}", flush=True)
        for where, (x, w, dy) in operands.items():
            matmul = matmuls.from_recipe(name, recipe, "reference", x)
            step = jax.jit(linear.step_of(matmul.product))
            *arrays, _ = step(x, w, dy, matmul.state, matmul.inputs)
            yield {
                "what": name,
                "data": where,
                "fallback": matmul.fallback,
                "extra_steps": (matmul.fallback or 0.0) / 3,
                "saved_bytes": matmuls.saved_bytes(matmul, x, w),
                "errors": _errors(arrays, exact[where]),
            }
    yield from _second_terms_rows(operands, exact)


def _second_terms_rows(
    operands: dict[str, Operands], exact: dict[str, Any]
) -> Iterator[dict[str, Any]]:
    """The errors of ``row_block_lhs`` if blocks of an operand fell back.

    Products are linear: those of a two-term operand are the sums of those of its terms.
    """
    matmul = matmuls.from_recipe(
        "", recipes.row_block_lhs, "reference", operands[_GAUSSIAN][0]
    )
    step = jax.jit(linear.step_of(matmul.product))

    def products(x: jax.Array, w: jax.Array, dy: jax.Array) -> list[jax.Array]:
        return list(step(x, w, dy, matmul.state, matmul.inputs)[:3])

    for name, (operand, share, block) in _SECOND_TERMS.items():
        print(f"measuring {name}", flush=True)
        scales = 1 if operand == "x" else 128, 128  # those of the recipe
        of_products = _PRODUCTS_WITH_SECOND_TERMS[operand]
        for where, (x, w, dy) in operands.items():
            floats = (array.astype(jnp.float32) for array in (x, w, dy))
            arrays = dict(zip(("x", "w", "dy"), floats, strict=True))
            found = products(**arrays)
            first, second = (
                products(**arrays | {operand: term})
                for term in _two_terms(arrays[operand], share, block, scales)
            )
            for index in of_products:
                found[index] = first[index] + second[index]
            yield {
                "what": name,
                "data": where,
                "fallback": None,
                "extra_steps": share * len(of_products) / 3,
                "saved_bytes": matmuls.saved_bytes(matmul, x, w),
                "errors": _errors(found, exact[where]),
            }


@functools.partial(jax.jit, static_argnums=(1, 2, 3))
def _two_terms(
    x: jax.Array, share: float, block: tuple[int, int], scales: tuple[int, int]
) -> tuple[jax.Array, jax.Array]:
    """A matrix as the sum of two, before the product quantizes each.

    In the blocks that fall back, those with the largest magnitudes, the first is x
    rounded to INT8, and the second what is left.  In the others the second is 0.

    Args:
      x: the matrix.
      share: the share of its blocks that fall back.
      block: the size of these blocks.
      scales: the size of blocks with one scale.
    """

    def quantized(block: tuple[int, int]) -> reference.FallbackQuantized:
        no_seed, unset = jnp.zeros(1, jnp.uint32), jnp.full(1, -1.0)
        return reference.quantize_fallback(
            x[None], unset, no_seed, block=block, criterion="absmax", colwise=None
        )

    metric = quantized(block).metric
    theta = jnp.quantile(metric, 1.0 - share)
    falls_back = reference.repeat_blocks(metric[0] > theta, block, x.shape)
    rounded = reference.dequantize(quantized(scales).main, scales)[0]
    first = jnp.where(falls_back, rounded, x)
    return first, x - first


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
        yield name, (data.swiglu(keys[0], (M, K), *outliers), w, dy)
    yield _ALL_TOKENS, (_channel_of_outliers(keys[0], (M, K)), w, dy)
    with_outliers = data.swiglu(keys[1], (K, N), *_OTHER_OUTLIERS) * K**-0.5
    yield _W, (x, with_outliers, dy)
    yield _DY, (x, w, data.swiglu(keys[2], (M, N), *_OTHER_OUTLIERS))
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
    x = data.swiglu(key, shape, *OUTLIERS["up to 606"])
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


def load(path: Path) -> dict[str, Any] | None:
    """The content of a file that ``run`` wrote; None if it holds something else."""
    content = results.read_mapping(path)
    is_ours = content is not None and "recipe_errors" in content
    return content if is_ours else None


def markdown(content: Mapping[str, Any]) -> str:
    """The table of a file, in Markdown: one row per recipe."""
    versions = ", ".join(f"{name} {v}" for name, v in content["versions"].items())
    sizes = ", ".join(map(str, content["shape"]))
    text = (
        f"**Errors of recipes with outliers in X, W or dY** (M, K, N = {sizes}), by "
        f"the reference on a {content['device'].upper()}, {content['date']}, "
        f"{versions}. "
        "Errors compare with float32 products: for Y and dX the mean over tokens, for "
        "dW over input channels. With outliers in W, Y's is the mean over output "
        "channels; with outliers in dY, dW's is. An uneven W has rows and columns with "
        "factors of 1/23 to 23, and X and dY have the inverse ones unless only W is "
        "uneven; errors are means over channels. Added work is that of second terms, "
        "on X up to 606, over the products'. Saved is what the forward pass saves of X."
    )
    by_recipe: dict[str, dict[str, Any]] = {}
    for row in content["recipe_errors"]:
        by_recipe.setdefault(row["what"], {})[row["data"]] = row
    xs = [_GAUSSIAN, *OUTLIERS, _ALL_TOKENS]
    columns = [
        *((f"Y, {x}", x, "y_token") for x in xs),
        (f"Y, {_W}", _W, "y_channel"),
        (f"dX, {_DY}", _DY, "dx_token"),
        *((f"dW, {x}", x, "dw_in") for x in xs),
        (f"dW, {_DY}", _DY, "dw_out"),
        *(
            (f"{product}, {x}", x, error)
            for x in (_UNEVEN, _UNEVEN_ALONE)
            for product, error in _ERRORS_OF_CHANNELS.items()
        ),
    ]
    head = [
        "recipe",
        "added work",
        "saved, bytes/value",
        *(title for title, *_ in columns),
    ]
    width = content["shape"][1]
    cells = [
        [
            name,
            f"+{rows['up to 606']['extra_steps']:.0%}",
            f"{rows['up to 606']['saved_bytes'] / width:.1f}",
            *(f"{rows[where]['errors'][error]:.3f}" for _, where, error in columns),
        ]
        for name, rows in by_recipe.items()
    ]
    return f"{text}\n\n{report.table(head, cells)}"
