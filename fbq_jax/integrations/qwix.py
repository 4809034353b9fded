"""Whole models whose own code multiplies by their parameters, through Qwix.

``fbq_jax.quantize`` reaches layers that take an op.  Other layers call ``jnp.einsum``,
``@`` or ``lax.dot_general`` on their parameters.  Qwix replaces functions of JAX while
a model runs, and asks a *provider* what to do instead.

The functions that Qwix's own providers replace do not suffice for ops with state.  JAX
traces ``@`` and ``jnp.dot`` once for all layers with equal shapes, so that only the
first layer calls the replaced ``lax.dot_general``, and inside a trace that no state may
leave.  The provider here replaces the function below, by which JAX calls a primitive.
It sees the operands of every product, and follows parameters through casts and
reshapes.
"""

import contextlib
import dataclasses
import functools
import inspect
import itertools
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn, TypeVar

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax import nnx
from flax.core import Scope, tracers
from flax.linen import module as flax_module
from jax.extend.core import (
    Jaxpr,
    Literal,
    unsafe_am_i_under_a_jit_DO_NOT_USE,
)
from qwix import LoraProvider, QuantizationProvider
from qwix._src import interception

from fbq_jax.core import weight_products
from fbq_jax.core.conv import conv_general_dilated
from fbq_jax.core.einsum import before_transposing
from fbq_jax.core.frozen_weight import (
    FrozenKernel,
    View,
    ViewStep,
    active_recorder,
)
from fbq_jax.core.layer_stats import layer_path
from fbq_jax.core.model_kind import QWIX_BASE
from fbq_jax.core.weight_products import VIEWS, ParameterUse
from fbq_jax.linen.dot import ParameterDot
from fbq_jax.linen.frozen import KERNEL, FrozenParameter, Parameter
from fbq_jax.linen.rules import RulesDot
from fbq_jax.linen.state import calling_module
from fbq_jax.linen.whole_models import inject_ops, quantize_with
from fbq_jax.nnx.callers import calling_layer, running_modules, seen_by_qwix
from fbq_jax.nnx.dot import (
    FallbackDot,
    Layer,
    activations_dot_name,
    dot_name,
    is_activations_dot,
)
from fbq_jax.nnx.naming import name_layers
from fbq_jax.nnx.rules import (
    drop_unused_ops,
    quantize_layers,
    stack_shape,
    trace_parameters,
)
from fbq_jax.recipes import path_rules
from fbq_jax.recipes.path_rules import Pairs
from fbq_jax.recipes.rules_report import (
    ActivationProduct,
    RulesReport,
    activation_product,
    warn_of_idle_rules,
)
from fbq_jax.recipes.schema import Recipe
from fbq_jax.sharding.layer_names import inside_layer

M = TypeVar("M", bound=nn.Module)
Op = Callable[..., jax.Array]

_PRODUCTS = frozenset({"dot_general", "conv_general_dilated"})
_FLOATS = ("bfloat16", "float16", "float32")


def quantize(
    model: M,
    rules: Mapping[str, Recipe | None] | RulesDot,
    rngs: Any,
    *args: Any,
    **kwargs: Any,
) -> tuple[M, RulesReport]:
    """``fbq_jax.quantize``, which also reaches products in the model's own code.

    Every product of an activation and a parameter is quantized by the rule for the
    module whose method computes it, whether by ``jnp.einsum``, ``jnp.dot``, ``@``,
    ``lax.dot_general`` or a convolution.  A product of two activations, as in
    attention, stays in float unless a rule names it (``fbq_jax.recipes.path_rules``).
    Of ``jnp.einsum`` the first operand then is the left one, in which blocks may fall
    back.  Products of two parameters stay in float, and so do those with parameters of
    LoRA, which Qwix may add before or after, and those inside a ``jax.checkpoint``,
    ``jax.vmap`` or ``lax.scan`` that the model, or a function such as
    ``jax.nn.dot_product_attention``, uses in place of Flax's: no state may leave those.
    ``fbq_jax.quantize`` documents the arguments.

    A call outside ``jit`` runs without ``jit`` inside, slowly.

    >>> import jax.numpy as jnp
    >>> from fbq_jax import recipes
    >>> class Model(nn.Module):
    ...     @nn.compact
    ...     def __call__(self, x):
    ...         w = self.param("w", nn.initializers.lecun_normal(), (16, 8))
    ...         return x @ w
    >>> x = jax.ShapeDtypeStruct((4, 16), jnp.float32)
    >>> model, report = quantize(Model(), {".*": recipes.block}, jax.random.key(0), x)
    >>> print(report)
    parameter  shape   rule  recipe
    w          16 x 8  .*    block
    """
    return quantize_with(_inject_linen, model, rules, rngs, args, kwargs)


def quantize_nnx(
    model: nnx.Module,
    rules: Mapping[str, Recipe | None],
    *args: Any,
    rngs: nnx.Rngs | None = None,
    implementation: str | None = None,
    ignore_precision: bool = False,
    **kwargs: Any,
) -> RulesReport:
    """``fbq_jax.nnx.quantize``, which also reaches products in the model's own code.

    ``quantize`` says which products.  The rule for the module that holds the parameter
    decides.  A module that multiplies by its parameter ``w`` gets a ``FallbackDot`` as
    ``w_dot_general``.  The model's class becomes one that is derived from it, in whose
    public methods products are reached.  A layer that is called outside of them
    multiplies by ``w`` in float.  A module's product of two activations gets a
    ``FallbackDot`` as ``activations_0_dot_general``, if a rule names it.

    Args:
      model: changed in place.
      rules: a mapping from patterns of paths to recipes, tried in order.
      *args: the arguments of a call of the model, which is traced; arrays may be
        ``jax.ShapeDtypeStruct``.
      rngs: seeds the noise of the layers, as in ``FallbackDot``.
      implementation: the implementation of the layers' ops, as in ``FallbackDot``.
      ignore_precision: whether to quantize products that ask for a precision.
      **kwargs: keyword arguments of the same call.

    Raises:
      TypeError: as in ``fbq_jax.nnx.quantize``.
      ValueError: as in ``fbq_jax.nnx.quantize``.
    """
    pairs = path_rules.as_pairs(rules)
    options: dict[str, Any] = {
        "rngs": rngs,
        "implementation": implementation,
        "ignore_precision": ignore_precision,
    }
    found = quantize_layers(model, pairs, **options)
    modules = _modules(model)
    others = {
        path: path_rules.first_match(pairs, path)
        for path, module in modules.items()
        if path not in found and any(True for _ in _matrices(module))
    }
    for path in others:
        for name, _ in list(_matrices(modules[path])):
            vars(modules[path]).pop(dot_name(name), None)  # of earlier rules
    model.__class__ = _nnx_class(vars(type(model)).get("unquantized", type(model)))
    _drop_activations(modules)
    if any(match.recipe is not None for match in others.values()):
        parameters = trace_parameters(model, args, kwargs)
        _set_own_code(modules, others, parameters, options)
    if path_rules.activations_rules(pairs):
        with _record_activations(model) as recorded:
            trace_parameters(model, args, kwargs)
        _set_activations(modules, recorded.products(pairs), options)
    with _record_activations(model) as recorded:
        parameters = trace_parameters(model, args, kwargs)
    for path, _, use in parameters:
        layer, _, name = path.rpartition("/")
        if layer in others and not use.quantized:
            vars(modules[layer]).pop(dot_name(name), None)
        if layer in others and (use.quantized or use.in_float):
            found[layer] = others[layer].pattern
    drop_unused_ops(model, pairs, found, parameters)
    name_layers(model)
    activations = recorded.products(pairs).values()
    report = weight_products.report(pairs, found, parameters, activations)
    warn_of_idle_rules(pairs, report)
    return report


def _set_own_code(
    modules: Mapping[str, nnx.Module],
    matches: Mapping[str, path_rules.Match],
    parameters: Iterable[tuple[str, tuple[int, ...], ParameterUse]],
    options: dict[str, Any],
) -> None:
    """Gives modules their ops for the parameters that they multiply by themselves.

    Args:
      modules: maps paths to modules.
      matches: maps the paths of those whose own code may multiply to their rules.
      parameters: the path, the shape and the use of each parameter.
      options: of ``FallbackDot``.
    """
    for path, shape, use in parameters:
        layer, _, name = path.rpartition("/")
        recipe = matches[layer].recipe if layer in matches else None
        if recipe is None or not use.in_float or weight_products.is_adapter(name):
            continue
        if len(shape) - use.stacked >= 2:
            dot = FallbackDot(recipe, **options)
            if use.stacked:
                dot.stack(shape[: use.stacked], options["rngs"])
            setattr(modules[layer], dot_name(name), nnx.data(dot))


def _drop_activations(modules: Mapping[str, nnx.Module]) -> None:
    """Removes the ops that earlier rules gave to products of two activations."""
    for module in modules.values():
        for name in list(filter(is_activations_dot, vars(module))):
            delattr(module, name)


def _set_activations(
    modules: Mapping[str, nnx.Module],
    products: Mapping[tuple[str, int], ActivationProduct],
    options: dict[str, Any],
) -> None:
    """Gives products of two activations their ops."""
    for (path, number), product in products.items():
        if product.recipe is None:
            continue
        dot = FallbackDot(product.recipe, **options)
        layers = (m for _, m in nnx.iter_modules(modules[path]) if isinstance(m, Layer))
        # Where its layers are stacks, so is the module.
        if (layer := next(layers, None)) and (shape := stack_shape(path, layer)):
            dot.stack(shape, options["rngs"])
        setattr(modules[path], activations_dot_name(number), nnx.data(dot))


def _matrices(module: nnx.Module) -> Iterator[tuple[str, nnx.Param[Any]]]:
    """The parameters of two or more dimensions that a module multiplies by itself."""
    for name, value in vars(module).items():
        if not isinstance(value, nnx.Param) or weight_products.is_adapter(name):
            continue
        if getattr(value, "ndim", 0) >= 2:
            yield name, value


@functools.cache
def _nnx_class(cls: Any) -> Any:
    """A class derived from a model's, in whose methods products are reached."""
    fields: dict[str, Any] = {
        "__module__": cls.__module__,
        "__qualname__": cls.__qualname__,
        "__doc__": cls.__doc__,
        "unquantized": cls,
    }
    if (before := getattr(cls, QWIX_BASE, None)) is not None:
        # Qwix changes this class, without its own change, if LoRA is applied again.
        is_quantized = "unquantized" in vars(before)
        fields[QWIX_BASE] = before if is_quantized else _nnx_class(before)
    for name in dir(cls):
        method = inspect.getattr_static(cls, name)
        public = name == "__call__" or not name.startswith("_")
        inherited = any(name in vars(base) for base in nnx.Module.__mro__)
        if public and inspect.isfunction(method) and not inherited:
            fields[name] = _reaching_products(method)
    return type(cls.__name__, (cls,), fields)


def _reaching_products(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if seen_by_qwix.value or not args or not isinstance(args[0], nnx.Module):
            return method(*args, **kwargs)
        with contextlib.ExitStack() as stack:
            stack.enter_context(seen_by_qwix(True))
            stack.enter_context(_shown_parameters(args[0]))
            stack.enter_context(_intercept(_NnxModules(args[0])))
            return method(*args, **kwargs)

    return wrapper


@contextlib.contextmanager
def _shown_parameters(model: nnx.Module) -> Iterator[None]:
    """Gives frozen parameters arrays of NaNs, which code other than layers' can read.

    The product that reads one is the op's, which reads its codes.
    """
    frozen = [
        (variable, kernel)
        for _, module in nnx.iter_modules(model)
        for variable in vars(module).values()
        if isinstance(variable, nnx.Param)
        and isinstance(kernel := variable.get_raw_value(), FrozenKernel)
    ]
    try:
        for variable, kernel in frozen:
            object.__setattr__(variable, "_raw_value", jnp.asarray(kernel))
        yield
    finally:
        for variable, kernel in frozen:
            object.__setattr__(variable, "_raw_value", kernel)


@contextlib.contextmanager
def _inject_linen(dot: RulesDot) -> Iterator[None]:
    """Gives layers their op, and intercepts the products of all others."""
    with inject_ops(dot), _intercept(_LinenModules(dot)):
        yield


class _LinenModules:
    """The parameters of the Linen modules whose methods are running."""

    def __init__(self, dot: RulesDot):
        self.dot = dot
        # The arrays that stand for frozen parameters, by their id.
        self.shown: dict[int, tuple[jax.Array, Parameter]] = {}

    @property
    def intercepted(self) -> dict[str, Callable[..., Any]]:
        """What Qwix replaces."""
        return {_GET_VARIABLE: self._get_variable}

    def _get_variable(
        self, scope: Scope, collection: str, name: str, default: Any = None
    ) -> Any:
        """Reads a variable: an array of NaNs for a frozen parameter.

        The product that reads it is the op's, which reads its codes.
        """
        read = interception.get_attribute(_GET_VARIABLE)
        value = read(scope, collection, name, default)
        if not isinstance(value, FrozenParameter):
            return value
        array = value.nans()
        parameter = Parameter((*scope.path, name), value, own_code=True)
        self.shown[id(array)] = array, parameter
        return array

    @property
    def sees_activations(self) -> bool:
        """Whether products of two activations matter."""
        return self.dot.sees_activations

    def has(self, x: Any, *, adapters: bool = False) -> bool:
        """Whether an array is a parameter, of LoRA only if ``adapters``."""
        parameter = self._parameter(x)
        if parameter is None:
            return False
        return adapters or not weight_products.is_adapter(parameter.path[-1])

    def _parameter(self, x: Any) -> Parameter | None:
        """The parameter that an array is."""
        if id(x) in self.shown:
            return self.shown[id(x)][1]
        stack = flax_module._context.module_stack
        roots = {m.scope.root for m in stack if m is not None and m.scope is not None}
        for root in roots:
            parameters = root._variables.get("params", {})
            for path, leaf in jax.tree.leaves_with_path(parameters):
                if x is leaf:
                    return Parameter((*root.path, *_names(path)), x, own_code=True)
        return None

    def op(self, x: Any) -> Op | None:
        """The op for a product with a parameter; None leaves it in float."""
        if not self._can_keep_state():
            return None
        parameter = self._parameter(x)
        assert parameter is not None
        if isinstance(parameter.value, FrozenParameter) and _is_lora_active():
            _refuse_lora("/".join(parameter.path))
        return self.dot.of_layer(functools.partial(ParameterDot, parameter=parameter))

    def op_of_activations(self, shape: tuple[int, ...]) -> Op | None:
        """The op for a product of two activations; None leaves it in float."""
        return self.dot.of_activations(shape) if self._can_keep_state() else None

    def _can_keep_state(self) -> bool:
        """Whether the state of the running module can leave what JAX traces."""
        module = calling_module()
        if module is None or module.scope is None:
            return False
        return module.scope.trace_level == tracers.current_trace()


# By which Linen modules read their variables.
_GET_VARIABLE = "flax.core.scope.Scope.get_variable"


def _names(path: tuple[Any, ...]) -> list[str]:
    """The path of a Linen parameter, which may be boxed."""
    return [str(key.key) for key in path if isinstance(key, jax.tree_util.DictKey)]


# The attribute with the path of a module while ``quantize_nnx`` traces the model.
_PATH = "fbq_jax_path"


@dataclasses.dataclass(eq=False)
class _Activations:
    """The products of two activations of a model that ``quantize_nnx`` traces.

    Attributes:
      shapes: maps the path of a module and the number of a product to the shape of its
        right operand.
    """

    shapes: dict[tuple[str, int], tuple[int, ...]] = dataclasses.field(
        default_factory=dict
    )

    def products(self, rules: Pairs) -> dict[tuple[str, int], ActivationProduct]:
        """What rules make of each."""
        return {
            key: activation_product(rules, path_rules.activations_name(*key), shape)
            for key, shape in self.shapes.items()
        }


# Part of the key of JAX's trace caches: a layer that was traced before is traced again.
_activations = jax.make_user_context(None)


@contextlib.contextmanager
def _record_activations(model: nnx.Module) -> Iterator[_Activations]:
    """Collects the products of two activations of a model that is traced inside."""
    modules = {
        path: module
        for path, module in _modules(model).items()
        if not isinstance(module, nnx.List | nnx.Dict)
    }
    recorded = _Activations()
    try:
        for path, module in modules.items():
            setattr(module, _PATH, path)
        with _activations(recorded):
            yield recorded
    finally:
        for module in modules.values():
            delattr(module, _PATH)


def _modules(model: nnx.Module) -> dict[str, nnx.Module]:
    return {"/".join(map(str, path)): m for path, m in nnx.iter_modules(model)}


def _can_keep_state(module: nnx.Module) -> bool:
    """Whether the variables of a module can leave what JAX traces."""
    variables = (v for _, v in nnx.iter_graph(module) if isinstance(v, nnx.Variable))
    return all(variable._can_update for variable in itertools.islice(variables, 1))


class _Owner(NamedTuple):
    """The module that holds a parameter, and the parameter's name."""

    module: nnx.Module
    name: str


class _NnxModules:
    """The parameters of the NNX modules whose methods are running."""

    # Frozen parameters are shown by ``_shown_parameters``.
    intercepted: Mapping[str, Callable[..., Any]] = {}

    def __init__(self, model: nnx.Module):
        self.sees_activations = _activations.value is not None or any(
            any(map(is_activations_dot, vars(module)))
            for _, module in nnx.iter_modules(model)
        )
        # The products of two activations that each module has computed.
        self.activations: Counter[nnx.Module] = Counter()

    def has(self, x: Any, *, adapters: bool = False) -> bool:
        """Whether an array is a parameter, of LoRA only if ``adapters``."""
        if self._owner(x) is not None:
            return True
        return adapters and any(
            isinstance(value, nnx.Param) and value.get_raw_value() is x
            for module in running_modules()
            for _, part in nnx.iter_modules(module)
            for value in vars(part).values()
        )

    def op(self, x: Any) -> Op | None:
        """The op for a product with a parameter; None leaves it in float."""
        owner = self._owner(x)
        assert owner is not None
        dot = getattr(owner.module, dot_name(owner.name), None)
        if dot is None or not (dot.theta._can_update or dot.evaluates):
            return None
        return dot

    def op_of_activations(self, shape: tuple[int, ...]) -> Op | None:
        """The op for a product of two activations; None leaves it in float."""
        module = next(running_modules(), None)
        if module is None or not _can_keep_state(module):
            return None
        number = self.activations[module]
        self.activations[module] += 1
        # A module that the call itself makes has no path, and cannot keep an op.
        path = getattr(module, _PATH, None)
        if _activations.value is not None and path is not None:
            _activations.value.shapes[path, number] = shape
        return getattr(module, activations_dot_name(number), None)

    def _owner(self, x: Any) -> _Owner | None:
        """Finds the module that holds a parameter."""
        # A transformation such as nnx.remat makes new modules for what runs inside.
        # They know nothing of the model, but a method of theirs is running.
        running = list(dict.fromkeys(running_modules()))
        inside = (m for module in running for _, m in nnx.iter_modules(module))
        for module in (*running, *inside):
            for name, parameter in _matrices(module):
                if parameter.get_raw_value() is x:
                    return _Owner(module, name)
        return None


@contextlib.contextmanager
def _intercept(modules: _LinenModules | _NnxModules) -> Iterator[None]:
    """Computes products with parameters by their ops, in this thread."""
    # Outside jit, JAX runs functions that it has compiled without a call in Python.
    eager = not unsafe_am_i_under_a_jit_DO_NOT_USE()
    products = _Products(modules)
    with contextlib.ExitStack() as stack:
        if eager:
            stack.enter_context(jax.disable_jit())
        for provider in (products, _OpCalls(products)):
            stack.enter_context(_activate(provider, eager))
        yield


@contextlib.contextmanager
def _activate(provider: QuantizationProvider, eager: bool) -> Iterator[None]:
    """Replaces the functions of a provider, in this thread."""
    (interceptor,) = (make() for make in provider.get_interceptors())
    interceptor = interception._preprocess_interceptor(interceptor, eager)
    _manager.activate_interceptor(interceptor)
    try:
        yield
    finally:
        _manager.deactivate_interceptor(interceptor)


_manager = interception.interception_manager


class _Weight(NamedTuple):
    """The right operand of an op that LoRA is to see, and the op."""

    array: Any
    op: Op


class _Products(QuantizationProvider):
    """Replaces ``Primitive.bind``, by which JAX calls a primitive.

    Qwix does not replace it while it runs the replacement.
    """

    def __init__(self, modules: _LinenModules | _NnxModules):
        super().__init__([])
        self.modules = modules
        # Of the op that is being called, until its product is found.
        self.called: _Weight | None = None
        # Of a jnp.einsum that is being called, the second operand.
        self.second: Any = None
        # Each view, which keeps its id from being used again; the parameter, or another
        # source, that it is of; and the steps between them.
        self.views: dict[int, tuple[Any, Any, View]] = {}

    def get_intercept_map(self) -> dict[str, Callable[..., Any]]:
        """What Qwix replaces."""
        replaced = super().get_intercept_map()
        replaced |= self.modules.intercepted
        return {**replaced, interception.PRIMITIVE_BIND_KEY: self.bind}

    def bind(self, primitive: Any, *args: Any, **params: Any) -> Any:
        """Calls a primitive, or an op in its place."""
        name = primitive.name
        if inside_layer():
            return primitive.bind(*args, **params)
        if name in _PRODUCTS:
            y = self._product(name, *args, **params)
            return primitive.bind(*args, **params) if y is None else y
        # Functions of activations alone stay as they are, to the bit, unless rules
        # name products of two activations.
        if (
            name in ("jit", "pjit")
            and _is_plain(params["jaxpr"].jaxpr)
            and (self.modules.sees_activations or any(map(self._is_weight, args)))
        ):
            return self._evaluate(params["jaxpr"], args)
        y = primitive.bind(*args, **params)
        if name in VIEWS and getattr(args[0], "ndim", 0) >= 1:
            step = ViewStep(primitive, args[1:], tuple(sorted(params.items())))
            _, source, steps = self._view(args[0])
            self.views[id(y)] = y, source, (*steps, step)
        return y

    def _view(self, x: Any) -> tuple[Any, Any, View]:
        return self.views.get(id(x), (x, x, ()))

    def _source(self, x: Any) -> Any:
        """The array that x is a view of."""
        return self._view(x)[1]

    def _is_weight(self, x: Any) -> bool:
        """Whether x is a parameter, or a view, of two or more dimensions."""
        if getattr(x, "ndim", 0) < 2:
            return False
        source = self._source(x)
        if source.ndim < 2:
            return False
        if self.called is not None and source is self._source(self.called.array):
            return True
        return self.modules.has(source)

    def _evaluate(self, closed: Any, args: Sequence[Any]) -> list[Any]:
        """Calls what a jitted function calls, one by one."""
        jaxpr = closed.jaxpr
        values = dict(zip(jaxpr.constvars, closed.consts, strict=True))
        values.update(zip(jaxpr.invars, args, strict=True))

        def read(x: Any) -> Any:
            return x.val if isinstance(x, Literal) else values[x]

        for eqn in jaxpr.eqns:
            y = self.bind(eqn.primitive, *map(read, eqn.invars), **eqn.params)
            outputs = y if eqn.primitive.multiple_results else [y]
            values.update(zip(eqn.outvars, outputs, strict=True))
        return [read(x) for x in jaxpr.outvars]

    def _product(
        self, name: str, lhs: Any, rhs: Any, /, **params: Any
    ) -> jax.Array | None:
        """A product by its op; None if it stays in float."""
        if lhs.dtype not in _FLOATS or rhs.dtype not in _FLOATS:
            return None
        weights = self._is_weight(lhs), self._is_weight(rhs)
        if weights[0] == weights[1]:
            is_dot = name == "dot_general" and not any(weights)
            return self._activations(lhs, rhs, **params) if is_dot else None
        if name == "conv_general_dilated":
            if weights[0] or params["batch_group_count"] != 1:
                return None
        elif not params["dimension_numbers"][0][0]:
            return None  # an outer product
        _, source, steps = self._view(rhs if weights[1] else lhs)
        if (op := self._op(source)) is None:
            return None
        op = interception.disable_interceptions(op)
        if (recorder := active_recorder()) is not None:
            recorder.view = steps
        if name == "conv_general_dilated":
            return conv_general_dilated(op, lhs, rhs, **params)
        return _dot_general(op, lhs, rhs, weights[0], **params)

    def _activations(
        self, lhs: Any, rhs: Any, *, dimension_numbers: Any, **params: Any
    ) -> jax.Array | None:
        """A product of two activations by its op; None if it stays in float."""
        sources = self._source(lhs), self._source(rhs)
        if (
            not self.modules.sees_activations
            or not dimension_numbers[0][0]
            or any(self.modules.has(source, adapters=True) for source in sources)
        ):
            return None
        # jnp.einsum may hand its operands over the other way round.
        second = None if self.second is None else self._source(self.second)
        swapped = sources[0] is second and sources[1] is not second
        op = self.modules.op_of_activations((lhs if swapped else rhs).shape)
        if op is None:
            return None
        op = interception.disable_interceptions(op)
        params["dimension_numbers"] = dimension_numbers
        return _dot_general(op, lhs, rhs, swapped, **params)

    def _op(self, x: Any) -> Op | None:
        """The op for a product with a parameter; None leaves it in float."""
        if self.called is not None and x is self._source(self.called.array):
            op, self.called = self.called.op, None
            return op
        return self.modules.op(x)


# What layers call, and the function that LoRA replaces, which they call in float.  All
# classes of dots have one ``__call__``.
_OP_CALLS = {
    "fbq_jax.FallbackDot.__call__": "jax.lax.dot_general",
    "fbq_jax.FallbackEinsum.__call__": "jax.numpy.einsum",
    "fbq_jax.nnx.FallbackEinsum.__call__": "jax.numpy.einsum",
    "fbq_jax.FallbackConv.__call__": "jax.lax.conv_general_dilated",
    "fbq_jax.nnx.FallbackConv.__call__": "jax.lax.conv_general_dilated",
}


class _OpCalls(QuantizationProvider):
    """Shows the products of ops to Qwix's LoRA.

    LoRA replaces functions of JAX, and adds to the products that it finds.  A layer
    with an op calls none of these functions.  Here it calls the one that it would call
    in float, and ``_Products`` calls the op for the product inside.
    """

    def __init__(self, products: _Products):
        super().__init__([])
        self.products = products

    def get_intercept_map(self) -> dict[str, Callable[..., Any]]:
        """What Qwix replaces."""
        calls: dict[str, Callable[..., Any]] = {
            name: functools.partial(self.call, function)
            for name, function in _OP_CALLS.items()
        }
        if self.products.modules.sees_activations:
            calls["jax.numpy.einsum"] = self.einsum
        return calls

    def einsum(self, *args: Any, **kwargs: Any) -> Any:
        """Calls ``jnp.einsum``, and tells its first operand from the second."""
        self.products.second = args[2] if len(args) == 3 else None
        try:
            return interception.get_attribute("jax.numpy.einsum")(*args, **kwargs)
        finally:
            self.products.second = None

    def call(self, function: str, op: Any, *args: Any, **kwargs: Any) -> Any:
        """Calls an op, or the function that it stands for."""
        if not _in_lora(function):
            return interception.disable_interceptions(op)(*args, **kwargs)
        position = 2 if function == "jax.numpy.einsum" else 1
        rhs = jnp.asarray(args[position])  # may be a FrozenKernel
        args = (*args[:position], rhs, *args[position + 1 :])
        self.products.called = _Weight(rhs, getattr(op, "dot_general", op))
        try:
            with _shown_to_lora(op, rhs):
                y = interception.get_attribute(function)(*args, **kwargs)
            if self.products.called is None:
                return y
        finally:
            self.products.called = None
        raise ValueError(
            "a LoraRule has a weight_qtype or an act_qtype for a layer that fbq_jax "
            "quantizes: omit them"
        )


def _in_lora(function: str) -> bool:
    """Whether Qwix's LoRA replaces a function of JAX, in this thread."""
    thread = threading.get_ident()
    return any(
        isinstance(getattr(replacement, "__self__", None), LoraProvider)
        for interceptor in _manager._interceptors
        if _manager._intercepted_threads.get((thread, interceptor.id))
        for name, replacement in interceptor.items()
        if name.startswith(function)
    )


def _is_lora_active() -> bool:
    """Whether Qwix's LoRA runs in this thread, even if inside its own replacement."""
    thread = threading.get_ident()
    return any(
        isinstance(getattr(replacement, "__self__", None), LoraProvider)
        for interceptor in _manager._interceptors
        if (thread, interceptor.id) in _manager._intercepted_threads
        for replacement in interceptor.values()
    )


@contextlib.contextmanager
def _shown_to_lora(op: Any, weight: jax.Array) -> Iterator[None]:
    """Lets LoRA find the weight of a frozen layer, which has codes in its place.

    LoRA names its own parameters after the one that a layer multiplies by.
    """
    if calling_module() is not None:
        _refuse_frozen_linen()
        yield
        return
    layer = calling_layer(op)
    frozen = {
        name: value
        for name, value in (vars(layer) if layer is not None else {}).items()
        if isinstance(value, FrozenKernel)
    }
    if layer is None or not frozen:
        yield
        return
    vars(layer).update({name: nnx.Param(weight) for name in frozen})
    try:
        yield
    finally:
        vars(layer).update(frozen)


def _refuse_frozen_linen() -> None:
    """Raises ValueError if the Linen layer that is running is frozen."""
    module = calling_module()
    assert module is not None
    if isinstance(module.get_variable("params", KERNEL), FrozenKernel):
        _refuse_lora(layer_path(module.path))


def _refuse_lora(layer: str) -> NoReturn:
    raise ValueError(
        f"layer {layer!r} is frozen, and LoRA finds no parameter in it: use NNX for "
        "LoRA on a frozen base, or LoRA without freeze"
    )


def _dot_general(
    op: Op,
    lhs: jax.Array,
    rhs: jax.Array,
    weight_is_left: bool,
    *,
    dimension_numbers: Any,
    out_sharding: Any,
    **params: Any,
) -> jax.Array:
    """``lax.dot_general`` by an op, whose left operand is the activation."""
    if not weight_is_left:
        return op(lhs, rhs, dimension_numbers, out_sharding=out_sharding, **params)
    contract, batch = dimension_numbers
    batches = len(batch[0])
    columns = lhs.ndim - batches - len(contract[0])
    rows = rhs.ndim - batches - len(contract[0])
    order = [
        *range(batches),
        *range(batches + rows, batches + rows + columns),
        *range(batches, batches + rows),
    ]
    sharding = before_transposing(out_sharding, order)
    swapped = contract[::-1], batch[::-1]
    y = op(rhs, lhs, swapped, out_sharding=sharding, **params)
    return y.transpose(order)


def _is_plain(jaxpr: Jaxpr) -> bool:
    """Whether a jitted function only views arrays, or multiplies without control flow.

    It has no call of another function but such, so that no op is inside.
    """
    names = set()
    for eqn in jaxpr.eqns:
        name = eqn.primitive.name
        if name in ("jit", "pjit"):
            if not _is_plain(eqn.params["jaxpr"].jaxpr):
                return False
            names.add("dot_general")
        elif any(
            isinstance(x, Jaxpr) or hasattr(x, "jaxpr") or callable(x)
            for x in eqn.params.values()
        ):
            return False
        else:
            names.add(name)
    return bool(names & _PRODUCTS) or names <= VIEWS
