"""Rules for Linen models: one ``dot_general`` that picks a recipe by path."""

import dataclasses
import itertools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
from flax import linen as nn
from flax.core.scope import Scope
from jax import lax

from fbq_jax.core.arguments import DimensionNumbers, DotArguments, DotGeneral
from fbq_jax.core.dot_general import LayerDot
from fbq_jax.core.tracing import trace
from fbq_jax.core.visitors import Visitor, visiting, visitor
from fbq_jax.linen.dot import ActivationsDot, FallbackDot
from fbq_jax.linen.grouped_dense import GroupedDense
from fbq_jax.linen.int8_flow import Block
from fbq_jax.linen.state import calling_module
from fbq_jax.linen.tracing import (
    ALL_STATE,
    Recorder,
    own_parameters,
    parameter_leaves,
)
from fbq_jax.ops.trace_contexts import make_trace_context
from fbq_jax.recipes import path_rules
from fbq_jax.recipes.rules_report import (
    FloatProduct,
    RulesReport,
    activation_product,
    rules_report,
)
from fbq_jax.recipes.schema import Recipe

LAYERS = (nn.Dense, nn.DenseGeneral, nn.Einsum, nn.Conv, GroupedDense)


# What numbers are reserved for, in place of a collection: products of two activations,
# and modules under ``nn.jit``.
_PRODUCTS, _JIT = "fbq_activations", "fbq_jit"


class Root(NamedTuple):
    """A quantized model (``fbq_jax.quantize``), maybe inside a larger one.

    Attributes:
      dot: the op of its layers.
      run: calls a function, and gives the layers that run in it the op.
      path: its path in the larger one.
    """

    dot: "RulesDot"
    run: Callable[["RulesDot", Callable[[], Any]], Any]
    path: tuple[str, ...] = ()


#: The innermost quantized model that runs, a ``Root`` or None.  It is part of the key
#: of JAX's trace caches: what was traced inside a quantized model is traced again
#: outside.
quantized_root = make_trace_context(None)


def relative_path(module: nn.Module) -> str:
    """The path of a layer in the model that rules are for."""
    path, root = module.path, quantized_root.value
    outer = () if root is None else root.path
    return "/".join(path[len(outer) :] if path[: len(outer)] == outer else path)


class _CallNumber:
    """The path of the running module, and how often it was asked for.

    ``nn.jit`` reads the fields of the ops of a module, and takes modules with equal
    fields for the same one, wherever they are.  With this field, it traces each layer.
    """

    def __get__(self, dot: Any, _: Any) -> tuple[str | int, ...] | None:
        module = None if dot is None else calling_module()
        if module is None or module.scope is None:
            return None
        return *module.path, _next_number(module.scope, _JIT)


@dataclasses.dataclass(frozen=True)
class RulesDot(DotGeneral):
    """A ``dot_general`` for all layers of a Linen model, with a recipe by path.

    The first rule that matches the path of a layer (``fbq_jax.recipes.path_rules``)
    sets its recipe.  The layer then computes, and keeps its state, as with
    ``FallbackDot(recipe)``.  A layer stays unquantized and has no state if its rule is
    None or no rule matches.  Several products of one module have its path in common,
    and so its rule.

    Attributes:
      rules: a mapping from patterns to recipes, tried in order.
      collection: the name of the variable collection.
      implementation: ``"mosaic"``, ``"triton"``, ``"tpu"`` or ``"reference"``;
        None lets ``fbq_jax.ops.dispatch`` choose.
      ignore_precision: whether to quantize products that ask for a precision, such as
        HIGHEST; otherwise they are errors.

    Raises:
      TypeError: a rule's recipe is neither a ``Recipe`` nor None.
      ValueError: a pattern is not a regular expression, the collection is
        ``"params"``, or no implementation has this name; or a call is outside any
        module and has no path.

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
    >>> print(report)
    parameter         shape    rule    recipe
    mlp_0/kernel      16 x 16  mlp_.*  fallback
    forgotten/kernel  16 x 16          float: no rule for its layer
    head/kernel       16 x 8           float: rule 'head'
    rules without effect: 'attn'
    layers without a rule: forgotten
    >>> report.layers
    {'mlp_0': 'mlp_.*', 'head': 'head'}
    >>> report.unused_rules, report.unmatched_layers
    (('attn',), ('forgotten',))
    """

    rules: Mapping[str, Recipe | None] | path_rules.Pairs
    collection: str = "fallback"
    implementation: str | None = None
    ignore_precision: bool = False
    _call: Any = dataclasses.field(
        default=_CallNumber(), init=False, repr=False, compare=False
    )

    def __post_init__(self) -> None:
        object.__setattr__(self, "rules", path_rules.as_pairs(self.rules))
        # Checks both, whatever the rules.
        FallbackDot(collection=self.collection, implementation=self.implementation)

    def _compute(
        self, lhs: jax.Array, rhs: jax.Array, arguments: DotArguments
    ) -> jax.Array:
        """Computes the product with the recipe of the calling layer."""
        dot = self.of_layer(rhs.shape) or lax.dot_general
        return dot(lhs, rhs, **arguments._asdict())

    def layer_dot(
        self, x: jax.Array, rhs: jax.Array, dimension_numbers: DimensionNumbers
    ) -> LayerDot | None:
        """The dot of the calling layer; None if it stays unquantized."""
        dot = self.of_layer(rhs.shape)
        return None if dot is None else dot.layer_dot(x, rhs, dimension_numbers)

    def of_layer(
        self,
        operand: tuple[int, ...] | str,
        kind: Callable[..., FallbackDot] = FallbackDot,
    ) -> FallbackDot | None:
        """The ``FallbackDot`` of the calling layer; None if it stays unquantized.

        Args:
          operand: the shape of the right operand, or the path of the parameter that it
            is, for reports.
          kind: the class of the ``FallbackDot``.
        """
        module = calling_module(self.collection)
        if module is None:
            raise ValueError(
                "RulesDot finds a recipe by the path of the Linen layer that calls it, "
                "and none is running: use fbq_jax.nnx.quantize in NNX, FallbackDot "
                "elsewhere"
            )
        path = relative_path(module)
        pattern, recipe = path_rules.first_match(self._pairs, path)
        if (recorder := self._recorder()) is not None:
            recorder.found[path] = pattern
            if recipe is None:
                recorder.floats.append(FloatProduct(path, operand))
        return self._dot(recipe, kind)

    def at(self, path: str) -> FallbackDot | None:
        """The ``FallbackDot`` of the layer at a path; None if it stays unquantized."""
        return self._dot(path_rules.first_match(self._pairs, path).recipe, FallbackDot)

    def of_activations(self, shape: tuple[int, ...]) -> FallbackDot | None:
        """The ``FallbackDot`` of the calling layer's next product of two activations.

        It is None if the product, whose right operand has this shape, stays in float.
        """
        module = calling_module()
        assert module is not None
        scope = module.scope
        assert scope is not None
        number = _next_number(scope, _PRODUCTS)
        name = path_rules.activations_name(relative_path(module), number)
        product = activation_product(self._pairs, name, shape)
        if (recorder := self._recorder()) is not None:
            recorder.activations[name] = product
        return self._dot(product.recipe, ActivationsDot)

    @property
    def sees_activations(self) -> bool:
        """Whether products of two activations matter, to rules or to a report."""
        has_rules = bool(path_rules.activations_rules(self._pairs))
        return has_rules or isinstance(visitor.value, Recorder)

    def names_activations(self, module: nn.Module) -> bool:
        """Whether a rule quantizes the first two products of activations in a layer."""
        path, rules = relative_path(module), path_rules.activations_rules(self._pairs)
        names = (path_rules.activations_name(path, number) for number in range(2))
        return any(path_rules.first_match(rules, name).recipe for name in names)

    def _dot(
        self, recipe: Recipe | None, kind: Callable[..., FallbackDot]
    ) -> FallbackDot | None:
        if recipe is None:
            return None
        return kind(recipe, self.collection, self.implementation, self.ignore_precision)

    def report(
        self, model: nn.Module, rngs: Any, *args: Any, **kwargs: Any
    ) -> RulesReport:
        """Traces ``model.init(rngs, ...)`` and ``model.apply``, and computes nothing.

        Args:
          model: a model that has this object as the ``dot_general`` of its layers.
          rngs: the PRNG keys of ``init``.
          *args: the arguments of the model; arrays may be ``jax.ShapeDtypeStruct``.
          **kwargs: keyword arguments of the model, and ``method``.

        Returns:
          The layers that called this object and the rules that matched them; the
          parameters that quantized products read; and all other parameters of two or
          more dimensions, with the reason.  Flax's ``Dense``, ``DenseGeneral``,
          ``Einsum`` and ``Conv`` layers and the projections of ``MoEMLP`` that did not
          call this object, because they have another ``dot_general`` or none, count as
          unmatched.
        """
        recorder = Recorder(self)
        blocks: set[str] = set()  # whose own operators quantize their parameters
        ndims: dict[str, int] = {}

        def see_module(
            call: Callable[..., Any],
            args: tuple[Any, ...],
            kwargs: dict[str, Any],
            context: nn.module.InterceptorContext,
        ) -> Any:
            module, root = context.module, quantized_root.value
            is_own = root is None or root.dot == self
            # ``nn.remat(lambda layer, x: layer(x))(layer, x)`` first calls the lambda,
            # with a copy of the layer that has no path.
            is_method = hasattr(type(module), context.method_name)
            if is_own and is_method and isinstance(module, LAYERS):
                layer = calling_module(self.collection)
                recorder.found.setdefault(relative_path(layer or module), None)
            if isinstance(module, Block):
                blocks.add(f"{relative_path(module)}/".lstrip("/"))
            out = call(*args, **kwargs)
            if module.scope is not None:
                for name, shape in own_parameters(module).items():
                    ndims["/".join((*module.path, name))] = len(shape)
            return out

        def run(rngs: Any, args: Any, kwargs: Any) -> Any:
            rngs = rngs if isinstance(rngs, Mapping) else {"params": rngs}
            variables = dict(model.init(rngs, *args, **kwargs))
            # Attention with ``decode=True`` takes the whole sequence until it has a
            # cache.
            variables.pop("cache", None)
            recorder.products.clear()  # of init
            model.apply(variables, *args, rngs=rngs, mutable=ALL_STATE, **kwargs)
            return variables.get("params", {})

        with visiting(recorder), nn.intercept_methods(see_module):
            shapes = trace(run, rngs, args, kwargs)
        own = tuple(blocks)
        leaves = {"/".join(path): leaf for path, leaf in parameter_leaves(shapes)}
        matrices = {
            path: leaf.shape
            for path, leaf in leaves.items()
            if ndims.get(path, leaf.ndim) >= 2 and not path.startswith(own)
        }
        return rules_report(
            self._pairs,
            recorder.found,
            matrices,
            recorder.products,
            recorder.activations.values(),
            recorder.floats,
        )

    def _recorder(self) -> Recorder | None:
        """What records a report of this object, if one is being made."""
        active: Visitor = visitor.value
        if isinstance(active, Recorder) and active.dot == self:
            return active
        return None

    @property
    def _pairs(self) -> path_rules.Pairs:
        assert isinstance(self.rules, tuple)  # __post_init__ makes it one
        return self.rules


def _next_number(scope: Scope, kind: str) -> int:
    """The next number, which Flax's reservations count for one call of a module."""
    # Names that no child of the module has.
    names = ((n, f"{kind} {n}") for n in itertools.count())
    number, name = next(x for x in names if not scope.name_reserved(x[1], kind))
    scope.reserve(name, kind)
    return number
