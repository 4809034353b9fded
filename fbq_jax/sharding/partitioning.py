"""Partitions an op over the devices of a mesh.

XLA cannot partition a kernel; it would gather the operands on every device.  So an op
has a rule (``fbq_jax.sharding.rule_language``), by which Shardy propagates shardings
between operands and results, and a function that computes one device's results.  On
TPUs, ``fbq_jax.sharding.propagation`` finds the shardings first.
"""

import functools
import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
from jax import lax
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from fbq_jax.sharding import propagation
from fbq_jax.sharding.assignment import (
    UNASSIGNED,
    MeshAxes,
    ShardAssignment,
    ShardedArray,
    assign_mesh_axes,
    factor_mesh_axes,
    warn_misaligned_shards,
)
from fbq_jax.sharding.layer_names import warn_once
from fbq_jax.sharding.local_ops import Shard
from fbq_jax.sharding.rule_language import (
    UNSHARDED,
    Factor,
    ShardingRule,
    parse_factors,
    word,
)


def call_partitioned(
    name: str,
    rule_of: Callable[..., ShardingRule],
    local: Callable[..., Any],
    *operands: Any,
    call_number: int | None = None,
) -> Any:
    """Calls an op that is partitioned by the rule ``rule_of(*operands)``.

    Args:
      name: the name of the op.
      rule_of: makes the op's sharding rule from its operands.
      local: computes the results of one device, called as ``local(shard, *operands)``.
        It may use collectives over the axes of the shard's assignment.
      *operands: arrays, or trees of arrays.
      call_number: the number of the call in a ``propagation.Plan``, if there is one.
    """
    rule = rule_of(*operands)
    # jit: the function is traced only once.
    whole = jax.jit(functools.partial(local, Shard(rule, UNASSIGNED)))
    if jax.sharding.get_abstract_mesh().manual_axes:
        return whole(*operands)  # Inside shard_map an array is a shard already.
    plan = propagation.current()
    if isinstance(plan, propagation.Plan):
        return _call_on_shards(name, rule, local, plan, call_number, operands)
    if plan is not None:
        recorded = custom_partitioning(whole)
        _define(recorded, rule, operands, functools.partial(setattr, plan, "mesh"))
        return recorded(*operands)
    # The partitioned op returns results without axes of size one.  XLA's simplifier for
    # GPUs removes such an axis from a result that is broadcast, and gives the op's
    # attributes to the new reshape.  Shardy would apply the op's rule to it and crash.
    shapes = jax.eval_shape(whole, *operands)
    words = jax.tree.map(_squeeze_words, rule.results, shapes)
    squeezed_rule = rule._replace(results=words)
    call = custom_partitioning(lambda *xs: jax.tree.map(_squeeze, whole(*xs), shapes))
    partition = functools.partial(
        _partition, name, squeezed_rule, rule, _traced_once(rule, local), shapes
    )
    _define(call, squeezed_rule, operands, propagation.check_platform, partition)
    return jax.tree.map(_expand, call(*operands), shapes)


def _define(
    call: custom_partitioning,
    rule: ShardingRule,
    operands: tuple[Any, ...],
    lowered_for: Callable[[Mesh], None],
    partition: Callable[..., Any] | None = None,
) -> None:
    """Gives an op its rule, and the function that partitions it.

    Args:
      call: the op.
      rule: its rule.
      operands: its operands.
      lowered_for: is called with the mesh if the op is lowered for several devices.
      partition: the callback of ``custom_partitioning``; None if it will not be called.
    """
    text, sizes = _shardy_rule(rule, operands)
    sizes |= {"reduction_factors": tuple(rule.contracted)}

    def shardy_rule(mesh: Mesh, *_: Any) -> tuple[str, dict[str, Any]]:
        lowered_for(mesh)
        return text, sizes

    call.def_partition(
        partition,
        decode_shardings=False,  # Shardy's are not always NamedShardings of the mesh.
        sharding_rule=shardy_rule,
    )


def _traced_once(
    rule: ShardingRule, local: Callable[..., Any]
) -> Callable[[ShardAssignment], Callable[..., Any]]:
    """What one device computes, by assignment.

    XLA partitions each call of an op on its own.  Calls with equal assignments, as in
    identical layers, share one traced function.
    """
    programs: dict[Any, Callable[..., Any]] = {}

    def program(assignment: ShardAssignment) -> Callable[..., Any]:
        key = tuple(tuple(sorted(field.items())) for field in assignment)
        if key not in programs:
            shard = Shard(rule, assignment)
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
    return text, parts


def _is_compound(factor: Factor) -> bool:
    return factor.name != UNSHARDED and factor.granularity > 1


def _shardy_axis(factor: Factor, unsharded: Iterator[int]) -> str:
    """An axis in Shardy's notation; every unsharded axis has its own factor."""
    if factor.name == UNSHARDED:
        return f"x{next(unsharded)}"
    return f"({factor.name} {word(*factor)})" if _is_compound(factor) else factor.name


def _partition(
    name: str,
    squeezed_rule: ShardingRule,
    rule: ShardingRule,
    local_of: Callable[[ShardAssignment], Callable[..., Any]],
    shapes: Any,
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
    assignment = assign_mesh_axes(squeezed_rule, operands, results, mesh)
    warn_misaligned_shards(name, squeezed_rule, operands, assignment)

    def run(*operands: Any) -> Any:
        # The caller may compile in the context of another mesh.
        with jax.sharding.use_abstract_mesh(AbstractMesh((), ())):
            results = local_of(assignment)(*operands)
            return jax.tree.map(_squeeze, results, shapes)

    def sharding(spec: PartitionSpec) -> NamedSharding:
        return NamedSharding(mesh, spec)

    specs = _result_specs(squeezed_rule, assignment), _operand_specs(rule, assignment)
    return mesh, run, *jax.tree.map(sharding, specs)


def _operand_specs(rule: ShardingRule, assignment: ShardAssignment) -> Any:
    """What shards the operands."""
    return jax.tree.map(functools.partial(_spec, assignment, {}), rule.operands)


def _result_specs(rule: ShardingRule, assignment: ShardAssignment) -> Any:
    """What shards the results."""
    scattered = assignment.reduce_scatter_axes
    return jax.tree.map(functools.partial(_spec, assignment, scattered), rule.results)


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


def _call_on_shards(
    name: str,
    rule: ShardingRule,
    local: Callable[..., Any],
    plan: propagation.Plan,
    call_number: int | None,
    operands: tuple[Any, ...],
) -> Any:
    """Calls an op in a ``shard_map``, with the shardings that a plan has of it."""
    whole = functools.partial(local, Shard(rule, UNASSIGNED))
    if call_number not in plan.shardings:  # The results are not used.
        return whole(*operands)
    results = jax.eval_shape(whole, *operands)
    given, wanted = map(
        _sharded_arrays, (operands, results), plan.shardings[call_number]
    )
    assignment = assign_mesh_axes(rule, given, wanted, plan.mesh)
    warn_misaligned_shards(name, rule, given, assignment)
    _warn_of_parts(name, given, plan.shardings[call_number][0])
    program: Callable[..., Any] = jax.shard_map(
        functools.partial(local, Shard(rule, assignment)),
        mesh=plan.shard_map_mesh(),
        in_specs=_operand_specs(rule, assignment),
        out_specs=_result_specs(rule, assignment),
        check_vma=False,
    )
    return program(*operands)


def _sharded_arrays(arrays: Any, axes: list[propagation.Axes]) -> Any:
    """Arrays with the mesh axes that shard them completely."""

    def sharded(x: Any, names: propagation.Axes) -> ShardedArray:
        complete = (tuple(n for n in own if n != propagation.PART) for own in names)
        return ShardedArray(x.shape, x.dtype, tuple(complete) or ((),) * len(x.shape))

    leaves, structure = jax.tree.flatten(arrays)
    return jax.tree.unflatten(structure, map(sharded, leaves, axes))


def _warn_of_parts(name: str, operands: Any, axes: list[propagation.Axes]) -> None:
    """Warns if part of a mesh axis shards an operand, and says what that costs."""
    for x, names in zip(jax.tree.leaves(operands), axes, strict=True):
        for i, own in enumerate(names):
            if propagation.PART in own and len(x.shape) >= 3:  # not a few scales
                text = (
                    f"axis {i} of {x.dtype}{list(x.shape)} is sharded over part of a "
                    "mesh axis, but fbq_jax.partitioned splits none: devices gather "
                    "the axis and may repeat each other's work. Make the mesh of "
                    "smaller axes. If you did not request this sharding, XLA chose it; "
                    "a sharding constraint prevents it."
                )
                warn_once(name, operands, (propagation.PART, x.shape[i]), text)
