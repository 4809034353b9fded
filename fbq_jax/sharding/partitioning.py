"""Partitions an op over the devices of a mesh.

XLA cannot partition a kernel; it would gather the operands on every device.  So an op
has a rule (``fbq_jax.sharding.rule_language``), by which Shardy propagates shardings
between operands and results, and a function that computes one device's results.

The compiler for TPUs cannot call Python, which this needs.  In a program for several
TPUs, XLA partitions the ops that can run as ``jax.numpy`` code; others are an error,
except inside ``shard_map``.
"""

import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
from jax import lax
from jax.experimental.custom_partitioning import custom_partitioning
from jax.extend.core import ClosedJaxpr, Primitive, jaxpr_as_fun
from jax.interpreters import mlir
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from fbq_jax.sharding.assignment import (
    MeshAxes,
    ShardAssignment,
    assign_mesh_axes,
    factor_mesh_axes,
    warn_misaligned_shards,
)
from fbq_jax.sharding.collectives import MeshShard
from fbq_jax.sharding.local_ops import Shard
from fbq_jax.sharding.rule_language import (
    UNSHARDED,
    Factor,
    ShardingRule,
    parse_factors,
    word,
)

# What one device computes, by assignment; None for the whole op.
Program = Callable[[ShardAssignment | None], Callable[..., Any]]


def call_partitioned(
    name: str,
    rule_of: Callable[..., ShardingRule],
    local: Callable[..., Any],
    *operands: Any,
    in_xla: Callable[..., Any] | None = None,
) -> Any:
    """Calls an op that is partitioned by the rule ``rule_of(*operands)``.

    Args:
      name: the name of the op.
      rule_of: makes the op's sharding rule from its operands.
      local: computes the results of one device, called as ``local(shard, *operands)``.
        It may use collectives over the axes of the shard's assignment.
      *operands: arrays, or trees of arrays.
      in_xla: does the same in ``jax.numpy`` code, which XLA partitions in a program for
        several TPUs; None if such a program is an error.
    """
    rule = rule_of(*operands)
    program = _traced_once(rule, local)
    whole = program(None)
    if jax.sharding.get_abstract_mesh().manual_axes:
        return whole(*operands)  # Inside shard_map an array is a shard already.
    shapes = jax.eval_shape(whole, *operands)
    run = _partitioned_op(name, rule, program, operands, shapes)
    leaves, tree = jax.tree.flatten(operands)

    def on_leaves(function: Callable[..., Any]) -> Callable[..., list[jax.Array]]:
        return lambda *xs: jax.tree.leaves(function(*jax.tree.unflatten(tree, xs)))

    if in_xla is not None:
        in_xla = jax.jit(functools.partial(in_xla, Shard(rule)))
    results = _partitioned_p.bind(
        *leaves,
        name=name,
        partitioned=jax.make_jaxpr(on_leaves(run))(*leaves),
        in_xla=in_xla and on_leaves(in_xla),
    )
    return jax.tree.unflatten(jax.tree.structure(shapes), results)


def _partitioned_op(
    name: str,
    rule: ShardingRule,
    program: Program,
    operands: tuple[Any, ...],
    shapes: Any,
) -> Callable[..., Any]:
    """The op with JAX's ``custom_partitioning``; its results have these shapes."""
    # The partitioned op returns results without axes of size one.  XLA's simplifier for
    # GPUs removes such an axis from a result that is broadcast, and gives the op's
    # attributes to the new reshape.  Shardy would apply the op's rule to it and crash.
    words = jax.tree.map(_squeeze_words, rule.results, shapes)
    squeezed = rule._replace(results=words)

    def squeezed_program(assignment: ShardAssignment | None) -> Callable[..., Any]:
        run = program(assignment)
        return lambda *xs: jax.tree.map(_squeeze, run(*xs), shapes)

    call = custom_partitioning(squeezed_program(None))
    text, sizes = _shardy_rule(squeezed, operands)
    call.def_partition(
        functools.partial(_partition, name, squeezed, squeezed_program),
        decode_shardings=False,  # Shardy's are not always NamedShardings of the mesh.
        sharding_rule=lambda *_: (text, sizes),
    )
    return lambda *operands: jax.tree.map(_expand, call(*operands), shapes)


_partitioned_p = Primitive("partitioned_op")
_partitioned_p.multiple_results = True


@_partitioned_p.def_abstract_eval
def _abstract_results(
    *_arrays: Any, partitioned: ClosedJaxpr, **_params: Any
) -> list[Any]:
    return list(partitioned.out_avals)


@_partitioned_p.def_impl
def _run_partitioned(
    *arrays: jax.Array, partitioned: ClosedJaxpr, **_params: Any
) -> list[jax.Array]:
    results: list[jax.Array] = jaxpr_as_fun(partitioned)(*arrays)
    return results


def _lower_for_tpus(
    context: mlir.LoweringRuleContext,
    *arrays: Any,
    name: str,
    partitioned: ClosedJaxpr,
    in_xla: Callable[..., list[jax.Array]] | None,
) -> Sequence[Any]:
    """Leaves the op to XLA: the compiler for TPUs does not call ``_partition``."""
    run = jaxpr_as_fun(partitioned)
    devices = context.module_context.axis_context
    count = devices.mesh.size if hasattr(devices, "mesh") else devices.num_devices
    if count > 1:
        if in_xla is None:
            raise NotImplementedError(
                f"{name}: the compiler for TPUs cannot partition the kernels of block "
                "recipes, nor Gemm.reduce other than 'int32', over several devices: "
                "call the layers in jax.shard_map, or use recipes.rowwise"
            )
        run = in_xla
    return mlir.lower_fun(run, multiple_results=True)(context, *arrays)


def _lower(
    context: mlir.LoweringRuleContext, *arrays: Any, **params: Any
) -> Sequence[Any]:
    kept_alive = context.module_context.keepalives
    before = len(kept_alive)
    run = mlir.lower_fun(_run_partitioned, multiple_results=True)
    results = run(context, *arrays, **params)
    # JAX would pickle ``_partition`` with a compiled program, which no longer calls it.
    kept_alive[before:] = map(_NotPickled, kept_alive[before:])
    return results


class _NotPickled:
    """Keeps objects alive; a copy by pickle keeps none."""

    def __init__(self, *kept: Any) -> None:
        self._kept = kept

    def __reduce__(self) -> Any:
        return _NotPickled, ()


mlir.register_lowering(_partitioned_p, _lower)
mlir.register_lowering(_partitioned_p, _lower_for_tpus, platform="tpu")


def _traced_once(rule: ShardingRule, local: Callable[..., Any]) -> Program:
    """What one device computes, by assignment.

    XLA partitions each call of an op on its own.  Calls with equal assignments, as in
    identical layers, share one traced function.
    """
    programs: dict[Any, Callable[..., Any]] = {}

    def program(assignment: ShardAssignment | None) -> Callable[..., Any]:
        key, shard = None, Shard(rule)
        if assignment is not None:
            key = tuple(tuple(sorted(field.items())) for field in assignment)
            shard = MeshShard(rule, assignment)
        if key not in programs:
            programs[key] = jax.jit(functools.partial(local, shard))
        return programs[key]

    return program


def _unit_axes(shape: Any) -> list[int]:
    return [axis for axis, size in enumerate(shape.shape) if size == 1]


def _squeeze_words(words: str, shape: Any) -> str:
    sized = zip(words.split(), shape.shape, strict=True)
    return " ".join(text for text, size in sized if size != 1)


def _squeeze(x: jax.Array, shape: Any) -> jax.Array:
    """Removes the axes that have size one in ``shape``."""
    return lax.squeeze(x, _unit_axes(shape))


def _expand(x: jax.Array, shape: Any) -> jax.Array:
    """Reverses ``_squeeze``."""
    return lax.expand_dims(x, _unit_axes(shape))


def _shardy_rule(
    rule: ShardingRule, operands: tuple[Any, ...]
) -> tuple[str, dict[str, Any]]:
    """The rule for Shardy, and the sizes of factors that are no full axis of an array.

    An axis with a granularity is a compound factor.  It shares only its major part with
    other arrays.
    """
    sides = [
        [parse_factors(words) for words in jax.tree.leaves(side)]
        for side in (rule.operands, rule.results)
    ]
    shapes = [array.shape for array in jax.tree.leaves(operands)]
    sizes = {
        factor.name: size // factor.granularity
        for factors, shape in zip(sides[0], shapes, strict=True)
        for factor, size in zip(factors, shape, strict=True)
    }
    factors = [factor for arrays in (*sides[0], *sides[1]) for factor in arrays]
    compound = filter(_is_compound, factors)
    sizes |= {word(*factor): factor.granularity for factor in compound}
    whole_axes = {factor.name for factor in factors if factor.granularity == 1}
    unsharded = itertools.count(1)
    text = " -> ".join(
        ", ".join(
            " ".join(_shardy_axis(factor, unsharded) for factor in array)
            for array in side
        )
        for side in sides
    )
    parts = {n: k for n, k in sizes.items() if n not in (UNSHARDED, *whole_axes)}
    return text, {**parts, "reduction_factors": tuple(rule.contracted)}


def _is_compound(factor: Factor) -> bool:
    return factor.name != UNSHARDED and factor.granularity > 1


def _shardy_axis(factor: Factor, unsharded: Iterator[int]) -> str:
    """An axis in Shardy's notation; every unsharded axis has its own factor."""
    if factor.name == UNSHARDED:
        return f"x{next(unsharded)}"
    return f"({factor.name} {word(*factor)})" if _is_compound(factor) else factor.name


def _partition(
    name: str,
    rule: ShardingRule,
    program: Program,
    mesh: Mesh,
    operands: tuple[Any, ...],
    results: Any,
) -> tuple[Mesh, Callable[..., Any], Any, Any]:
    """The callback of ``custom_partitioning``; arrays are shapes with shardings."""
    if mesh.empty:
        first = jax.tree.leaves(operands)[0]
        # A shape that any number of shards divides.
        shape = (first.sharding.num_devices,) * len(first.shape)
        mesh = Mesh(list(first.sharding.devices_indices_map(shape)), ("devices",))
    mesh, (operands, results) = factor_mesh_axes(mesh, (operands, results))
    assignment = assign_mesh_axes(rule, operands, results, mesh)
    warn_misaligned_shards(name, rule, operands, assignment)

    def run(*operands: Any) -> Any:
        # The caller may compile in the context of another mesh.
        with jax.sharding.use_abstract_mesh(AbstractMesh((), ())):
            return program(assignment)(*operands)

    def shardings(side: Any, scattered: Mapping[str, MeshAxes]) -> Any:
        spec = functools.partial(_spec, assignment, scattered)
        return jax.tree.map(lambda words: NamedSharding(mesh, spec(words)), side)

    of_results = shardings(rule.results, assignment.reduce_scatter_axes)
    return mesh, run, of_results, shardings(rule.operands, {})


def _spec(
    assignment: ShardAssignment, scattered: Mapping[str, MeshAxes], words: str
) -> PartitionSpec:
    """What shards an array with these words."""
    spec = []
    for factor, granularity in parse_factors(words):
        axes = assignment.mesh_axes.get(factor, ())
        if granularity > 1:
            axes = assignment.axes_of(factor)
        spec.append((*axes, *scattered.get(factor, ())) or None)
    return PartitionSpec(*spec)
