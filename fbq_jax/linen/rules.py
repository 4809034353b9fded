"""Rules for whole models in Flax Linen: one ``dot_general`` that looks at paths."""

import contextvars
import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
from flax import linen as nn
from jax import lax

from fbq_jax.core.dimension_numbers import DimensionNumbers
from fbq_jax.linen.dot import FallbackDot
from fbq_jax.linen.state import calling_module
from fbq_jax.recipes import path_rules
from fbq_jax.recipes.path_rules import RulesReport
from fbq_jax.recipes.schema import Recipe

LAYERS = (nn.Dense, nn.DenseGeneral, nn.Einsum, nn.Conv)

# The object that a report is about, and the layers that it has found so far, each with
# the pattern that took it.
_reporting: contextvars.ContextVar[tuple["RulesDot", dict[str, str | None]] | None] = (
    contextvars.ContextVar("reporting", default=None)
)


@dataclasses.dataclass(frozen=True)
class RulesDot:
    """A ``dot_general`` for all layers of a Linen model, with a recipe by path.

    Each layer computes as with ``FallbackDot(recipe)`` of the first rule that matches
    its path (``fbq_jax.recipes.path_rules``), and keeps its state where that would.  A
    layer whose rule is None, or which no rule matches, computes in float and has no
    state.

    Attributes:
      rules: a mapping from patterns to recipes, in the order in which they are tried.
      collection: the name of the variable collection.
      implementation: ``"mosaic"``, ``"triton"`` or ``"reference"``; by default
        ``fbq_jax.ops.dispatch`` chooses.

    Raises:
      TypeError: a rule's recipe is neither a ``Recipe`` nor None.
      ValueError: a pattern is no regular expression, or the collection is
        ``"params"``; or it is called outside any module, where there is no path.

    >>> from fbq_jax import recipes
    >>> dot = RulesDot({"head": None, "mlp_.*": recipes.fallback, "attn": None})
    >>> class Model(nn.Module):
    ...     @nn.compact
    ...     def __call__(self, x):
    ...         x = nn.Dense(16, dot_general=dot, name="mlp_0")(x)
    ...         x = nn.Dense(16, name="forgotten")(x)
    ...         return nn.Dense(8, dot_general=dot, name="head")(x)
    >>> x = jax.ShapeDtypeStruct((4, 16), "float32")
    >>> report = dot.report(Model(), jax.random.key(0), x)
    >>> report.layers
    {'mlp_0': 'mlp_.*', 'head': 'head'}
    >>> report.unused_rules, report.unmatched_layers
    (('attn',), ('forgotten',))
    """

    rules: Mapping[str, Recipe | None] | path_rules.Pairs
    collection: str = "fallback"
    implementation: str | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "rules", path_rules.check(self.rules))
        FallbackDot(collection=self.collection)  # which says if it cannot be

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
        """``lax.dot_general(lhs, rhs, ...)``, quantized as the layer's rule says."""
        return (self.of_layer() or lax.dot_general)(
            lhs,
            rhs,
            dimension_numbers,
            precision,
            preferred_element_type,
            out_sharding=out_sharding,
        )

    def ragged_dot(
        self,
        lhs: jax.Array,
        rhs: jax.Array,
        group_sizes: jax.Array,
        precision: Any = None,
        preferred_element_type: jax.typing.DTypeLike | None = None,
    ) -> jax.Array:
        """``lax.ragged_dot(lhs, rhs, group_sizes, ...)``, likewise."""
        dot = self.of_layer()
        ragged_dot = lax.ragged_dot if dot is None else dot.ragged_dot
        return ragged_dot(lhs, rhs, group_sizes, precision, preferred_element_type)

    def of_layer(self) -> FallbackDot | None:
        """What the layer that calls computes with; None is float."""
        module = calling_module()
        if module is None:
            raise ValueError(
                "RulesDot finds a recipe by the path of the Linen layer that calls it; "
                "for NNX there is fbq_jax.nnx.apply_rules, elsewhere use FallbackDot"
            )
        path = "/".join(module.path)
        assert isinstance(self.rules, tuple)  # as __post_init__ leaves it
        pattern, recipe = path_rules.find(self.rules, path) or (None, None)
        if (reporting := _reporting.get()) and reporting[0] == self:
            reporting[1][path] = pattern
        if recipe is None:
            return None
        return FallbackDot(recipe, self.collection, self.implementation)

    def report(
        self, model: nn.Module, rngs: Any, *args: Any, **kwargs: Any
    ) -> RulesReport:
        """Traces ``model.init(rngs, *args, **kwargs)``; nothing is computed.

        Args:
          model: has this object as the ``dot_general`` of its layers.
          rngs: as ``init`` takes them.
          *args: arrays, or their ``jax.ShapeDtypeStruct``.
          **kwargs: static options, such as ``train=False``.

        Returns:
          The layers that called this object and the rules that took them.  Flax's
          ``Dense``, ``DenseGeneral``, ``Einsum`` and ``Conv`` layers that did not call
          it, for they have another ``dot_general`` or none, count as unmatched.
        """
        found: dict[str, str | None] = {}

        def look(
            call: Callable[..., Any],
            args: tuple[Any, ...],
            kwargs: dict[str, Any],
            context: nn.module.InterceptorContext,
        ) -> Any:
            if isinstance(context.module, LAYERS):
                found.setdefault("/".join(context.module.path), None)
            return call(*args, **kwargs)

        token = _reporting.set((self, found))
        try:
            with nn.intercept_methods(look):
                jax.eval_shape(functools.partial(model.init, **kwargs), rngs, *args)
        finally:
            _reporting.reset(token)
        assert isinstance(self.rules, tuple)
        return path_rules.report(self.rules, found)
