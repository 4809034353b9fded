"""A projection of groups of rows that is yet to be computed.

A layer of experts gives it to code that computes two projections at once
(``fbq_jax.core.fused_experts``).  It has all that the layer knows: its weight, its
state, and where its new state goes.
"""

import dataclasses
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager

import jax

from fbq_jax.core.dot_call import RaggedCall, RaggedDotGeneral
from fbq_jax.core.dot_general import DotConfig
from fbq_jax.core.qtensor import QTensor
from fbq_jax.core.ragged_dot import stateful_ragged_dot
from fbq_jax.core.threshold import State


@dataclasses.dataclass(frozen=True)
class GroupedProjection:
    """The ragged dot of a layer with state, except for its rows.

    Attributes:
      config: the recipe and the implementation.
      weight: ``[G, K, N]``.  In a frozen layer only its shape and dtype are read.
      call: the other arguments of ``lax.ragged_dot``.
      state: the ``threshold.State`` of the layer.
      codes: the codes of a frozen layer's weight; None if the layer is not frozen.
      commit: takes the output, the state after a training forward and the fallback rate
        of each group, as ``stateful_ragged_dot`` returns them.  It stores the latter
        two and returns the output.
      named: names the layer in warnings about the ops that are traced in its context.
    """

    config: DotConfig
    weight: jax.Array
    call: RaggedCall
    state: Mapping[str, jax.Array]
    codes: QTensor | None
    commit: Callable[[jax.Array, State, jax.Array], jax.Array]
    named: Callable[[], AbstractContextManager[None]]

    def multiply(self, lhs: jax.Array) -> jax.Array:
        """Computes the product of rows, and updates the state."""
        with self.named():
            out, new, rates = stateful_ragged_dot(
                self.config, self.state, lhs, self.weight, self.call, self.codes
            )
        return self.commit(out, new, rates)


class GroupedDot(RaggedDotGeneral):
    """A ``RaggedDotGeneral`` that need not compute a product at once."""

    def projection(
        self, x: jax.Array, rhs: jax.Array, call: RaggedCall
    ) -> GroupedProjection | None:
        """The product of the calling layer; None if it has no state.

        Each subclass implements it.

        Args:
          x: the rows, or an array that they are computed from.
          rhs: the weight.
          call: the other arguments of ``lax.ragged_dot``.
        """
        raise NotImplementedError
