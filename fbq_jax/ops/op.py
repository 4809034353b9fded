"""The record of one op, and how one device runs it.

``Op`` holds everything the library knows about an op.  ``transformations`` turns it
into a function that JAX can transform, ``dispatch`` chooses its backend, and
``fbq_jax.sharding`` partitions it.

To add an op, write its definition under ``kernels``, make its record, register it, and
give every backend that has a kernel for it (``backends``) a method of its name.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
from jax import export, lax

from fbq_jax.kernels.apart import call_apart
from fbq_jax.ops.backends import REFERENCE, Backend, Request
from fbq_jax.ops.platform import call_kernel, warn_elsewhere
from fbq_jax.sharding.local_ops import Shard
from fbq_jax.sharding.manual_axes import varying_axes
from fbq_jax.sharding.rule_language import ShardingRule


@dataclasses.dataclass(frozen=True, eq=False)
class Op:
    """One op of the library.

    Attributes:
      reference: the definition in ``jax.numpy``, which runs on any device.  The op has
        its name.
      request: describes a call by its operands and options, for ``dispatch``.
      sharding_rule: makes the op's rule from its operands and options.
      on_shard: computes the results of one device, called as
        ``on_shard(run, shard, operands, options)``; ``run`` is the op on one device.
      stacks: takes the operands.  Returns whether the leading axis of every array is a
        stack of independent matrices.  If so, ``vmap`` merges a mapped axis into it;
        otherwise ``vmap`` runs the op on one example after the other.
      seeded: whether operands of dtype uint32 are seeds.  If so, ``vmap`` gives each
        mapped example seeds of its own, so that examples draw different noise.
    """

    reference: Callable[..., Any]
    request: Callable[..., Request]
    sharding_rule: Callable[..., ShardingRule]
    on_shard: Callable[["LocalOp", Shard, tuple[Any, ...], dict[str, Any]], Any]
    stacks: Callable[..., bool] = lambda *_: True
    seeded: bool = True

    @property
    def name(self) -> str:
        """The name of the op's function in ``fbq_jax.ops``."""
        return self.reference.__name__


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
        return dataclasses.replace(self, backend=REFERENCE, kernel="reference")

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


OPS: dict[str, Op] = {}


def register(op: Op) -> Op:
    """Adds an op to ``OPS``, and returns it."""
    OPS[op.name] = op
    return op
