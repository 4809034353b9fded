"""What is trained is what is served: ``freeze`` for Flax Linen.

``variables`` do not tell what dtype a layer computes in, nor which of its kernel's axes
are contracted, and codes depend on both.  So ``freeze`` runs the model, and each layer
quantizes what it multiplies by.  ``fbq_jax.core.frozen_weight`` and ``linen_frozen``
say how the codes then reach it.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax.core import unfreeze
from flax.traverse_util import flatten_dict, unflatten_dict

from fbq_jax.core.frozen_weight import FrozenKernel, check_thetas, zeros
from fbq_jax.core.layer_stats import is_state
from fbq_jax.linen.frozen import ASKED, KERNEL, WEIGHT
from fbq_jax.linen.state import calling_module

Path = tuple[str, ...]


def freeze(
    model: nn.Module, variables: Mapping[str, Any], *args: Any, **kwargs: Any
) -> dict[str, Any]:
    """Turns the weights of a model's quantized layers into INT8 codes and scales.

    The same model, applied to what is returned, gives bit for bit what it gives for
    ``variables`` in evaluation.  The layers are those that multiply their parameter
    ``kernel`` by a ``FallbackDot`` (Flax's ``Dense``, ``DenseGeneral`` and attention,
    ``Einsum``, ``Conv``, ``NormDense``, ``GatedMLP``); other parameters stay as they
    are.

    The tree keeps its form but for those layers: the kernel becomes a ``FrozenKernel``,
    which has no leaves, and the layer's state gets a ``FrozenWeight`` with the codes.
    Its shape alone, as for restoring a checkpoint, is
    ``jax.eval_shape(lambda: freeze(model, model.init(key, x), x))``.

    Args:
      model: the one that was trained.
      variables: its parameters and the collection of its dots' state.
      *args: what ``model.apply`` takes for an evaluation that runs every layer, once;
        a ``jax.ShapeDtypeStruct`` will do for an array.
      **kwargs: likewise, ``method`` and ``rngs`` among them.

    Raises:
      ValueError: no layer multiplies by a ``FallbackDot``, or one is frozen already,
        has no threshold yet, has a recipe that multiplies in floats in the forward
        pass, does not run, or reads its kernel in another way than by its dot, or in
        two ways by it (an ``Einsum`` called with subscripts of its own).

    >>> from fbq_jax import fallback_dot
    >>> layer = nn.Dense(64, dot_general=fallback_dot)
    >>> x = jax.random.normal(jax.random.key(0), (32, 128))
    >>> variables = layer.init(jax.random.key(1), x)
    >>> _, state = layer.apply(variables, x, mutable=["fallback"])  # trains
    >>> variables = {**variables, **state}
    >>> frozen = freeze(layer, variables, x)
    >>> bool(jnp.all(layer.apply(frozen, x) == layer.apply(variables, x)))
    True
    >>> frozen["fallback"]["dot_general"]["weight"].codes.mT.shape
    (1, 128, 64)
    """
    leaves = _flatten(variables)
    slots = {path: value for path, value in leaves.items() if is_state(value)}
    _check_slots(slots, leaves)
    args, kwargs = jax.tree.map(zeros, (args, kwargs))
    collections = sorted({collection for collection, *_ in slots})

    @jax.jit
    def quantize(variables: dict[str, Any]) -> Any:
        return model.apply(variables, *args, mutable=collections, **kwargs)[1]

    asked = {path: {**state, ASKED: None} for path, state in slots.items()}
    updates = _flatten(quantize(unflatten_dict({**leaves, **asked})))
    weights = {path: updates[path][ASKED] for path in slots}
    idle = [_layer(path) for path, weight in weights.items() if weight is None]
    if idle:
        raise ValueError(
            f"the call that freeze was given does not run: {', '.join(idle)}; pass "
            "arguments, or a method=, that run every quantized layer"
        )
    check_thetas(
        {
            _layer(path): (weight.recipe, slots[path]["theta"])
            for path, weight in weights.items()
        }
    )
    for path, weight in weights.items():
        kernel = jax.tree.leaves(leaves[_kernel(path)])[0]  # boxed, it may be
        leaves[_kernel(path)] = _LinenKernel(weight.shape, jnp.dtype(kernel.dtype))
        leaves[path] = {**slots[path], WEIGHT: weight}
    served = unflatten_dict(leaves)
    _check_served(model, served, args, kwargs)
    return served


@jax.tree_util.register_static
@dataclass(frozen=True)
class _LinenKernel(FrozenKernel):
    """A ``FrozenKernel`` that knows the layer by which it is read."""

    def __jax_array__(self) -> jax.Array:
        module = calling_module()
        if module is not None and any(
            getattr(module, op, self) is None
            and getattr(module, f"{op}_cls", None) is None
            for op in ("dot_general", "conv_general_dilated")
        ):
            layer = "/".join(module.path) or "(root)"
            raise ValueError(
                f"layer {layer!r} is frozen to INT8 codes, and this model multiplies "
                "in floats there: use the model that was trained"
            )
        return super().__jax_array__()


def _flatten(variables: Mapping[str, Any]) -> dict[Path, Any]:
    """Path to value; a layer's state is one value."""
    return flatten_dict(
        unfreeze(dict(variables)),
        keep_empty_nodes=True,
        is_leaf=lambda _, value: is_state(value),
    )


def _kernel(slot: Path) -> Path:
    return ("params", *slot[1:-1], KERNEL)


def _layer(slot: Path) -> str:
    return "/".join(slot[1:-1]) or "(root)"


def _check_slots(slots: Mapping[Path, Any], leaves: Mapping[Path, Any]) -> None:
    if not slots:
        raise ValueError(
            "freeze found no state of a FallbackDot in the collections "
            f"{sorted({path[0] for path in leaves})}: pass params and state together "
            "({'params': ..., 'fallback': ...})"
        )
    if again := [_layer(path) for path, state in slots.items() if WEIGHT in state]:
        raise ValueError(f"freeze takes a model once; frozen are: {', '.join(again)}")
    if unknown := [_layer(path) for path in slots if _kernel(path) not in leaves]:
        raise ValueError(
            f"freeze takes layers whose weight is their parameter {KERNEL!r}, as "
            f"nn.Dense has it; there is none in: {', '.join(unknown)}"
        )


def _check_served(
    model: nn.Module, served: dict[str, Any], args: Any, kwargs: Any
) -> None:
    """Says now what could not be served: a kernel that is more than its dot's."""
    try:
        jax.eval_shape(lambda: model.apply(served, *args, **kwargs))
    except (TypeError, ValueError, AttributeError) as error:
        raise ValueError(
            "the frozen model does not run: some layer reads its kernel in another way "
            "than to multiply by it with its FallbackDot"
        ) from error
