"""What the layers' thresholds are doing, for logs, and whether they are alive."""

from collections.abc import Iterator, Mapping
from typing import Any

import jax
import numpy as np
from flax import struct

SLOT = "dot_general"
"""The name under which a layer keeps its state."""


@struct.dataclass
class LayerStats:
    """A layer's state: arrays ``[]``, or ``[layers]`` where ``nn.scan`` stacks layers.

    Attributes:
      rate: float32, the share of blocks that fell back in the last training forward.
      theta: float32, the threshold of the next one; -1 while there is none.
      count: the number of training forwards.
    """

    rate: jax.Array
    theta: jax.Array
    count: jax.Array


def fallback_stats(
    variables: Mapping[str, Any], collection: str = "fallback"
) -> dict[str, LayerStats]:
    """Collects the state of every quantized layer of a Linen model.

    Args:
      variables: what ``apply`` takes; the arrays may be traced.
      collection: the collection of ``FallbackDot``.

    Returns:
      Layer path (``"layers/mlp/down"``) to ``LayerStats``; empty where no layer of the
      model is quantized.

    >>> state = {"theta": 2.0, "rate": 0.25, "count": 7, "seed": 0}
    >>> fallback_stats({"fallback": {"Dense_0": {"dot_general": state}}})
    {'Dense_0': LayerStats(rate=0.25, theta=2.0, count=7)}
    """
    return {
        "/".join(path).removesuffix(SLOT).rstrip("/") or "(root)": stats
        for path, stats in _walk(variables.get(collection, {}), ())
    }


def mean_rate(variables: Mapping[str, Any]) -> float | None:
    """The mean of the layers' last rates, None where none is quantized."""
    rates = [np.ravel(layer.rate) for layer in fallback_stats(variables).values()]
    return float(np.mean(np.concatenate(rates))) if rates else None


def _walk(
    node: Any, path: tuple[str, ...]
) -> Iterator[tuple[tuple[str, ...], LayerStats]]:
    if not isinstance(node, Mapping):
        return
    if is_state(node):
        yield path, LayerStats(node["rate"], node["theta"], node["count"])
        return
    for name, child in node.items():
        yield from _walk(child, (*path, name))


def is_state(node: Any) -> bool:
    """Whether a node of the variables is the state of a layer."""
    return isinstance(node, Mapping) and node.keys() >= {"theta", "rate", "count"}


def assert_live(
    before: Mapping[str, LayerStats], after: Mapping[str, LayerStats]
) -> None:
    """Raises if a training step left a layer's ``count`` where it was.

    State that is dropped between steps gives no error and no NaN: the threshold just
    never moves.  Call this once after the first steps.

    Args:
      before: ``fallback_stats`` of the variables before a training step.
      after: of those after it.

    Raises:
      TypeError: if these are other mappings, such as the variables themselves.
      ValueError: if there is no quantized layer at all, or not the same ones.
      RuntimeError: names the layers whose count did not grow.
    """
    for stats in (*before.values(), *after.values()):
        if not isinstance(stats, LayerStats):
            raise TypeError(
                "a liveness check compares what fallback_stats returns before and "
                f"after a step; got a mapping to {type(stats).__name__}"
            )
    if not before or before.keys() != after.keys():
        raise ValueError(
            "a liveness check compares the same quantized layers before and after a "
            f"step; got {sorted(before)} and {sorted(after)}"
        )
    dead = [
        path
        for path, stats in before.items()
        if not np.all(np.asarray(after[path].count) > np.asarray(stats.count))
    ]
    if dead:
        raise RuntimeError(
            f"training left the fallback state of {', '.join(dead)} where it was; "
            "with Linen, make its collection mutable in apply (mutable=['fallback']) "
            "and put what apply returns into the next step's variables"
        )
