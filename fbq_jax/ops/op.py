"""The record of one op.

``Op`` holds everything the library knows about an op.  ``transformations`` turns it
into a function that JAX can transform, ``dispatch`` chooses its kernel, and
``fbq_jax.sharding`` partitions it.

To add an op, make its record and function with ``transformations.define_op``, and
export the function from ``fbq_jax.ops``.  To add a backend, write a function that
says what it cannot run, add a name to ``dispatch.IMPLEMENTATIONS``, and add an entry to
``kernels`` of each op.  For an op that the backend does not support, the entry names
another backend's kernel, as those of ``mosaic`` name Triton's.
"""

import dataclasses
import functools
import importlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jax import export, lax

from fbq_jax.ops.platform import call_kernel, warn_elsewhere
from fbq_jax.sharding.local_ops import Shard
from fbq_jax.sharding.manual_axes import varying_axes
from fbq_jax.sharding.rule_language import ShardingRule

# What XLA partitions itself, by the names of ``Kernel.backend``.
_PARTITIONED = frozenset({"xla", "reference"})


def no_float8() -> str:
    """The refusal of a kernel that has INT8 codes only."""
    return "it has no kernel for FP8 codes"


@dataclasses.dataclass(frozen=True)
class Kernel:
    """The kernel of an implementation for an op.

    Attributes:
      backend: what the kernel is written in, ``"mosaic"``, ``"triton"`` or ``"tpu"``,
        or ``"xla"`` for ``jax.numpy`` code that is fast enough.
      module: the name of the module, imported when the kernel is first used.  It has a
        function with the op's name and the signature of its reference.
      refusal: takes the shape of a block.  Returns the reason why the kernel cannot run
        here with such blocks, or None if it can.
      caveat: takes the shape of a block and the length of a row.  Returns what is slow
        about them, or nothing.
      blockless_module: XLA's module for operands without blocks; None if the kernel
        serves them.
      float8_refusal: the reason why the kernel has no FP8 codes here, or None if it
        has.
    """

    backend: str
    module: str
    refusal: Callable[[Sequence[int]], str | None]
    caveat: Callable[[Sequence[int], int | None], str] = lambda *_: ""
    blockless_module: str | None = None
    float8_refusal: Callable[[], str | None] = no_float8


@dataclasses.dataclass(frozen=True, eq=False)
class Op:
    """One op of the library.

    Attributes:
      reference: the definition in ``jax.numpy``, which runs on any device.  The op has
        its name.
      sharding_rule: makes the op's rule from its operands and options.
      on_shard: computes the results of one device, called as
        ``on_shard(run, shard, operands, options)``; ``run`` is the op on one device.
      stacks: whether the leading axis of every array is a stack of independent
        matrices.  If so, ``vmap`` merges a mapped axis into it; otherwise ``vmap`` runs
        the op on one example after the other.
      seeded: whether operands of dtype uint32 are seeds.  If so, ``vmap`` gives each
        mapped example seeds of its own, so that examples draw different noise.
      packed_width: takes the operands of a fused op.  Returns the row length of what it
        packs for the backward pass.  None for other ops, which pack nothing.
      kernels: the kernel of each backend, by the backend's name.
    """

    reference: Callable[..., Any]
    sharding_rule: Callable[..., ShardingRule]
    on_shard: Callable[["LocalOp", Shard, tuple[Any, ...], dict[str, Any]], Any]
    stacks: bool = True
    seeded: bool = True
    packed_width: Callable[[tuple[Any, ...]], int] | None = None
    kernels: Mapping[str, Kernel] = dataclasses.field(default_factory=dict)

    @property
    def name(self) -> str:
        """The name of the op's function in ``fbq_jax.ops``."""
        return self.reference.__name__

    @property
    def has_float8(self) -> bool:
        """Whether a kernel of the op, on some device, has FP8 codes."""
        refusals = (kernel.float8_refusal for kernel in self.kernels.values())
        return any(refusal is not no_float8 for refusal in refusals)

    def implementation(
        self, name: str, block_shape: Sequence[int]
    ) -> Callable[..., Any]:
        """The function of the implementation with this name."""
        if name == "reference":
            return self.reference
        kernel = self.kernels[name]
        blockless_module = None if block_shape else kernel.blockless_module
        module = importlib.import_module(blockless_module or kernel.module)
        return getattr(module, self.name)

    def backend(self, name: str, block_shape: Sequence[int]) -> str:
        """What computes the op in the implementation with this name."""
        if name == "reference":
            return name
        kernel = self.kernels[name]
        return "xla" if kernel.blockless_module and not block_shape else kernel.backend


@dataclasses.dataclass(frozen=True)
class LocalOp:
    """One implementation of an op, run on one device.

    Attributes:
      op: the op.
      implementation: the name of the implementation.
      block_shape: the shape of a block; empty without blocks.
      warns_elsewhere: whether to warn if a program for another platform contains it.
    """

    op: Op
    implementation: str
    block_shape: tuple[int, ...]
    warns_elsewhere: bool = False

    def __call__(self, *operands: Any, **options: Any) -> Any:
        """Runs the op."""
        function = self.op.implementation(self.implementation, self.block_shape)
        # No kernel starts on empty operands.
        is_empty = any(x.size == 0 for x in jax.tree.leaves(operands))
        if self.implementation == "reference" or is_empty:
            results = self._reference(*operands, **options)
            if self.warns_elsewhere:
                return warn_elsewhere(self.op.name, results)
            return results
        kernel = self.op.backend(self.implementation, self.block_shape)
        for size in (size for x in jax.tree.leaves(operands) for size in x.shape):
            if export.is_symbolic_dim(size) and kernel != "xla":
                raise ValueError(
                    f"{self.op.name}: the size {size} is symbolic, and the grid of a "
                    f"{kernel} kernel needs a number: export one function for each "
                    "size, or export jax.numpy code, many times slower, with "
                    "implementation='reference'"
                )
        varying = varying_axes(*jax.tree.leaves(operands))
        if varying and kernel != "xla":
            names = ", ".join(sorted(map(str, varying)))
            raise ValueError(
                f"{self.op.name}: inside shard_map over {names}, a {kernel} kernel "
                "needs check_vma=False, because JAX does not know over which axes its "
                "results vary"
            )
        # A program may also run on the machine's CPU, which has no kernel.
        if "amax_reduce" in options:  # uses named axes of a mesh
            on_cpu, run = (
                functools.partial(f, **options) for f in (self._reference, function)
            )
            return lax.platform_dependent(*operands, cpu=on_cpu, default=run)
        return call_kernel(function, self._reference, operands, options)

    def without_kernel(self) -> "LocalOp | None":
        """The op as code that XLA can partition; None if a kernel has its blocks."""
        if self.op.backend(self.implementation, self.block_shape) in _PARTITIONED:
            return self
        if self.block_shape:
            return None
        return dataclasses.replace(self, implementation="reference")

    def _reference(self, *operands: Any, **options: Any) -> Any:
        """The reference of matrices that exist in memory, as those of kernels do.

        Otherwise XLA would merge what computes them with the op: an operand may keep
        bits that its dtype has not, and constant factors may move to scales.  A
        threshold and seeds may be constants, of which XLA makes use.
        """

        def stored(x: jax.Array) -> jax.Array:
            return lax.optimization_barrier(x) if x.ndim > 1 else x

        return self.op.reference(*jax.tree.map(stored, operands), **options)


OPS: dict[str, Op] = {}


def register(op: Op) -> None:
    """Adds an op to ``OPS``."""
    OPS[op.name] = op
