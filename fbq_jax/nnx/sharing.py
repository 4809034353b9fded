"""A check that the layers of an NNX model do not share state."""

from flax import nnx

from fbq_jax.nnx.dot import FallbackConv, FallbackDot, FallbackEinsum
from fbq_jax.nnx.fp8 import Fp8Dot

OPS = (FallbackDot, FallbackEinsum, FallbackConv, Fp8Dot)


def check_unshared(model: nnx.Module) -> None:
    """Raises if two layers of a model share one op, and so its state.

    They would share one threshold.  FP8 returns new state as a gradient, and the shared
    gradient would be a sum of two states.  ``fallback_stats`` and ``freeze`` call this
    check; with ``Fp8Dot``, call it once on a new model.

    Args:
      model: a model with ``FallbackDot``, ``FallbackEinsum``, ``FallbackConv`` or
        ``Fp8Dot`` ops.

    Raises:
      ValueError: two layers share one op; the message names them.

    >>> dot, rngs = Fp8Dot(), nnx.Rngs(0)
    >>> layers = [nnx.Linear(16, 16, dot_general=dot, rngs=rngs) for _ in "12"]
    >>> check_unshared(nnx.Sequential(*layers))
    Traceback (most recent call last):
        ...
    ValueError: layers 'layers/0' and 'layers/1' share one Fp8Dot, and so its state; \
give each layer its own
    """
    owners: dict[int, str] = {}
    for path, module in nnx.iter_modules(model):
        name = "/".join(map(str, path)) or "(root)"
        for op in vars(module).values():
            if not isinstance(op, OPS):
                continue
            if (owner := owners.setdefault(id(op), name)) != name:
                raise ValueError(
                    f"layers {owner!r} and {name!r} share one {type(op).__name__}, and "
                    "so its state; give each layer its own"
                )
