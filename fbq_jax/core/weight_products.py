"""Which parameters a model multiplies by, and what becomes of the other ones.

A model is traced once, and its jaxpr says where each parameter goes: through casts and
reshapes, into scanned and rematerialized layers, to a product.  A value counts as a
weight while it depends on parameters only.  The search stops at a weight that a
quantized op has marked (``weight_marks``).
"""

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal, Var

from fbq_jax.core.weight_marks import MARK, ProductRecorder, QuantizedProduct
from fbq_jax.recipes.path_rules import Pairs
from fbq_jax.recipes.rules_report import (
    ActivationProduct,
    FloatParameter,
    QuantizedParameter,
    RulesReport,
    rules_report,
)
from fbq_jax.recipes.schema import Recipe

_PRODUCTS = frozenset({"dot_general", "conv_general_dilated", "ragged_dot_general"})


# The primitives that leave a parameter the same matrix, or a part of it.
VIEWS = frozenset(
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


@dataclasses.dataclass
class ParameterUse:
    """What a traced model does with one parameter.

    Attributes:
      quantized: the quantized products of this parameter.
      combined: the quantized products of its layer with a weight of the parameter's
        size that also depends on the model's inputs, such as a kernel whose rows are
        scaled.
      in_float: whether a product in float reads it.
      others: the primitives that read it together with other values.
      changes: the primitives that compute with it and with other parameters only, such
        as those that normalize a kernel.
      stacked: the number of its axes that scans run over.
      without_op: the class of its module, if that takes no op and nothing was traced.
    """

    quantized: list[QuantizedProduct] = dataclasses.field(default_factory=list)
    combined: list[QuantizedProduct] = dataclasses.field(default_factory=list)
    in_float: bool = False
    others: set[str] = dataclasses.field(default_factory=set)
    changes: set[str] = dataclasses.field(default_factory=set)
    stacked: int = 0
    without_op: str | None = None

    @property
    def other_readers(self) -> list[str]:
        """What reads the parameter, except for quantized products."""
        return sorted(self.others) + ["a product in float"] * self.in_float


def is_adapter(parameter: str) -> bool:
    """Whether a name belongs to a LoRA parameter, which products in float read.

    ``nnx.LoRA`` calls its parameters ``lora_a`` and ``lora_b``; Qwix adds
    ``kernel_lora_a`` and ``kernel_lora_b`` to a parameter ``kernel``.
    """
    return parameter.endswith(("lora_a", "lora_b"))


def split_arrays(tree: Any) -> tuple[list[Any], Callable[[list[Any]], Any]]:
    """Splits arrays, and shapes of arrays, from static options such as ``train``."""
    leaves, structure = jax.tree.flatten(tree)
    is_array = [hasattr(x, "shape") and hasattr(x, "dtype") for x in leaves]
    arrays = [x for x, array in zip(leaves, is_array, strict=True) if array]

    def rebuild(arrays: list[Any]) -> Any:
        values = iter(arrays)
        merged = [
            next(values) if array else x
            for x, array in zip(leaves, is_array, strict=True)
        ]
        return jax.tree.unflatten(structure, merged)

    return arrays, rebuild


def find_uses(
    closed: ClosedJaxpr,
    parameters: Mapping[int, str],
    recorder: ProductRecorder,
    *,
    root: str = "",
) -> list[tuple[str, tuple[int, ...], ParameterUse]]:
    """Finds what a traced model does with its parameters.

    Args:
      closed: the traced model.
      parameters: maps the position of each parameter among the model's inputs to the
        parameter's path.
      recorder: was active during the trace.
      root: what the products of the model itself call their layer.

    Returns:
      The path, the shape and the use of each parameter.
    """
    uses = [ParameterUse() for _ in parameters]
    inputs: list[_Weight | None] = [None] * len(closed.jaxpr.invars)
    for index, position in enumerate(parameters):
        inputs[position] = frozenset({index})
    search = _Search(uses, recorder)
    search.jaxpr(closed.jaxpr, inputs)
    shapes = [closed.in_avals[position].shape for position in parameters]
    found = list(zip(parameters.values(), shapes, uses, strict=True))
    for path, shape, use in found:
        layer, size = path.rpartition("/")[0], math.prod(shape[use.stacked :])
        if not use.quantized:
            use.combined += [
                product
                for product in search.of_inputs
                if product.layer == (layer or root) and math.prod(product.shape) == size
            ]
    return found


# The parameters that a value depends on; empty for constants, None if it also depends
# on the model's inputs.
_Weight = frozenset[int]


@dataclasses.dataclass
class _Search:
    """Follows weights through a jaxpr."""

    uses: list[ParameterUse]
    recorder: ProductRecorder
    # Quantized products whose weight depends on the model's inputs.
    of_inputs: list[QuantizedProduct] = dataclasses.field(default_factory=list)

    def jaxpr(
        self, jaxpr: Jaxpr, inputs: Sequence[_Weight | None]
    ) -> list[_Weight | None]:
        """Visits a jaxpr; returns what its outputs depend on."""
        known: dict[Var, _Weight | None] = dict.fromkeys(jaxpr.constvars, _Weight())
        known.update(zip(jaxpr.invars, inputs, strict=True))

        def weight(x: Any) -> _Weight | None:
            return _Weight() if isinstance(x, Literal) else known[x]

        for eqn in jaxpr.eqns:
            outputs = self._equation(eqn, [weight(x) for x in eqn.invars])
            known.update(zip(eqn.outvars, outputs, strict=True))
        return [weight(x) for x in jaxpr.outvars]

    def _equation(
        self, eqn: Any, inputs: list[_Weight | None]
    ) -> Sequence[_Weight | None]:
        name, none = eqn.primitive.name, [None] * len(eqn.outvars)
        label = eqn.params.get("name")
        if isinstance(label, str) and label.startswith(MARK):
            product = self.recorder.products[int(label.removeprefix(MARK))]
            for use in self._of(inputs):
                use.quantized.append(product)
            if None in inputs:
                self.of_inputs.append(product)
            return none
        if name in _PRODUCTS:
            for use in self._of(inputs[:2]):
                use.in_float = True
        elif name in _LOOPS:
            return _LOOPS[name](self, eqn, inputs)
        elif (inner := inner_jaxpr(eqn)) is not None:
            return self.jaxpr(inner.jaxpr, inputs)
        if all(x is not None for x in inputs):
            if name not in VIEWS:
                for use in self._of(inputs):
                    use.changes.add(name)
            return [_Weight().union(*inputs)] * len(eqn.outvars)  # type: ignore[arg-type]
        if name not in _PRODUCTS:
            for use in self._of(inputs):
                use.others.add(name)
        return none

    def _of(self, inputs: Sequence[_Weight | None]) -> list[ParameterUse]:
        """The uses of the parameters that inputs depend on."""
        found = _Weight().union(*(x for x in inputs if x is not None))
        return [self.uses[index] for index in sorted(found)]

    def _scan(self, eqn: Any, inputs: list[_Weight | None]) -> Sequence[_Weight | None]:
        body, (consts, carried) = eqn.params["jaxpr"].jaxpr, scan_sizes(eqn)
        last = consts + carried
        for use in self._of(inputs[last:]):
            use.stacked += 1
        carries = self._carry(eqn, body, inputs[consts:last], consts)
        outputs = self.jaxpr(body, [*inputs[:consts], *carries, *inputs[last:]])
        return [*carries, *outputs[carried:]]

    def _while(
        self, eqn: Any, inputs: list[_Weight | None]
    ) -> Sequence[_Weight | None]:
        body = eqn.params["body_jaxpr"].jaxpr
        first = eqn.params["cond_nconsts"]
        last = first + eqn.params["body_nconsts"]
        carries = self._carry(eqn, body, inputs[last:], last - first)
        self.jaxpr(eqn.params["cond_jaxpr"].jaxpr, [*inputs[:first], *carries])
        self.jaxpr(body, [*inputs[first:last], *carries])
        return carries

    def _carry(
        self, eqn: Any, body: Jaxpr, inputs: Sequence[_Weight | None], first: int
    ) -> list[_Weight | None]:
        """What a loop's carried values depend on, the ``first`` input of its body on.

        A weight that the body returns as it is stays one.  Everything else that is
        carried counts as an activation.
        """
        given = body.invars[first : first + len(inputs)]
        triples = zip(inputs, given, body.outvars[: len(inputs)], strict=True)
        carries = [x if start is end else None for x, start, end in triples]
        changed = [x for x, kept in zip(inputs, carries, strict=True) if kept is None]
        for use in self._of(changed):
            use.others.add(eqn.primitive.name)
        return carries

    def _cond(self, eqn: Any, inputs: list[_Weight | None]) -> Sequence[_Weight | None]:
        read = inputs[:1]
        for branch in eqn.params["branches"]:
            read += self.jaxpr(branch.jaxpr, inputs[1:])
        for use in self._of(read):
            use.others.add("cond")
        return [None] * len(eqn.outvars)


_LOOPS = {"scan": _Search._scan, "while": _Search._while, "cond": _Search._cond}


def scan_sizes(eqn: Any) -> tuple[int, int]:
    """The numbers of constants and of carried values of a scan, its first inputs."""
    # The other inputs and outputs are arrays that lose their first axis inside.
    body = eqn.params["jaxpr"].jaxpr
    carried = sum(map(_same_rank, eqn.outvars, body.outvars))
    return sum(map(_same_rank, eqn.invars, body.invars)) - carried, carried


def _same_rank(x: Any, y: Any) -> bool:
    return len(x.aval.shape) == len(y.aval.shape)


def inner_jaxpr(eqn: Any) -> ClosedJaxpr | None:
    """The jaxpr that an equation calls with its own inputs, if there is one."""
    for value in eqn.params.values():
        if isinstance(value, ClosedJaxpr):  # newer versions of JAX have this class only
            inner = value
        elif isinstance(value, Jaxpr):
            inner = ClosedJaxpr(value, ())
        else:
            continue
        if len(inner.jaxpr.invars) == len(eqn.invars):
            return inner
    return None


def check_weight(
    layer: str, parameter: str, use: ParameterUse, *, kept: bool = False
) -> None:
    """Checks that codes can take the place of a parameter that ``freeze`` quantizes.

    Args:
      layer: the name of the layer.
      parameter: the path of the parameter.
      use: what the model does with it.
      kept: whether the parameter stays for its other readers.

    Raises:
      ValueError: the layer's weight also depends on the model's inputs; or something
        else reads the parameter, which is not ``kept``.
    """
    if not use.quantized:
        raise ValueError(
            f"freeze cannot quantize {parameter!r} once: layer {layer!r} multiplies by "
            "a weight that depends on the model's inputs. Fold the factor into the "
            "parameter, or give the layer None in the rules"
        )
    if use.other_readers and not kept:
        raise ValueError(
            f"freeze would remove {parameter!r}, which the model reads other than by "
            f"the product of layer {layer!r} ({', '.join(use.other_readers)}): give "
            "the layer None in the rules"
        )


#: Why a parameter stays in float: the module that holds it takes no op.
WITHOUT_OP = "its layer multiplies without an op (see fbq_jax.integrations.qwix)"
#: Why a parameter stays in float: for example, a layer's kernel that other code reads,
#: or a product inside ``jax.vmap``.
NOT_REACHED = "no op reached its product"


def report(
    rules: Pairs,
    found: Mapping[str, str | None],
    parameters: Iterable[tuple[str, tuple[int, ...], ParameterUse]],
    activation_products: Iterable[ActivationProduct] = (),
) -> RulesReport:
    """Reports what rules did to a model.

    Args:
      rules: all rules.
      found: maps the path of each layer that rules are for to the pattern that matched
        it, or None.
      parameters: the path, the shape and the use of each parameter.
      activation_products: the products of two activations that rules can name.
    """
    products: list[QuantizedParameter] = []
    floats = []
    for path, shape, use in parameters:
        owner = path.rpartition("/")[0]
        own = shape[use.stacked :]
        for product in use.quantized or use.combined:
            if len(own) < 2 and math.prod(own) < math.prod(product.shape):
                continue  # a factor of the weight, such as a scale of each column
            layer = owner if product.layer not in found else str(product.layer)
            row = QuantizedParameter(
                path,
                product.shape,
                layer,
                found.get(layer),
                product.recipe,
                product.ignores_precision,
            )
            if row not in products:
                products.append(row)
        reason: str | None = "LoRA"
        if not is_adapter(path):
            reason = _float_reason(dict(rules), found, owner, use)
        if reason is not None and len(own) >= 2:
            floats.append(FloatParameter(path, shape, reason))
    return rules_report(rules, found, products, floats, activation_products)


def _float_reason(
    rules: Mapping[str, Recipe | None],
    found: Mapping[str, str | None],
    owner: str,
    use: ParameterUse,
) -> str | None:
    """Why a parameter stays in float; None if only quantized products read it."""
    if use.without_op is not None:
        return f"{use.without_op} takes no op"
    if use.quantized or use.combined:
        return "a product in float reads it, too" if use.in_float else None
    if use.in_float:
        if owner not in found:
            return WITHOUT_OP
        pattern = found[owner]
        if pattern is None:
            return "no rule for its layer"
        if rules[pattern] is None:
            return f"rule {pattern!r}"
        return NOT_REACHED
    if use.others:
        return f"no product reads it ({', '.join(sorted(use.others))})"
    return "not read in this call"
