"""Optimizers that write the codes of the weights that they change.

A weight changes once a step.  Its layer reads codes, which ``quantize_weights_once``
makes before the first step, and which the optimizer writes when it changes the weight.
The step neither casts nor quantizes a weight.
"""

from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

import jax
import optax
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

    A loss that reads weights itself, as to penalize them, takes the gradient with
    respect to ``params``.  The parameters may be some of the model's, such as the
    adapters of LoRA: codes of the others stay as they are.

    Attributes:
      init: makes the state of the optimizer from the parameters.
      update: maps gradients, state, parameters and codes to the new parameters, state
        and codes.
    """

    init: Callable[[Any], Any]
    update: Callable[..., tuple[Any, Any, Any]]

    @staticmethod
    def differentiable(params: Any, codes: Mapping[str, Any]) -> Any:
        """The parameters, of which weights with codes have the products' dtype."""
        found = find_weights(codes, params)

        def cast(path: Any, x: jax.Array) -> jax.Array:
            weight = found.get(_names(path))
            return x if weight is None else x.astype(weight.dtype)

        plain = jax.tree.map_with_path(cast, meta.unbox(params))
        return meta.replace_boxed(params, plain)


def with_codes(optimizer: optax.GradientTransformation) -> CodeWriter:
    """An optimizer of optax that writes the codes of the weights that it changes.

    Args:
      optimizer: any transformation, such as ``optax.chain`` of several.
    """

    def update(
        grads: Any, state: Any, params: Any, codes: Any = None
    ) -> tuple[Any, Any, Any]:
        found = find_weights(codes, params)
        wide = jax.tree.map(lambda g, p: g.astype(p.dtype), grads, params)
        updates, state = optimizer.update(wide, state, params)
        params = optax.apply_updates(params, updates)
        return params, state, _write(codes, found, params)

    return CodeWriter(optimizer.init, update)


def write_codes(codes: Mapping[str, Any], params: Any) -> dict[str, Any]:
    """The codes of other parameters, such as a checkpoint's or a moving average.

    Args:
      codes: codes of the same layers, whose values do not matter.
      params: all parameters of the Linen model.

    Raises:
      ValueError: there are no codes, or a parameter is missing.
    """
    return _write(codes, find_weights(codes, params, all_params=True), params)


def _write(codes: Any, found: Collection[Path], params: Any) -> dict[str, Any]:
    """The codes, of which those that were found are of these parameters."""
    weights = _flatten(params)

    def write(weight: StepWeight) -> StepWeight:
        path = weight.parameter
        return weight.of(weights[path]) if path in found else weight

    return jax.tree.map(write, dict(codes), is_leaf=_is_weight)


def assert_live(params: Any, codes: Mapping[str, Any]) -> None:
    """Raises if codes are of other weights than the parameters.

    A step that changes a parameter without its codes, a checkpoint without codes and an
    average of parameters leave codes of other weights, which layers would multiply by.
    This quantizes all weights once: call it after the first steps, and after parameters
    are restored or replaced.

    Args:
      params: all parameters of a Linen model.
      codes: the codes, of ``quantize_weights_once`` or of a ``CodeWriter``.

    Raises:
      RuntimeError: codes are of other weights; the message names the parameters.
      ValueError: there are no codes, or a parameter is missing.
    """
    stale = jax.device_get(_find_stale(params, codes))
    if names := [name for name, is_stale in stale.items() if is_stale]:
        raise RuntimeError(
            f"the codes of {', '.join(names)} are of other weights: make new ones with "
            "write_codes (fbq_jax.optim, fbq_jax.nnx), and change weights only by an "
            "optimizer that writes codes"
        )


@jax.jit
def _find_stale(params: Any, codes: Any) -> dict[str, jax.Array]:
    stale: dict[str, Any] = {}
    fresh = _weights(write_codes(codes, params))
    for old, new in zip(_weights(codes), fresh, strict=True):
        name = "/".join(map(str, old.parameter))
        stale[name] = stale.get(name, False) | differ(old.codes, new.codes)
    return stale


def find_weights(
    codes: Mapping[str, Any] | None, params: Any, *, all_params: bool = False
) -> dict[Path, StepWeight]:
    """The codes of each parameter that has some: of its first product.

    Args:
      codes: the codes.
      params: the parameters that are looked for.
      all_params: whether a parameter that is missing is an error, too.

    Raises:
      TypeError: the codes are missing.
      ValueError: there are no codes, or the parameters have none of them.
    """
    if codes is None:
        raise TypeError(
            "the update of a CodeWriter takes codes: update(grads, opt_state, params, "
            "codes). Transformations of optax, such as chain and MultiSteps, go into "
            "with_codes, and do not take a CodeWriter"
        )
    every = {weight.parameter: weight for weight in reversed(_weights(codes))}
    if not every:
        raise ValueError(
            "there are no codes to write: pass the collection that "
            "quantize_weights_once returns, and the one of the step before"
        )
    known = _flatten(params)
    found = {path: weight for path, weight in every.items() if path in known}
    if not found or (all_params and len(found) < len(every)):
        names = sorted("/".join(map(str, path)) for path in every.keys() - known.keys())
        raise ValueError(
            f"there are codes of {', '.join(names)}, which the parameters lack: pass "
            "the parameters of the model that quantize_weights_once was given"
        )
    return found


def _weights(codes: Mapping[str, Any]) -> list[StepWeight]:
    return jax.tree.leaves(codes, is_leaf=_is_weight)


def _flatten(params: Any) -> dict[Path, Any]:
    """Parameters without boxes, by their paths."""
    leaves = jax.tree.leaves_with_path(meta.unbox(params))
    return {_names(path): x for path, x in leaves}


def _names(path: Any) -> Path:
    return tuple(getattr(key, "key", key) for key in path)


def _is_weight(x: Any) -> bool:
    return isinstance(x, StepWeight)
