"""A quantized einsum for Flax Linen and plain JAX."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

from fbq_jax.core.einsum import QuantizedEinsum, parse
from fbq_jax.linen.dot import check_dot_general, fallback_dot
from fbq_jax.linen.rules import RulesDot


@dataclasses.dataclass(frozen=True)
class FallbackEinsum(QuantizedEinsum):
    """``jnp.einsum`` of an activation and a weight, quantized.

    The first operand is the activation, whatever the subscripts.  A dimension that both
    operands and the output have is a batch dimension, with its own codes and scales.
    An operand is first summed over the labels that neither the other one nor the output
    has, ellipses included, and dimensions of size 1 are broadcast.  The other
    dimensions of each operand are flattened to a matrix, in the operand's order.  An
    outer product, which sums over nothing, is one of matrices with one column and one
    row.  If an operand has batch dimensions only, it scales the other element by
    element: in float, without state, because that is no matrix product.

    Attributes:
      dot_general: computes the product and, in a Linen module, keeps its state there: a
        ``FallbackDot``, a ``RulesDot`` or any other ``dot_general``.

    Raises:
      TypeError: ``dot_general`` is not callable (a ``Recipe`` is not).
      ValueError: there are not two operands, a label occurs twice in one operand (a
        diagonal), or the subscripts do not fit the operands.

    >>> x, w = jnp.ones((2, 5, 64)), jnp.ones((4, 64, 8))
    >>> jax.eval_shape(lambda: fallback_einsum("btd,hdk->bhtk", x, w)).shape
    (2, 4, 5, 8)
    """

    dot_general: Callable[..., jax.Array] = fallback_dot

    def __post_init__(self) -> None:
        check_dot_general("FallbackEinsum", self.dot_general)

    def __call__(self, subscripts: str, /, *operands: Any, **kwargs: Any) -> jax.Array:
        """``jnp.einsum(subscripts, *operands, ...)``, quantized."""
        if isinstance(self.dot_general, RulesDot):
            if (dot := self.dot_general.of_layer(jnp.shape(operands[-1]))) is None:
                return jnp.einsum(subscripts, *operands, **kwargs)
            return FallbackEinsum(dot)(subscripts, *operands, **kwargs)
        return super().__call__(subscripts, *operands, **kwargs)


fallback_einsum = FallbackEinsum()


class Einsum(nn.Einsum):
    """``nn.Einsum`` with a quantized einsum, which Flax's layer does not accept.

    It has one attribute more than ``nn.Einsum``; parameters and arguments are the same.

    Attributes:
      einsum_op: computes the einsum of subscripts, inputs and kernel.

    >>> layer = Einsum((16, 2, 8), "...d,dhk->...hk")
    >>> variables = jax.eval_shape(layer.init, jax.random.key(0), jnp.ones((3, 16)))
    >>> jax.tree.map(jnp.shape, variables["params"])
    {'bias': (2, 8), 'kernel': (16, 2, 8)}
    >>> sorted(variables["fallback"])
    ['dot_general']
    """

    einsum_op: Callable[..., jax.Array] = fallback_einsum

    @nn.compact
    def __call__(self, inputs: jax.Array, einsum_str: str | None = None) -> jax.Array:
        """Multiplies the inputs with the kernel and adds the bias.

        Args:
          inputs: the activation.
          einsum_str: the subscripts, if the attribute of that name is None.
        """
        return call_einsum(self, self.einsum_op, inputs, einsum_str)


def call_einsum(
    layer: nn.Einsum,
    einsum_op: Callable[..., jax.Array],
    inputs: jax.Array,
    einsum_str: str | None = None,
) -> jax.Array:
    """Computes an ``nn.Einsum``, whose method is running, by ``einsum_op``."""
    subscripts = nn.merge_param("einsum_str", layer.einsum_str, einsum_str)
    labels = parse(subscripts, inputs.ndim, len(layer.shape))
    kernel = layer.param("kernel", layer.kernel_init, layer.shape, layer.param_dtype)
    sizes = dict(zip(labels.rhs, layer.shape, strict=True))
    bias: jax.Array | None = None
    if layer.use_bias:
        shape = tuple(sizes[label] for label in labels.out if label in sizes)
        bias = layer.param("bias", layer.bias_init, shape, layer.param_dtype)
    promoted: Any = layer.promote_dtype(inputs, kernel, bias, dtype=layer.dtype)
    inputs, kernel, bias = promoted
    y = einsum_op(
        subscripts,
        inputs,
        kernel,
        precision=layer.precision,
        preferred_element_type=layer.preferred_element_type,
    )
    if bias is not None:
        y += bias.reshape([sizes.get(label, 1) for label in labels.out])
    return y
