"""The memory of a differentiated program, from its compiled form."""

from collections.abc import Callable
from typing import Any

import jax
from jax import lax


def saved_bytes(
    function: Callable[[Any, jax.Array], jax.Array], params: Any, x: jax.Array
) -> float:
    """Bytes saved for the backward pass, per row of x.

    Compiles the forward pass alone and counts each distinct residual once. A residual
    whose size does not change with half of x belongs to the parameters and is left out.

    Args:
      function: differentiable, ``(params, x) -> y``.
      params: a pytree of arrays.
      x: ``[B, ...]`` with an even number B of rows.
    """

    def forward(params: Any, x: jax.Array) -> list[jax.Array]:
        _, vjp = jax.vjp(function, params, x)
        residuals = {id(leaf): leaf for leaf in jax.tree.leaves(vjp)}
        # Without the barrier, inputs returned as they are would not be outputs.
        return lax.optimization_barrier(list(residuals.values()))

    half = jax.ShapeDtypeStruct((len(x) // 2, *x.shape[1:]), x.dtype)
    pairs = zip(
        jax.eval_shape(forward, params, x),
        jax.eval_shape(forward, params, half),
        strict=True,
    )
    of_params = sum(a.size * a.dtype.itemsize for a, b in pairs if a.shape == b.shape)
    memory = _analysis(jax.jit(forward).lower(params, x).compile())
    return (memory.output_size_in_bytes - of_params) / len(x)


def peak_bytes(compiled: jax.stages.Compiled) -> int:
    """Bytes that a program has allocated at once: arguments, outputs, temporaries."""
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
