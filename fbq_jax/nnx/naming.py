"""The paths of an NNX model's layers, by which warnings name them.

An NNX layer does not know where it is in its model, so the model's owner tells it.
"""

from flax import nnx

from fbq_jax.core.threshold import ROOT, layer_path
from fbq_jax.model_kind import check_nnx
from fbq_jax.nnx.dot import LAYER_OPS, FallbackDot, LayerPath, dot_name


def name_layers(model: nnx.Module) -> None:
    """Tells each quantized layer its path, so that warnings can name it.

    ``quantize`` calls this.  If you give layers their ops by hand, call it once on
    the new model, and again if you move layers.  The warnings of a layer that has no
    name say so, and give the shape of its kernel.  An op that a module's own code
    multiplies with has the path of the module.

    A name is static, in no state and no checkpoint.  Layers that differ in their names
    only are equal to JAX: a compiled function that serves several of them (``nnx.jit``
    or ``nnx.remat`` of one block) is traced with the first, and leaves its name in all.

    Args:
      model: changed in place.

    Raises:
      TypeError: the model is not one of NNX.

    >>> layer = nnx.Linear(8, 2, dot_general=FallbackDot(), rngs=nnx.Rngs(0))
    >>> name_layers(nnx.Sequential(layer))
    >>> layer.dot_general.path.name
    'layers/0'
    """
    check_nnx("name_layers", model, in_linen=False)
    for path, dot in dots_by_path(model).items():
        module = module_path(path)
        dot.path = LayerPath(module, module or type(model).__name__)


def modules_of(model: nnx.Module) -> dict[str, nnx.Module]:
    """The modules of a model, by their paths."""
    return {"/".join(map(str, path)): m for path, m in nnx.iter_modules(model)}


def module_path(op: str) -> str:
    """The path of the module that multiplies by an op, by the op's path."""
    is_own = op.endswith(dot_name("")) or op == ROOT  # of its code, not of its layer
    return op.rpartition("/")[0] if is_own else op


def dots_by_path(model: nnx.Module) -> dict[str, FallbackDot]:
    """The ``FallbackDot`` of each quantized layer, by the layer's path."""
    einsum, conv = LAYER_OPS[nnx.Einsum].name, LAYER_OPS[nnx.Conv].name
    dots = {}
    for path, module in nnx.iter_modules(model):
        if isinstance(module, FallbackDot):
            if path[-2:-1] in ((einsum,), (conv,)):
                path = (*path[:-2], path[-1])
            dots[layer_path(path)] = module
    return dots
