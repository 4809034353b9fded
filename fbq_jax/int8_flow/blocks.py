"""Blocks of operators between which only INT8 travels (arXiv 2403.12422).

    h = dropout(linear(gelu(linear(layer_norm(x)))))        y = add(x, h)

JAX gives INT8 arrays no cotangents, so what ``jax.grad`` sees of a composition is one
function with a derivative of its own, ``apply``: floats at its ends, and in it the
operators' own backward passes on quantized gradients.  Between two compositions floats
lose nothing if they are float32: what has been codes gets the same codes again.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from fbq_jax.core.dimension_numbers import DTYPES
from fbq_jax.core.qtensor import QTensor
from fbq_jax.int8_flow.operators import (
    Dropout,
    Gelu,
    LayerNorm,
    Linear,
    Operator,
    Params,
    add,
    add_grads,
    grad_to_codes,
    to_codes,
)
from fbq_jax.int8_flow.self_attention import SelfAttention
from fbq_jax.kernels import rounding
from fbq_jax.recipes.schema import BLOCK_SIDES

# Beyond the streams of operators, which count from 0.
_ADD_STREAM, _GRAD_STREAM = 1 << 16, (1 << 16) + 1


@dataclasses.dataclass(frozen=True)
class Chain:
    """Operators one after another, by name; each has the parameters of its name."""

    operators: tuple[tuple[str, Operator], ...]

    def forward(
        self, params: Params, x: QTensor, seed: jax.Array
    ) -> tuple[QTensor, list[Any]]:
        """Through all of them."""
        saved = []
        for i, (name, operator) in enumerate(self.operators):
            own = params.get(name, {})
            x, kept = operator.forward(own, x, rounding.fold(seed, i))
            saved.append(kept)
        return x, saved

    def backward(
        self, saved: list[Any], dy: QTensor, seed: jax.Array
    ) -> tuple[QTensor, dict[str, Any]]:
        """Back through all of them."""
        grads = {}
        for i, (name, operator) in reversed(list(enumerate(self.operators))):
            dy, own = operator.backward(saved[i], dy, rounding.fold(seed, i))
            if own:
                grads[name] = own
        return dy, grads


@dataclasses.dataclass(frozen=True)
class Residual:
    """A branch, and the sum of its input and output."""

    branch: Operator

    def forward(
        self, params: Params, x: QTensor, seed: jax.Array
    ) -> tuple[QTensor, Any]:
        """The sum of x and what the branch gives."""
        y, saved = self.branch.forward(params, x, seed)
        return add(x, y), saved

    def backward(
        self, saved: Any, dy: QTensor, seed: jax.Array
    ) -> tuple[QTensor, dict[str, Any]]:
        """The sum of dy and what the branch gives back."""
        dx, grads = self.branch.backward(saved, dy, seed)
        return add_grads(dy, dx, rounding.fold(seed, _ADD_STREAM)), grads


def mlp(
    *, epsilon: float = 1e-6, use_bias: bool = True, dropout_rate: float = 0.0
) -> Residual:
    """A Transformer's MLP, before it a norm, around it the residual connection.

    Its parameters are ``norm`` (``scale``, ``bias``), ``up`` and ``down`` (``kernel``,
    ``bias``).
    """
    operators: list[tuple[str, Operator]] = [
        ("norm", LayerNorm(epsilon)),
        ("up", Linear(use_bias)),
        ("gelu", Gelu()),
        ("down", Linear(use_bias)),
    ]
    return _residual(operators, dropout_rate)


def attention(
    num_heads: int,
    length: int,
    *,
    dtype: Any = jnp.bfloat16,
    attention_fn: Callable[..., jax.Array] = jax.nn.dot_product_attention,
    epsilon: float = 1e-6,
    use_bias: bool = True,
    dropout_rate: float = 0.0,
) -> Residual:
    """Self-attention, before it a norm, around it the residual connection.

    Its parameters are ``norm`` (``scale``, ``bias``) and ``attention``, of ``qkv`` and
    ``out`` (``kernel``, ``bias``).  ``SelfAttention`` has the arguments.
    """
    operators: list[tuple[str, Operator]] = [
        ("norm", LayerNorm(epsilon)),
        ("attention", SelfAttention(num_heads, length, dtype, attention_fn, use_bias)),
    ]
    return _residual(operators, dropout_rate)


def _residual(operators: list[tuple[str, Operator]], dropout_rate: float) -> Residual:
    check_dropout(dropout_rate)
    if dropout_rate > 0.0:
        operators = [*operators, ("dropout", Dropout(dropout_rate))]
    return Residual(Chain(tuple(operators)))


def check_dropout(dropout_rate: float) -> None:
    """Raises ValueError unless a rate is that of what may be dropped out."""
    if not 0.0 <= dropout_rate < 1.0:
        raise ValueError(f"dropout_rate is at least 0 and below 1; got {dropout_rate}")


def check_heads(num_heads: int, size: int) -> None:
    """Raises ValueError unless a width is one of so many heads."""
    if num_heads < 1 or size % num_heads:
        raise ValueError(
            "num_heads is at least 1 and divides the width of the input; got "
            f"{num_heads} heads and a width of {size}"
        )


def field_of_all(layers: Sequence[Any], field: str) -> Any:
    """What the layers of an ``Int8Sequential`` have in common, or an error."""
    others = {type(layer).__name__ for layer in layers if not hasattr(layer, field)}
    if others:
        raise TypeError(
            "Int8Sequential takes Int8MLP and Int8Attention; got "
            f"{', '.join(sorted(others))}"
        )
    values = {getattr(layer, field) for layer in layers}
    if len(values) != 1:
        raise ValueError(
            f"Int8Sequential takes one or more layers of one {field}; got "
            f"{sorted(values)}"
        )
    return values.pop()


def apply(
    operator: Operator,
    params: Params,
    x: jax.Array,
    *,
    seed: jax.Array,
    block: int = 32,
) -> jax.Array:
    """Runs operators on floats, with INT8 between them, forward and backward.

    Args:
      operator: such as ``mlp()`` or a ``Chain`` of them.
      params: float arrays in dictionaries, as the operator names them.
      x: bfloat16, float16 or float32 ``[..., C]``; its rows are those of one matrix.
      seed: uint32 ``[]``, of the noise of gradients and of dropout's masks; training
        passes a new one each call.
      block: the side of a block that shares a scale, 32, 64, 128 or 256.

    Returns:
      What the operator gives, ``[..., N]`` in x's dtype.

    Raises:
      TypeError: x is of another dtype.
      ValueError: there are no such blocks.

    >>> params = {
    ...     "norm": {"scale": jnp.ones(4), "bias": jnp.zeros(4)},
    ...     "up": {"kernel": jnp.ones((4, 8)), "bias": jnp.zeros(8)},
    ...     "down": {"kernel": jnp.ones((8, 4)), "bias": jnp.zeros(4)},
    ... }
    >>> apply(mlp(), params, jnp.ones((2, 4)), seed=jnp.uint32(0))[0]
    Array([1., 1., 1., 1.], dtype=float32)
    """
    if x.dtype not in DTYPES:
        accepted = ", ".join(jnp.dtype(dtype).name for dtype in DTYPES)
        raise TypeError(f"x is {x.dtype}; the INT8 data flow takes {accepted}")
    if block not in BLOCK_SIDES:
        raise ValueError(f"block takes one of {BLOCK_SIDES}; got {block!r}")
    params = jax.tree.map(lambda p: p.astype(jnp.float32), dict(params))
    y = _apply(operator, block, params, x.reshape(1, -1, x.shape[-1]), seed)
    return y.reshape(*x.shape[:-1], y.shape[-1])


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _apply(
    operator: Operator, block: int, params: Params, x: jax.Array, seed: jax.Array
) -> jax.Array:
    return _apply_fwd(operator, block, params, x, seed)[0]


def _apply_fwd(
    operator: Operator, block: int, params: Params, x: jax.Array, seed: jax.Array
) -> tuple[jax.Array, tuple[Any, jax.Array]]:
    y, saved = operator.forward(params, to_codes(x, block), seed)
    return y.dequantize(x.dtype), (saved, seed)


def _apply_bwd(
    operator: Operator, block: int, residuals: tuple[Any, jax.Array], dy: jax.Array
) -> tuple[dict[str, Any], jax.Array, None]:
    saved, seed = residuals
    codes = grad_to_codes(dy, block, rounding.fold(seed, _GRAD_STREAM))
    dx, grads = operator.backward(saved, codes, seed)
    return grads, dx.dequantize(dy.dtype), None


_apply.defvjp(_apply_fwd, _apply_bwd)
