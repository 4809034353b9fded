"""A check that the layers of an NNX model do not share state."""

from typing import Any

from flax import nnx

from fbq_jax.model_kind import check_nnx
from fbq_jax.nnx.dot import LAYER_OPS, FallbackConv, FallbackDot, FallbackEinsum
from fbq_jax.nnx.fp8 import Fp8Dot

OPS = (FallbackDot, FallbackEinsum, FallbackConv, Fp8Dot)
# The attributes of layers that hold their ops.
_NAMES = {op.name for op in LAYER_OPS.values()}


def check_unshared(model: nnx.Module) -> None:
    """Raises if two layers of a model share one op, and so its state.

    They would share one threshold.  FP8 returns new state as a gradient, and the shared
    gradient would be a sum of two states.  ``fallback_stats`` and ``freeze`` call this
    check; with ``Fp8Dot``, call it once on a new model.

    Args:
      model: a model with ``FallbackDot``, ``FallbackEinsum``, ``FallbackConv`` or
        ``Fp8Dot`` ops.

    Raises:
      TypeError: the model is not one of NNX.
      ValueError: two layers share one op; the message names them.

    >>> dot, rngs = Fp8Dot(), nnx.Rngs(0)
    >>> layers = [nnx.Linear(16, 16, dot_general=dot, rngs=rngs) for _ in "12"]
    >>> check_unshared(nnx.Sequential(*layers))
    Traceback (most recent call last):
        ...
    ValueError: layers 'layers/0' and 'layers/1' share one Fp8Dot, and so its state; \
give each layer its own
    """
    check_nnx("check_unshared", model, in_linen=False)
    holders: dict[int, tuple[Any, list[Any], list[Any]]] = {}
    for path, module in nnx.iter_modules(model):
        for name, op in vars(module).items():
            if isinstance(op, OPS):
                _, layers, others = holders.setdefault(id(op), (op, [], []))
                (layers if name in _NAMES else others).append(path)
    for op, layers, others in holders.values():
        # A module may keep the op of a layer inside it.
        found = layers + [
            path
            for path in others
            if not any(layer[: len(path)] == path for layer in layers)
        ]
        if len(found) > 1:
            first, second = ("/".join(map(str, p)) or "(root)" for p in found[:2])
            raise ValueError(
                f"layers {first!r} and {second!r} share one {type(op).__name__}, and "
                "so its state; give each layer its own"
            )
