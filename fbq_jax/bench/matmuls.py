"""The differentiable matrix products that a linear layer is measured with."""

import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from fbq_jax import ops, recipes
from fbq_jax.bench import memory
from fbq_jax.core import threshold
from fbq_jax.core.dot_general import dot_general
from fbq_jax.core.llm_int8 import llm_int8_dot
from fbq_jax.fp8 import dot_general as fp8
from fbq_jax.kernels.reference import CodeDtype
from fbq_jax.linen.fp8 import Fp8Dot, ScalingMethod
from fbq_jax.ops import dispatch
from fbq_jax.recipes.schema import Recipe

MATMUL = (((1,), (0,)), ((), ()))
# The recipes that are faster than bf16 and recommended for some case: all sections for
# whole steps, blocks and layers measure them.
TIMED = ("fallback", "block", "row_block_lhs", "fp8_row_block_lhs")

# product(x, w, state, inputs) -> y
Product = Callable[[jax.Array, jax.Array, Any, Any], jax.Array]

# bf16 outputs of float32 sums in another order: some values round the other way.
_REFERENCE_LIMIT = 1e-3
# The same where tensor cores keep about 14 bits of a sum of products of FP8 codes.
FLOAT8_REFERENCE_LIMIT = 1e-2


class Matmul(NamedTuple):
    """One way to compute ``x @ w`` and its gradients.

    Attributes:
      name: the recipe or library.
      implementation: the backend that computes it.
      product: the differentiable function ``(x, w, state, inputs) -> y``.
      state: a pytree that the backward pass updates: its gradient is its new value.
      inputs: a pytree that is not differentiated, such as a threshold or a PRNG key.
      fallback: the share of x's blocks that fall back; None without fallback.
      reference: the product that this one must agree with; None for other libraries.
      reference_limit: the largest relative error against it, on a corner.
    """

    name: str
    implementation: str
    product: Product
    state: Any = ()
    inputs: Any = ()
    fallback: float | None = None
    reference: Product | None = None
    reference_limit: float = _REFERENCE_LIMIT


def timed(x: jax.Array, implementation: str | None) -> Iterator[Matmul]:
    """The recipes of ``TIMED`` for the activation x.

    If the library chooses the implementation and takes ``mosaic``, the recipe
    ``fallback`` also comes with ``triton``, which other GPUs run.
    """
    for name in TIMED:
        recipe = recipes.NAMED[name]
        if not is_supported(recipe, implementation):
            continue
        matmul = from_recipe(name, recipe, implementation, x)
        yield matmul
        also_triton = implementation is None and matmul.implementation == "mosaic"
        if also_triton and recipe is recipes.fallback:
            yield from_recipe(name, recipe, "triton", x)


def forward_choice(recipe: Recipe, implementation: str | None) -> dispatch.Choice:
    """The choice for a recipe's forward GEMM on this device."""
    return dispatch.choose(
        "matmul",
        _forward_blocks(recipe),
        codes=recipe.codes,
        implementation=implementation,
    )


def _forward_blocks(recipe: Recipe) -> tuple[int, ...]:
    if recipe.fwd.splits_contraction:
        return recipe.fwd.block_shape(recipe.block_shape)
    return ()


def is_supported(recipe: Recipe, implementation: str | None) -> bool:
    """Whether an implementation that was asked for has a recipe's codes here."""
    return can_multiply(recipe.codes, _forward_blocks(recipe), implementation)


def can_multiply(
    codes: CodeDtype, block_shape: tuple[int, ...], implementation: str | None
) -> bool:
    """Whether an implementation that was asked for multiplies INT8 or FP8 codes here.

    Those of GPUs without FP8 tensor cores have INT8 codes only.
    """
    if codes == "int8":
        return True
    try:
        dispatch.choose(
            "matmul", block_shape, codes=codes, implementation=implementation
        )
    except ValueError:
        return False
    return True


def saved_bytes(matmul: Matmul, x: jax.Array, w: jax.Array) -> float:
    """Bytes of X and its scales saved for the backward pass, per token."""

    def product(w: jax.Array, x: jax.Array) -> jax.Array:
        return matmul.product(x, w, matmul.state, matmul.inputs)

    return memory.saved_bytes(product, w, x)


def from_recipe(
    name: str, recipe: Recipe, implementation: str | None, x: jax.Array
) -> Matmul:
    """A recipe's product, by the implementation chosen for its forward GEMM.

    The threshold is the quantile of x's blocks that gives the middle of the recipe's
    target range of fallback rates.
    """
    choice = forward_choice(recipe, implementation)
    theta = fallback = None
    if recipe.criterion is not None:
        unset = threshold.Scalars(jnp.float32(threshold.UNSET), jnp.uint32(0))
        quantized = ops.quantize_fallback(
            x[None],
            unset.theta[None],
            jnp.zeros(1, jnp.uint32),
            block=recipe.lhs_block,
            criterion=recipe.criterion,
            colwise=None,
            implementation=choice.implementation,
        )
        _, stats = threshold.apply(unset, quantized.metric, quantized.residual, recipe)
        theta, fallback = stats.theta, float(stats.rate)
    return Matmul(
        name,
        choice.backend,
        _recipe_product(recipe, choice.implementation),
        inputs=(theta, jax.random.key(1)),
        fallback=fallback,
        reference=_recipe_product(recipe, "reference"),
        reference_limit=(
            _REFERENCE_LIMIT if recipe.codes == "int8" else FLOAT8_REFERENCE_LIMIT
        ),
    )


def _recipe_product(recipe: Recipe, implementation: str) -> Product:
    dot = functools.partial(dot_general, recipe=recipe, implementation=implementation)

    def product(x: jax.Array, w: jax.Array, _: Any, inputs: Any) -> jax.Array:
        theta, key = inputs
        return dot(x, w, MATMUL, theta=theta, key=key)[0]

    return product


def all_products(recipe: Recipe | None) -> Callable[..., tuple[jax.Array, ...]]:
    """The function ``(x, w, dy) -> (y, dx, dw)``, of bf16 products.

    Args:
      recipe: the recipe of the layer, with a given threshold; None for bf16.
    """

    def product(x: jax.Array, w: jax.Array) -> jax.Array:
        w = w.astype(jnp.bfloat16)
        if recipe is None:
            return lax.dot_general(x, w, MATMUL)
        key, theta = jax.random.key(0), jnp.float32(1.0)
        options = {} if recipe.criterion is None else {"theta": theta}
        return dot_general(x, w, MATMUL, recipe=recipe, key=key, **options)[0]

    def layer(x: jax.Array, w: jax.Array, dy: jax.Array) -> tuple[jax.Array, ...]:
        y, vjp = jax.vjp(product, x, w)
        return y, *vjp(dy)

    return layer


def fp8_dot(scaling: ScalingMethod) -> Matmul:
    """The product of ``Fp8Dot``, with the state of delayed scaling."""

    def product(x: jax.Array, w: jax.Array, state: Any, _: Any) -> jax.Array:
        spec = fp8.Spec(x.dtype, x.dtype, w.dtype)
        return fp8.matmul(spec, x[None], w[None], state)[0]

    state = fp8.start(Fp8Dot().history) if scaling == "delayed" else fp8.Scalings()
    return Matmul(f"fp8_{scaling}", "xla", product, state=state)


def llm_int8() -> Matmul:
    """The product of ``llm_int8_dot``."""
    return Matmul("llm_int8", "xla", lambda x, w, *_: llm_int8_dot(x, w, MATMUL))
