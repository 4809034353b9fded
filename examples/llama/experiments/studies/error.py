"""The error of a projection's input by bits, plain and with fallback."""

import jax
import jax.numpy as jnp

from examples.llama.experiments.studies import emulate
from examples.llama.experiments.studies.subject import Subject

PLAIN = tuple(range(4, 17))
FALLBACK = tuple(range(4, 11))
RATE = 0.2


def study(subject: Subject) -> dict[str, dict[str, list[float]]]:
    """The relative rms error of a token's values, its mean over tokens and layers.

    Not that of all values together, of which the outliers would be the most.

    Returns:
        By projection: "plain", for `PLAIN` bits in 128x128 blocks, and "fallback", for
        `FALLBACK` bits with a second term of as many in `RATE` of the blocks.
    """
    return {
        name: {
            "plain": [float(_error(of.x, bits, 0.0)) for bits in PLAIN],
            "fallback": [float(_error(of.x, bits, RATE)) for bits in FALLBACK],
        }
        for name, of in subject.operands.items()
    }


@jax.jit
def _error(x: jax.Array, bits: int, rate: float) -> jax.Array:
    """Of [L, M, K]."""
    values = jax.vmap(lambda x: emulate.fall_back(x, bits, rate))(x)
    lost, whole = (jnp.linalg.norm(of, axis=2) for of in (values - x, x))
    return jnp.mean(lost / jnp.maximum(whole, jnp.finfo(jnp.float32).tiny))
