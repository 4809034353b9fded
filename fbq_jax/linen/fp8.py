"""FP8 in Flax Linen: ``nn.Dense(..., dot_general=fp8_dot)``."""

import dataclasses
from typing import Any, Literal, get_args

import jax
from flax.linen.fp8_ops import OVERWRITE_WITH_GRADIENT

from fbq_jax.core.arguments import DotArguments, DotGeneral
from fbq_jax.fp8 import dot_general as fp8
from fbq_jax.linen.state import (
    calling_module,
    check_state_gradient,
    find_variable,
)

ScalingMethod = Literal["delayed", "current"]


@dataclasses.dataclass(frozen=True)
class Fp8Dot(DotGeneral):
    """A ``dot_general`` in FP8 (E4M3; E5M2 for gradients) with one scale per tensor.

    ``fbq_jax.fp8.dot_general`` defines the numerics.  One object serves all layers of a
    model.

    Delayed scaling keeps the state of each layer, ``fp8.Scalings`` as a dictionary, in
    Flax's collection ``_overwrite_with_gradient`` under the layer's path.
    Differentiate with respect to the collection together with the parameters, and
    replace it by its "gradient", which is the new state.  Flax's ``TrainState`` does
    this.  Such gradients must not be summed over micro-batches, and a layer must not be
    called twice in one forward pass.  Evaluation does not change the state.

    Current scaling has no state and also works outside Linen.  For delayed scaling in
    NNX use ``fbq_jax.nnx.Fp8Dot``.

    Attributes:
      scaling: ``"delayed"`` or ``"current"``.
      history: the number of calls whose largest magnitude sets a delayed scale.

    Raises:
      ValueError: ``scaling`` is unknown, or ``history`` is not a positive integer; or,
        in a call, delayed scaling has no layer to keep its state in.

    >>> import jax.numpy as jnp
    >>> from flax import linen as nn
    >>> layer = nn.Dense(2, dot_general=Fp8Dot(history=16))
    >>> variables = jax.eval_shape(layer.init, jax.random.key(1), jnp.ones((4, 8)))
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
        # fp8.start would make arrays at import, before distributed processes connect.
        fp8.check_history(self.history)

    def _compute(
        self, lhs: jax.Array, rhs: jax.Array, arguments: DotArguments
    ) -> jax.Array:
        """Computes the product in FP8; lhs is the activation."""
        if self.scaling == "current":
            return fp8.dot_general(fp8.Scalings(), lhs, rhs, arguments)
        module = calling_module()
        if module is None:
            raise ValueError(
                "delayed scaling keeps its state in a Linen module, and none is "
                "running: use fbq_jax.nnx.Fp8Dot in NNX, or Fp8Dot(scaling='current')"
            )
        variable = find_variable(module, OVERWRITE_WITH_GRADIENT, self._start)
        state = fp8.as_float32(variable.value)
        scalings = fp8.Scalings(**{n: fp8.Scaling(**state[n]) for n in state})
        rhs = check_state_gradient(module, rhs, scalings)
        return fp8.dot_general(scalings, lhs, rhs, arguments)

    def _start(self, *_: Any) -> dict[str, dict[str, jax.Array]]:
        """The first state, as the dictionaries that Flax keeps."""
        scalings = fp8.start(self.history)._asdict()
        return {name: scaling._asdict() for name, scaling in scalings.items()}


fp8_dot = Fp8Dot()
