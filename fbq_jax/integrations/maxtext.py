"""MaxText's ``quant=``: the object that its layers ask for a ``dot_general``.

MAXTEXT.md says how MaxText gets it, and which models it supports.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, ClassVar

import jax
from flax import linen as nn

from fbq_jax.core.dot_call import DotCall, DotGeneral
from fbq_jax.linen.dot import FallbackDot
from fbq_jax.recipes import fallback
from fbq_jax.recipes.schema import Recipe

# The collections that MaxText carries from step to step, for NNX and for Linen models.
COLLECTIONS = ("aqt", "_overwrite_with_gradient")

_NO_EXPERTS = (
    "fbq_jax.maxtext quantizes dense layers only: the einsums and grouped products of "
    "MaxText's mixture of experts have no state when they first run"
)


class FallbackDotGeneral(DotGeneral, nn.Module):
    """``FallbackDot`` as a module, because MaxText bridges modules to NNX.

    Each layer has its own.

    Attributes:
      dot: computes the product, and keeps its state in this module.
    """

    dot: FallbackDot

    @nn.compact
    def compute(self, lhs: jax.Array, rhs: jax.Array, call: DotCall) -> jax.Array:
        """Computes the product; lhs is the activation."""
        return self.dot.compute(lhs, rhs, call)


@dataclasses.dataclass(frozen=True)
class Quantization:
    """A recipe for the dense layers of a MaxText model.

    Attributes:
      recipe: how the three GEMMs are quantized.
      collection: the collection with the layers' state.  ``"aqt"`` is for NNX models,
        MaxText's default: it is the only collection that MaxText lets a bridged op
        change.  ``"_overwrite_with_gradient"`` is for Linen models (``pure_nnx=False``)
        of older versions: it is the only one that their training step carries, and it
        excludes gradient accumulation.
      implementation: ``"mosaic"``, ``"triton"`` or ``"reference"``; None lets
        ``fbq_jax.ops.dispatch`` choose.

    Raises:
      TypeError: ``recipe`` is not a ``Recipe``.
      ValueError: MaxText would not update state in this collection, or no
        implementation has this name.

    >>> layer = Quantization().dot_general_cls(mesh_axes=("embed", "mlp"))()
    >>> x, w = jax.numpy.ones((1, 8)), jax.numpy.ones((8, 8))
    >>> dims = ((1,), (0,)), ((), ())
    >>> sorted(jax.eval_shape(lambda: layer.init(jax.random.key(0), x, w, dims)))
    ['aqt']
    """

    recipe: Recipe = fallback
    collection: str = "aqt"
    implementation: str | None = None

    quant_mode: ClassVar[str] = "train"
    # The state seeds the noise, so a layer needs no generator once it is initialized.
    needs_apply_rngs: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if self.collection not in COLLECTIONS:
            raise ValueError(
                f"MaxText carries state in {' or '.join(map(repr, COLLECTIONS))} only; "
                f"got collection={self.collection!r}"
            )
        self._dot()

    def dot_general_cls(self, mesh_axes: tuple[Any, ...] = ()) -> Callable[[], Any]:
        """Returns a factory for a layer's ``dot_general``.

        Args:
          mesh_axes: ignored; shardings follow from the operands.
        """
        del mesh_axes
        return functools.partial(FallbackDotGeneral, self._dot())

    def einsum(self, mesh_axes: tuple[Any, ...] = ()) -> Any:
        """Raises ValueError.

        MaxText asks for the einsum of experts in the forward pass, where it is too late
        to initialize state.
        """
        del mesh_axes
        raise ValueError(_NO_EXPERTS)

    @property
    def quant_dg(self) -> Any:
        """Raises ValueError: MaxText reads AQT's object here, for grouped products."""
        raise ValueError(_NO_EXPERTS)

    def _dot(self) -> FallbackDot:
        return FallbackDot(self.recipe, self.collection, self.implementation)
