"""Optimizers that update a weight and quantize it in one kernel."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import traverse_util

from fbq_jax.core.frozen_weight import StepWeight
from fbq_jax.core.gemms import Spec, quantize_in_layouts
from fbq_jax.kernels.quantized import Layouts
from fbq_jax.kernels.weight_update import (
    UpdatedWeight,
    UpdateScalars,
    WeightState,
    update,
)
from fbq_jax.optim.code_writer import (
    CodeWriter,
    Path,
    flatten,
    unflatten,
    weights_by_path,
)


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
        grads: Any, state: optax.ScaleByAdamState, params: Any, codes: Any = None
    ) -> tuple[Any, Any, Any]:
        count = optax.safe_increment(state.count)
        t = count.astype(jnp.float32)
        scalars = _scalars(
            *(learning_rate, state.count, weight_decay, _clip_factor(grads, clip_norm)),
            of_mu=(b1, 1.0 - b1, 1.0 - b1**t),
            of_nu=(b2, 1.0 - b2, 1.0 - b2**t),
            eps=eps,
        )
        old = WeightState(params, state.mu, state.nu)
        new, codes = _update_all(grads, old, codes, scalars, _mask_of(mask, params))
        state = optax.ScaleByAdamState(count, new.mu, new.nu)
        return new.weight, state, codes

    return CodeWriter(init, step)


def sgd(
    learning_rate: optax.ScalarOrSchedule, *, clip_norm: float | None = None
) -> CodeWriter:
    """``optax.sgd`` without momentum that writes codes, as ``adamw`` does.

    Args:
      learning_rate: a number or a schedule.
      clip_norm: as in ``adamw``.
    """

    def init(params: optax.Params) -> optax.ScaleByScheduleState:
        del params
        return optax.ScaleByScheduleState(jnp.zeros((), jnp.int32))

    def step(
        grads: Any, state: optax.ScaleByScheduleState, params: Any, codes: Any = None
    ) -> tuple[Any, Any, Any]:
        factor = _clip_factor(grads, clip_norm)
        scalars = _scalars(learning_rate, state.count, 0.0, factor)
        decays = _mask_of(None, params)
        new, codes = _update_all(grads, WeightState(params), codes, scalars, decays)
        state = optax.ScaleByScheduleState(optax.safe_increment(state.count))
        return new.weight, state, codes

    return CodeWriter(init, step)


def _scalars(
    learning_rate: optax.ScalarOrSchedule,
    count: jax.Array,
    decay: float,
    grad_scale: jax.Array,
    of_mu: Sequence[Any] = (0.0, 0.0, 1.0),
    of_nu: Sequence[Any] = (0.0, 0.0, 1.0),
    eps: float = 0.0,
) -> UpdateScalars:
    rate = learning_rate(count) if callable(learning_rate) else learning_rate
    numbers = rate, decay, grad_scale, *of_mu, *of_nu, eps
    return UpdateScalars(*(jnp.asarray(x, jnp.float32) for x in numbers))


def _update_all(
    grads: Any, state: WeightState, codes: Any, scalars: UpdateScalars, decays: Any
) -> tuple[WeightState, Any]:
    """The parameters and moments after a step, and the codes.

    Args:
      grads: the gradients.
      state: the parameters and the moments; each field is a tree.
      codes: the codes of some parameters.
      scalars: the numbers of the step.
      decays: whether each parameter decays.
    """
    no_decay = scalars._replace(decay=jnp.zeros((), jnp.float32))
    found = weights_by_path(codes, state.weight)
    new_codes = traverse_util.flatten_dict(dict(codes), is_leaf=_is_entry)
    trees = [None if tree is None else flatten(tree) for tree in state]
    grads, paths = flatten(grads), [*flatten(state.weight)]
    for path, decays_too in zip(paths, jax.tree.leaves(decays), strict=True):
        leaves: Any = (None if tree is None else tree[path] for tree in trees)
        own = WeightState(*leaves)
        numbers = scalars if decays_too else no_decay
        weights = found.get(path, [])
        if not weights:
            new = update(grads[path], own, numbers)
        for i, (at, weight) in enumerate(weights):
            if i == 0:
                new, new_codes[at] = _write(weight, grads[path], own, numbers)
            else:  # another product with the same weight
                new_codes[at] = weight.of(new.weight)
        for tree, value in zip(trees, new, strict=True):
            if tree is not None:
                tree[path] = value
    results: Any = [
        None if tree is None else unflatten(old, tree.values())
        for old, tree in zip(state, trees, strict=True)
    ]
    return WeightState(*results), traverse_util.unflatten_dict(new_codes)


def _write(
    weight: StepWeight,
    grad: jax.Array,
    state: WeightState,
    scalars: UpdateScalars,
) -> tuple[WeightState, StepWeight]:
    """A weight after a step, and its codes."""

    def run_apart(*operands: Any) -> tuple[WeightState, Layouts]:
        new = update(*operands)
        return new, weight.of(new.weight).codes

    stacked = _stacked(weight)
    shape = _matrix_shape(weight, grad.shape[stacked:])
    run = run_apart if shape is None else _in_one_pass(weight, shape, stacked)
    operands = grad, state, scalars
    if axes := jax.typeof(grad).sharding.mesh.explicit_axes:
        # Sharding types cannot express blocks.
        shapes = jax.eval_shape(run_apart, *operands)
        shardings = jax.tree.map(lambda x: x.sharding, shapes)
        run = jax.sharding.auto_axes(run, axes=axes, out_sharding=shardings)
    new, codes = run(*operands)
    return new, replace(weight, codes=codes)


def _in_one_pass(
    weight: StepWeight, shape: tuple[int, ...], stacked: int
) -> Callable[..., tuple[WeightState, Layouts]]:
    """Updates and quantizes a weight, whose matrices in a layer have this shape."""
    config, dtype = weight.config, weight.dtype
    spec = Spec(config.recipe, dtype, dtype, dtype, config.implementation)

    def run(
        grad: jax.Array, state: WeightState, scalars: UpdateScalars
    ) -> tuple[WeightState, Layouts]:
        values, own = jax.tree.map(lambda x: x.reshape(shape), (grad, state))
        numbers = jnp.broadcast_to(jnp.stack(scalars), (shape[0], len(scalars)))
        source = UpdatedWeight(values, own, numbers, dtype)
        no_seeds = jnp.zeros(shape[:1], jnp.uint32)  # nearest rounding draws no noise
        found = quantize_in_layouts(spec, source, no_seeds, spec.rhs(save=True))
        new = jax.tree.map(lambda x: x.reshape(grad.shape), found.saved)
        return new, found._replace(saved=())

    for _ in range(stacked):
        run = jax.vmap(run, in_axes=(0, 0, None))
    return run


def _matrix_shape(weight: StepWeight, shape: tuple[int, ...]) -> tuple[int, ...] | None:
    """The shape of a weight for ``UpdatedWeight``; None if it is transposed."""
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
    """Whether each parameter decays; as in optax, a flag may be for several."""
    if mask is None:
        mask = True
    elif callable(mask):
        mask = mask(params)
    return jax.tree.map(lambda x, under: jax.tree.map(lambda _: x, under), mask, params)


def _clip_factor(grads: Any, clip_norm: float | None) -> jax.Array:
    """What gradients are multiplied by, so that their norm is at most this."""
    if clip_norm is None:
        return jnp.ones((), jnp.float32)
    squares = [
        jnp.sum(jnp.square(g.astype(jnp.float32))) for g in jax.tree.leaves(grads)
    ]
    norm = jnp.sqrt(sum(squares))
    return jnp.where(norm > clip_norm, clip_norm / norm, 1.0)
