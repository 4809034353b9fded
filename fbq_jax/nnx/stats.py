"""Statistics of the thresholds of a Flax NNX model's layers."""

from flax import nnx

from fbq_jax.core.layer_stats import LayerStats
from fbq_jax.nnx.naming import dots_by_path
from fbq_jax.nnx.sharing import check_unshared


def fallback_stats(model: nnx.Module) -> dict[str, LayerStats]:
    """Collects the state of every quantized layer of an NNX model.

    Returns:
      A mapping from layer path (``"mlp/down"``) to ``LayerStats``, as from
      ``fbq_jax.fallback_stats``; empty if no layer is quantized.

    Raises:
      ValueError: two layers share one op (``check_unshared``).
    """
    check_unshared(model)
    return {
        path: LayerStats(dot.rate[...], dot.theta[...], dot.count[...])
        for path, dot in dots_by_path(model).items()
    }
