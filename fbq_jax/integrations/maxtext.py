"""MaxText's ``quant=``: the object that its layers ask how to multiply.

MAXTEXT.md says how MaxText gets it, and what of MaxText it serves.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, ClassVar

import jax
from flax import linen as nn

from fbq_jax.core.dimension_numbers import DimensionNumbers
from fbq_jax.linen.dot import FallbackDot
from fbq_jax.recipes import fallback
from fbq_jax.recipes.schema import Recipe

# Those that MaxText carries from step to step, of models in NNX and in Linen.
COLLECTIONS = ("aqt", "_overwrite_with_gradient")

_NO_EXPERTS = (
    "fbq_jax.maxtext quantizes dense layers; a mixture of experts in MaxText is not "
    "among them, for its einsums and grouped products start without a state"
)


class FallbackDotGeneral(nn.Module):
    """``FallbackDot`` as a module, which MaxText bridges to NNX; a layer has its own.

    Attributes:
      dot: multiplies, and keeps its state in this module.
    """

    dot: FallbackDot

    @nn.compact
    def __call__(
        self,
        lhs: jax.Array,
        rhs: jax.Array,
        dimension_numbers: DimensionNumbers,
        precision: Any = None,
        preferred_element_type: jax.typing.DTypeLike | None = None,
        *,
        out_sharding: Any = None,
    ) -> jax.Array:
        """``lax.dot_general(lhs, rhs, ...)``, quantized; lhs is the activation."""
        return self.dot(
            lhs,
            rhs,
            dimension_numbers,
            precision,
            preferred_element_type,
            out_sharding=out_sharding,
        )


@dataclasses.dataclass(frozen=True)
class Quantization:
    """A recipe for the dense layers of a MaxText model.

    Attributes:
      recipe: what is quantized how.
      collection: where the layers keep their state. ``"aqt"``, for models in NNX,
        MaxText's default, is the only collection that its layers let a bridged op
        change; ``"_overwrite_with_gradient"``, for the models in Linen
        (``pure_nnx=False``) of older versions, is the only one that such a step carries
        on, and no gradients can then be accumulated.
      implementation: ``"mosaic"``, ``"triton"`` or ``"reference"``; by default
        ``fbq_jax.ops.dispatch`` chooses.

    Raises:
      TypeError: the recipe is none.
      ValueError: the collection is another, which MaxText would freeze.

    >>> layer = Quantization().dot_general_cls(mesh_axes=("embed", "mlp"))()
    >>> x, w = jax.numpy.ones((1, 128)), jax.numpy.ones((128, 128))
    >>> sorted(layer.init(jax.random.key(0), x, w, (((1,), (0,)), ((), ()))))
    ['aqt']
    """

    recipe: Recipe = fallback
    collection: str = "aqt"
    implementation: str | None = None

    quant_mode: ClassVar[str] = "train"
    # Noise comes of the state: a layer drops its generator when it has started.
    needs_apply_rngs: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if self.collection not in COLLECTIONS:
            raise ValueError(
                f"MaxText carries state in {' or '.join(map(repr, COLLECTIONS))} only; "
                f"got collection={self.collection!r}"
            )
        self._dot()

    def dot_general_cls(self, mesh_axes: tuple[Any, ...] = ()) -> Callable[[], Any]:
        """What makes a layer's op.  Shardings are the operands' own."""
        del mesh_axes
        return functools.partial(FallbackDotGeneral, self._dot())

    def einsum(self, mesh_axes: tuple[Any, ...] = ()) -> Any:
        """Raises: MaxText asks for those of experts in a forward, past any start."""
        del mesh_axes
        raise ValueError(_NO_EXPERTS)

    @property
    def quant_dg(self) -> Any:
        """Raises: what MaxText's grouped products, of experts, read of AQT's object."""
        raise ValueError(_NO_EXPERTS)

    def _dot(self) -> FallbackDot:
        return FallbackDot(self.recipe, self.collection, self.implementation)
