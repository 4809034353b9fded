"""Computes products with parameters, and of activations, by ops."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jax.extend.core import Jaxpr, Literal
from qwix import QuantizationProvider

from fbq_jax.contrib.qwix.internals import PRIMITIVE_BIND, disable_interceptions
from fbq_jax.core.arguments import DTYPES
from fbq_jax.core.conv import conv_general_dilated
from fbq_jax.core.einsum import before_transposing
from fbq_jax.sharding.layer_names import current_path

Op = Callable[..., jax.Array]

_PRODUCTS = frozenset({"dot_general", "conv_general_dilated"})
# The primitives that leave a parameter the same matrix, or a part of it.
_VIEWS = frozenset(
    {
        "broadcast_in_dim",
        "convert_element_type",
        "copy",
        "dynamic_slice",
        "optimization_barrier",
        "reduce_precision",
        "reshape",
        "reshard",
        "sharding_constraint",
        "slice",
        "squeeze",
        "transpose",
    }
)


class Modules(Protocol):
    """The modules of a model whose methods are running, which have its parameters."""

    @property
    def intercepted(self) -> Mapping[str, Callable[..., Any]]:
        """What else Qwix replaces."""

    @property
    def sees_activations(self) -> bool:
        """Whether products of two activations matter."""

    def has(self, x: Any, *, adapters: bool = False) -> bool:
        """Whether an array is a parameter, of LoRA only if ``adapters``."""

    def op(self, x: Any) -> Op | None:
        """The op for a product with a parameter; None leaves it in float."""

    def op_of_activations(self, shape: tuple[int, ...]) -> Op | None:
        """The op for a product of two activations; None leaves it in float."""


class Weight(NamedTuple):
    """The right operand of an op that LoRA is to see, and the op."""

    array: Any
    op: Op


class Products(QuantizationProvider):
    """Replaces ``Primitive.bind``, by which JAX calls a primitive.

    Qwix does not replace it while it runs the replacement.
    """

    def __init__(self, modules: Modules):
        super().__init__([])
        self.modules = modules
        # Of the op that is being called, until its product is found.
        self.called: Weight | None = None
        # Of a jnp.einsum that is being called, the second operand.
        self.second: Any = None
        # Each view, which keeps its id from being used again, and what it is a view of.
        self.views: dict[int, tuple[Any, Any]] = {}

    def get_intercept_map(self) -> dict[str, Callable[..., Any]]:
        """What Qwix replaces."""
        replaced = super().get_intercept_map()
        replaced |= self.modules.intercepted
        return {**replaced, PRIMITIVE_BIND: self.bind}

    def bind(self, primitive: Any, *args: Any, **params: Any) -> Any:
        """Calls a primitive, or an op in its place."""
        name = primitive.name
        if current_path() is not None:
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
        if name in _VIEWS and getattr(args[0], "ndim", 0) >= 1:
            self.views[id(y)] = y, args[0]
        return y

    def _source(self, x: Any) -> Any:
        """The array that x is a view of, or x itself.

        A parameter may be a view of another one, as in one layer of a stack.
        """
        views = []
        while id(x) in self.views:
            views.append(x)
            x = self.views[id(x)][1]
        if not views or not self.modules.has(x):
            return x
        return next(filter(self.modules.has, views), x)

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
        # An operand may be whatever JAX takes: a Python number, an array of NumPy.
        dtypes = [jax.typeof(x).dtype for x in (lhs, rhs)]
        dtypes.append(params["preferred_element_type"] or dtypes[0])
        if any(dtype not in DTYPES for dtype in dtypes):
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
        source = self._source(rhs if weights[1] else lhs)
        if (op := self._op(source)) is None:
            return None
        op, lhs, rhs = disable_interceptions(op), jnp.asarray(lhs), jnp.asarray(rhs)
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
        op, lhs, rhs = disable_interceptions(op), jnp.asarray(lhs), jnp.asarray(rhs)
        params["dimension_numbers"] = dimension_numbers
        return _dot_general(op, lhs, rhs, swapped, **params)

    def _op(self, x: Any) -> Op | None:
        """The op for a product with a parameter; None leaves it in float."""
        if self.called is not None and x is self._source(self.called.array):
            op, self.called = self.called.op, None
            return op
        return self.modules.op(x)


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
    return bool(names & _PRODUCTS) or names <= _VIEWS
