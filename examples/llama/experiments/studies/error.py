"""The error of a projection's input by bits, with and without fallback."""

import jax
import jax.numpy as jnp

from examples.llama.experiments.studies import emulate
from examples.llama.experiments.studies.subject import Subject

PLAIN = tuple(range(4, 17))
FALLBACK = tuple(range(4, 11))
RATE = 0.2


def study(subject: Subject) -> dict[str, dict[str, list[float]]]:
    """Measures the relative rms error of a token, averaged over tokens and layers.

    The error of all values together would be dominated by the outliers.

    Returns:
        By projection: "plain", the errors for `PLAIN` bits in 128x128 blocks; and
        "fallback", the errors for `FALLBACK` bits with a second term of as many bits
        in a fraction `RATE` of the blocks.
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
    """The mean error of the tokens of ``x`` [L, M, K]."""
    values = jax.vmap(lambda x: emulate.fall_back(x, bits, rate))(x)
    error, norm = jnp.linalg.norm(values - x, axis=2), jnp.linalg.norm(x, axis=2)
    return jnp.mean(error / jnp.maximum(norm, jnp.finfo(jnp.float32).tiny))
