"""Blocks of operators that exchange INT8 values (arXiv 2403.12422).

    h = dropout(linear(gelu(linear(layer_norm(x)))))        y = add(x, h)

JAX has no cotangents for INT8 arrays, so ``apply`` makes a composition one
``custom_vjp`` function: floats at both ends, and inside it the operators' own backward
passes on quantized gradients.  Float32 between two compositions loses nothing:
quantizing a dequantized array again gives the same codes.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax.core import unfreeze

from fbq_jax.core.arguments import DTYPE_NAMES, DTYPES
from fbq_jax.int8_flow.operators import (
    Dropout,
    Gelu,
    LayerNorm,
    Linear,
    Operator,
    Params,
    Result,
    add,
    add_grads,
    grad_to_codes,
    to_codes,
)
from fbq_jax.int8_flow.self_attention import SelfAttention
from fbq_jax.kernels import rounding
from fbq_jax.quantized import Quantized
from fbq_jax.recipes.schema import BLOCK_SIDES
from fbq_jax.sharding.mesh_axes import (
    as_varying,
    device_seed,
    run_over_auto_axes,
    warn_of_copies,
)

# Above the streams of the operators, which count from 0.
_ADD_STREAM, _GRAD_STREAM = 1 << 16, (1 << 16) + 1


@dataclasses.dataclass(frozen=True)
class Chain:
    """Named operators in sequence; ``params[name]`` has the parameters of each.

    An operator without parameters needs no entry.  Operators of one name share theirs.
    """

    operators: tuple[tuple[str, Operator], ...]

    def forward(self, params: Params, x: Quantized, seed: jax.Array) -> Result:
        """Runs the operators first to last."""
        saved = []
        for i, (name, operator) in enumerate(self.operators):
            own = params.get(name, {})
            x, residuals = operator.forward(own, x, rounding.fold(seed, i))
            saved.append(residuals)
        return x, saved

    def backward(self, saved: list[Any], dy: Quantized, seed: jax.Array) -> Result:
        """Runs the backward passes last to first."""
        grads: dict[str, Any] = {}
        for i, (name, operator) in reversed(list(enumerate(self.operators))):
            dy, own = operator.backward(saved[i], dy, rounding.fold(seed, i))
            if name in grads:
                grads[name] = jax.tree.map(jnp.add, grads[name], own)
            elif own:
                grads[name] = own
        return dy, grads


@dataclasses.dataclass(frozen=True)
class SkipConnection:
    """``x + branch(x)``."""

    branch: Operator

    def forward(self, params: Params, x: Quantized, seed: jax.Array) -> Result:
        """Adds x and the branch's output."""
        y, saved = self.branch.forward(params, x, seed)
        return add(x, y), saved

    def backward(self, saved: Any, dy: Quantized, seed: jax.Array) -> Result:
        """Adds dy and the branch's gradient."""
        dx, grads = self.branch.backward(saved, dy, seed)
        return add_grads(dy, dx, rounding.fold(seed, _ADD_STREAM)), grads


def mlp(
    *, epsilon: float = 1e-6, use_bias: bool = True, dropout_rate: float = 0.0
) -> SkipConnection:
    """A Transformer's pre-norm MLP block, ``x + dropout(down(gelu(up(norm(x)))))``.

    Its parameters are ``norm`` (``scale``, ``bias``), ``up`` and ``down`` (``kernel``,
    ``bias``).

    Args:
      epsilon: added to the variance.
      use_bias: whether ``up`` and ``down`` have biases.
      dropout_rate: probability of a zero, at least 0 and below 1.

    Raises:
      ValueError: ``dropout_rate`` is out of range.
    """
    return _with_skip(
        dropout_rate,
        norm=LayerNorm(epsilon),
        up=Linear(use_bias),
        gelu=Gelu(),
        down=Linear(use_bias),
    )


def attention(
    num_heads: int,
    length: int,
    *,
    dtype: Any = jnp.bfloat16,
    attention_fn: Callable[..., jax.Array] = jax.nn.dot_product_attention,
    epsilon: float = 1e-6,
    use_bias: bool = True,
    dropout_rate: float = 0.0,
) -> SkipConnection:
    """A Transformer's pre-norm attention block, ``x + dropout(attention(norm(x)))``.

    Its parameters are ``norm`` (``scale``, ``bias``) and ``attention``, with ``qkv``
    and ``out`` (``kernel``, ``bias``).

    Args:
      num_heads: H, a divisor of C.
      length: T, the tokens in a sequence.
      dtype: dtype of the attention core.
      attention_fn: the core, which maps q, k and v ``[B, T, H, C/H]`` to an output of
        that shape.
      epsilon: added to the variance.
      use_bias: whether the projections have biases.
      dropout_rate: probability of a zero, at least 0 and below 1.

    Raises:
      ValueError: ``dropout_rate`` is out of range.
    """
    core = SelfAttention(num_heads, length, dtype, attention_fn, use_bias)
    return _with_skip(dropout_rate, norm=LayerNorm(epsilon), attention=core)


def _with_skip(dropout_rate: float, **operators: Operator) -> SkipConnection:
    check_dropout_rate(dropout_rate)
    if dropout_rate > 0.0:
        operators["dropout"] = Dropout(dropout_rate)
    return SkipConnection(Chain(tuple(operators.items())))


def check_dropout_rate(dropout_rate: float) -> None:
    """Raises ValueError unless ``0 <= dropout_rate < 1``."""
    if not 0.0 <= dropout_rate < 1.0:
        raise ValueError(
            f"dropout_rate must be at least 0 and below 1; got {dropout_rate}"
        )


def width(x: jax.Array) -> int:
    """C of an input ``[..., C]``; raises ValueError if it has no axis, or C is 0."""
    if not x.ndim or not x.shape[-1]:
        raise ValueError(
            f"x has the shape {x.shape}; the INT8 data flow takes [..., C] with C > 0"
        )
    return x.shape[-1]


def apply(
    operator: Operator,
    params: Params,
    x: jax.Array,
    *,
    seed: jax.Array,
    block: int = 32,
) -> jax.Array:
    """Runs operators on a float array, with INT8 between them, forward and backward.

    Args:
      operator: for example ``mlp()``, or a ``Chain`` of such blocks.
      params: float arrays in nested dictionaries, under the operator's names.
      x: bfloat16, float16 or float32 ``[..., C]``; all axes before C become the rows of
        one matrix.
      seed: uint32 ``[]``, seeds the noise of gradients and dropout masks.  Training
        passes a new one in each call.
      block: the side of the square blocks that share a scale: 32, 64, 128 or 256.

    Returns:
      The output, ``[..., N]`` in x's dtype, over explicit mesh axes sharded like x.

    Raises:
      TypeError: x has another dtype.
      ValueError: x has no axis or no channels, or ``block`` is another number.

    >>> params = {
    ...     "norm": {"scale": jnp.ones(4), "bias": jnp.zeros(4)},
    ...     "up": {"kernel": jnp.ones((4, 8)), "bias": jnp.zeros(8)},
    ...     "down": {"kernel": jnp.ones((8, 4)), "bias": jnp.zeros(4)},
    ... }
    >>> apply(mlp(), params, jnp.ones((2, 4)), seed=jnp.uint32(0))[0]
    Array([1., 1., 1., 1.], dtype=float32)
    """
    if x.dtype not in DTYPES:
        raise TypeError(f"x is {x.dtype}; the INT8 data flow takes {DTYPE_NAMES}")
    if block not in BLOCK_SIDES:
        raise ValueError(f"block must be one of {BLOCK_SIDES}; got {block!r}")

    def run(
        params: Params, x: jax.Array, seed: jax.Array
    ) -> tuple[jax.Array, tuple[()]]:
        params, x = as_varying((params, x))
        matrix = x.reshape(1, -1, width(x))
        y = _apply(operator, block, params, matrix, device_seed(seed, x))
        return y.reshape(*x.shape[:-1], y.shape[-1]), ()

    params = jax.tree.map(lambda p: p.astype(jnp.float32), unfreeze(dict(params)))
    return run_over_auto_axes(run, jax.typeof(x), params, x, seed)[0]


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
    warn_of_copies()
    saved, seed = residuals
    codes = grad_to_codes(dy, block, rounding.fold(seed, _GRAD_STREAM))
    dx, grads = operator.backward(saved, codes, seed)
    return grads, dx.dequantize(dy.dtype), None


_apply.defvjp(_apply_fwd, _apply_bwd)
