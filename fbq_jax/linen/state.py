"""The state of a Linen layer, in a variable of the module that is running.

The codes of the layer's weight are there, too, if it has any.  Where steps of an
``nn.scan``, or examples of an ``nn.vmap``, have states of their own but share the
parameters, the codes of a frozen layer are with the parameters.  The codes of a
training step are in a collection of their own.
"""

import contextlib
import dataclasses
import itertools
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax.core import tracers
from flax.core.scope import Scope, Variable
from flax.linen.fp8_ops import OVERWRITE_WITH_GRADIENT
from flax.nnx import bridge
from jax.custom_batching import custom_vmap

from fbq_jax.core import threshold
from fbq_jax.core.arguments import DimensionNumbers
from fbq_jax.core.dot_general import DotConfig
from fbq_jax.core.threshold import SLOT, layer_path
from fbq_jax.core.training_warnings import warn_without_state_gradient
from fbq_jax.core.visitors import FoundCodes, StandIn, WeightCodes, is_freezing
from fbq_jax.flax_internals import running_modules
from fbq_jax.kernels.quantized import UNSET
from fbq_jax.sharding.layer_names import warn_first

Tree = TypeVar("Tree")

#: The parameter that is the weight of a layer.
KERNEL = "kernel"
#: The key of the ``WeightCodes`` in the state of a frozen layer.
WEIGHT = "weight"

# The paths of the modules that called ``share_state``.
_sharing: ContextVar[set[tuple[str, ...]] | None] = ContextVar("sharing", default=None)


def find_variable(
    module: nn.Module, collection: str, start: Callable[[Scope, str], Any]
) -> Variable:
    """The variable of this call; a module that calls twice has two variables.

    Args:
      module: the calling module.
      collection: the collection of the variable.
      start: makes its first value from the scope and the variable's name.

    Raises:
      ValueError: the variable does not exist and the collection is not mutable, or the
        module is an NNX module in ``nnx.bridge.ToLinen``.
    """
    scope, name = _next_slot(module, collection)
    if not scope.has_variable(collection, name):
        _report_missing(module, collection, name)
    return scope.variable(collection, name, start, scope, name)


def lacks_state(module: nn.Module, collection: str) -> bool:
    """Whether this call has no state, and the collection is not mutable.

    Arguments and errors are as in ``find_variable``.
    """
    scope, name = _next_slot(module, collection)
    return not (
        scope.has_variable(collection, name) or module.is_mutable_collection(collection)
    )


def is_mutable_state(scope: Scope | None, collection: str) -> bool:
    """Whether layers in a scope may change their state.

    While ``freeze`` traces a model, they may store codes only.
    """
    if scope is None or is_freezing():
        return False
    return scope.is_mutable_collection(collection)


@contextlib.contextmanager
def sharing_states() -> Iterator[None]:
    """A context for ``share_state``."""
    if _sharing.get() is not None:
        yield
        return
    token = _sharing.set(set())
    try:
        yield
    finally:
        _sharing.reset(token)


def share_state(module: nn.Module) -> None:
    """Makes the examples of an ``nn.vmap`` that a module calls share their state."""
    paths = _sharing.get()
    assert paths is not None
    assert module.scope is not None
    paths.add(module.scope.path)


def state_of(variable: Variable) -> dict[str, Any]:
    """The state in the variable of a layer.

    Examples that ``share_state`` share those that examples had in training: their
    threshold is the mean of those that are set.

    Returns:
      A plain dictionary, as its gradient is, even if it came as a FrozenDict.
    """
    state = dict(variable.value)
    paths = _sharing.get() or ()
    path = () if variable.scope is None else variable.scope.path
    if not any(path[: len(of_module)] == of_module for of_module in paths):
        return state
    first = {name: state[name].ravel()[0] for name in ("rate", "count", "seed")}
    return {**state, **first, "theta": _mean_of_set(state["theta"])}


def _mean_of_set(thetas: jax.Array) -> jax.Array:
    """The mean of the thresholds that are set; ``UNSET`` if none is."""
    is_set = thetas >= 0.0  # NaN counts as unset
    count = jnp.sum(is_set, dtype=jnp.float32)
    mean = jnp.sum(thetas, where=is_set) / jnp.maximum(count, 1.0)
    return jnp.where(count > 0.0, mean, UNSET)


class Parameter(NamedTuple):
    """A parameter that a layer multiplies by.

    Attributes:
      path: its path in the model's parameters.
      value: an array, which may be boxed, or a ``StandIn``; None if there is no such
        parameter.
      own_code: whether the model's own code multiplies by it, not the op of a layer.
    """

    path: tuple[str, ...]
    value: Any
    own_code: bool = False


def kernel_of(module: nn.Module) -> Parameter:
    """The kernel of a layer."""
    assert module.scope is not None
    kernel = module.scope.get_variable("params", KERNEL)
    return Parameter((*module.path, KERNEL), kernel)


def codes_collection(collection: str) -> str:
    """The collection of codes, of layers that keep their state in ``collection``."""
    return f"{collection}_codes"


def is_frozen(state: Mapping[str, Any]) -> bool:
    """Whether a layer is frozen, or ``freeze`` is running its model."""
    return WEIGHT in state or is_freezing()


@dataclasses.dataclass(frozen=True)
class LayerWeight:
    """The weight of a Linen layer in one product.

    Attributes:
      config: the settings of the layer's dot.
      module: the layer.
      variable: holds the layer's state.
      rhs: the weight.
      as_matrix: makes the right operand of the product from it; None if it is that.
      dimension_numbers: of the product.
      parameter: the parameter that is the weight; None in a product of two activations.
      ignores_precision: whether the layer asked for a precision that is ignored.
    """

    config: DotConfig
    module: nn.Module
    variable: Variable
    rhs: jax.Array
    as_matrix: Callable[[jax.Array], jax.Array] | None
    dimension_numbers: DimensionNumbers
    parameter: Parameter | None
    ignores_precision: bool

    @property
    def layer(self) -> str:
        """The name of the layer."""
        return layer_path((*self.module.path, self.variable.name))

    @property
    def collection(self) -> str:
        """The collection with the layer's state."""
        return self.variable.collection

    @property
    def trains(self) -> bool:
        """Whether the layer's state may change."""
        return self.module.is_mutable_collection(self.collection)

    @property
    def has_stand_in(self) -> bool:
        """Whether the parameter has no values, because the layer is frozen."""
        return self.parameter is not None and isinstance(self.parameter.value, StandIn)

    @property
    def parameter_name(self) -> str:
        """The parameter's path inside the module, or its name in an outer one."""
        assert self.parameter is not None
        path, outer = self.parameter.path, self.module.path
        inside = path[: len(outer)] == outer
        return "/".join(path[len(outer) :] if inside else path[-1:])

    def operand(self) -> jax.Array:
        """The right operand of the product."""
        return self.rhs if self.as_matrix is None else self.as_matrix(self.rhs)

    def codes(self) -> FoundCodes:
        """The codes that the layer's variables have, and whether it is frozen.

        There are none in a layer that quantizes its weight itself.

        Raises:
          ValueError: parameters and state do not belong together, or the codes are of
            another weight or product.
        """
        if self.parameter is None:
            return None, False
        codes: WeightCodes | None = self.variable.value.get(WEIGHT)
        if codes is None and self.has_stand_in:
            raise self.lacks_codes(self.collection)
        if codes is None:
            collection, name = codes_collection(self.collection), self.variable.name
            codes = self.module.get_variable(collection, name)
        if codes is None:
            return None, False
        return codes.codes_for(self), codes.is_frozen

    def lacks_codes(self, collection: str) -> ValueError:
        """The error of a frozen layer without codes in a collection."""
        return ValueError(
            f"layer {self.layer!r} is frozen, but has no codes in the collection "
            f"{collection!r}: pass apply all collections that freeze returned"
        )


def can_keep_state(scope: Scope | None) -> bool:
    """Whether a value that is computed here can be stored in a module's scope.

    It cannot leave a transformation of JAX itself, such as ``jax.checkpoint``, that the
    module calls.
    """
    return scope is not None and scope.trace_level == tracers.current_trace()


def temporary_variable(collection: str, value: Any) -> Variable:
    """A variable for a call that lacks state: it is in no module's scope."""
    return Scope({collection: {SLOT: value}}).variable(collection, SLOT)


def _next_slot(module: nn.Module, collection: str) -> tuple[Scope, str]:
    """The scope of a module, and the name of its next variable."""
    if isinstance(module, bridge.ToLinen):
        raise ValueError(
            f"layer {layer_path(module.path)!r} is an NNX module in ToLinen, which "
            "keeps no state of Linen ops: give its layers ops of fbq_jax.nnx"
        )
    scope = module.scope
    assert scope is not None
    names = (f"{SLOT}_{i}" if i else SLOT for i in itertools.count())
    return scope, next(n for n in names if not scope.name_reserved(n, collection))


def _report_missing(module: nn.Module, collection: str, name: str) -> None:
    """Raises ValueError if a layer can have no state; warns if it starts anew."""
    missing = (
        f"layer {layer_path(module.path)!r} has no state {name!r} in the collection "
        f"{collection!r}"
    )
    if not module.is_mutable_collection(collection):
        raise ValueError(
            f"{missing}: pass apply the state that init returned "
            f"({{'params': ..., {collection!r}: ...}}), or start a new one with "
            f"mutable=[{collection!r}]; list the collection in variable_axes if the "
            "layer is inside nn.scan or nn.vmap"
        )
    if module.is_initializing():
        return
    warn_first(
        ("missing state", collection),
        f"{missing} and starts a new one. That is right in the first step with "
        "parameters of another model, which passes rngs={'params': key}, so that the "
        f"layers of nn.scan have seeds of their own. Otherwise restore {collection!r} "
        "together with the parameters, and pass the updates that apply returns to the "
        "next step",
    )


def check_state_gradient(module: nn.Module, weight: Tree, state: Any) -> Tree:
    """The weight of a layer; its gradient warns if the state's is not taken.

    Args:
      module: the calling layer.
      weight: float arrays.
      state: float arrays, of the collection whose gradient is its new value.
    """
    collection = repr(OVERWRITE_WITH_GRADIENT)
    text = (
        f"layer {layer_path(module.path)!r}: a gradient is taken with respect to the "
        f"weight, but not to the collection {collection}, whose gradient is its new "
        "value, so it never changes. Differentiate with respect to both, and replace "
        "the collection by its gradient, as Flax's TrainState does"
    )
    return warn_without_state_gradient("no gradient of the state", text, weight, state)


def check_collection(collection: str) -> None:
    """Raises an error if a layer cannot keep its state in the collection."""
    if not isinstance(collection, str):
        raise TypeError(
            "collection= takes the name of a variable collection, such as 'fallback'; "
            f"got {collection!r}"
        )
    if collection == "params":
        raise ValueError(
            "collection='params' is for parameters; keep the state of FallbackDot in "
            "another collection, such as 'fallback'"
        )


def calling_module(collection: str | None = None) -> nn.Module | None:
    """The Linen module whose method is running; None outside any module.

    A model that calls ``self.head.apply({"params": ...}, x)``, as for a head that
    shares the embedding's weight, gives the head variables of its own, in which no
    state can stay.  The module is then a copy of the head in its place in the model.

    Args:
      collection: the collection with the state that the module keeps.
    """
    stack = running_modules()
    module = stack[-1]
    if collection is None or module is None or module.scope is None:
        return module
    scope = module.scope
    has_state = not scope.root.is_collection_empty(collection)
    if has_state or scope.root.mutable is not False:
        return module  # it has state, or can keep it
    modules: list[nn.Module] = [m for m in stack if m is not None and m.scope]
    inside = [m for m in modules if m.scope and m.scope.root is scope.root]
    first = modules.index(inside[0])
    if not first or not _is_applied(modules[first], modules[first - 1]):
        return module
    applied, place = modules[first], modules[first - 1].scope
    assert place is not None
    for part in (applied.name or type(applied).__name__, *module.path):
        place = place.push(part, reuse=True)
    return module.clone(parent=place)


def is_mutable_outside(collection: str) -> bool:
    """Whether a module around the running method can change the collection.

    If the method's own module cannot, a lifted transformation such as
    ``nn.map_variables`` made it immutable.
    """
    modules = (m for m in running_modules() if m is not None)
    return any(m.scope and m.is_mutable_collection(collection) for m in modules)


def _is_applied(module: nn.Module, caller: nn.Module) -> bool:
    """Whether ``module.apply`` made the scope of a module, in a method of ``caller``.

    Otherwise a lifted transformation did, which keeps the path.
    """
    if module.name is not None:
        return module.path[-1:] != (module.name,)
    return not module.path and not isinstance(caller, type(module))


def as_float32(state: threshold.State) -> threshold.State:
    """The state in float32, because ``jax.grad`` rejects integers."""
    return jax.tree.map(lambda x: x.astype(jnp.float32), state)


@jax.custom_vjp
def return_as_gradient(
    out: jax.Array, state: Mapping[str, jax.Array], new: threshold.State
) -> jax.Array:
    """Returns ``out``; the gradient with respect to ``state`` is always ``new``."""
    del state, new
    return out


@custom_vmap
def _mean_over_examples(
    new: threshold.State, _state: Mapping[str, jax.Array]
) -> threshold.State:
    """The new state, under ``vmap`` the mean of all examples that share a state.

    As a gradient it would be their sum.
    """
    return new


@_mean_over_examples.def_vmap
def _map_mean_over_examples(
    _size: int, in_batched: list[Any], new: Any, state: Any
) -> tuple[Any, Any]:
    of_new, of_state = in_batched
    if not any(of_state.values()):
        means: dict[str, Callable[[jax.Array], jax.Array]]
        means = {"theta": _mean_of_set, "rate": jnp.mean}  # the others are equal
        new = {name: means[name](x) if of_new[name] else x for name, x in new.items()}
        of_new = dict.fromkeys(of_new, False)
    return _mean_over_examples(new, state), of_new


return_as_gradient.defvjp(
    lambda out, state, new: (out, _mean_over_examples(new, state)),
    lambda new, out_grad: (out_grad, new, None),
)
