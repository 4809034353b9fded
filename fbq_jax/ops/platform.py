"""What depends on the platform that a program is lowered for, not on this machine.

``call_kernel`` runs a kernel on an accelerator, and the reference on a CPU.
``jax.lax.platform_dependent`` does the same, but traces both.  The reference consists
of some hundred operations, so tracing it takes most of the time to trace a layer; here,
it is traced when a program is lowered for a CPU.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, Primitive, jaxpr_as_fun
from jax.interpreters import mlir

from fbq_jax.sharding.layer_names import warn_first

_call_p = Primitive("kernel_or_reference")
_call_p.multiple_results = True


def call_kernel(
    kernel: Callable[..., Any],
    reference: Callable[..., Any],
    operands: tuple[Any, ...],
    options: Mapping[str, Any],
) -> Any:
    """Calls ``kernel(*operands, **options)``; on a CPU, calls ``reference`` instead.

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
    results = _call_p.bind(*leaves, kernel=jaxpr, reference=on_leaves(reference))
    return jax.tree.unflatten(jax.tree.structure(shapes), results)


def _has_array(option: Any) -> bool:
    return any(isinstance(x, jax.Array) for x in jax.tree.leaves(option))


@_call_p.def_abstract_eval
def _abstract_results(*_arrays: Any, kernel: ClosedJaxpr, **_params: Any) -> list[Any]:
    return list(kernel.out_avals)


@_call_p.def_impl
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


mlir.register_lowering(_call_p, mlir.lower_fun(_call_kernel, multiple_results=True))
mlir.register_lowering(
    _call_p, mlir.lower_fun(_call_reference, multiple_results=True), platform="cpu"
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
