"""AdamW with FP8 moments, for optax (arXiv 2409.12517).

The moments ``m`` and ``v`` are stored in FP8; the update itself runs in float32.  With
a gradient ``g``, step ``t`` and stored moments ``m~`` and ``v~``:

    m = b1 m~ + (1 - b1) g        u = (m / (1 - b1^t)) / (sqrt(v / (1 - b2^t)) + eps)
    v = b2 v~ + (1 - b2) g^2      v~ = E5M2(v)    m~ = E4M3(m) where v~ > 0, else 0

Each tensor has one scale, which maps its largest magnitude to the format's largest
finite value: 448 in E4M3 (240 on the paper's hardware) and 57344 in E5M2.  Gradients
beyond ``2**63`` in magnitude count as ``2**63``, because their squares could overflow
float32; an Inf or a NaN stays.

**Range.**  The update divides by the second moment, which therefore takes E5M2's wider
range.  ``v~`` is 0 where gradients stay below 1/87000 of their tensor's largest
gradient.  There ``m~`` is 0 as well, although E4M3 represents more: a next gradient
that is much smaller than ``m~`` would give a step of up to ``m~ / eps``.

**Rounding and b2.**  E5M2 has two mantissa bits, so neighbours are 12 to 25 % apart,
and nearest rounding undoes any change of ``v`` by less than half of that.  With
``b2 = 0.95``, the paper's value, ``v`` grows once ``g^2`` reaches about ``3.5 v``; with
0.999, only at about ``100 v``.  It shrinks only with its tensor's scale: after a few
large gradients, a weight's steps stay small.  With 0.95 training matches float32 if
there are no such gradients.  With 0.999, ``v`` lags behind.  Under stochastic rounding
it neither lags behind nor stays large.

**A gradient that is not finite** makes all moments of its tensor NaN, because they
share a scale: wrap the optimizer in ``optax.apply_if_finite``.

**Casts.**  Each update stores moments, scales and master weights in their own dtypes,
also if the state before was cast to others.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from fbq_jax.fp8 import scaled_tensor
from fbq_jax.fp8.scaled_tensor import ScaledTensor
from fbq_jax.kernels.rounding import ROUNDINGS, Rounding, fold
from fbq_jax.recipes.numbers_in_float32 import is_number, is_positive_float32

MU_STREAM, NU_STREAM = range(2)

# Squares of larger gradients could overflow float32.
MAX_GRADIENT = 2.0**63


class Fp8AdamState(NamedTuple):
    """The state of ``scale_by_fp8_adam``: 2 bytes per parameter and 8 per tensor.

    Attributes:
      count: int32 ``[]``, the number of updates.
      mu: first moments, ``ScaledTensor`` in float8_e4m3fn.
      nu: second moments, ``ScaledTensor`` in float8_e5m2.
    """

    count: jax.Array  # type: ignore[assignment] # optax's name, and a tuple's method
    mu: optax.Updates
    nu: optax.Updates


class MasterWeightsState(NamedTuple):
    """The state of ``with_master_weights``.

    Attributes:
      master: the parameters, in float32 or as ``ScaledTensor`` in float16.
      inner: the state of the wrapped transformation.
    """

    master: optax.Params
    inner: optax.OptState


def fp8_adamw(
    learning_rate: optax.ScalarOrSchedule,
    b1: float = 0.9,
    b2: float = 0.95,
    eps: float = 1e-8,
    weight_decay: optax.ScalarOrSchedule = 1e-4,
    mask: Any | Callable[[optax.Params], Any] | None = None,
    *,
    rounding: Rounding = "nearest",
    master_dtype: jax.typing.DTypeLike | None = None,
) -> optax.GradientTransformationExtraArgs:
    """``optax.adamw`` with FP8 moments.

    Args:
      learning_rate: a number or a schedule.
      b1: decay of the first moment.
      b2: decay of the second moment.  Above 0.95, or if gradients have spikes, use
        stochastic rounding.
      eps: added to the square root of the second moment.
      weight_decay: decoupled weight decay, multiplied by the learning rate.
      mask: selects the parameters that decay, as in ``optax.add_decayed_weights``.
      rounding: rounding of the moments, ``"nearest"`` or ``"stochastic"``.
      master_dtype: float32 or float16 keeps a copy of the parameters in the state, to
        which the updates apply (``with_master_weights``); None keeps none.

    Raises:
      ValueError: ``rounding`` or ``master_dtype`` is not one of these, or a number is
        out of range.

    >>> params = {"w": jnp.array([3.0, -2.0])}
    >>> optimizer = fp8_adamw(0.1)
    >>> state = optimizer.init(params)
    >>> grads = {"w": jnp.array([1.0, 0.5])}
    >>> updates, state = jax.jit(optimizer.update)(grads, state, params)
    >>> jax.tree.map(jnp.shape, state[0].nu["w"]), state[0].nu["w"].values.dtype
    (ScaledTensor(values=(2,), scale=()), dtype(float8_e5m2))
    """
    optimizer = optax.chain(
        scale_by_fp8_adam(b1, b2, eps, rounding=rounding),
        optax.add_decayed_weights(weight_decay, mask),
        optax.scale_by_learning_rate(learning_rate),
    )
    if master_dtype is None:
        return optimizer
    return with_master_weights(optimizer, master_dtype)


def scale_by_fp8_adam(
    b1: float = 0.9,
    b2: float = 0.95,
    eps: float = 1e-8,
    *,
    rounding: Rounding = "nearest",
) -> optax.GradientTransformation:
    """``optax.scale_by_adam`` with FP8 moments.

    The count of updates seeds the noise of stochastic rounding.

    Args:
      b1: decay of the first moment.
      b2: decay of the second moment.  Above 0.95, or if gradients have spikes, use
        stochastic rounding.
      eps: added to the square root of the second moment.
      rounding: rounding of the moments, ``"nearest"`` or ``"stochastic"``.

    Raises:
      ValueError: ``rounding`` is not one of these, or a number is out of range.
    """
    if rounding not in ROUNDINGS:
        raise ValueError(f"rounding must be one of {ROUNDINGS}; got {rounding!r}")
    # Arrays, which ``optax.inject_hyperparams`` passes, have no values yet.
    for name, value in {"b1": b1, "b2": b2}.items():
        if is_number(value) and not (0 <= value < 1 and np.float32(value) < 1):
            raise ValueError(
                f"{name} takes a number from 0 to below 1, in float32; got {value!r}"
            )
    if is_number(eps) and eps != 0 and not is_positive_float32(eps):
        raise ValueError(
            f"eps takes 0 or a number above it that float32 can represent; got {eps!r}"
        )

    def init(params: optax.Params) -> Fp8AdamState:
        _check_is_real("fp8_adamw", params)
        zeros = jax.tree.map(lambda p: jnp.zeros_like(p, jnp.float32), params)
        return _store_moments(jnp.zeros((), jnp.int32), zeros, zeros, rounding)

    def update(
        updates: optax.Updates, state: Fp8AdamState, params: optax.Params | None = None
    ) -> tuple[optax.Updates, Fp8AdamState]:
        del params
        count = optax.safe_increment(state.count)
        t = count.astype(jnp.float32)

        def direction(g: jax.Array, m: jax.Array, v: jax.Array) -> jax.Array:
            m, v = m / (1.0 - b1**t), v / (1.0 - b2**t)
            return (m / (jnp.sqrt(v) + eps)).astype(g.dtype)

        mu = _decay_moments(updates, state.mu, 1, b1)
        nu = _decay_moments(updates, state.nu, 2, b2)
        new = _store_moments(count, mu, nu, rounding)
        return jax.tree.map(direction, updates, mu, nu), new

    return optax.GradientTransformation(init, update)


def _check_is_real(optimizer: str, params: optax.Params) -> None:
    """Raises TypeError if a parameter is complex."""
    for leaf in jax.tree.leaves(params):
        if jnp.iscomplexobj(leaf):
            raise TypeError(
                f"{optimizer} takes real parameters; got {leaf.dtype}, whose moments "
                "would lose the imaginary part"
            )


def _decay_moments(
    grads: optax.Updates, stored: optax.Updates, order: int, decay: float
) -> optax.Updates:
    """``decay * stored + (1 - decay) * g^order`` in float32."""

    def step(g: jax.Array, old: Any) -> jax.Array:
        g = g.astype(jnp.float32)
        clipped = jnp.clip(g, -MAX_GRADIENT, MAX_GRADIENT)
        new = jnp.where(jnp.isfinite(g), clipped, g) ** order
        return decay * _dequantize(old) + (1.0 - decay) * new

    return jax.tree.map(step, grads, stored)


def _dequantize(stored: Any) -> jax.Array:
    """A ``ScaledTensor`` in float32, also as a mapping, as ``nnx.Optimizer`` has it."""
    if not isinstance(stored, ScaledTensor):
        stored = ScaledTensor(*(stored[name] for name in ScaledTensor._fields))
    return stored.dequantize()


def _store_moments(
    count: jax.Array, mu: optax.Updates, nu: optax.Updates, rounding: Rounding
) -> Fp8AdamState:
    """Rounds both moments to FP8; the first is 0 where the second is."""

    def store(tree: optax.Updates, dtype: Any, stream: int) -> list[ScaledTensor]:
        seed = fold(count.astype(jnp.uint32), stream)
        return [
            scaled_tensor.quantize(
                x, dtype, fold(seed, i) if rounding == "stochastic" else None
            )
            for i, x in enumerate(jax.tree.leaves(tree))
        ]

    second = store(nu, jnp.float8_e5m2, NU_STREAM)
    first = [
        m._replace(values=jnp.where(v.values == 0, jnp.zeros_like(m.values), m.values))
        for m, v in zip(store(mu, jnp.float8_e4m3fn, MU_STREAM), second, strict=True)
    ]
    structure = jax.tree.structure(nu)
    return Fp8AdamState(
        count,
        jax.tree.unflatten(structure, first),
        jax.tree.unflatten(structure, second),
    )


def with_master_weights(
    inner: optax.GradientTransformation, dtype: jax.typing.DTypeLike
) -> optax.GradientTransformationExtraArgs:
    """Keeps a copy of the parameters with more bits than the model's own.

    ``inner`` reads float32 gradients and the copy, and its updates apply to the copy.
    The returned updates move the model's parameters to the copy's values, rounded to
    the model's dtype (to within one last bit; the error does not accumulate).

    A float16 copy has one scale per tensor, as in the paper (arXiv 2409.12517).  It has
    11 bits, so it loses an update below 2**-12 of its parameter.

    Args:
      inner: any transformation.
      dtype: dtype of the copy, float32 or float16.

    Raises:
      ValueError: ``dtype`` is another dtype, or ``update`` is called without params.

    >>> optimizer = with_master_weights(optax.sgd(1e-3), jnp.float32)
    >>> params = jnp.ones(1, jnp.bfloat16)
    >>> state = optimizer.init(params)
    >>> for _ in range(4):  # 1 - 0.001 is 1 in bfloat16
    ...     updates, state = optimizer.update(params, state, params)
    ...     params = optax.apply_updates(params, updates)
    >>> params, state.master
    (Array([0.996094], dtype=bfloat16), Array([0.9960078], dtype=float32))
    """
    dtype = jnp.dtype(dtype)
    if dtype not in (jnp.float32, jnp.float16):
        raise ValueError(f"master weights must be float32 or float16; got {dtype}")
    inner = optax.with_extra_args_support(inner)

    def init(params: optax.Params) -> MasterWeightsState:
        # A copy even of float32 parameters: a step may donate both.
        _check_is_real("with_master_weights", params)
        exact = jax.tree.map(lambda p: jnp.array(p, jnp.float32), params)
        return MasterWeightsState(_store_master(exact, dtype), inner.init(exact))

    def update(
        updates: optax.Updates,
        state: MasterWeightsState,
        params: optax.Params | None = None,
        **extra: Any,
    ) -> tuple[optax.Updates, MasterWeightsState]:
        if params is None:
            raise ValueError("with_master_weights needs params: pass them to update")
        before = _load_master(state.master, params, dtype)
        grads = optax.tree.cast(updates, jnp.float32)
        moves, inner_state = inner.update(grads, state.inner, before, **extra)
        master = _store_master(optax.apply_updates(before, moves), dtype)
        after = optax.tree.cast_like(_load_master(master, params, dtype), params)
        moves = jax.tree.map(lambda new, old: new - old, after, params)
        return moves, MasterWeightsState(master, inner_state)

    return optax.GradientTransformationExtraArgs(init, update)


def _store_master(params: optax.Params, dtype: Any) -> optax.Params:
    """Float32 parameters as the copy holds them."""
    if dtype == jnp.float32:
        return params
    return jax.tree.map(lambda p: scaled_tensor.quantize(p, dtype), params)


def _load_master(master: optax.Params, like: optax.Params, dtype: Any) -> optax.Params:
    """The copy in float32; ``like`` has the structure of the parameters."""
    if dtype == jnp.float32:
        return optax.tree.cast(master, jnp.float32)  # may have been cast
    return jax.tree.map(lambda _, m: _dequantize(m), like, master)
