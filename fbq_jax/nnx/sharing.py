"""Each layer of an NNX model has state of its own."""

from flax import nnx

from fbq_jax.nnx.dot import FallbackConv, FallbackDot, FallbackEinsum
from fbq_jax.nnx.fp8 import Fp8Dot

OPS = (FallbackDot, FallbackEinsum, FallbackConv, Fp8Dot)


def check_unshared(model: nnx.Module) -> None:
    """Raises where two layers of a model have one op, and so one state between them.

    One threshold would serve both, and of FP8's states, which come out as gradients,
    each would be the sum of two.  ``fallback_stats`` and ``freeze`` call it; with
    ``Fp8Dot``, call it once on the model that you made.

    Args:
      model: with any of ``FallbackDot``, ``FallbackEinsum``, ``FallbackConv`` and
        ``Fp8Dot``.

    Raises:
      ValueError: names two layers that share one.

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
