"""An op: its record, a call of it, and how JAX transforms it.

``Op`` holds everything the library knows about an op.  ``call`` makes it a function
that ``jit``, ``vmap`` and ``grad`` take.  For one device, or for each shard of several
(``Op.partition``), a ``LocalOp`` runs it in the backend that ``dispatch`` chose.

To add an op, write its definition under ``kernels``, give the reference and every
backend that has a kernel for it (``backends``) a method of its name, make its record
and register it.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax import export, lax
from jax.custom_batching import custom_vmap
from jax.extend.core import ClosedJaxpr, Primitive, jaxpr_as_fun
from jax.interpreters import mlir

from fbq_jax.kernels import rounding
from fbq_jax.kernels.apart import call_apart
from fbq_jax.ops import dispatch
from fbq_jax.ops.dispatch import BACKENDS, OPS, Backend, Request
from fbq_jax.ops.trace_contexts import outside_trace_contexts
from fbq_jax.sharding.layer_names import record_layer, warn_first
from fbq_jax.sharding.local_ops import Shard
from fbq_jax.sharding.mesh_axes import varying_axes
from fbq_jax.sharding.rule_language import ShardingRule


@dataclasses.dataclass(frozen=True, eq=False)
class Op:
    """One op of the library.

    Attributes:
      name: the name of its function in ``fbq_jax.ops``, and of its methods of backends.
      request: describes a call by its operands and options, for ``dispatch``.
      sharding_rule: makes the op's rule from its operands and options.
      on_shard: computes the results of one device, called as
        ``on_shard(run, shard, operands, options)``; ``run`` is the op on one device.
      stacks: takes the operands.  Returns whether the leading axis of every array is a
        stack of independent matrices.  If so, ``vmap`` merges a mapped axis into it;
        otherwise ``vmap`` runs the op on one example after the other.
      seeded: whether operands of dtype uint32 are seeds.  If so, ``vmap`` gives each
        mapped example seeds of its own, so that examples draw different noise.
      partition: calls what computes an op, with a ``Shard``, for each shard of its
        operands: on one device, once for all of it.  ``fbq_jax.ops`` puts
        ``fbq_jax.sharding.partitioning.call_partitioned`` here.
    """

    name: str
    request: Callable[..., Request]
    sharding_rule: Callable[..., ShardingRule]
    on_shard: Callable[["LocalOp", Shard, tuple[Any, ...], dict[str, Any]], Any]
    stacks: Callable[..., bool] = lambda *_: True
    seeded: bool = True
    partition: ClassVar[Callable[..., Any]]

    @property
    def reference(self) -> Callable[..., Any]:
        """The definition in ``jax.numpy``, which runs on any device."""
        definition: Callable[..., Any] = getattr(BACKENDS["reference"], self.name)
        return definition


@dataclasses.dataclass(frozen=True)
class LocalOp:
    """An op in one backend, run on one device.

    Attributes:
      op: the op.
      backend: the backend.
      kernel: what computes the op there: the backend's name, or ``"xla"`` where XLA's
        own operations do.
      has_blocks: whether a scale is of a block.
      warns_elsewhere: whether to warn if a program for another platform contains it.
    """

    op: Op
    backend: Backend
    kernel: str
    has_blocks: bool = True
    warns_elsewhere: bool = False

    def __call__(self, *operands: Any, **options: Any) -> Any:
        """Runs the op."""
        # No kernel starts on empty operands.
        is_empty = any(x.size == 0 for x in jax.tree.leaves(operands))
        if self.kernel == "reference" or is_empty:
            results = self._reference(*operands, **options)
            if self.warns_elsewhere:
                return warn_elsewhere(self.op.name, results)
            return results
        if self.kernel != "xla":
            self._check(operands)
        function = getattr(self.backend, self.op.name)
        # A program may also run on the machine's CPU, which has no kernel.
        if "amax_reduce" in options:  # uses named axes of a mesh
            on_cpu, run = (
                functools.partial(f, **options) for f in (self._reference, function)
            )
            return lax.platform_dependent(*operands, cpu=on_cpu, default=run)
        return call_kernel(function, self._reference, operands, options)

    def _check(self, operands: tuple[Any, ...]) -> None:
        """Raises ValueError if a kernel cannot run on these arrays."""
        for size in (size for x in jax.tree.leaves(operands) for size in x.shape):
            if export.is_symbolic_dim(size):
                raise ValueError(
                    f"{self.op.name}: the size {size} is symbolic, and the grid of a "
                    f"{self.kernel} kernel needs a number: export one function for "
                    "each size, or export jax.numpy code, many times slower, with "
                    "implementation='reference'"
                )
        if varying := varying_axes(*jax.tree.leaves(operands)):
            names = ", ".join(sorted(map(str, varying)))
            raise ValueError(
                f"{self.op.name}: inside shard_map over {names}, a {self.kernel} "
                "kernel needs check_vma=False, because JAX does not know over which "
                "axes its results vary"
            )

    def without_kernel(self) -> "LocalOp | None":
        """The op as code that XLA can partition; None if a kernel has its blocks."""
        if self.kernel in ("xla", "reference"):
            return self
        if self.has_blocks:
            return None
        return dataclasses.replace(
            self, backend=BACKENDS["reference"], kernel="reference"
        )

    def _reference(self, *operands: Any, **options: Any) -> Any:
        """Runs the reference on matrices that exist in memory, as kernels do.

        Otherwise XLA would merge what computes them with the op: an operand may keep
        bits that its dtype has not, and constant factors may move to scales.  A
        threshold and seeds may be constants, of which XLA makes use.

        XLA for CPUs merges across a barrier, but not into a call that it keeps.
        """

        def stored(x: jax.Array) -> jax.Array:
            return lax.optimization_barrier(x) if x.ndim > 1 else x

        def reference(*operands: Any) -> Any:
            return self.op.reference(*jax.tree.map(stored, operands), **options)

        if "amax_reduce" in options:  # collectives, which such a call cannot have
            return reference(*operands)
        return call_apart(reference, *operands)


def register(op: Op) -> Op:
    """Adds an op to ``OPS``, and returns it."""
    OPS[op.name] = op
    return op


def call(
    op: Op,
    operands: tuple[Any, ...],
    options: Mapping[str, Any],
    implementation: str | None,
) -> Any:
    """Calls an op.

    Args:
      op: the record of the op.
      operands: arrays, or trees of arrays.
      options: the op's keyword arguments, which must be hashable.
      implementation: as in ``dispatch.choose``.
    """
    request = op.request(*operands, **options)
    choice = dispatch.choose_for(request, implementation)
    dispatch.warn_of_choice(choice, request, implementation)
    record_layer(op.name, operands)
    has_no_device = jax.default_backend() == "cpu"
    warns = has_no_device and dispatch.is_reference_by_default(choice, implementation)
    backend, has_blocks = BACKENDS[choice.implementation], bool(request.sides)
    run = LocalOp(op, backend, choice.backend, has_blocks, warns_elsewhere=warns)
    with outside_trace_contexts():
        return _transformed(run, tuple(sorted(options.items())))(*operands)


@functools.cache
def _transformed(
    run: LocalOp, options: tuple[tuple[str, Any], ...]
) -> Callable[..., Any]:
    """The op as a function that JAX can transform.

    Kernels have no batching rule, so this defines one.  Differentiation raises an
    error.  Rounding has derivative 0, so without the error, a second derivative of a
    quantized dot would silently be wrong.
    """
    op = run.op
    rule_of = functools.partial(op.sharding_rule, **dict(options))

    def local(shard: Shard, *operands: Any) -> Any:
        return op.on_shard(run, shard, operands, dict(options))

    def in_xla(shard: Shard, *operands: Any) -> Any:
        assert xla_run is not None
        if xla_run is not run:
            warn_first(
                ("no kernel on several TPUs", op.name),
                f"{op.name} runs as jax.numpy code in this program for several TPUs, "
                "slower than a kernel, because XLA cannot partition kernels: call the "
                "layers in jax.shard_map",
            )
        return op.on_shard(xla_run, shard, operands, dict(options))

    # XLA sums codes in int32, and others in the dtype of the product.
    is_own = dict(options).get("reduce") not in (None, "int32")
    xla_run = None if is_own else run.without_kernel()
    # jit: outside a compiled function, the reference would otherwise compile some sixty
    # programs, one per operation.
    call_op = functools.partial(
        Op.partition, op.name, rule_of, local, in_xla=in_xla if xla_run else None
    )
    mapped = custom_vmap(jax.jit(call_op))
    mapped.def_vmap(functools.partial(_map, op, mapped))
    transformed = jax.custom_jvp(mapped)
    transformed.defjvp(_no_derivative)
    return transformed


def _map(
    op: Op,
    mapped: Callable[..., Any],
    axis_size: int,
    in_batched: Sequence[Any],
    *args: Any,
) -> tuple[Any, Any]:
    """The rule of ``vmap``."""
    if not axis_size:
        return _map_empty(mapped, in_batched, *args)
    map_op = _map_stacked if op.stacks(*args) else _map_in_sequence
    return map_op(op, mapped, axis_size, in_batched, *args)


def _map_stacked(
    op: Op,
    mapped: Callable[..., Any],
    axis_size: int,
    in_batched: Sequence[Any],
    *args: Any,
) -> tuple[Any, Any]:
    """Merges a mapped axis into the leading one."""
    stack = functools.partial(_stack_operand, op, axis_size)
    stacked = [*map(stack, args, in_batched)]
    record_layer(op.name, stacked)
    out = jax.tree.map(
        lambda x: x.reshape(axis_size, len(x) // axis_size, *x.shape[1:]),
        mapped(*stacked),
    )
    return out, jax.tree.map(lambda _: True, out)


def _stack_operand(op: Op, axis_size: int, operand: Any, batched: Any) -> Any:
    """Merges a mapped axis of an operand into its leading one."""

    def merge(x: jax.Array, batched: bool) -> jax.Array:
        if not batched:
            x = jnp.broadcast_to(x, (axis_size, *x.shape))
        return x.reshape(-1, *x.shape[2:])

    return jax.tree.map(merge, *_own_seeds(op, axis_size, operand, batched))


def _own_seeds(op: Op, axis_size: int, operand: Any, batched: Any) -> tuple[Any, Any]:
    """An operand, and which of its arrays are mapped.

    Seeds of which none is mapped become different ones for each example.
    """
    dtypes = {x.dtype for x in jax.tree.leaves(operand)}
    is_seeds = op.seeded and dtypes == {jnp.dtype(jnp.uint32)}
    if is_seeds and not any(jax.tree.leaves(batched)):
        seeds = rounding.fold_seeds(operand)[None]
        index = jnp.expand_dims(jnp.arange(axis_size), range(1, seeds.ndim))
        return rounding.fold(seeds, index), True
    return operand, batched


def _map_empty(
    mapped: Callable[..., Any], in_batched: Sequence[Any], *args: Any
) -> tuple[Any, Any]:
    """Maps an axis of size 0: there is nothing to compute."""

    def example(x: jax.Array, batched: bool) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(x.shape[1:] if batched else x.shape, x.dtype)

    shapes = jax.eval_shape(mapped, *jax.tree.map(example, list(args), [*in_batched]))
    out = jax.tree.map(lambda y: jnp.zeros((0, *y.shape), y.dtype), shapes)
    return out, jax.tree.map(lambda _: True, out)


def _map_in_sequence(
    op: Op,
    mapped: Callable[..., Any],
    axis_size: int,
    in_batched: Sequence[Any],
    *args: Any,
) -> tuple[Any, Any]:
    """Runs the op on one example after the other."""
    own = functools.partial(_own_seeds, op, axis_size)
    operands, batched = zip(*map(own, args, in_batched), strict=True)
    leaves, tree = jax.tree.flatten(operands)
    flags = jax.tree.leaves(batched)

    def run(examples: list[jax.Array]) -> Any:
        rest = iter(examples)
        pairs = zip(leaves, flags, strict=True)
        every = [next(rest) if is_mapped else x for x, is_mapped in pairs]
        return mapped(*jax.tree.unflatten(tree, every))

    pairs = zip(leaves, flags, strict=True)
    out = lax.map(run, [x for x, is_mapped in pairs if is_mapped])
    return out, jax.tree.map(lambda _: True, out)


def _no_derivative(*_: Any) -> Any:
    raise NotImplementedError("a quantized dot has no second derivative")


# What depends on the platform that a program is lowered for, not on this machine:

_kernel_p = Primitive("kernel_or_reference")
_kernel_p.multiple_results = True


def call_kernel(
    kernel: Callable[..., Any],
    reference: Callable[..., Any],
    operands: tuple[Any, ...],
    options: Mapping[str, Any],
) -> Any:
    """Calls ``kernel(*operands, **options)``; on a CPU, calls ``reference`` instead.

    ``jax.lax.platform_dependent`` does the same, but traces both.  The reference
    consists of some hundred operations, so tracing it takes most of the time to trace a
    layer; here, it is traced when a program is lowered for a CPU.

    Args:
      kernel: returns a tree of arrays.
      reference: returns one with the same shapes and dtypes.  Where it is traced, there
        are neither named axes of a mesh nor the tracers of the caller.
      operands: trees of arrays.
      options: trees of arrays, or anything without one.
    """
    arrays = {name: x for name, x in options.items() if _has_array(x)}
    static = {name: x for name, x in options.items() if name not in arrays}
    leaves, tree = jax.tree.flatten((operands, arrays))

    def on_leaves(function: Callable[..., Any]) -> Callable[..., list[jax.Array]]:
        def call(*leaves: jax.Array) -> list[jax.Array]:
            operands, arrays = jax.tree.unflatten(tree, leaves)
            return jax.tree.leaves(function(*operands, **arrays, **static))

        return call

    run = functools.partial(kernel, **static)
    jaxpr, shapes = jax.make_jaxpr(run, return_shape=True)(*operands, **arrays)
    assert not any(isinstance(x, jax.core.Tracer) for x in jaxpr.consts)
    results = _kernel_p.bind(*leaves, kernel=jaxpr, reference=on_leaves(reference))
    return jax.tree.unflatten(jax.tree.structure(shapes), results)


def _has_array(option: Any) -> bool:
    return any(isinstance(x, jax.Array) for x in jax.tree.leaves(option))


@_kernel_p.def_abstract_eval
def _abstract_results(*_arrays: Any, kernel: ClosedJaxpr, **_params: Any) -> list[Any]:
    return list(kernel.out_avals)


@_kernel_p.def_impl
def _run(
    *arrays: jax.Array, kernel: ClosedJaxpr, reference: Callable[..., list[jax.Array]]
) -> list[jax.Array]:
    is_on_cpu = jax.default_backend() == "cpu"
    return (reference if is_on_cpu else jaxpr_as_fun(kernel))(*arrays)


def _call_reference(
    *arrays: jax.Array, reference: Callable[..., list[jax.Array]], **_params: Any
) -> list[jax.Array]:
    return reference(*arrays)


def _call_kernel(
    *arrays: jax.Array, kernel: ClosedJaxpr, **_params: Any
) -> list[jax.Array]:
    return jaxpr_as_fun(kernel)(*arrays)


mlir.register_lowering(_kernel_p, mlir.lower_fun(_call_kernel, multiple_results=True))
mlir.register_lowering(
    _kernel_p, mlir.lower_fun(_call_reference, multiple_results=True), platform="cpu"
)


_reference_p = Primitive("reference_result")


def warn_elsewhere(op: str, results: Any) -> Any:
    """The results of ``jax.numpy`` code that this machine chose, for want of a GPU.

    Warns, once for each platform, if a program for an accelerator contains the code.

    Args:
      op: the name of the op.
      results: a tree of arrays.
    """
    first, *others = jax.tree.leaves(results)
    return jax.tree.unflatten(
        jax.tree.structure(results), [_reference_p.bind(first, op=op), *others]
    )


_reference_p.def_abstract_eval(lambda x, **_: x)
_reference_p.def_impl(lambda x, **_: x)


def _lower_reference(
    context: mlir.LoweringRuleContext, x: Any, *, op: str
) -> Sequence[Any]:
    for platform in context.module_context.platforms:
        if platform != "cpu":
            warn_first(
                ("reference elsewhere", platform),
                f"{op} and other ops are jax.numpy code in this program for {platform},"
                " many times slower than kernels, because this machine has no such "
                "device: export it on one that has, or ask for this code with "
                "implementation='reference'",
            )
    return [x]


mlir.register_lowering(_reference_p, _lower_reference)
