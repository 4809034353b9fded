"""A layer's state: its delay threshold, and the seeds of its noise.

``fbq_jax.kernels.threshold_reference`` defines how the threshold is set and moves.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, NoReturn, TypedDict

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_batching import custom_vmap

from fbq_jax import ops
from fbq_jax.core.state_dtypes import keep_dtype
from fbq_jax.kernels.quantized import UNSET
from fbq_jax.kernels.rounding import CallSeed, MatrixSeeds, Seeds, fold, fold_seeds
from fbq_jax.recipes.schema import Recipe
from fbq_jax.sharding.layer_names import current_layer
from fbq_jax.sharding.mesh_axes import device_seed

SLOT = "dot_general"
"""The name under which a layer keeps its state."""
ROOT = "(root)"
"""The path of a layer that is a model of its own."""
# The independent noise streams of one call.
LHS_STREAM, RHS_STREAM, GRAD_STREAM, SUM_STREAM = range(4)


class State(TypedDict):
    """The scalars that a layer carries from one training forward to the next.

    Attributes:
      theta: float32, the threshold of the next forward; ``UNSET`` until it is known.
        Any negative value or NaN counts as ``UNSET``.
      rate: float32, the fallback rate of the last training forward that could fall
        back; 0 before.
      count: uint32, the number of training forwards.  Stored as float32, it starts
        anew after ``2**24``.
      seed: uint32, constant; seeds the noise of each call together with ``count``.
    """

    theta: jax.Array
    rate: jax.Array
    count: jax.Array
    seed: jax.Array


class Scalars(NamedTuple):
    """The traced scalars of one call.

    Attributes:
      theta: float32 ``[]``, the threshold of fallback, or ``UNSET``.
      seed: uint32 ``[]``, seeds the noise; of a layer with state, together with
        ``calls``.
      calls: uint32 ``[]``, the number of training forwards before, of a layer with
        state; None without state.
      rate: float32 ``[]``, the rate of the last one; None without state.
    """

    theta: jax.Array
    seed: jax.Array
    calls: jax.Array | None = None
    rate: jax.Array | None = None

    @property
    def call_seed(self) -> CallSeed:
        """Seeds the noise of X, whose quantization precedes ``apply``."""
        if self.calls is None:
            return self.seed
        return self.seed, self.calls, jnp.uint32(0)

    def later_seed(self, stats: "Stats") -> CallSeed:
        """Seeds the other noise of the call: folded, it is ``call_seed``.

        It reads the count of the stats, so that may take the old one's memory.
        """
        if self.calls is None:
            return self.seed
        return self.seed, stats.next_count, jnp.uint32(1)

    def on_device(self, *operands: jax.Array) -> "Scalars":
        """The scalars of a call on this device (``mesh_axes.device_seed``)."""
        return self._replace(seed=device_seed(self.seed, *operands))


def seeds_of(seed: CallSeed, stream: int, indices: jax.Array) -> Seeds:
    """The seeds of matrices or tiles in one of a call's streams of noise.

    Args:
      seed: of the call.
      stream: one of the streams above.
      indices: int32, the index of each matrix or tile.
    """
    indices = indices.astype(jnp.uint32)
    if not isinstance(seed, tuple):
        return fold(fold(seed, stream), indices)
    layer, calls, not_earlier = (jnp.broadcast_to(x, indices.shape) for x in seed)
    place = indices << 3 | jnp.uint32(stream << 1) | not_earlier
    return MatrixSeeds(layer, calls, place)


def frozen_seed(seed: CallSeed, dy: jax.Array) -> jax.Array:
    """The seed of the gradient's noise in a frozen layer, uint32 ``[]``.

    The state of such a layer, and so its seed, is the same in every step.  So the bits
    of dY, the gradient of its output, seed the noise as well.
    """
    bits = lax.bitcast_convert_type(dy.astype(jnp.float32), jnp.uint32)
    return fold(fold_seeds(seed), jnp.sum(bits, dtype=jnp.uint32))


class Stats(NamedTuple):
    """Measurements of the forward pass.

    Attributes:
      rate: float32 ``[]``, the fallback rate: the share of blocks that fell back.  Zero
        blocks do not count.
      theta: float32 ``[]``, the threshold that was used.  ``UNSET``, which counts as 0,
        if none was given and lhs does not determine one (it is zero, or has a NaN or an
        Inf).
      metric: float32 ``[B, ceil(M/m), ceil(K/k)]``, the criterion's value of each
        block.
      next_theta: float32 ``[]``, the threshold of the next call: theta, moved if the
        rate is outside the recipe's range.
      next_count: uint32 ``[]``, the number of training forwards with this one, which is
        1 without state.
    """

    rate: jax.Array
    theta: jax.Array
    metric: jax.Array
    next_theta: jax.Array
    next_count: jax.Array


def layer_path(path: Sequence[Any]) -> str:
    """The path of the layer that keeps its state at ``path``: ``"layers/mlp/down"``."""
    layer = path[:-1] if path[-1:] == (SLOT,) else path
    return "/".join(map(str, layer)) or ROOT


def start(recipe: Recipe, seed: jax.Array | int = 0) -> State:
    """The state before the first training forward."""
    theta = UNSET if recipe.start == "first_batch" else recipe.start
    return canonicalize_state({"theta": theta, "rate": 0, "count": 0, "seed": seed})


def canonicalize_state(state: Mapping[str, Any]) -> State:
    """Converts a state to the dtypes of ``State``; it may be all floats.

    Raises:
      ValueError: a scalar is missing, or is an array.
    """
    _check_scalars(state)
    return State(
        theta=jnp.asarray(state["theta"], jnp.float32),
        rate=jnp.asarray(state["rate"], jnp.float32),
        count=_as_count(state["count"]),
        seed=jnp.asarray(state["seed"], jnp.uint32),
    )


def _check_scalars(state: Mapping[str, Any]) -> None:
    names = [*State.__annotations__]
    shapes = {name: jnp.shape(state[name]) for name in names if name in state}
    if len(shapes) < len(names) or any(shapes.values()):
        found = [f"{name} {list(shape)}" for name, shape in shapes.items()]
        raise ValueError(
            f"the state of {current_layer() or 'a layer'} takes the scalars "
            f"{', '.join(names)}; got {', '.join(found) or 'none of them'}. Layers in "
            "nn.scan and nn.vmap have a stack of states, and so do those of a pmap: "
            "restore the state of a model with the same layers"
        )


def _as_count(count: Any) -> jax.Array:
    """A count as uint32; one that its float dtype cannot add 1 to starts anew."""
    count = jnp.asarray(count)
    if jnp.issubdtype(count.dtype, jnp.floating):
        count = count % _largest_count(count.dtype)
    return count.astype(jnp.uint32)


def _largest_count(dtype: Any) -> int:
    """The whole number up to which a dtype represents all."""
    if jnp.issubdtype(dtype, jnp.floating):
        return 2 ** (int(jnp.finfo(dtype).nmant) + 1)
    return int(jnp.iinfo(dtype).max)


def check_dtypes(state: Mapping[str, Any], layer: str) -> None:
    """Raises ValueError if the dtypes of a state are too small for training.

    With less than 24 bits for the count, the noise of steps would repeat.  Evaluation
    does not count.

    Args:
      state: a ``State``, whose arrays may have other dtypes.
      layer: the layer's name.
    """
    _check_scalars(state)
    dtype = jnp.result_type(state["theta"])
    if not jnp.issubdtype(dtype, jnp.floating) or jnp.finfo(dtype).bits < 16:
        raise ValueError(
            f"{layer}: the theta of its state is {dtype}, which cannot hold a "
            "threshold; cast it to float32, or to another float of 16 bits or more"
        )
    dtype = jnp.asarray(state["count"]).dtype
    if (largest := _largest_count(dtype)) < 2**24:
        raise ValueError(
            f"{layer}: the count of its state is {dtype}, which holds whole numbers up "
            f"to {largest} only, so its noise would repeat: leave the state out when "
            "you cast variables, or cast its count and seed to uint32"
        )


def raise_lost_state(layer: str, instead: str) -> NoReturn:
    """Raises a ValueError: a transformation of JAX itself would discard the state.

    Args:
      layer: the name of the layer.
      instead: what Flax has in place of JAX's transformations.
    """
    raise ValueError(
        f"{layer}: its state cannot leave the jax.jit, jax.checkpoint or other "
        f"transformation of JAX that the layer is called in. Use {instead}, or turn "
        "that off in the model; or give the layer None or a recipe that rounds to "
        "nearest, as recipes.rowwise does. Evaluation needs none of these"
    )


def scalars_of(state: State) -> Scalars:
    """The scalars of the next call."""
    return Scalars(state["theta"], state["seed"], state["count"], state["rate"])


def call_seed(state: State) -> jax.Array:
    """The seed of the next call's noise, uint32 ``[]``."""
    return fold_seeds(scalars_of(state).call_seed)


def next_state(state: State, stats: Stats) -> State:
    """The state after a training forward with these stats."""
    return State(
        theta=stats.next_theta,
        rate=stats.rate,
        count=stats.next_count,
        seed=state["seed"],
    )


def keep_dtypes(before: Mapping[str, Any], after: State) -> State:
    """The next state in the dtypes of the one before, as a layer stores it.

    Floats of a layer's state may be cast, together with the floats of the model.  Then
    they stay so, and the step's program with them.  Scalars in integers are uint32.
    """
    return State(
        theta=keep_dtype(before["theta"], after["theta"]),
        rate=keep_dtype(before["rate"], after["rate"]),
        count=keep_dtype(before["count"], after["count"]),
        seed=keep_dtype(before["seed"], after["seed"]),
    )


def without_fallback(scalars: Scalars, stack: int) -> Stats:
    """The stats of a call that cannot fall back: the state's theta and rate stay.

    Args:
      scalars: the scalars of the call.
      stack: the number of matrices, which have no blocks to measure.
    """
    theta, rate = scalars.theta, scalars.rate
    metric = jnp.zeros((stack, 0, 0), jnp.float32)
    rate = jnp.zeros((), jnp.float32) if rate is None else rate
    return Stats(rate, theta, metric, theta, _calls(scalars) + jnp.uint32(1))


def _calls(scalars: Scalars) -> jax.Array:
    return jnp.uint32(0) if scalars.calls is None else scalars.calls


def apply(
    scalars: Scalars,
    metric: jax.Array,
    residual_scales: jax.Array,
    recipe: Recipe,
    *,
    blocks: jax.Array | None = None,
    frozen: bool = False,
    implementation: str | None = None,
) -> tuple[jax.Array, Stats]:
    """Selects the residuals of blocks that fall back, and moves the threshold.

    Args:
      scalars: the call's scalars; their threshold quantized the activation.
      metric: float32, the metric of each block.
      residual_scales: float32, the scales of the residuals, of the shape of ``metric``.
      recipe: gives the range of the fallback rate and alpha.
      blocks: the number of blocks, int32 ``[]``, if ``metric`` also has zeros for
        blocks that do not exist; None if every value belongs to a block.
      frozen: whether the layer is frozen.  It does not wait for its threshold to move,
        and uses the residuals as they are.
      implementation: as in ``fbq_jax.ops.dispatch.choose``.

    Returns:
      The scales of the residuals, 0 for each block that does not fall back; and the
      stats, which nothing reads of a frozen layer.
    """
    middle = sum(recipe.target_rate) / 2
    if blocks is None:
        blocks = jnp.int32(metric.size)
        with jax.enable_x64(True):  # exact for any number, also one that is symbolic
            above = jnp.round(middle * blocks.astype(jnp.float64)).astype(jnp.int32)
    else:
        above = jnp.round(middle * blocks.astype(jnp.float32)).astype(jnp.int32)
    above = jnp.clip(above, 0, blocks - 1)
    moved = ops.move_threshold(
        metric[None],
        residual_scales[None],
        scalars.theta[None],
        blocks[None],
        above[None],
        _calls(scalars)[None],
        None if scalars.rate is None else scalars.rate[None],
        target_rate=recipe.target_rate,
        alpha=recipe.alpha,
        implementation=implementation,
    )
    theta, rate, next_theta, next_count = (x.reshape(()) for x in moved[:4])
    if not frozen:
        residual_scales = moved.residual_scales[0]
    next_count = _of_calls(next_count, _calls(scalars))
    return residual_scales, Stats(rate, theta, metric, next_theta, next_count)


@custom_vmap
def _of_calls(next_count: jax.Array, _calls: jax.Array) -> jax.Array:
    """The next count, which depends on the calls alone.

    Under ``vmap``, examples that share the state of a layer also share its next count.
    If each had one, the seeds made of it would seem to be the examples' own.
    """
    return next_count


@_of_calls.def_vmap
def _map_of_calls(
    _size: int, in_batched: list[bool], next_count: jax.Array, calls: jax.Array
) -> tuple[jax.Array, bool]:
    if not in_batched[1]:
        return calls + jnp.uint32(1), False
    return _of_calls(next_count, calls), True
