"""Injection into Flax NNX: ``nnx.Linear(..., dot_general=FallbackDot())``.

The norms of ``fbq_jax.nnx_norms`` are here by name.
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from fbq_jax import threshold
from fbq_jax.dot_general import stateful_dot_general
from fbq_jax.matrices import DimensionNumbers
from fbq_jax.nnx_norms import LayerNorm as LayerNorm
from fbq_jax.nnx_norms import RMSNorm as RMSNorm
from fbq_jax.recipe import Recipe
from fbq_jax.recipes import fallback
from fbq_jax.stats import SLOT, LayerStats


class FallbackState(nnx.Variable):
    """A layer's state: ``fbq_jax.threshold.State`` says what each one holds."""


class FallbackDot(nnx.Module):
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
      implementation: of the ops, as ``fbq_jax.dispatch`` names them; None leaves the
        choice to it.

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
        self.recipe = recipe
        self.implementation = implementation
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
        state = {
            "theta": self.theta[...],
            "rate": self.rate[...],
            "count": self.count[...],
            "seed": self.seed[...],
        }
        out, new = stateful_dot_general(
            state,
            lhs,
            rhs,
            dimension_numbers,
            precision,
            preferred_element_type,
            recipe=self.recipe,
            out_sharding=out_sharding,
            implementation=self.implementation,
        )
        if not self.use_running_average:
            self.theta[...] = new["theta"]
            self.rate[...] = new["rate"]
            self.count[...] = new["count"]
        return out


def fallback_stats(model: nnx.Module) -> dict[str, LayerStats]:
    """Collects the state of every quantized layer of an NNX model.

    Returns:
      Layer path (``"mlp/down"``) to ``LayerStats``, as ``fbq_jax.fallback_stats``.

    Raises:
      ValueError: if two layers share one ``FallbackDot``, and so one threshold.
    """
    owners: dict[int, str] = {}
    stats = {}
    for path, module in nnx.iter_modules(model):
        name = "/".join(map(str, path))
        if isinstance(module, FallbackDot):
            layer = name.removesuffix(SLOT).rstrip("/") or "(root)"
            stats[layer] = LayerStats(
                module.rate[...], module.theta[...], module.count[...]
            )
        for dot in vars(module).values():
            if (
                isinstance(dot, FallbackDot)
                and owners.setdefault(id(dot), name) != name
            ):
                raise ValueError(
                    f"layers {owners[id(dot)]!r} and {name!r} share one FallbackDot, "
                    "and so one threshold; give each layer its own"
                )
    return stats
