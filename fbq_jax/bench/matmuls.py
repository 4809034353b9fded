"""The matrix products of a linear layer: recipes, bf16 and other libraries."""

import functools
import importlib
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax import lax

from fbq_jax import recipes
from fbq_jax.core.dot_general import dot_general
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
    for name, recipe in supported(TIMED, implementation):
        matmul = from_recipe(name, recipe, implementation, x)
        yield matmul
        also_triton = implementation is None and matmul.implementation == "mosaic"
        if also_triton and recipe is recipes.fallback:
            yield from_recipe(name, recipe, "triton", x)


def forward_choice(recipe: Recipe, implementation: str | None) -> dispatch.Choice:
    """The choice for a recipe's forward GEMM on this device.

    Raises:
      ValueError: the implementation does not run it here, such as FP8 on a GPU without
        FP8 tensor cores.
    """
    fwd = recipe.fwd
    blocks = fwd.block_shape(recipe.block_shape) if fwd.splits_contraction else ()
    return dispatch.choose(
        "matmul", blocks, codes=recipe.codes, implementation=implementation
    )


def supported(
    names: Sequence[str], implementation: str | None
) -> Iterator[tuple[str, Recipe]]:
    """The named recipes that run here; stderr names the others."""
    for name in names:
        recipe = recipes.NAMED[name]
        try:
            forward_choice(recipe, implementation)
        except ValueError as error:
            print(f"without {name}: {error}", file=sys.stderr)
        else:
            yield name, recipe


def from_recipe(
    name: str, recipe: Recipe, implementation: str | None, x: jax.Array
) -> Matmul:
    """A recipe's product, by the implementation chosen for its forward GEMM.

    The threshold is the quantile of x's blocks that gives the middle of the recipe's
    target range of fallback rates.
    """
    choice = forward_choice(recipe, implementation)

    dot = functools.partial(dot_general, dimension_numbers=MATMUL, recipe=recipe)

    def product_by(implementation: str) -> Product:
        return lambda x, w, _, inputs: dot(
            x, w, implementation=implementation, **inputs
        )[0]

    fallback, inputs = None, {"key": jax.random.key(1)}
    if recipe.criterion is not None:
        w = jnp.zeros((x.shape[1], 128), x.dtype)  # It plays no part.
        quantize = functools.partial(dot, implementation=choice.implementation)
        _, stats = jax.jit(quantize)(x, w)
        fallback, inputs["theta"] = float(stats.rate), stats.theta
    is_int8 = recipe.codes == "int8"
    return Matmul(
        name,
        choice.backend,
        product_by(choice.implementation),
        inputs=inputs,
        fallback=fallback,
        reference=product_by("reference"),
        reference_limit=_REFERENCE_LIMIT if is_int8 else FLOAT8_REFERENCE_LIMIT,
    )


def bf16() -> Matmul:
    """XLA's product in the dtype of the operands."""
    return Matmul("bf16", "xla", lambda x, w, *_: lax.dot_general(x, w, MATMUL))


def flax_fp8(x: jax.Array, w: jax.Array) -> Matmul:
    """Flax's FP8 product: one scale per tensor, from the maxima of earlier steps."""
    op = nn.Fp8DotGeneral()
    state = op.init(jax.random.key(0), x, w, MATMUL)

    def product(x: jax.Array, w: jax.Array, state: Any, _: Any) -> jax.Array:
        y = op.apply(state, x, w, MATMUL)
        assert isinstance(y, jax.Array)
        return y

    return Matmul("Flax Fp8DotGeneral", "xla", product, state=state)


def installed_int8_libraries() -> Iterator[tuple[Matmul, dict[str, Any]]]:
    """Qwix and AQT where installed, as products and as arguments of ``nn.Dense``.

    stderr names the missing ones.
    """
    for name, library in (("qwix", _qwix_int8), ("aqt", _aqt_int8)):
        try:
            yield library()
        except ImportError as error:
            print(f"without {name}: {error}", file=sys.stderr)


def _qwix_int8() -> tuple[Matmul, dict[str, Any]]:
    """Qwix: INT8 in all three products, a scale per channel, nearest rounding."""
    qwix = importlib.import_module("qwix._src.core.dot_general_qt")
    config = qwix.DotGeneralQtConfig(
        lhs_qtype=jnp.int8,
        rhs_qtype=jnp.int8,
        dlhs_grad_qtype=jnp.int8,
        drhs_grad_qtype=jnp.int8,
    )

    def dot(x: jax.Array, w: jax.Array, dims: Any, **_: Any) -> jax.Array:
        y: jax.Array = qwix.dot_general_qt(x, w, dims, config)
        return y

    product = Matmul("Qwix INT8", "xla", lambda x, w, *_: dot(x, w, MATMUL))
    return product, {"dot_general": dot}


def _aqt_int8() -> tuple[Matmul, dict[str, Any]]:
    """AQT: INT8 in all three products, stochastic rounding of the gradients."""
    config = importlib.import_module("aqt.jax.v2.config")
    layer = importlib.import_module("aqt.jax.v2.flax.aqt_flax").AqtDotGeneral
    int8 = config.fully_quantized(fwd_bits=8, bwd_bits=8)

    def product(x: jax.Array, w: jax.Array, _: Any, key: jax.Array) -> jax.Array:
        y: jax.Array = config.set_context(int8, key, train_step=None)(x, w, MATMUL)
        return y

    return (
        Matmul("AQT INT8", "xla", product, inputs=jax.random.key(1)),
        {"dot_general_cls": functools.partial(layer, int8)},
    )
