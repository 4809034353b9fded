"""Another seed for each example of a new layer under ``vmap``.

The seed depends on whether the layer's input is mapped, not on its values.  In
``lazy_init`` and in the scan of ``nn.RNN``, Flax creates variables that must not depend
on the input: JAX treats every result of an unknown value as unknown, and newer versions
of Flax refuse what reads the input after the removal of dead code.  So this is a
primitive, whose rules keep a known seed known and the input unread.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir, partial_eval

from fbq_jax.kernels.rounding import fold

_seed_p = Primitive("example_seed")


def example_seed(seed: jax.Array, x: jax.Array) -> jax.Array:
    """The seed of a new layer; under ``vmap`` of ``x``, another one for each example.

    Args:
      seed: uint32 ``[]``.  A seed that is mapped does not change.
      x: the layer's input.
    """
    result: jax.Array = _seed_p.bind(seed, lax.stop_gradient(x))
    return result


@_seed_p.def_impl
@_seed_p.def_abstract_eval
def _same_seed(seed: Any, x: Any) -> Any:
    del x
    return seed


mlir.register_lowering(_seed_p, mlir.lower_fun(_same_seed, multiple_results=False))


def _map_seed(
    operands: Sequence[jax.Array], axes: Sequence[int | None]
) -> tuple[jax.Array, int]:
    (seed, x), (seed_axis, x_axis) = operands, axes
    if seed_axis is not None:
        return seed, seed_axis
    assert x_axis is not None
    seed = example_seed(seed, x)  # another vmap may be around this one
    return fold(seed, jnp.arange(x.shape[x_axis], dtype=jnp.uint32)), 0


batching.primitive_batchers[_seed_p] = _map_seed


def _known_seed(trace: Any, seed: Any, x: Any) -> Any:
    if seed.is_known() and not x.is_known():
        return seed
    return trace.default_process_primitive(_seed_p, (seed, x), {})


partial_eval.custom_partial_eval_rules[_seed_p] = _known_seed


def _known_seed_in_remat(
    _: Any, unknown: Sequence[bool], instantiated: Sequence[bool], eqn: Any
) -> tuple[Any, Any, list[bool], list[bool], list[Any]]:
    """The equation in the known or the unknown part of ``nn.remat``."""
    seed, x = eqn.invars
    if unknown[0]:
        missing = zip(eqn.invars, instantiated, strict=True)
        return None, eqn, [True], [True], [x for x, ready in missing if not ready]
    # The known part cannot read an unknown input.
    known = eqn.replace(invars=[seed, seed if unknown[1] else x])
    return known, None, [False], [False], []


partial_eval.partial_eval_jaxpr_custom_rules[_seed_p] = _known_seed_in_remat


def _seed_without_x(used: Sequence[bool], *args: Any) -> tuple[list[bool], Any]:
    """The equation after the removal of dead code, which no longer reads x."""
    if not used[0]:
        return [False, False], None
    eqn = args[-1]  # jax 0.12 passes something else before it
    seed, _ = eqn.invars
    return [True, False], eqn.replace(invars=[seed, seed])


partial_eval.dce_rules[_seed_p] = _seed_without_x
