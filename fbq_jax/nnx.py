"""Injection into Flax NNX: ``nnx.Linear(..., dot_general=FallbackDot())``.

``apply_rules`` gives the layers of a whole model theirs.  The norms of
``fbq_jax.nnx_norms`` are here by name.
"""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from fbq_jax import rules as rules_of_paths
from fbq_jax import threshold
from fbq_jax.dot_general import stateful_dot_general
from fbq_jax.einsum import einsum
from fbq_jax.matrices import DimensionNumbers
from fbq_jax.nnx_norms import LayerNorm as LayerNorm
from fbq_jax.nnx_norms import RMSNorm as RMSNorm
from fbq_jax.ragged import stateful_ragged_dot
from fbq_jax.recipe import Recipe
from fbq_jax.recipes import fallback
from fbq_jax.rules import RulesReport
from fbq_jax.stats import SLOT, LayerStats

Layer = nnx.Linear | nnx.LinearGeneral | nnx.Einsum


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
        out, new = stateful_dot_general(
            self._state(),
            lhs,
            rhs,
            dimension_numbers,
            precision,
            preferred_element_type,
            recipe=self.recipe,
            out_sharding=out_sharding,
            implementation=self.implementation,
        )
        self._move(new)
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
            self._state(),
            lhs,
            rhs,
            group_sizes,
            precision,
            preferred_element_type,
            recipe=self.recipe,
            implementation=self.implementation,
        )
        self._move(new)
        return out

    def _state(self) -> dict[str, jax.Array]:
        return {
            "theta": self.theta[...],
            "rate": self.rate[...],
            "count": self.count[...],
            "seed": self.seed[...],
        }

    def _move(self, new: threshold.State) -> None:
        if not self.use_running_average:
            self.theta[...] = new["theta"]
            self.rate[...] = new["rate"]
            self.count[...] = new["count"]


class FallbackEinsum(nnx.Module):
    """A quantized ``jnp.einsum`` for one ``nnx.Einsum``; its state lives in it.

    The first operand is the activation (``fbq_jax.FallbackEinsum`` says more).  It has
    a ``FallbackDot``, and takes its arguments.

    >>> op = FallbackEinsum(rngs=nnx.Rngs(0))
    >>> layer = nnx.Einsum(
    ...     "btd,dhk->bhtk", (16, 2, 8), einsum_op=op, rngs=nnx.Rngs(0))
    >>> layer(jnp.ones((3, 5, 16))).shape
    (3, 2, 5, 8)
    >>> fallback_stats(layer)["(root)"].count[...]
    Array(1, dtype=uint32)
    """

    def __init__(
        self,
        recipe: Recipe = fallback,
        *,
        rngs: nnx.Rngs | None = None,
        implementation: str | None = None,
    ):
        self.dot_general = FallbackDot(recipe, rngs=rngs, implementation=implementation)

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
            layer = path[:-1] if path[-1:] == (SLOT,) else path
            layer = layer[:-1] if layer[-1:] == ("einsum_op",) else layer
            stats["/".join(map(str, layer)) or "(root)"] = LayerStats(
                module.rate[...], module.theta[...], module.count[...]
            )
        for dot in vars(module).values():
            if (
                isinstance(dot, FallbackDot | FallbackEinsum)
                and owners.setdefault(id(dot), name) != name
            ):
                raise ValueError(
                    f"layers {owners[id(dot)]!r} and {name!r} share one FallbackDot, "
                    "and so one threshold; give each layer its own"
                )
    return stats


def apply_rules(
    model: nnx.Module,
    rules: Mapping[str, Recipe | None],
    *,
    rngs: nnx.Rngs | None = None,
    implementation: str | None = None,
) -> RulesReport:
    """Gives each linear layer of a model the recipe of the first rule that matches it.

    The layers are the model's ``nnx.Linear``, ``nnx.LinearGeneral`` and ``nnx.Einsum``;
    rules match their paths, such as ``"blocks/0/mlp/up"`` (``fbq_jax.rules``).  A layer
    gets a ``FallbackDot`` of its own as its ``dot_general``, or a ``FallbackEinsum`` as
    its ``einsum_op``.  By a rule that is None it gets ``lax.dot_general`` or
    ``jnp.einsum``: float.  A layer that no rule matches stays as it is.

    Args:
      model: changed in place, or, on an error, not at all.
      rules: a mapping from patterns to recipes, in the order in which they are tried.
      rngs: as for ``FallbackDot``.
      implementation: as for ``FallbackDot``.

    Returns:
      Which rule took which layer, the rules that took none and the layers that none
      took.

    Raises:
      TypeError: a rule's recipe is neither a ``Recipe`` nor None.
      ValueError: a pattern is no regular expression; or a layer that a rule takes is a
        stack made by ``nnx.vmap``, each layer of which needs state of its own: apply
        rules where one layer of the stack is made.

    >>> model = nnx.MultiHeadAttention(2, 16, decode=False, rngs=nnx.Rngs(0))
    >>> report = apply_rules(model, {"out": None, "query|key": fallback, "up": None})
    >>> report.layers
    {'key': 'query|key', 'out': 'out', 'query': 'query|key'}
    >>> report.unused_rules, report.unmatched_layers
    (('up',), ('value',))
    """
    pairs = rules_of_paths.check(rules)
    found: dict[str, str | None] = {}
    taken: list[tuple[Layer, Recipe | None]] = []
    for parts, module in nnx.iter_modules(model):
        if not isinstance(module, Layer):
            continue
        path = "/".join(map(str, parts))
        rule = rules_of_paths.find(pairs, path)
        found[path] = None if rule is None else rule[0]
        if rule is not None:
            if rule[1] is not None and _is_stack(module):
                raise ValueError(
                    f"layer {path!r} is a stack of layers, its kernel of shape "
                    f"{module.kernel.shape}: apply rules where one of them is made, "
                    "inside nnx.vmap"
                )
            taken.append((module, rule[1]))
    for layer, recipe in taken:
        _set(layer, recipe, rngs, implementation)
    return rules_of_paths.report(pairs, found)


def _set(
    layer: Layer,
    recipe: Recipe | None,
    rngs: nnx.Rngs | None,
    implementation: str | None,
) -> None:
    """Gives a layer the op of a recipe."""
    op: Any
    if isinstance(layer, nnx.Einsum):
        op = nnx.static(jnp.einsum)
        if recipe is not None:
            op = FallbackEinsum(recipe, rngs=rngs, implementation=implementation)
            op = nnx.data(op)
        layer.einsum_op = op
        return
    op = nnx.static(lax.dot_general)
    if recipe is not None:
        op = nnx.data(FallbackDot(recipe, rngs=rngs, implementation=implementation))
    layer.dot_general = op
    if isinstance(layer, nnx.LinearGeneral):
        layer.dot_general_cls = None  # which would go first


def _is_stack(layer: Layer) -> bool:
    if isinstance(layer, nnx.Linear):
        return layer.kernel.ndim != 2
    if isinstance(layer, nnx.Einsum):
        return layer.kernel.ndim != len(layer.kernel_shape)
    sizes = (*layer.batch_axis, *layer.in_features, *layer.out_features)
    return layer.kernel.ndim != len(sizes)
