"""Calls that XLA compiles apart from their callers."""

from collections.abc import Callable
from typing import Any

import jax
from jax import lax
from jax.experimental.xla_metadata import set_xla_metadata


def call_apart(function: Callable[..., Any], *operands: Any) -> Any:
    """Calls a function whose operands and results exist in memory on CPUs.

    XLA for CPUs fuses cheap operations into every operation that reads their results,
    also across ``lax.optimization_barrier``.  So it compiles and computes a hash of a
    hundred operations again for each of its readers.  It fuses nothing into a call that
    it must not inline.

    Args:
      function: the function, without collectives.
      *operands: its operands, trees of arrays.
    """
    function = jax.jit(function)  # both branches share one trace

    def on_cpu(*operands: Any) -> Any:
        return set_xla_metadata(function(*operands), inlineable="false")

    return lax.platform_dependent(*operands, cpu=on_cpu, default=function)
