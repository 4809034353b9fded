"""What traced programs compute."""

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Jaxpr


def jaxprs_inside(eqn):
    """All jaxprs among the parameters of an equation."""
    for value in jax.tree.leaves(tuple(eqn.params.values())):
        inner = value.jaxpr if isinstance(value, ClosedJaxpr) else value
        if isinstance(inner, Jaxpr):
            yield inner


def codes_among(arrays):
    """The shapes of saved codes, also of those that lie in words of four."""
    arrays = [x for x in arrays if getattr(x, "ndim", 0) > 2]
    words = [x.shape for x in arrays if x.dtype == jnp.int32]
    codes = [x.shape for x in arrays if x.dtype == jnp.int8]
    return sorted(codes + [(*lead, 4 * size) for *lead, size in words])


def equations(jaxpr, primitive):
    """The equations of a primitive, in all inner programs too."""
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == primitive:
            yield eqn
        for inner in jaxprs_inside(eqn):
            yield from equations(inner, primitive)


def count_equations(jaxpr, primitive):
    """The number of equations of a primitive, in all inner programs too."""
    return sum(1 for _ in equations(jaxpr, primitive))


def count_quantized(jaxpr, shape, length=None):
    """The number of ops that quantize matrices of this shape.

    Args:
      jaxpr: a program.
      shape: of the matrices, ``(B, K, N)``.
      length: counts only in scans of so many steps; None counts everywhere.
    """
    count = 0
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "partitioned_op":
            codes = {x.aval.dtype.name for x in eqn.outvars}
            is_this = eqn.invars[0].aval.shape == shape and "int8" in codes
            count += is_this and length is None
            continue
        inside = eqn.primitive.name == "scan" and eqn.params["length"] == length
        for inner in jaxprs_inside(eqn):
            count += count_quantized(inner, shape, None if inside else length)
    return count
