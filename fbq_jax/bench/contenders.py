"""The products that a linear layer can be made of: this library's and others'."""

import importlib
import sys
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax import lax

from fbq_jax import ops, recipes
from fbq_jax.core import threshold
from fbq_jax.core.dot_general import dot_general
from fbq_jax.fp8 import dot_general as fp8
from fbq_jax.linen.fp8 import Fp8Dot, ScalingMethod
from fbq_jax.ops import dispatch
from fbq_jax.recipes.schema import Recipe

MATMUL = (((1,), (0,)), ((), ()))

# product(x, w, state, inputs) -> y
Product = Callable[[jax.Array, jax.Array, Any, Any], jax.Array]


class Contender(NamedTuple):
    """One way to compute ``x . w`` and its gradients.

    Attributes:
      name: of the recipe or library.
      implementation: what computes it.
      product: the differentiable function ``(x, w, state, inputs) -> y``.
      state: what the backward pass renews, by returning its new value as its gradient.
      inputs: other arrays, not differentiated: a threshold, a PRNG key.
      fallback: the share of blocks of x that fall back, None where none can.
      definition: the product that this one must agree with, None for others' work.
    """

    name: str
    implementation: str
    product: Product
    state: Any = ()
    inputs: Any = ()
    fallback: float | None = None
    definition: Product | None = None


def bf16() -> Contender:
    """XLA's product in the operands' own dtype."""
    return Contender("bf16", "xla", lambda x, w, *_: lax.dot_general(x, w, MATMUL))


def timed_recipes() -> dict[str, Recipe]:
    """The named recipes that are made to be fast: in Y, blocks of 128."""
    return {
        name: recipe
        for name, recipe in recipes.NAMED.items()
        if recipe.fwd.in_blocks and recipe.block_shape == (128, 128, 128)
    }


def own(x: jax.Array, implementation: str | None) -> Iterator[Contender]:
    """The recipes above, by one implementation.

    Where that is left to the library and it takes ``mosaic``, the recipe ``fallback``
    comes once more by ``triton``, which is what other GPUs run.
    """
    for name, recipe in timed_recipes().items():
        by = forward_by(recipe, implementation)
        yield by_recipe(name, recipe, by, x)
        also_triton = implementation is None and by == "mosaic"
        if also_triton and recipe is recipes.fallback:
            yield by_recipe(name, recipe, "triton", x)


def forward_by(recipe: Recipe, implementation: str | None) -> str:
    """The implementation that a recipe's forward GEMM runs by."""
    sides = recipe.block_shape if recipe.fwd.in_blocks else ()
    choice = dispatch.choose("matmul", sides, implementation=implementation)
    return choice.implementation


def by_recipe(
    name: str, recipe: Recipe, implementation: str, x: jax.Array
) -> Contender:
    """A recipe, with a threshold that the middle of its target rate exceeds in x."""
    theta = fallback = None
    if recipe.criterion is not None:
        metric = ops.block_metric(
            x[None],
            block=recipe.lhs_block,
            criterion=recipe.criterion,
            implementation=implementation,
        )
        theta = threshold.quantile(metric, recipe)
        fallback = float(threshold.fallback_rate(metric, theta))

    def product_by(implementation: str) -> Product:
        def product(x: jax.Array, w: jax.Array, state: Any, inputs: Any) -> jax.Array:
            del state
            theta, key = inputs
            y, _ = dot_general(
                x,
                w,
                MATMUL,
                recipe=recipe,
                theta=theta,
                key=key,
                implementation=implementation,
            )
            return y

        return product

    return Contender(
        name,
        implementation,
        product_by(implementation),
        inputs=(theta, jax.random.key(1)),
        fallback=fallback,
        definition=product_by("reference"),
    )


def own_fp8(scaling: ScalingMethod) -> Contender:
    """``Fp8Dot``'s product, with its state where it has one."""

    def product(x: jax.Array, w: jax.Array, state: Any, _: Any) -> jax.Array:
        spec = fp8.Spec(x.dtype, x.dtype, w.dtype)
        return fp8.matmul(spec, x[None], w[None], state)[0]

    state = fp8.start(Fp8Dot().history) if scaling == "delayed" else None
    return Contender(f"fp8_{scaling}", "xla", product, state=state)


def flax_fp8(x: jax.Array, w: jax.Array) -> Contender:
    """Flax's FP8 product: one scale a tensor, from the maxima of earlier steps."""
    op = nn.Fp8DotGeneral()
    state = op.init(jax.random.key(0), x, w, MATMUL)

    def product(x: jax.Array, w: jax.Array, state: Any, _: Any) -> jax.Array:
        y = op.apply(state, x, w, MATMUL)
        assert isinstance(y, jax.Array)
        return y

    return Contender("Flax Fp8DotGeneral", "xla", product, state=state)


def others() -> Iterator[Contender]:
    """The INT8 libraries that are installed; says which are not."""
    for library in (_qwix_int8, _aqt_int8):
        try:
            yield library()
        except ImportError as error:
            print(f"without {library.__name__[1:]}: {error}", file=sys.stderr)


def _qwix_int8() -> Contender:
    """Qwix's INT8 in all three products, a scale a channel, nearest rounding."""
    qwix = importlib.import_module("qwix._src.core.dot_general_qt")
    config = qwix.DotGeneralQtConfig(
        lhs_qtype=jnp.int8,
        rhs_qtype=jnp.int8,
        dlhs_grad_qtype=jnp.int8,
        drhs_grad_qtype=jnp.int8,
    )

    def product(x: jax.Array, w: jax.Array, *_: Any) -> jax.Array:
        return qwix.dot_general_qt(x, w, MATMUL, config)

    return Contender("Qwix INT8", "xla", product)


def _aqt_int8() -> Contender:
    """AQT's INT8 in all three products, stochastic rounding of the gradients."""
    config = importlib.import_module("aqt.jax.v2.config")
    int8 = config.fully_quantized(fwd_bits=8, bwd_bits=8)

    def product(x: jax.Array, w: jax.Array, _: Any, key: jax.Array) -> jax.Array:
        return config.set_context(int8, key, train_step=None)(x, w, MATMUL)

    return Contender("AQT INT8", "xla", product, inputs=jax.random.key(1))
