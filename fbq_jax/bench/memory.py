"""The memory of a differentiated program, as its compiled form has it."""

import math
from collections.abc import Callable
from typing import Any

import jax
from jax import lax


def saved_bytes(
    function: Callable[[Any, jax.Array], jax.Array], params: Any, x: jax.Array
) -> float:
    """Bytes that a function keeps from its forward to its backward pass, a row of x.

    The forward pass is compiled by itself, and what it gives beside its output is
    counted, each array once.  Arrays that are as large for half of x are not: they
    belong to the parameters.

    Args:
      function: differentiable, ``(params, x) -> y``.
      params: a pytree of arrays.
      x: ``[B, ...]`` with an even B; a row is one of B.
    """

    def forward(params: Any, x: jax.Array) -> list[jax.Array]:
        _, vjp = jax.vjp(function, params, x)
        # The barrier makes outputs of inputs, too.
        unique = {id(leaf): leaf for leaf in jax.tree.leaves(vjp)}
        return lax.optimization_barrier(list(unique.values()))

    half = jax.ShapeDtypeStruct((len(x) // 2, *x.shape[1:]), x.dtype)
    pairs = zip(
        jax.eval_shape(forward, params, x),
        jax.eval_shape(forward, params, half),
        strict=True,
    )
    of_params = sum(_bytes(leaf) for leaf, same in pairs if leaf.shape == same.shape)
    memory = _analysis(jax.jit(forward).lower(params, x).compile())
    return (memory.output_size_in_bytes - of_params) / len(x)


def peak_bytes(compiled: jax.stages.Compiled) -> int:
    """What a program has allocated at once: arguments, outputs and temporaries."""
    memory = _analysis(compiled)
    return (
        memory.argument_size_in_bytes
        + memory.output_size_in_bytes
        + memory.temp_size_in_bytes
        - memory.alias_size_in_bytes
    )


def _analysis(compiled: jax.stages.Compiled) -> Any:
    analysis = compiled.memory_analysis()
    assert analysis is not None
    return analysis


def _bytes(x: jax.ShapeDtypeStruct) -> int:
    return math.prod(x.shape) * x.dtype.itemsize
