"""The record of one op.

``Op`` holds all that the library knows of an op.  ``transformations`` makes the op from
it as JAX sees it, ``dispatch`` chooses its kernel, and ``fbq_jax.sharding`` partitions
it.  A new op is a record, a function that calls it, and an entry in ``fbq_jax.ops``.  A
new backend is a function that says what it refuses, a name in
``dispatch.IMPLEMENTATIONS``, and an entry in ``kernels`` of each op that it serves.
"""

import dataclasses
import functools
import importlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jax import lax

from fbq_jax.sharding.local_ops import Shard
from fbq_jax.sharding.rule_language import ShardingRule


def no_caveat(block_shape: Sequence[int], width: int | None) -> str:
    """Adds nothing to a reason."""
    del block_shape, width
    return ""


@dataclasses.dataclass(frozen=True)
class Kernel:
    """One backend's kernel for an op.

    Attributes:
      module: the name of the module, imported when the kernel is first used.  It has a
        function with the op's name and the signature of its reference.
      refusal: says why the kernel cannot run here with blocks of some shape, or returns
        None if it can.
      caveat: what the reason of a choice adds for blocks of some shape and rows of some
        width.
      blockless_module: the module for operands without blocks, if it is another one.
    """

    module: str
    refusal: Callable[[Sequence[int]], str | None]
    caveat: Callable[[Sequence[int], int | None], str] = no_caveat
    blockless_module: str | None = None

    def load(self, name: str, block_shape: Sequence[int]) -> Callable[..., Any]:
        """Imports the kernel of the op with this name."""
        blockless = self.blockless_module if not block_shape else None
        return getattr(importlib.import_module(blockless or self.module), name)


@dataclasses.dataclass(frozen=True, eq=False)
class Op:
    """One op of the library.

    Attributes:
      name: the op's function in ``fbq_jax.ops``.
      reference: the definition in ``jax.numpy``, which runs on any device.
      sharding_rule: makes the op's rule from its operands' shapes and its options.
      on_shard: computes a device's results, as
        ``on_shard(run, shard, operands, options)``, where ``run`` is the op on one
        device.
      stacks: whether the leading axis of every array is a stack of independent
        matrices.  ``vmap`` then stacks a mapped axis into it; otherwise it maps the
        reference.
      kernels: by the names of their backends.
    """

    name: str
    reference: Callable[..., Any]
    sharding_rule: Callable[..., ShardingRule]
    on_shard: Callable[["LocalOp", Shard, tuple[Any, ...], dict[str, Any]], Any]
    stacks: bool = True
    kernels: Mapping[str, Kernel] = dataclasses.field(default_factory=dict)

    def implementation(
        self, name: str, block_shape: Sequence[int]
    ) -> Callable[..., Any]:
        """The function of the implementation with this name."""
        if name == "reference":
            return self.reference
        return self.kernels[name].load(self.name, block_shape)


@dataclasses.dataclass(frozen=True)
class LocalOp:
    """An op on one device, by one implementation."""

    op: Op
    implementation: str
    block_shape: tuple[int, ...]

    def __call__(self, *operands: Any, **options: Any) -> Any:
        """Computes the op."""
        function = self.op.implementation(self.implementation, self.block_shape)
        run = functools.partial(function, **options)
        if self.implementation == "reference":
            return run(*operands)
        # A program may also run on the machine's CPU, which has no kernel.
        on_cpu = functools.partial(self.op.reference, **options)
        return lax.platform_dependent(*operands, cpu=on_cpu, default=run)


OPS: dict[str, Op] = {}


def register(op: Op) -> Op:
    """Adds an op to the library's ops."""
    OPS[op.name] = op
    return op
