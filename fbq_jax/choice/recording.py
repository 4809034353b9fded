"""Records what the layers of a model multiply in a training step."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from fbq_jax.core.arguments import DotArguments, as_matrices
from fbq_jax.core.visitors import Visitor
from fbq_jax.sharding.layer_names import current_layer

Sizes = tuple[int, int, int]


class Operands(NamedTuple):
    """One product of a layer, ``Y = X . W``, and the gradient of its output.

    Attributes:
      x: ``[B, M', K]``, some rows of X.
      w: ``[B, K, N]``.
      dy: ``[B, M', N]``, the same rows of dY.
      sizes: M, K and N of the product in the model.
    """

    x: np.ndarray
    w: np.ndarray
    dy: np.ndarray
    sizes: Sizes


class Recording(Visitor):
    """The visitor for which layers multiply in float, and show what they multiply.

    Attributes:
      rows: the most rows of X and dY that are kept.
      products: the products by the path of their layer, those of a stack in any order.
    """

    def __init__(self, rows: int):
        self.rows = rows
        self.products: dict[str, list[Operands]] = {}

    def multiply(
        self, layer: Any, lhs: jax.Array, arguments: DotArguments
    ) -> jax.Array | None:
        """The product in float, whose gradient is recorded."""
        path = current_layer() or ""
        out = arguments.output(lhs, layer.weight)
        sizes = arguments.sizes(lhs, out)
        add = functools.partial(self._add, path, sizes)

        def product(lhs: jax.Array, rhs: jax.Array) -> jax.Array:
            wide = jnp.promote_types(lhs.dtype, rhs.dtype)
            return lax.dot_general(
                lhs.astype(wide), rhs.astype(wide), **arguments._asdict()
            )

        @jax.custom_vjp
        def recorded(lhs: jax.Array, rhs: jax.Array) -> jax.Array:
            return product(lhs, rhs)

        def backward(operands: tuple[jax.Array, jax.Array], dy: jax.Array) -> Any:
            x, w = as_matrices(*operands, arguments.dimension_numbers)
            rows = dy.reshape(len(x), -1, w.shape[2])[:, : self.rows]
            x = x.reshape(len(x), -1, x.shape[-1])[:, : self.rows]
            jax.debug.callback(add, x, w, rows)
            return jax.vjp(product, *operands)[1](dy)

        recorded.defvjp(lambda *operands: (product(*operands), operands), backward)
        return recorded(lhs, layer.weight)

    def _add(self, path: str, sizes: Sizes, *arrays: Any) -> None:
        x, w, dy = map(np.asarray, arrays)
        product = Operands(x, w, dy, sizes)
        self.products.setdefault(path, []).append(product)
