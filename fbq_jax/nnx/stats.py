"""What the thresholds of a Flax NNX model's layers are doing."""

from flax import nnx

from fbq_jax.core.layer_stats import SLOT, LayerStats
from fbq_jax.nnx.dot import FallbackDot
from fbq_jax.nnx.sharing import check_unshared


def fallback_stats(model: nnx.Module) -> dict[str, LayerStats]:
    """Collects the state of every quantized layer of an NNX model.

    Returns:
      Layer path (``"mlp/down"``) to ``LayerStats``, as ``fbq_jax.fallback_stats``.

    Raises:
      ValueError: two layers share one op (``check_unshared``).
    """
    check_unshared(model)
    stats = {}
    for path, module in nnx.iter_modules(model):
        if isinstance(module, FallbackDot):
            layer = path[:-1] if path[-1:] == (SLOT,) else path
            if layer[-1:] in (("einsum_op",), ("conv_general_dilated",)):
                layer = layer[:-1]
            stats["/".join(map(str, layer)) or "(root)"] = LayerStats(
                module.rate[...], module.theta[...], module.count[...]
            )
    return stats
