"""Optimizers that write the codes of the weights that they change.

A weight changes once a step.  Its layer reads codes, which ``quantize_weights_once``
makes before the first step, and which the optimizer writes when it changes the weight.
The step neither casts nor quantizes a weight.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import optax
from flax import traverse_util
from flax.core import meta

from fbq_jax.core.frozen_weight import StepWeight, differ

Path = tuple[str, ...]


class CodeWriter(NamedTuple):
    """An optimizer that writes codes.

    A training step of Linen differentiates with respect to ``differentiable(params,
    codes)``, whose weights have the dtype of the layers' products: the step reads
    nothing of them but their shape, so the cast costs nothing, and gradients have half
    of the bytes::

        weights = writer.differentiable(params, codes)
        grads, state = jax.grad(loss, has_aux=True)(weights, {**state, **codes}, batch)
        params, opt_state, codes = writer.update(grads, opt_state, params, codes)

    Attributes:
      init: makes the state of the optimizer from the parameters.
      update: maps gradients, state, parameters and codes to the new state, parameters
        and codes.
    """

    init: Callable[[Any], Any]
    update: Callable[[Any, Any, Any, Any], tuple[Any, Any, Any]]

    @staticmethod
    def differentiable(params: Any, codes: Mapping[str, Any]) -> Any:
        """The parameters, of which weights with codes have the products' dtype."""
        found, flat = weights_by_path(codes, params), flatten(params)
        for path, ((_, weight), *_) in found.items():
            dtype = weight.dtype
            flat[path] = jax.tree.map(lambda x, to=dtype: x.astype(to), flat[path])
        return traverse_util.unflatten_dict(flat)


def with_codes(optimizer: optax.GradientTransformation) -> CodeWriter:
    """An optimizer of optax that writes the codes of the weights that it changes.

    Args:
      optimizer: any transformation, such as ``optax.chain`` of several.
    """

    def update(grads: Any, state: Any, params: Any, codes: Any) -> tuple[Any, Any, Any]:
        wide = jax.tree.map(lambda g, p: g.astype(p.dtype), grads, params)
        updates, state = optimizer.update(wide, state, params)
        params = optax.apply_updates(params, updates)
        return params, state, write_codes(codes, params)

    return CodeWriter(optimizer.init, update)


def write_codes(codes: Mapping[str, Any], params: Any) -> dict[str, Any]:
    """The codes of other parameters, of the same layers."""
    weights = flatten(params)
    weights_by_path(codes, params)  # checks that they belong together

    def write(weight: StepWeight) -> StepWeight:
        return weight.of(meta.unbox(weights[weight.parameter]))

    return jax.tree.map(write, dict(codes), is_leaf=_is_weight)


def assert_live(params: Any, codes: Mapping[str, Any]) -> None:
    """Raises if codes are not those of the parameters.

    A step that changes a parameter without its codes, a checkpoint without codes and an
    average of parameters leave codes of other weights, which layers would multiply by.
    This quantizes all weights once: call it after the first steps, and after parameters
    are restored or replaced.

    Args:
      params: the parameters of a Linen model.
      codes: the codes, of ``quantize_weights_once`` or of a ``CodeWriter``.

    Raises:
      RuntimeError: codes are of other weights; the message names the parameters.
    """
    stale = jax.device_get(_find_stale(params, codes))
    if names := [name for name, is_stale in stale.items() if is_stale]:
        raise RuntimeError(
            f"the codes of {', '.join(names)} are of other weights: make new ones with "
            "quantize_weights_once, and change parameters only by the update of a "
            "CodeWriter"
        )


@jax.jit
def _find_stale(params: Any, codes: Any) -> dict[str, jax.Array]:
    fresh = entries_of(write_codes(codes, params))
    return {
        "/".join(map(str, old.parameter)): differ(old.codes, new.codes)
        for (_, old), (_, new) in zip(entries_of(codes), fresh, strict=True)
    }


def weights_by_path(
    codes: Mapping[str, Any], params: Any
) -> dict[Path, list[tuple[Path, StepWeight]]]:
    """The paths of codes and the codes of each parameter that has some.

    Raises:
      ValueError: there are no codes, or a parameter is missing.
    """
    found: dict[Path, list[tuple[Path, StepWeight]]] = {}
    known = flatten(params)
    for at, weight in entries_of(codes):
        if weight.parameter not in known:
            name = "/".join(map(str, weight.parameter))
            raise ValueError(
                f"there are codes of {name}, which the parameters lack: pass all "
                "parameters of the model that quantize_weights_once was given"
            )
        found.setdefault(weight.parameter, []).append((at, weight))
    if not found:
        raise ValueError(
            "there are no codes to write: pass the collection that "
            "quantize_weights_once returns, and the one of the step before"
        )
    return found


def entries_of(codes: Mapping[str, Any]) -> Iterator[tuple[Path, StepWeight]]:
    """The paths of codes, and the codes."""
    leaves, _ = jax.tree.flatten_with_path(codes, is_leaf=_is_weight)
    for path, weight in leaves:
        yield tuple(key.key for key in path), weight


def flatten(params: Any) -> dict[Path, Any]:
    """Parameters by their paths; they may be boxed."""
    flat: dict[Path, Any] = traverse_util.flatten_dict(params)
    return flat


def _is_weight(x: Any) -> bool:
    return isinstance(x, StepWeight)
