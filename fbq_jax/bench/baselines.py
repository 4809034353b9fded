"""The products that this library is compared with: bf16 and other libraries."""

import functools
import importlib
import sys
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax import lax

from fbq_jax.bench.matmuls import MATMUL, Matmul

_T = TypeVar("_T")
_QWIX, _AQT = "Qwix INT8", "AQT INT8"


def bf16() -> Matmul:
    """XLA's product in the dtype of the operands."""
    return Matmul("bf16", "xla", lambda x, w, *_: lax.dot_general(x, w, MATMUL))


def flax_fp8(x: jax.Array, w: jax.Array) -> Matmul:
    """Flax's FP8 product: one scale per tensor, from the maxima of earlier steps."""
    op = nn.Fp8DotGeneral()
    state = op.init(jax.random.key(0), x, w, MATMUL)

    def product(x: jax.Array, w: jax.Array, state: Any, _: Any) -> jax.Array:
        y = op.apply(state, x, w, MATMUL)
        assert isinstance(y, jax.Array)
        return y

    return Matmul("Flax Fp8DotGeneral", "xla", product, state=state)


def installed_int8_libraries() -> Iterator[Matmul]:
    """Qwix and AQT where they are installed; stderr names the missing ones."""
    yield from _installed(_qwix_int8, _aqt_int8)


def installed_int8_layers() -> Iterator[tuple[str, dict[str, Any]]]:
    """The same libraries, as names and keyword arguments of ``nn.Dense``."""
    yield from _installed(_qwix_int8_layer, _aqt_int8_layer)


def _installed(*makers: Callable[[], _T]) -> Iterator[_T]:
    """What the functions make; stderr names the libraries that are missing."""
    for maker in makers:
        try:
            yield maker()
        except ImportError as error:
            library = maker.__name__.removeprefix("_").removesuffix("_layer")
            print(f"without {library}: {error}", file=sys.stderr)


def _qwix_int8() -> Matmul:
    """Qwix: INT8 in all three products, a scale per channel, nearest rounding."""
    dot = _qwix_dot()
    return Matmul(_QWIX, "xla", lambda x, w, *_: dot(x, w, MATMUL))


def _qwix_int8_layer() -> tuple[str, dict[str, Any]]:
    dot = _qwix_dot()
    return _QWIX, {"dot_general": lambda x, w, dims, **_: dot(x, w, dims)}


def _qwix_dot() -> Callable[..., jax.Array]:
    """Qwix's ``(x, w, dimension_numbers) -> y``."""
    qwix = importlib.import_module("qwix._src.core.dot_general_qt")
    config = qwix.DotGeneralQtConfig(
        lhs_qtype=jnp.int8,
        rhs_qtype=jnp.int8,
        dlhs_grad_qtype=jnp.int8,
        drhs_grad_qtype=jnp.int8,
    )
    return lambda x, w, dims: qwix.dot_general_qt(x, w, dims, config)


def _aqt_int8() -> Matmul:
    """AQT: INT8 in all three products, stochastic rounding of the gradients."""
    config, int8 = _aqt_config()

    def product(x: jax.Array, w: jax.Array, _: Any, key: jax.Array) -> jax.Array:
        return config.set_context(int8, key, train_step=None)(x, w, MATMUL)

    return Matmul(_AQT, "xla", product, inputs=jax.random.key(1))


def _aqt_int8_layer() -> tuple[str, dict[str, Any]]:
    _, int8 = _aqt_config()
    layer = importlib.import_module("aqt.jax.v2.flax.aqt_flax").AqtDotGeneral
    return _AQT, {"dot_general_cls": functools.partial(layer, int8)}


def _aqt_config() -> tuple[Any, Any]:
    """AQT's module of configurations, and its configuration."""
    config = importlib.import_module("aqt.jax.v2.config")
    return config, config.fully_quantized(fwd_bits=8, bwd_bits=8)
