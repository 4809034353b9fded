"""Shardings of ops that are found before compilation, for compilers without callbacks.

XLA calls an op's partitioning function while it compiles, when it knows the shardings.
The compiler for TPUs cannot call Python.  So ``partitioned`` traces and lowers a jitted
function twice: the first time to let Shardy propagate the shardings to each *call* of
an op, the second time to compute each call in a ``jax.shard_map`` with them.  Calls are
numbered in the order in which they are traced.
"""

import contextlib
import dataclasses
import functools
import re
import threading
from collections.abc import Callable, Hashable, Iterator
from typing import Any

import jax
import numpy as np
from jax.extend.mlir import ir, passmanager
from jax.extend.mlir.dialects import sdy
from jax.sharding import Mesh

_PLATFORMS = frozenset({"tpu"})  # whose compilers cannot call Python
_CALL = "fbq_call_"
_TARGET = "CustomSPMDPartitioning"

# The mesh axes that shard each axis of an array. The last one may be ``PART``.
Axes = tuple[tuple[str, ...], ...]
PART = "part"  # of a further mesh axis


class MismatchError(RuntimeError):
    """A function calls other ops than when its shardings were found."""


@dataclasses.dataclass(eq=False)
class Recorder:
    """The calls of ops in a function that is being traced for the first time.

    Attributes:
      described: what is known of each call, in order.
      mesh: the mesh of the function, once it is lowered.
    """

    described: list[Hashable] = dataclasses.field(default_factory=list)
    mesh: Mesh | None = None

    def next_call(self, description: Hashable) -> int:
        """The number of a call that is being traced."""
        self.described.append(description)
        return len(self.described) - 1


class _Count(threading.local):
    value = 0


@dataclasses.dataclass(eq=False)
class Plan:
    """The shardings of all calls of ops in a function.

    Attributes:
      described: as in ``Recorder``.
      mesh: the mesh of the function.
      shardings: by number, what shards the operands and the results of a call.  There
        is none for a call whose results are not used.
      traced: how many calls this thread has traced.
    """

    described: list[Hashable]
    mesh: Mesh
    shardings: dict[int, tuple[list[Axes], list[Axes]]]
    traced: _Count = dataclasses.field(default_factory=_Count)

    def next_call(self, description: Hashable) -> int:
        """The number of a call that is being traced.

        Raises:
          MismatchError: another call had this number.
        """
        number = self.traced.value
        self.traced.value += 1
        if self.described[number : number + 1] != [description]:
            raise MismatchError(
                f"call {number} of a quantized op is {description}, and was another "
                "one when the shardings were found"
            )
        return number

    def shard_map_mesh(self) -> Mesh | None:
        """The mesh for ``jax.shard_map``, None for that of the context."""
        return self.mesh if jax.sharding.get_abstract_mesh().empty else None


# Part of the key of JAX's trace caches: a function is traced again in another context.
_context = jax.make_user_context(None)


def current() -> Recorder | Plan | None:
    """What the function that is being traced runs under."""
    found: Recorder | Plan | None = _context.value
    return found


def call_name(number: int | None) -> str:
    """The name of the function that holds a call, by which its shardings are found."""
    return "call_partitioned" if number is None else f"{_CALL}{number}_"


def check_platform(mesh: Mesh) -> None:
    """Raises NotImplementedError if the compiler for a mesh cannot call Python."""
    platform = jax.default_backend() if mesh.empty else mesh.devices.flat[0].platform
    if platform in _PLATFORMS:
        raise NotImplementedError(
            f"the compiler for {platform.upper()}s cannot partition quantized ops over "
            "several devices by itself. Wrap the jitted function, as in step = "
            "fbq_jax.partitioned(jax.jit(step)), or call the layers in jax.shard_map"
        )


class Partitioned:
    """A jitted function whose quantized ops are partitioned; see ``partitioned``."""

    def __init__(self, jitted: Any) -> None:
        self._jitted = jitted
        # Those of a key differ by a static number; the latest comes first.
        self._plans: dict[Hashable, list[Plan]] = {}
        functools.update_wrapper(self, jitted)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the function."""
        return self._run(self._jitted, args, kwargs)

    def lower(self, *args: Any, **kwargs: Any) -> Any:
        """As ``jax.jit(...).lower``."""
        return self._run(self._jitted.lower, args, kwargs)

    def _run(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: Any
    ) -> Any:
        if not _needs_plan((args, kwargs)):
            return function(*args, **kwargs)
        plans = self._plans.setdefault(_key((args, kwargs)), [])
        for plan in [*plans]:
            with contextlib.suppress(MismatchError), _entered(plan):
                result = function(*args, **kwargs)
                plans.remove(plan)
                plans.insert(0, plan)
                return result
        plan = _find_shardings(self._jitted, args, kwargs)
        with _entered(plan):
            result = function(*args, **kwargs)
        plans.insert(0, plan)
        return result


def partitioned(jitted: Any) -> Partitioned:
    """Partitions the quantized ops of a jitted function over the devices of a TPU mesh.

    On other platforms, and on one device, the function is called as it is: there, XLA
    partitions the ops by itself.

    On a TPU mesh, the function is traced twice for each new combination of shapes and
    shardings of its arguments.  Ops get the same shardings as on other platforms,
    except that a mesh axis shards an op completely or not at all.

    Args:
      jitted: what ``jax.jit`` or ``flax.nnx.jit`` returns.

    Returns:
      A function with the same arguments and results, which also has ``lower``.

    >>> step = partitioned(jax.jit(lambda x: 2 * x))
    >>> int(step(3))
    6
    """
    return Partitioned(jitted)


@contextlib.contextmanager
def _entered(plan: Plan) -> Iterator[None]:
    plan.traced.value = 0
    with _context(plan):
        yield


def _needs_plan(tree: Any) -> bool:
    """Whether a compiler that cannot call Python compiles for several devices."""
    leaves = jax.tree.leaves(tree)
    if any(isinstance(x, jax.core.Tracer) for x in leaves):
        return False  # The outer function is what is compiled.
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.size > 1 and jax.default_backend() in _PLATFORMS:
        return True
    found = (getattr(x, "sharding", None) for x in leaves)
    devices = (list(sharding.device_set) for sharding in found if sharding is not None)
    return any(len(some) > 1 and some[0].platform in _PLATFORMS for some in devices)


def _key(tree: Any) -> Hashable:
    leaves, structure = jax.tree.flatten(tree)
    return structure, jax.sharding.get_abstract_mesh(), *map(_leaf_key, leaves)


def _leaf_key(x: Any) -> Hashable:
    if isinstance(x, int | float | complex) and not isinstance(x, bool):
        return type(x).__name__  # maybe not static, and another one in each call
    if not hasattr(x, "shape"):
        return x  # static
    return x.shape, x.dtype, getattr(x, "sharding", None)


def _find_shardings(jitted: Any, args: tuple[Any, ...], kwargs: Any) -> Plan:
    """Lowers a function, and propagates the shardings of its arguments."""
    recorder = Recorder()
    with _context(recorder):
        lowered = jitted.lower(*args, **kwargs)
    if recorder.mesh is None:  # no calls
        return Plan([], Mesh(np.empty((), object), ()), {})
    module = lowered.compiler_ir("stablehlo")
    with module.context:
        _run_passes(module, "sdy-flatten-call-graph")  # one call of each function
        _inline(module)
        _run_passes(module, "sdy-propagation-pipeline")
        shardings = dict(_calls(module))
    return Plan(recorder.described, recorder.mesh, shardings)


def _run_passes(module: Any, passes: str) -> None:
    passmanager.PassManager.parse(f"builtin.module({passes})").run(module.operation)


def _inline(module: Any) -> None:
    """Inlines all functions, each of which is called once, as XLA does.

    Shardings would not propagate through their results in the same order.
    """
    functions = {
        _text(f.attributes["sym_name"]): f
        for f in module.body.operations
        if _is(f, "func.func")
    }
    calls = [op for op in _walk(module.operation) if op.name == "func.call"]
    for call in calls:
        name = _text(call.attributes["callee"]).removeprefix("@")
        block = functions[name].regions[0].blocks[0]
        *operations, last = [op.operation for op in block.operations]
        for argument, operand in zip(block.arguments, call.operands, strict=True):
            argument.replace_all_uses_with(operand)
        for operation in operations:
            if found := re.match(rf"{_CALL}(\d+)_", name):
                operation.attributes[_CALL] = ir.StringAttr.get(found[1])
            operation.move_before(call)
        for result, value in zip(call.results, last.operands, strict=True):
            result.replace_all_uses_with(value)
        call.erase()
        functions[name].erase()


def _walk(operation: Any) -> Iterator[Any]:
    """The operations in the regions of an operation."""
    for region in operation.regions:
        for block in region.blocks:
            for inner in block.operations:
                yield inner.operation
                yield from _walk(inner.operation)


def _is(operation: Any, name: str) -> bool:
    return bool(operation.operation.name == name)


def _text(attribute: Any) -> str:
    return str(attribute).strip('"')


def _calls(module: Any) -> Iterator[tuple[int, tuple[list[Axes], list[Axes]]]]:
    """The numbers and the shardings of the calls in a module."""
    for operation in _walk(module.operation):
        is_call = (
            _is(operation, "stablehlo.custom_call") and _CALL in operation.attributes
        )
        if is_call and _text(operation.attributes["call_target_name"]) == _TARGET:
            values = [*operation.operands], [*operation.results]
            operands, results = ([*map(_axes_of, side)] for side in values)
            yield int(_text(operation.attributes[_CALL])), (operands, results)


def _axes_of(value: Any) -> Axes:
    """The mesh axes that shard a value; ``()`` if none do."""
    if isinstance(value.owner, ir.Block):
        argument: Any = ir.BlockArgument(value)
        owner = value.owner.owner
        if _is(owner, "func.func"):
            attributes = ir.ArrayAttr(owner.attributes["arg_attrs"])
            of_argument = ir.DictAttr(attributes[argument.arg_number])
            if "sdy.sharding" not in of_argument:
                return ()
            return _axes(of_argument["sdy.sharding"])
        index = argument.arg_number  # The results of a loop are its arguments.
    else:
        owner, index = value.owner, ir.OpResult(value).result_number
    if "sdy.sharding" not in owner.attributes:
        return ()
    found = sdy.TensorShardingPerValueAttr(owner.attributes["sdy.sharding"])
    return _axes(found.shardings[index])


def _axes(sharding: Any) -> Axes:
    """The mesh axes that shard each axis of an array; ``PART`` comes last."""
    dimensions = sdy.TensorShardingAttr(sharding).dimension_shardings
    found = []
    for dimension in dimensions:
        axes = [sdy.AxisRefAttr(a) for a in sdy.DimensionShardingAttr(dimension).axes]
        parts = (i for i, axis in enumerate(axes) if axis.sub_axis_info is not None)
        end = next(parts, len(axes))
        names = tuple(axis.name for axis in axes[:end])
        found.append(names if end == len(axes) else (*names, PART))
    return tuple(found)
