"""AdamW with FP8 moments, for optax (arXiv 2409.12517).

With ``g`` a gradient, moments ``m`` and ``v`` that are read and written in FP8, and
AdamW's own step in float32 between,

    m = b1 m~ + (1 - b1) g        u = (m / (1 - b1^t)) / (sqrt(v / (1 - b2^t)) + eps)
    v = b2 v~ + (1 - b2) g^2      m~ = E4M3(m)    v~ = E5M2(v)

Each tensor has a scale of its own, which takes its largest magnitude to the format's
largest finite value: 448 in E4M3 (the paper's hardware has 240) and 57344 in E5M2.

**Range.**  The second moment is divided by, hence E5M2.  Gradients that stay below
1/87000 of their tensor's largest still have a ``v~`` of 0, and above 1/460000 an ``m~``
that is not 0: should the next gradient be exactly 0, the step is ``m / eps``.

**Rounding and b2.**  E5M2 has two bits of mantissa: neighbours are 12 to 25 % apart,
and nearest rounding takes back what moves ``v`` by less than half of that.  With
``b2 = 0.95``, the authors', a ``g^2`` of some 3.5 ``v`` moves it up, with 0.999 only
one of some 100 ``v``; what moves it down is its tensor's scale alone.  That trains as
float32 does with 0.95, but leaves ``v`` behind with 0.999, where stochastic rounding
does not.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from fbq_jax.fp8 import scaled_tensor
from fbq_jax.fp8.scaled_tensor import ScaledTensor
from fbq_jax.kernels.rounding import ROUNDINGS, Rounding, fold

MU_STREAM, NU_STREAM = range(2)


class Fp8AdamState(NamedTuple):
    """2 bytes a parameter, and 8 a tensor.

    Attributes:
      count: int32 ``[]``, the number of updates.
      mu: first moments, ``ScaledTensor`` of float8_e4m3fn.
      nu: second moments, ``ScaledTensor`` of float8_e5m2.
    """

    count: jax.Array  # type: ignore[assignment] # optax's name, and a tuple's method
    mu: optax.Updates
    nu: optax.Updates


class MasterWeightsState(NamedTuple):
    """What ``with_master_weights`` keeps.

    Attributes:
      master: the parameters, in float32 or as ``ScaledTensor`` of float16.
      inner: the state of the transformation inside.
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
    """``optax.adamw`` with its moments in FP8.

    Args:
      learning_rate: a number or a schedule.
      b1: decay of the first moment.
      b2: decay of the second moment; above 0.95 stochastic rounding is the better one.
      eps: added to the root of the second moment.
      weight_decay: decoupled, and multiplied by the learning rate.
      mask: of ``optax.add_decayed_weights``: what decays.
      rounding: of the moments, ``"nearest"`` or ``"stochastic"``.
      master_dtype: float32 or float16 for a copy of the parameters in the state, which
        the updates go to (``with_master_weights``); None for none.

    Raises:
      ValueError: there is no such rounding or master dtype.

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
    """``optax.scale_by_adam`` with its moments in FP8; the arguments of ``fp8_adamw``.

    The noise of stochastic rounding is drawn from the count of updates.
    """
    if rounding not in ROUNDINGS:
        raise ValueError(f"rounding takes one of {ROUNDINGS}; got {rounding!r}")
    noisy = rounding == "stochastic"

    def store(tree: optax.Updates, dtype: Any, seed: jax.Array) -> optax.Updates:
        leaves, structure = jax.tree.flatten(tree)
        stored = [
            scaled_tensor.quantize(x, dtype, fold(seed, i) if noisy else None)
            for i, x in enumerate(leaves)
        ]
        return jax.tree.unflatten(structure, stored)

    def store_state(
        count: jax.Array, mu: optax.Updates, nu: optax.Updates
    ) -> Fp8AdamState:
        seed = count.astype(jnp.uint32)
        return Fp8AdamState(
            count,
            store(mu, jnp.float8_e4m3fn, fold(seed, MU_STREAM)),
            store(nu, jnp.float8_e5m2, fold(seed, NU_STREAM)),
        )

    def init(params: optax.Params) -> Fp8AdamState:
        zeros = jax.tree.map(lambda p: jnp.zeros_like(p, jnp.float32), params)
        return store_state(jnp.zeros((), jnp.int32), zeros, zeros)

    def update(
        updates: optax.Updates, state: Fp8AdamState, params: optax.Params | None = None
    ) -> tuple[optax.Updates, Fp8AdamState]:
        del params
        count = optax.safe_increment(state.count)
        t = count.astype(jnp.float32)

        def moment(order: int, decay: float, stored: optax.Updates) -> optax.Updates:
            def step(g: jax.Array, old: ScaledTensor) -> jax.Array:
                new = g.astype(jnp.float32) ** order
                return decay * old.dequantize() + (1.0 - decay) * new

            return jax.tree.map(step, updates, stored)

        def direction(g: jax.Array, m: jax.Array, v: jax.Array) -> jax.Array:
            m, v = m / (1.0 - b1**t), v / (1.0 - b2**t)
            return (m / (jnp.sqrt(v) + eps)).astype(g.dtype)

        mu, nu = moment(1, b1, state.mu), moment(2, b2, state.nu)
        new = store_state(count, mu, nu)
        return jax.tree.map(direction, updates, mu, nu), new

    return optax.GradientTransformation(init, update)


def with_master_weights(
    inner: optax.GradientTransformation, dtype: jax.typing.DTypeLike
) -> optax.GradientTransformationExtraArgs:
    """Keeps parameters of more bits than those that the model computes with.

    ``inner`` sees gradients and parameters in float32 and its updates go to the copy;
    what comes out takes the model's parameters to the copy's values, rounded to theirs
    (to a last bit, which no later step builds on).  A float16 copy has a scale a tensor
    (the paper's, arXiv 2409.12517): 11 bits, so that an update below 2**-12 of its
    parameter is lost.

    Args:
      inner: any transformation.
      dtype: float32 or float16.

    Raises:
      ValueError: another dtype.

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
        raise ValueError(f"master weights are of float32 or float16; got {dtype}")
    inner = optax.with_extra_args_support(inner)
    narrow = dtype != jnp.float32

    def store(params: optax.Params) -> optax.Params:
        if not narrow:
            return params
        return jax.tree.map(lambda p: scaled_tensor.quantize(p, dtype), params)

    def load(like: optax.Params, master: optax.Params) -> optax.Params:
        if not narrow:
            return master
        return jax.tree.map(lambda _, m: m.dequantize(), like, master)

    def init(params: optax.Params) -> MasterWeightsState:
        # Copied even if they are float32: a step may donate both.
        exact = jax.tree.map(lambda p: jnp.array(p, jnp.float32), params)
        return MasterWeightsState(store(exact), inner.init(exact))

    def update(
        updates: optax.Updates,
        state: MasterWeightsState,
        params: optax.Params | None = None,
        **extra: Any,
    ) -> tuple[optax.Updates, MasterWeightsState]:
        if params is None:
            raise ValueError("with_master_weights moves params: pass them to update")
        before = load(params, state.master)
        grads = optax.tree.cast(updates, jnp.float32)
        moves, inner_state = inner.update(grads, state.inner, before, **extra)
        master = store(optax.apply_updates(before, moves))
        after = optax.tree.cast_like(load(params, master), params)
        moves = jax.tree.map(lambda new, old: new - old, after, params)
        return moves, MasterWeightsState(master, inner_state)

    return optax.GradientTransformationExtraArgs(init, update)
