"""Which implementation of an op runs here, and why.

An op has one signature, that of ``fbq_jax.kernels.reference``, and any number of
implementations: modules that offer functions of the op's name.  The ops below are what
the rest of the library calls.  ``FBQ_IMPLEMENTATION`` in the environment forces an
implementation; it is read when a function is traced.
"""

import functools
import os
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.custom_batching import custom_vmap

from fbq_jax.kernels import reference, rounding
from fbq_jax.kernels.reference import (
    Block,
    Criterion,
    FallbackQuantized,
    Layouts,
    Quantized,
)
from fbq_jax.kernels.rounding import Rounding

ENVIRONMENT_VARIABLE = "FBQ_IMPLEMENTATION"
IMPLEMENTATIONS: dict[str, ModuleType] = {"reference": reference}


class Choice(NamedTuple):
    """The implementation of an op that runs here, and the reason in words."""

    op: str
    implementation: str
    reason: str


def choose(op: str) -> Choice:
    """Chooses the implementation of ``op`` for JAX's default backend.

    Raises:
      ValueError: if ``FBQ_IMPLEMENTATION`` names none that there is.

    >>> choose("matmul").implementation
    'reference'
    """
    if forced := os.environ.get(ENVIRONMENT_VARIABLE):
        if forced not in IMPLEMENTATIONS:
            raise ValueError(
                f"{ENVIRONMENT_VARIABLE}={forced!r} is not an implementation; "
                f"there are: {', '.join(IMPLEMENTATIONS)}"
            )
        return Choice(op, forced, f"{ENVIRONMENT_VARIABLE} asks for it")
    backend = jax.default_backend()
    return Choice(op, "reference", f"there is no kernel of its own for {backend}")


def quantize(
    x: jax.Array,
    seeds: jax.Array,
    *,
    block: Block,
    rows: Rounding | None,
    columns: Rounding | None,
) -> Layouts:
    """``reference.quantize`` by the implementation chosen."""
    return _batched("quantize", block=block, rows=rows, columns=columns)(x, seeds)


def quantize_fallback(
    x: jax.Array,
    theta: jax.Array,
    seeds: jax.Array,
    *,
    block: Block,
    criterion: Criterion,
    columns: Rounding | None,
) -> FallbackQuantized:
    """``reference.quantize_fallback`` by the implementation chosen."""
    op = _batched(
        "quantize_fallback", block=block, criterion=criterion, columns=columns
    )
    return op(x, theta, seeds)


def block_metric(x: jax.Array, *, block: Block, criterion: Criterion) -> jax.Array:
    """``reference.block_metric`` by the implementation chosen."""
    return _batched("block_metric", block=block, criterion=criterion)(x)


def matmul(
    lhs: Quantized,
    residual: Quantized | None,
    rhs: Quantized,
    *,
    blocks: tuple[int, int, int],
    dtype: jax.typing.DTypeLike,
) -> jax.Array:
    """``reference.matmul`` by the implementation chosen."""
    return _batched("matmul", blocks=blocks, dtype=jnp.dtype(dtype))(lhs, residual, rhs)


def _batched(op: str, **options: Any) -> Callable[..., Any]:
    return _batched_op(op, choose(op).implementation, tuple(options.items()))


@functools.cache
def _batched_op(
    op: str, implementation: str, options: tuple[tuple[str, Any], ...]
) -> Callable[..., Any]:
    """An op as JAX's transformations see it.

    ``vmap`` stacks into the leading axis that every op has: kernels have no batching
    rule of their own.  The seeds of a mapped axis are made to differ, as those of the
    leading axis do, so that mapped examples draw noise of their own.

    There is no derivative.  Rounding's own is 0, which would pass for an answer where
    the gradient of a quantized dot is differentiated once more.
    """
    function = getattr(IMPLEMENTATIONS[implementation], op)
    # Compiled as a whole even where the caller is not: op by op, the reference would
    # compile some sixty programs.
    compiled = jax.jit(functools.partial(function, **dict(options)))
    mapped = custom_vmap(compiled)

    @mapped.def_vmap
    def _rule(axis_size: int, in_batched: Sequence[Any], *args: Any) -> tuple[Any, Any]:
        def stack(x: jax.Array, batched: bool) -> jax.Array:
            if not batched:
                x = jnp.broadcast_to(x, (axis_size, *x.shape))
                if x.dtype == jnp.uint32:
                    x = rounding.fold(x, jnp.arange(axis_size)[:, None])
            return x.reshape(-1, *x.shape[2:])

        stacked = jax.tree.map(stack, list(args), list(in_batched))
        out = mapped(*stacked)
        out = jax.tree.map(lambda x: x.reshape(axis_size, -1, *x.shape[1:]), out)
        return out, jax.tree.map(lambda _: True, out)

    op_function = jax.custom_jvp(mapped)

    @op_function.defjvp
    def _no_derivative(*_: Any) -> Any:
        raise NotImplementedError("a quantized dot has no second derivative")

    return op_function
