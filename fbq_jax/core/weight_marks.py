"""Marks of the weights of quantized products, in a model that is being traced."""

import contextlib
import dataclasses
from collections.abc import Iterator

import jax
from jax import lax

from fbq_jax.recipes.schema import Recipe
from fbq_jax.sharding.layer_names import current_layer

#: How the names of the jitted functions begin that mark weights.
MARK = "fbq_jax_weight_"


@dataclasses.dataclass(frozen=True)
class QuantizedProduct:
    """A product that a quantized op computes.

    Attributes:
      layer: the name of the calling layer; None if it has none.
      shape: the shape of the right operand.
      recipe: the recipe of the product.
      ignores_precision: whether the layer asked for a precision that was ignored.
    """

    layer: str | None
    shape: tuple[int, ...]
    recipe: Recipe
    ignores_precision: bool = False


@dataclasses.dataclass(eq=False)
class ProductRecorder:
    """The quantized products of a model that is being traced, in order."""

    products: list[QuantizedProduct] = dataclasses.field(default_factory=list)


# Part of the key of JAX's trace caches: a layer that was traced before is traced again.
_recorder = jax.make_user_context(None)


@contextlib.contextmanager
def record_products() -> Iterator[ProductRecorder]:
    """Makes quantized ops that are traced inside report to the yielded recorder."""
    recorder = ProductRecorder()
    # A mark is the name of a jitted function.
    with _recorder(recorder), jax.disable_jit(False):
        yield recorder


def mark_weight(
    weight: jax.Array, recipe: Recipe, *, ignores_precision: bool = False
) -> jax.Array:
    """The weight of a quantized product, marked if a recorder is active."""
    recorder: ProductRecorder | None = _recorder.value
    if recorder is None:
        return weight

    def marked(x: jax.Array) -> jax.Array:
        return lax.optimization_barrier(x)  # JAX would drop an identity

    marked.__name__ = f"{MARK}{len(recorder.products)}"
    product = QuantizedProduct(current_layer(), weight.shape, recipe, ignores_precision)
    recorder.products.append(product)
    return jax.jit(marked)(weight)
