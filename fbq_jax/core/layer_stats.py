"""Statistics of the layers' thresholds for logs, and a check that they move."""

from collections.abc import Iterator, Mapping
from typing import Any

import jax
import numpy as np
from flax import struct

from fbq_jax.core.threshold import layer_path
from fbq_jax.sharding.layer_names import is_first, warn_first


@struct.dataclass
class LayerStats:
    """The state of a layer: arrays ``[]``, or ``[layers]`` under ``nn.scan``.

    Attributes:
      rate: float32, the fallback rate: the share of blocks that fell back in the last
        training forward, without zero blocks.
      theta: float32, the threshold of the next forward; -1 until it is set.
      count: uint32, the number of training forwards; float32 in the collection
        ``_overwrite_with_gradient``.
    """

    rate: jax.Array
    theta: jax.Array
    count: jax.Array


def fallback_stats(
    variables: Mapping[str, Any], collection: str = "fallback"
) -> dict[str, LayerStats]:
    """Collects the state of every quantized layer of a Linen model.

    Args:
      variables: the variables of the model; their arrays may be traced.
      collection: the collection of ``FallbackDot``.

    Returns:
      A mapping from layer path (``"layers/mlp/down"``) to ``LayerStats``; empty if no
      layer is quantized.

    Raises:
      TypeError: ``variables`` is no mapping of collections, or is itself the state in
        a collection.

    >>> state = {"theta": 2.0, "rate": 0.25, "count": 7, "seed": 0}
    >>> fallback_stats({"fallback": {"Dense_0": {"dot_general": state}}})
    {'Dense_0': LayerStats(rate=0.25, theta=2.0, count=7)}
    """
    if not isinstance(variables, Mapping):
        raise TypeError(
            "fallback_stats takes the variables of a Linen model, such as "
            "{'fallback': state}, and fbq_jax.nnx.fallback_stats an NNX model; got "
            f"{type(variables).__name__}"
        )
    if collection not in variables and any(_walk(variables, ())):
        others = [name for name in variables if any(_walk(variables[name], ()))]
        if "params" in variables:
            raise TypeError(
                f"the variables have no collection {collection!r}, and states in "
                f"{others[0]!r}: call fallback_stats(variables, {others[0]!r})"
            )
        raise TypeError(
            "fallback_stats takes the variables of a Linen model, such as "
            f"{{{collection!r}: state}}; got the state of a collection"
        )
    states = {layer_path(p): s for p, s in _walk(variables.get(collection, {}), ())}
    return {layer: stats_of(layer, state) for layer, state in states.items()}


def stats_of(layer: str, state: Mapping[str, Any]) -> LayerStats:
    """The stats of a layer's state.

    Warns, once, if the layers of a stack have one seed.  Inside ``nn.scan`` a layer
    cannot know that, nor its index.

    Args:
      layer: the layer's path.
      state: a ``fbq_jax.core.threshold.State``, whose arrays may be traced.
    """
    seed: Any = state.get("seed")
    # Reading seeds waits for the device, so it happens once.
    if _is_stack(seed) and is_first(("seeds", layer)) and _are_equal(seed):
        warn_first(
            "equal seeds",
            f"the layers of the stack {layer!r} share a seed, so all have the same "
            'noise: initialize them with split_rngs={"params": True} in nn.scan, or in '
            "NNX with rngs that nnx.split_rngs has split; if they share parameters in "
            "nn.scan, replace the seed in their state after init by "
            f"jax.random.bits(key, {seed.shape})",
        )
    return LayerStats(state["rate"], state["theta"], state["count"])


def _is_stack(seed: Any) -> bool:
    """Whether these are the seeds of several layers, with values on this host."""
    if isinstance(seed, jax.core.Tracer) or not isinstance(seed, jax.Array):
        return isinstance(seed, np.ndarray) and seed.ndim > 0
    return seed.ndim > 0 and seed.is_fully_addressable


def _are_equal(seeds: Any) -> bool:
    """Whether an axis of the stack has one seed; two of many are equal by chance."""
    seeds = np.asarray(seeds)
    return any(
        size > 1 and bool(np.all(seeds == seeds.take([0], axis)))
        for axis, size in enumerate(seeds.shape)
    )


def mean_rate(variables: Mapping[str, Any]) -> float | None:
    """The mean fallback rate of a Linen model's layers; None if none is quantized."""
    rates = [np.ravel(layer.rate) for layer in fallback_stats(variables).values()]
    return float(np.mean(np.concatenate(rates))) if rates else None


def _walk(
    node: Any, path: tuple[str, ...]
) -> Iterator[tuple[tuple[str, ...], Mapping[str, Any]]]:
    if not isinstance(node, Mapping):
        return
    if is_state(node):
        yield path, node
        return
    for name, child in node.items():
        yield from _walk(child, (*path, name))


def is_state(node: Any) -> bool:
    """Whether a node of the variables is the state of a quantized layer."""
    return isinstance(node, Mapping) and node.keys() >= {"theta", "rate", "count"}


def assert_live(
    before: Mapping[str, LayerStats], after: Mapping[str, LayerStats]
) -> None:
    """Raises if a training step did not advance the ``count`` of every layer.

    Dropped state gives neither an error nor a NaN: the threshold just never moves, and
    every step has the same noise.  A weight's gradient in Linen with an immutable
    collection, or in NNX in evaluation mode, warns when it is traced.  The following
    gives no warning; call this once after the first steps, and after a checkpoint is
    restored, to find it:

    - Only other weights are trained, as with LoRA.  The gradient of a layer's input
      does not warn, because evaluation may take it.
    - The updates that ``apply`` returns, or the state that ``nnx.split`` gives, do not
      reach the next step.
    - An optimizer, gradient clipping or loss scaling treats the collection
      ``"_overwrite_with_gradient"`` as gradients, so that counts are no whole numbers.

    Evaluation in training mode moves the state, too.  To find it, compare the
    ``fallback_stats`` before and after an evaluation, which must be equal.

    Args:
      before: ``fallback_stats`` of the variables before a training step.  A step that
        donates the variables deletes their arrays, and these are the same: take
        ``jax.device_get(fallback_stats(variables))``.
      after: ``fallback_stats`` of the variables after it.

    Raises:
      TypeError: an argument does not come from ``fallback_stats``.
      ValueError: there is no quantized layer, the layers differ, or a step has deleted
        the arrays.
      RuntimeError: a count did not grow by a whole number; the message names the
        layers.
    """
    takes = "assert_live takes the results of fallback_stats before and after a step"
    for argument in (before, after):
        if not isinstance(argument, Mapping):
            raise TypeError(f"{takes}; got {type(argument).__name__}")
        for stats in argument.values():
            if not isinstance(stats, LayerStats):
                raise TypeError(f"{takes}; got a mapping to {type(stats).__name__}")
    if not before or before.keys() != after.keys():
        raise ValueError(
            "assert_live takes the same quantized layers before and after a step, at "
            f"least one; got {sorted(before)} and {sorted(after)}"
        )
    counts = [stats.count for stats in (*before.values(), *after.values())]
    if any(isinstance(x, jax.Array) and x.is_deleted() for x in counts):
        raise ValueError(
            "assert_live got stats whose arrays a step has deleted, because it donates "
            "its state: take jax.device_get(fallback_stats(...)) before the step"
        )
    if dead := [path for path in before if not _counted(before[path], after[path])]:
        raise RuntimeError(
            f"training did not update the fallback state of {', '.join(dead)}; in "
            "Linen, make its collection mutable in apply (mutable=['fallback']) and "
            "pass the updates that apply returns to the next step; with "
            "'_overwrite_with_gradient', replace the state by its gradient, and "
            "neither scale nor clip it"
        )


def _counted(before: LayerStats, after: LayerStats) -> bool:
    """Whether a layer's count grew by a whole number."""
    step = np.asarray(after.count, np.float64) - np.asarray(before.count, np.float64)
    return bool(np.all((step >= 1) & (step == np.round(step))))
