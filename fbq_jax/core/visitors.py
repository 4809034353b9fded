"""What an op knows of those who look into a model: freezing, reports and checks.

A function such as ``freeze`` runs a model in the context of a ``Visitor``.  Each
quantized product calls the visitor, which may look at it, or give it codes of its
weight.  Codes that stay in the state of a layer are ``WeightCodes``, which the op asks
for what it multiplies by.  It imports nothing of those who make them.
"""

import contextlib
import weakref
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any, ClassVar, Generic, TypeVar

import jax

from fbq_jax.kernels.quantized import Layouts
from fbq_jax.ops.trace_contexts import make_trace_context

Product = TypeVar("Product")
#: The codes of a product's weight, and whether it has nothing else to multiply by.
FoundCodes = tuple[Layouts | None, bool]


class WeightCodes:
    """The codes of a weight in the state of a layer; the base of what makes them.

    Attributes:
      is_frozen: whether the layer has nothing else to multiply by.
    """

    is_frozen: ClassVar[bool] = False

    def codes_for(self, product: Any) -> Layouts:
        """The codes that a product reads.

        Raises:
          ValueError: they are of another weight or product.
        """
        raise NotImplementedError


class StandIn:
    """A base of what stands in for a parameter whose layer has codes only."""


class Visitor:
    """Sees the quantized products of a model; this one does nothing.

    A product is a ``LayerWeight`` in Linen, and in NNX a ``DotProduct``.

    Attributes:
      freezes: whether layers keep their state, because they are being frozen.
    """

    freezes = False

    def see(self, product: Product) -> Product:
        """Sees a product; returns it, or one with another right operand."""
        return product

    def multiply(self, layer: Any, lhs: jax.Array, arguments: Any) -> jax.Array | None:
        """What a layer computes in place of its product; None for the product.

        Args:
          layer: the ``LayerDot``.
          lhs: the activation.
          arguments: the ``DotArguments`` of the product.
        """
        del layer, lhs, arguments
        return None

    def codes(self, product: Any) -> FoundCodes | None:
        """Codes for a product; None for those that its state has, if any."""
        del product
        return None


T = TypeVar("T")


class TraceContext(Generic[T]):
    """A value for what is traced in a context, where all is traced again.

    The value is part of the key of JAX's trace caches, which do not keep it alive.
    """

    def __init__(self, default: T):
        self._default = default
        self._trace_key = make_trace_context(None)

    @property
    def value(self) -> T:
        """The value of the innermost context."""
        reference = self._trace_key.value
        return self._default if reference is None else reference()

    def __call__(self, value: T) -> AbstractContextManager[None]:
        """A context with a value, which the caller keeps alive."""
        context: AbstractContextManager[None] = self._trace_key(weakref.ref(value))
        return context


#: The active visitor.
visitor = TraceContext(Visitor())

V = TypeVar("V", bound=Visitor)


@contextlib.contextmanager
def visiting(active: V) -> Iterator[V]:
    """A context in which quantized products call a visitor."""
    with visitor(active):
        yield active


def is_freezing() -> bool:
    """Whether a model is being frozen."""
    return visitor.value.freezes
