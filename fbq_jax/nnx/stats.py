"""Statistics of the thresholds of a Flax NNX model's layers."""

from collections.abc import Iterator

from flax import nnx
from flax.nnx import bridge

from fbq_jax.core import layer_stats
from fbq_jax.core.layer_stats import LayerStats, stats_of
from fbq_jax.core.threshold import ROOT
from fbq_jax.model_kind import check_nnx
from fbq_jax.nnx.naming import dots_by_path
from fbq_jax.nnx.sharing import check_unshared


def fallback_stats(model: nnx.Module) -> dict[str, LayerStats]:
    """Collects the state of every quantized layer of an NNX model.

    Args:
      model: its Linen modules, in ``nnx.bridge.ToNNX``, count as well.

    Returns:
      A mapping from layer path (``"mlp/down"``) to ``LayerStats``, as from
      ``fbq_jax.fallback_stats``; empty if no layer is quantized.

    Raises:
      TypeError: the model is not one of NNX.
      ValueError: two layers share one op (``check_unshared``), or a layer's state has
        no values.
    """
    check_nnx("fallback_stats", model)
    check_unshared(model)
    states = {path: dot.state() for path, dot in dots_by_path(model).items()}
    stats = {path: stats_of(path, state) for path, state in states.items()}
    return stats | dict(_linen_stats(model))


def _linen_stats(model: nnx.Module) -> Iterator[tuple[str, LayerStats]]:
    """The layers of Linen modules in ``ToNNX``, by path in the model."""
    for path, module in nnx.iter_modules(model):
        if not isinstance(module, bridge.ToNNX):
            continue
        # ToNNX merges the collections.
        variables = {"fallback": nnx.to_pure_dict(nnx.state(module))}
        for layer, stats in layer_stats.fallback_stats(variables).items():
            inner = () if layer == ROOT else (layer,)
            yield "/".join((*map(str, path), *inner)) or ROOT, stats
