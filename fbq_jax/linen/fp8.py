"""FP8 in Flax Linen: ``nn.Dense(..., dot_general=fp8_dot)``."""

import dataclasses
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
from flax.linen.fp8_ops import OVERWRITE_WITH_GRADIENT

from fbq_jax.core.dimension_numbers import DimensionNumbers
from fbq_jax.fp8 import dot_general as fp8
from fbq_jax.linen.state import calling_module, find_slot

ScalingMethod = Literal["delayed", "current"]


@dataclasses.dataclass(frozen=True)
class Fp8Dot:
    """A ``dot_general`` in FP8 with a scale a tensor: E4M3, and E5M2 for gradients.

    The numerics are those of ``fbq_jax.fp8.dot_general``.  One object serves a whole
    model.

    Delayed scaling keeps each layer's state, ``fp8.Scalings`` as a dictionary, under
    the layer's path in Flax's collection ``_overwrite_with_gradient``.  Differentiate
    with respect to it together with the parameters, and put its "gradient", the new
    state, in its place, as Flax's ``TrainState`` does, and MaxText for models in Linen.
    Such gradients must not be summed over micro-batches, nor a layer be used twice in
    one forward.  Evaluation leaves the state alone.  Current scaling has no state, and
    works outside Linen too; delayed scaling in NNX is ``fbq_jax.nnx.Fp8Dot``.

    Attributes:
      scaling: ``"delayed"`` or ``"current"``.
      history: the number of calls whose largest value sets a delayed scale.

    >>> from flax import linen as nn
    >>> layer = nn.Dense(8, dot_general=Fp8Dot(history=16))
    >>> variables = jax.jit(layer.init)(jax.random.key(1), jnp.ones((4, 16)))
    >>> jax.tree.map(jnp.shape, variables["_overwrite_with_gradient"]["dot_general"])
    ... # doctest: +NORMALIZE_WHITESPACE
    {'grad': {'amax_history': (16,), 'scale': ()},
     'lhs': {'amax_history': (16,), 'scale': ()},
     'rhs': {'amax_history': (16,), 'scale': ()}}
    """

    scaling: ScalingMethod = "delayed"
    history: int = 1024

    def __post_init__(self) -> None:
        if self.scaling not in get_args(ScalingMethod):
            raise ValueError(
                f"Fp8Dot.scaling takes one of {get_args(ScalingMethod)}; got "
                f"{self.scaling!r}"
            )
        # Not by making one: fp8_dot is made before processes meet.
        fp8.check_history(self.history)

    def __call__(
        self,
        lhs: jax.Array,
        rhs: jax.Array,
        dimension_numbers: DimensionNumbers,
        precision: Any = None,
        preferred_element_type: jax.typing.DTypeLike | None = None,
        *,
        out_sharding: Any = None,
    ) -> jax.Array:
        """``lax.dot_general(lhs, rhs, ...)`` in FP8; lhs is the activation."""
        scalings = self._state() if self.scaling == "delayed" else None
        return fp8.dot_general(
            scalings,
            lhs,
            rhs,
            dimension_numbers,
            precision,
            preferred_element_type,
            out_sharding,
        )

    def _state(self) -> fp8.Scalings:
        module = calling_module()
        if module is None:
            raise ValueError(
                "delayed scaling keeps its state in a Linen module; NNX has "
                "fbq_jax.nnx.Fp8Dot, and elsewhere there is Fp8Dot(scaling='current')"
            )
        variable = find_slot(module, OVERWRITE_WITH_GRADIENT, self._start)
        state = jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), variable.value)
        return fp8.Scalings(**{name: fp8.Scaling(**state[name]) for name in state})

    def _start(self, *_: Any) -> dict[str, dict[str, jax.Array]]:
        scalings = fp8.start(self.history)._asdict()
        return {name: scaling._asdict() for name, scaling in scalings.items()}


fp8_dot = Fp8Dot()
