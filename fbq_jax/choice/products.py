"""What the layers of a model multiply in a step, and what quantization does to it."""

import functools
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from fbq_jax.core.arguments import DotArguments, as_matrices
from fbq_jax.core.dot_general import dot_general
from fbq_jax.core.visitors import Visitor, visiting
from fbq_jax.kernels.speed_map import Sizes
from fbq_jax.recipes.schema import Recipe
from fbq_jax.sharding.layer_names import current_layer, current_path

DIMENSIONS = ((2,), (1,)), ((0,), (0,))
_BLOCK = 128
#: A block is an outlier if its largest magnitude is so many times the lower quartile of
#: all blocks' largest magnitudes.
OUTLIER = 8.0


class Product(NamedTuple):
    """One product of a layer, ``Y = X . W``, and the gradient of its output.

    Attributes:
      x: ``[B, M', K]``, some rows of X.
      w: ``[B, K, N]``.
      dy: ``[B, M', N]``, the same rows of dY.
      sizes: M, K and N of the product in the model.
    """

    x: Any
    w: Any
    dy: Any
    sizes: Sizes


class Recorder(Visitor):
    """For this visitor, layers multiply in float and show what they multiply.

    A step that is compiled in its context shows its products in every call.

    Attributes:
      rows: the most rows of X and dY that are kept, several times 128.
      products: by the path of their layer, in any order in a stack.
    """

    def __init__(self, rows: int):
        self.rows = rows
        self.products: dict[str, list[Product]] = {}
        self.seen: set[str] = set()  # names of layers
        self._names: dict[str, str] = {}  # by path

    def record(self, step: Callable[[], Any]) -> dict[str, list[Product]]:
        """The products of a step, which takes a gradient."""
        self.products.clear()
        with visiting(self):
            jax.block_until_ready(step())
        jax.effects_barrier()
        others = self.seen.difference(map(self._names.get, self.products))
        if self.products and others:
            names = ", ".join(sorted(others))
            warnings.warn(f"not measured, and without a rule: {names}", stacklevel=5)
        self.seen.clear()
        return dict(sorted(self.products.items()))

    def see(self, product: Any) -> Any:
        """Sees a product, maybe one of several in an op, as of experts."""
        self.seen.add(current_layer() or "")
        return product

    def multiply(
        self, layer: Any, lhs: jax.Array, arguments: DotArguments
    ) -> jax.Array | None:
        """The product in float, whose gradient is recorded."""
        sizes = arguments.sizes(lhs, arguments.output(lhs, layer.weight))
        path, name = current_path() or "", current_layer() or ""
        self._names[path] = name
        add = functools.partial(self._add, path, sizes)

        def product(lhs: jax.Array, rhs: jax.Array) -> jax.Array:
            wide = jnp.promote_types(lhs.dtype, rhs.dtype)
            operands = lhs.astype(wide), rhs.astype(wide)
            return lax.dot_general(*operands, **arguments._asdict())

        def backward(operands: tuple[jax.Array, jax.Array], dy: jax.Array) -> Any:
            x, w = as_matrices(*operands, arguments.dimension_numbers)
            x, dy_ = (
                a.reshape(len(w), -1, n)
                for a, n in zip((x, dy), w.shape[1:], strict=True)
            )
            rows = _rows(x, self.rows)
            jax.debug.callback(add, x[:, rows], w, dy_[:, rows])
            return jax.vjp(product, *operands)[1](dy)

        recorded = jax.custom_vjp(product)
        recorded.defvjp(lambda *operands: (product(*operands), operands), backward)
        y: jax.Array = recorded(lhs, layer.weight)
        return y

    def _add(self, path: str, sizes: Sizes, *arrays: Any) -> None:
        x, w, dy = map(np.asarray, arrays)
        self.products.setdefault(path, []).append(Product(x, w, dy, sizes))


def _rows(x: jax.Array, most: int) -> jax.Array:
    """Indices of rows of X ``[B, M, K]``, in blocks of 128.

    They are evenly spaced, but for the block with the largest magnitude, or with NaN.
    """
    M = x.shape[1]
    if most >= M:
        return jnp.arange(M)
    first = np.minimum(np.arange(0, M, _BLOCK), M - _BLOCK)
    blocks = first[:, None] + np.arange(_BLOCK)
    size = jnp.where(jnp.isnan(x), jnp.inf, jnp.abs(x))  # XLA's maximum may lose a NaN
    largest = jnp.argmax(size.max(axis=(0, 2))[blocks].max(axis=1))
    others = np.linspace(0, len(blocks) - 2, most // _BLOCK - 1).astype(int)
    chosen = jnp.append(jnp.where(others < largest, others, others + 1), largest)
    return jnp.asarray(blocks)[chosen].reshape(-1)


@functools.partial(jax.jit, static_argnums=3)
def errors(
    x: jax.Array, w: jax.Array, dy: jax.Array, recipes: Sequence[Recipe]
) -> list[list[jax.Array]]:
    """The errors of each recipe in Y, dX and dW of a ``Product``.

    They are relative to float32 products of the same operands, in the Frobenius norm.
    The threshold of fallback is the quantile of the operands' own blocks.
    """

    def relative(actual: jax.Array, exact: jax.Array) -> jax.Array:
        norm = jnp.linalg.norm(exact.ravel())
        difference = jnp.linalg.norm((actual.astype(jnp.float32) - exact).ravel())
        return jnp.where(norm == 0, 0.0, difference / norm)

    with jax.default_matmul_precision("highest"):
        exact = gradients(None, *(a.astype(jnp.float32) for a in (x, w, dy)))
    found = [gradients(recipe, x, w, dy) for recipe in recipes]
    return [list(map(relative, actual, exact)) for actual in found]


def gradients(
    recipe: Recipe | None,
    x: jax.Array,
    w: jax.Array,
    dy: jax.Array,
    theta: jax.Array | None = None,
) -> tuple[jax.Array, ...]:
    """Y, dX and dW of a ``Product``, by a recipe or, if it is None, in float."""

    def product(x: jax.Array, w: jax.Array) -> jax.Array:
        options: Any = {"preferred_element_type": dy.dtype}
        if recipe is None:
            return lax.dot_general(x, w, DIMENSIONS, **options)
        options |= {"recipe": recipe, "theta": theta, "key": jax.random.key(0)}
        return dot_general(x, w, DIMENSIONS, **options)[0]

    y, backward = jax.vjp(product, x, w)
    return y, *backward(dy)


@jax.jit
def outliers(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """What stands out in an activation ``[B, M, K]``.

    Returns its largest magnitude over the root mean square; and the share of 128x128
    blocks whose largest magnitude is more than ``OUTLIER`` times the lower quartile of
    all blocks' largest magnitudes.
    """
    size = jnp.abs(x.astype(jnp.float32))
    blocks = jnp.pad(size, [(0, 0)] + [(0, -side % _BLOCK) for side in x.shape[1:]])
    batch, rows, columns = blocks.shape
    blocks = blocks.reshape(batch, rows // _BLOCK, _BLOCK, columns // _BLOCK, _BLOCK)
    blocks = blocks.max(axis=(2, 4))
    rms = jnp.sqrt(jnp.mean(jnp.square(size)))
    share = jnp.mean(blocks > OUTLIER * jnp.quantile(blocks, 0.25))
    return size.max() / jnp.maximum(rms, jnp.finfo(jnp.float32).tiny), share
