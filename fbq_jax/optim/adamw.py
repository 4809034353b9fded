"""AdamW that updates a weight and quantizes it in one kernel."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import traverse_util
from flax.core import meta

from fbq_jax.core.frozen_weight import StepWeight
from fbq_jax.core.gemms import Spec, quantize_in_layouts
from fbq_jax.kernels.adam_source import Adam, AdamScalars, AdamWeight, update
from fbq_jax.kernels.quantized import Layouts
from fbq_jax.optim.code_writer import CodeWriter, Path, entries_of, flatten


def adamw(
    learning_rate: optax.ScalarOrSchedule,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    weight_decay: float = 1e-4,
    mask: Any | Callable[[optax.Params], Any] | None = None,
    *,
    clip_norm: float | None = None,
) -> CodeWriter:
    """``optax.adamw`` that writes codes (``CodeWriter``).

    One kernel reads a weight with its gradient and moments, and writes them and the
    codes.  The state is that of ``optax.scale_by_adam``, in float32.  Results differ
    from optax's by the rounding of float32, because products are in another order.

    Args:
      learning_rate: a number or a schedule.
      b1: decay of the first moment.
      b2: decay of the second moment.
      eps: added to the square root of the second moment.
      weight_decay: decoupled weight decay, multiplied by the learning rate.
      mask: selects the parameters that decay, as in ``optax.add_decayed_weights``.
      clip_norm: the largest global norm of gradients, as in
        ``optax.clip_by_global_norm``; None for any.
    """

    def init(params: optax.Params) -> optax.ScaleByAdamState:
        zeros = jax.tree.map(lambda p: jnp.zeros_like(p, jnp.float32), params)
        twin = jax.tree.map(jnp.zeros_like, zeros)
        return optax.ScaleByAdamState(jnp.zeros((), jnp.int32), zeros, twin)

    def step(
        grads: Any, state: optax.ScaleByAdamState, params: Any, codes: Any
    ) -> tuple[Any, Any, Any]:
        count = optax.safe_increment(state.count)
        t = count.astype(jnp.float32)
        rate = learning_rate(state.count) if callable(learning_rate) else learning_rate
        scalars = AdamScalars(
            *(jnp.asarray(x, jnp.float32) for x in (rate, weight_decay)),
            1.0 - b1**t,
            1.0 - b2**t,
            _clip_factor(grads, clip_norm),
        )
        decays = flatten(_mask_of(mask, params))
        trees = [flatten(tree) for tree in (grads, params, state.mu, state.nu)]
        found = {path: (at, weight) for path, at, weight in entries_of(codes)}
        after: list[dict[Path, Any]] = [{}, {}, {}]
        new_codes = traverse_util.flatten_dict(dict(codes), is_leaf=_is_entry)
        for path in trees[0]:
            boxes = [tree[path] for tree in trees]
            grad, *old = map(meta.unbox, boxes)
            own = scalars
            if not decays[path]:
                own = own._replace(decay=jnp.zeros((), jnp.float32))
            at, weight = found.get(path, (None, None))
            state_of = AdamWeight(*old)
            if weight is None:
                new = update(grad, state_of, own, b1, b2, eps)
            else:
                new, written = _write(weight, grad, state_of, own, (b1, b2, eps))
                new_codes[at] = written
            for tree, box, value in zip(after, boxes[1:], new, strict=True):
                tree[path] = meta.replace_boxed(box, value)
        params, mu, nu = map(traverse_util.unflatten_dict, after)
        state = optax.ScaleByAdamState(count, mu, nu)
        return params, state, traverse_util.unflatten_dict(new_codes)

    return CodeWriter(init, step)


def _write(
    weight: StepWeight,
    grad: jax.Array,
    state: AdamWeight,
    scalars: AdamScalars,
    decays: tuple[float, float, float],
) -> tuple[AdamWeight, StepWeight]:
    """A weight after a step, and its codes."""
    stacked = _stacked(weight)
    shape = _matrix_shape(weight, grad.shape[stacked:])
    if shape is None:
        new = update(grad, state, scalars, *decays)
        return new, weight.of(new.weight)
    config, dtype = weight.config, weight.dtype
    spec = Spec(config.recipe, dtype, dtype, dtype, config.implementation)
    numbers = jnp.broadcast_to(jnp.stack(scalars), (shape[0], len(scalars)))
    no_seeds = jnp.zeros(shape[:1], jnp.uint32)  # nearest rounding draws no noise

    def run(grad: jax.Array, state: AdamWeight) -> tuple[AdamWeight, Layouts]:
        values, own = jax.tree.map(lambda x: x.reshape(shape), (grad, state))
        source = Adam(values, own, numbers, *decays, dtype=dtype)
        found = quantize_in_layouts(spec, source, no_seeds, spec.rhs(save=True))
        new = jax.tree.map(lambda x: x.reshape(grad.shape), found.saved)
        return new, found._replace(saved=())

    for _ in range(stacked):
        run = jax.vmap(run)
    new, codes = run(grad, state)
    return new, replace(weight, codes=codes)


def _matrix_shape(weight: StepWeight, shape: tuple[int, ...]) -> tuple[int, ...] | None:
    """The shape of a weight as ``Adam`` takes it; None if a product transposes it."""
    if weight.as_matrix is not None and len(shape) == 3:  # of gate and up
        return (1, *shape)
    contract, batch = weight.axes
    free = [axis for axis in range(len(shape)) if axis not in (*contract, *batch)]
    if [*batch, *contract, *free] != [*range(len(shape))]:
        return None
    groups = batch, contract, free
    return tuple(math.prod(shape[i] for i in axes) for axes in groups)


def _stacked(weight: StepWeight) -> int:
    """The number of leading axes of a stack of layers."""
    return jax.tree.leaves(weight.codes)[0].ndim - 3


def _is_entry(_: Path, value: Any) -> bool:
    return isinstance(value, StepWeight)


def _mask_of(mask: Any, params: Any) -> Any:
    """Whether each parameter decays."""
    if mask is None:
        return jax.tree.map(lambda _: True, params)
    return mask(params) if callable(mask) else mask


def _clip_factor(grads: Any, clip_norm: float | None) -> jax.Array:
    """What gradients are multiplied by, so that their norm is at most this."""
    if clip_norm is None:
        return jnp.ones((), jnp.float32)
    squares = [
        jnp.sum(jnp.square(g.astype(jnp.float32))) for g in jax.tree.leaves(grads)
    ]
    norm = jnp.sqrt(sum(squares))
    return jnp.where(norm > clip_norm, clip_norm / norm, 1.0)
