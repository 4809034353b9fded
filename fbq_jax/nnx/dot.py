"""The quantized op of one Flax NNX layer, with its state."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from fbq_jax.core import threshold
from fbq_jax.core.conv import conv_general_dilated
from fbq_jax.core.dimension_numbers import DimensionNumbers
from fbq_jax.core.dot_general import stateful_dot_general
from fbq_jax.core.einsum import einsum
from fbq_jax.core.ragged_dot import stateful_ragged_dot
from fbq_jax.nnx.frozen import FreezableDot
from fbq_jax.recipes import fallback
from fbq_jax.recipes.schema import Recipe


class FallbackState(nnx.Variable):
    """A layer's state: ``fbq_jax.core.threshold.State`` says what each one holds."""


class FallbackDot(FreezableDot):
    """A quantized ``dot_general`` for one NNX layer; its state lives in it.

    Each layer needs an instance of its own: ``fbq_jax.nnx.fallback_stats`` raises where
    two layers share one.  ``model.eval()`` freezes the threshold and ``model.train()``
    lets it move again, through ``use_running_average`` as in ``nnx.BatchNorm``.
    ``nnx.LinearGeneral`` takes it as ``dot_general=``; its ``dot_general_cls=`` makes a
    new object in every call, which can keep no state.

    Args:
      recipe: what is quantized how.
      rngs: seeds the layer's noise from its ``params`` stream.  Without it layers
        draw the same noise for elements at the same place.
      implementation: ``"mosaic"``, ``"triton"`` or ``"reference"``; by default
        ``fbq_jax.ops.dispatch`` chooses.

    >>> layer = nnx.Linear(16, 8, dot_general=FallbackDot(), rngs=nnx.Rngs(0))
    >>> y = layer(jax.random.normal(jax.random.key(0), (4, 16)))
    >>> int(layer.dot_general.count[...])
    1
    """

    def __init__(
        self,
        recipe: Recipe = fallback,
        *,
        rngs: nnx.Rngs | None = None,
        implementation: str | None = None,
    ):
        if not isinstance(recipe, Recipe):
            raise TypeError(
                f"FallbackDot takes a Recipe, such as fbq_jax.recipes.fallback; got "
                f"{recipe!r}"
            )
        seed = 0 if rngs is None else jax.random.bits(rngs.params(), (), jnp.uint32)
        state = threshold.start(recipe, seed)
        super().__init__(recipe, implementation)
        self.use_running_average = False
        self.theta = FallbackState(state["theta"])
        self.rate = FallbackState(state["rate"])
        self.count = FallbackState(state["count"])
        self.seed = FallbackState(state["seed"])

    def set_view(self, use_running_average: bool | None = None) -> None:
        """Called by ``nnx.view``: True freezes the threshold, False lets it move."""
        if use_running_average is not None:
            self.use_running_average = use_running_average

    def __call__(
        self,
        lhs: jax.Array,
        rhs: jax.Array,
        dimension_numbers: DimensionNumbers,
        precision: Any = None,
        preferred_element_type: jax.typing.DTypeLike | None = None,
        *,
        out_sharding: Any = None,
    ) -> jax.Array:
        """``lax.dot_general(lhs, rhs, ...)``, quantized; lhs is the activation."""
        out, new = stateful_dot_general(
            self.state(),
            lhs,
            rhs,
            dimension_numbers,
            precision,
            preferred_element_type,
            recipe=self.recipe,
            out_sharding=out_sharding,
            implementation=self.implementation,
            codes=self.codes_of(rhs, dimension_numbers),
        )
        self.commit(new)
        return out

    def ragged_dot(
        self,
        lhs: jax.Array,
        rhs: jax.Array,
        group_sizes: jax.Array,
        precision: Any = None,
        preferred_element_type: jax.typing.DTypeLike | None = None,
    ) -> jax.Array:
        """``lax.ragged_dot(lhs, rhs, group_sizes, ...)``, with state as for a call.

        ``fbq_jax.ragged_dot`` says what it takes; there is no GPU kernel for it.
        """
        out, new = stateful_ragged_dot(
            self.state(),
            lhs,
            rhs,
            group_sizes,
            precision,
            preferred_element_type,
            recipe=self.recipe,
            implementation=self.implementation,
        )
        self.commit(new)
        return out

    def commit(self, new: threshold.State) -> None:
        """Puts a call's new state in the place of the old, but in evaluation."""
        if not self.use_running_average:
            self.theta[...] = new["theta"]
            self.rate[...] = new["rate"]
            self.count[...] = new["count"]


class FallbackOp(nnx.Module):
    """An op that is one product by a ``FallbackDot`` of its own, with its arguments."""

    def __init__(
        self,
        recipe: Recipe = fallback,
        *,
        rngs: nnx.Rngs | None = None,
        implementation: str | None = None,
    ):
        self.dot_general = FallbackDot(recipe, rngs=rngs, implementation=implementation)


class FallbackEinsum(FallbackOp):
    """A quantized ``jnp.einsum`` for one ``nnx.Einsum``; its state lives in it.

    The first operand is the activation (``fbq_jax.FallbackEinsum`` says more).  It has
    a ``FallbackDot``, and takes its arguments.

    >>> op = FallbackEinsum(rngs=nnx.Rngs(0))
    >>> layer = nnx.Einsum(
    ...     "btd,dhk->bhtk", (16, 2, 8), einsum_op=op, rngs=nnx.Rngs(0))
    >>> layer(jnp.ones((3, 5, 16))).shape
    (3, 2, 5, 8)
    >>> op.dot_general.count[...]
    Array(1, dtype=uint32)
    """

    def __call__(
        self,
        subscripts: str,
        /,
        *operands: jax.Array,
        precision: Any = None,
        preferred_element_type: jax.typing.DTypeLike | None = None,
        out_sharding: Any = None,
    ) -> jax.Array:
        """``jnp.einsum(subscripts, *operands, ...)``, quantized."""
        return einsum(
            self.dot_general,
            subscripts,
            operands,
            precision,
            preferred_element_type,
            out_sharding,
        )


class FallbackConv(FallbackOp):
    """A quantized ``lax.conv_general_dilated`` for one ``nnx.Conv``, with its state.

    ``fbq_jax.FallbackConv`` says what it takes and what overlapping windows cost.  It
    has a ``FallbackDot``, and takes its arguments.

    >>> op = FallbackConv(rngs=nnx.Rngs(0))
    >>> layer = nnx.Conv(
    ...     3, 8, (4, 4), strides=4, conv_general_dilated=op, rngs=nnx.Rngs(0))
    >>> layer(jnp.ones((2, 16, 16, 3))).shape
    (2, 4, 4, 8)
    >>> op.dot_general.count[...]
    Array(1, dtype=uint32)
    """

    def __call__(
        self, lhs: jax.Array, rhs: jax.Array, *args: Any, **kwargs: Any
    ) -> jax.Array:
        """``lax.conv_general_dilated(lhs, rhs, ...)``, quantized."""
        return conv_general_dilated(self.dot_general, lhs, rhs, *args, **kwargs)
