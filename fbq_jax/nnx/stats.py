"""Statistics of the thresholds of a Flax NNX model's layers."""

from flax import nnx

from fbq_jax.core.layer_stats import LayerStats, layer_path
from fbq_jax.nnx.dot import LAYER_OPS, FallbackDot
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
    einsum, conv = LAYER_OPS[nnx.Einsum].name, LAYER_OPS[nnx.Conv].name
    stats = {}
    for path, module in nnx.iter_modules(model):
        if isinstance(module, FallbackDot):
            if path[-2:-1] in ((einsum,), (conv,)):
                path = (*path[:-2], path[-1])
            stats[layer_path(path)] = LayerStats(
                module.rate[...], module.theta[...], module.count[...]
            )
    return stats
