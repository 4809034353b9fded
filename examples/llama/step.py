"""One training step, its state, and validation.

Quantized layers keep their thresholds in the collection "fallback". A step treats it
like batch statistics: `apply` receives it as mutable and returns the updated one.
Delayed FP8 keeps its scales in Flax's overwrite-with-gradient collection, whose
gradient is the new state.

Experts add two losses to the cross-entropy: one that balances their load, with the
weight of the model's configuration, and the router's z-loss (ST-MoE), with `Z_LOSS`.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeAlias

import flax.struct
import flax.traverse_util
import jax
import jax.numpy as jnp
import optax
from flax.linen.fp8_ops import OVERWRITE_WITH_GRADIENT

from examples.llama import mesh
from examples.llama.config import Config
from examples.llama.model import Llama
from examples.llama.model_config import LlamaConfig
from fbq_jax import FallbackDot, fallback_stats, optim, quantize_weights_once

EVAL_BATCHES = 8
Z_LOSS = 0.001  # the weight of the z-loss of ST-MoE and of OLMoE (arXiv 2409.02060)
PyTree = Any
Metrics = dict[str, Any]
Optimizer: TypeAlias = optax.GradientTransformation | optim.CodeWriter


@flax.struct.dataclass
class TrainState:
    """The state that a step updates and, without the codes, a checkpoint stores."""

    step: jax.Array  # the number of steps taken, int32 []
    params: PyTree  # the master weights, float32
    fallback: PyTree  # the state of INT8 layers; empty if there are none
    overwritten: PyTree  # the state of FP8 layers with delayed scaling, or empty
    opt_state: optax.OptState  # the optimizer's moments
    # The INT8 weights that the optimizer writes; empty if the layers make them.
    codes: PyTree = flax.struct.field(default_factory=dict)

    def variables(self) -> dict[str, PyTree]:
        """Returns the variables of the model."""
        state = {"fallback": self.fallback, OVERWRITE_WITH_GRADIENT: self.overwritten}
        return {"params": self.params, **state, **self.codes}

    def stats(self) -> dict[str, Any]:
        """Returns rate, theta and count of each quantized layer, on the host."""
        return jax.device_get(fallback_stats({"fallback": self.fallback}))


def make_optimizer(config: Config) -> tuple[Optimizer, optax.Schedule]:
    """Returns AdamW with clipping, and its schedule: linear warmup, cosine decay."""
    writes_codes = bool(config.optimizer_codes)
    options = config.steps, config.lr, config.clip, config.moments, writes_codes
    return _optimizer(*options)


# Cached, so that runs with the same optimizer or model share one compiled program.
@functools.lru_cache(maxsize=4)
def _optimizer(
    steps: int, lr: float, clip: float, moments: str, writes_codes: bool
) -> tuple[Optimizer, optax.Schedule]:
    warmup = steps // 10
    schedule = optax.warmup_cosine_decay_schedule(
        lr / (warmup + 1), lr, warmup, decay_steps=steps, end_value=lr / 10
    )

    def is_matrix(path: tuple[Any, ...], _: jax.Array) -> bool:
        # The rank does not tell: stacked norms and biases also have two axes.
        return path[-1].key in ("kernel", "embedding")

    decayed = partial(jax.tree.map_with_path, is_matrix)
    adamw = optim.fp8_adamw if moments == "fp8" else optax.adamw
    optimizer = optax.chain(
        optax.clip_by_global_norm(clip) if clip else optax.identity(),
        adamw(schedule, b1=0.9, b2=0.95, weight_decay=0.1, mask=decayed),
    )
    return optim.with_codes(optimizer) if writes_codes else optimizer, schedule


def init_state(
    model: Llama, optimizer: Optimizer, weights: PyTree | None, seed: int
) -> TrainState:
    """Returns the state before the first step, with new weights if they are None."""
    init, key = make_initializer(model, optimizer), jax.random.key(seed)
    # Explicit shardings, as a restored state has, so that both use the same program.
    shardings = mesh.shardings(jax.eval_shape(init, key, weights))
    if weights is not None:
        weights = jax.tree.map(jax.device_put, weights, shardings.params)
    return jax.jit(init, out_shardings=shardings)(key, weights)


@functools.lru_cache(maxsize=4)
def make_initializer(model: Llama, optimizer: Optimizer) -> Callable[..., TrainState]:
    """Returns a function from a key, and weights or None, to `init_state`'s result."""

    def init(key: jax.Array, weights: PyTree | None) -> TrainState:
        variables = model.init(key, _any_tokens(model))
        # Copied, because a step donates the memory of its state.
        params = variables["params"]
        if weights is not None:
            params = jax.tree.map(jnp.copy, weights)
        return TrainState(
            step=jnp.zeros((), jnp.int32),
            params=params,
            fallback=variables.get("fallback", {}),
            overwritten=variables.get(OVERWRITE_WITH_GRADIENT, {}),
            opt_state=optimizer.init(params),
        )

    return init


def _any_tokens(model: Llama) -> jax.Array:
    """Tokens for calls of which only shapes matter."""
    # Over several devices each shard of the batch is a whole block; otherwise ops would
    # warn of shards that no training step has.
    shards = mesh.shards("batch")
    length = min(128, model.config.max_seq_len) if shards > 1 else 1
    return jnp.zeros((shards, length), jnp.int32)


def add_codes(model: Llama, optimizer: Optimizer, state: TrainState) -> TrainState:
    """Returns a new or restored state with codes, if the optimizer writes them."""
    if not isinstance(optimizer, optim.CodeWriter):
        return state
    return dataclasses.replace(state, codes=_make_codes(model, state.variables()))


@functools.partial(jax.jit, static_argnums=0)
def _make_codes(model: Llama, variables: PyTree) -> PyTree:
    codes = quantize_weights_once(model, variables, _any_tokens(model))
    return mesh.constrain(codes)


@functools.lru_cache(maxsize=4)
def make_train_step(
    model: Llama, optimizer: Optimizer, schedule: optax.Schedule
) -> jax.stages.Wrapped:
    """Returns the jitted training step, ``(state, tokens) -> (state, metrics)``.

    ``tokens`` is int32 [N, B/N, S+1]. The step averages the gradients of microbatches,
    each of which also updates the state of the layers. The old state is donated.
    """

    # With what it does not read, such as fallback rates, the state stays in its place.
    @partial(jax.jit, donate_argnums=0, keep_unused=True)
    def train_step(state: TrainState, tokens: jax.Array) -> tuple[TrainState, Metrics]:
        carry, measured = _accumulate(model, state, tokens)
        fallback, overwritten, total = carry
        grads = optax.tree.scale(1 / tokens.shape[0], total)
        old, codes = (state.opt_state, state.params), state.codes
        if isinstance(optimizer, optim.CodeWriter):
            params, opt_state, codes = optimizer.update(grads, *old, codes)
        else:
            updates, opt_state = optimizer.update(grads, *old)
            params = optax.apply_updates(state.params, updates)
        new = TrainState(
            step=state.step + 1,
            params=params,
            fallback=fallback,
            overwritten=overwritten,
            opt_state=opt_state,
            codes=codes,
        )
        new = mesh.constrain(new)
        # Copied to the metrics, because the next step donates the state.
        fallback_metrics = {
            name: {"rate": layer.rate, "theta": layer.theta}
            for name, layer in fallback_stats({"fallback": new.fallback}).items()
        }
        for name, rates in measured.pop("expert_rates").items():
            fallback_metrics[name]["expert_rates"] = rates[-1]  # as the others
        if "expert_load" in measured:
            measured["expert_load"] = measured["expert_load"].sum(axis=0)
        return new, {
            **{name: x.mean() if x.ndim == 1 else x for name, x in measured.items()},
            "lr": schedule(state.step),
            "grad_norm": optax.tree.norm(grads),
            "fallback": fallback_metrics,
        }

    return train_step


# `fallback`, `overwritten` and the sum of the gradients.
_Carry = tuple[PyTree, PyTree, PyTree]


def _accumulate(model: Llama, state: TrainState, tokens: Any) -> tuple[_Carry, Any]:
    """Scans over microbatches [N, B/N, S+1]; also returns what `_loss` measured."""
    value_and_grad = jax.value_and_grad(partial(_loss, model), has_aux=True)
    codes, params = state.codes, state.params
    if codes:
        params = optim.CodeWriter.differentiable(params, codes)
    elif tokens.shape[0] > 1 and isinstance(model.dot_general, FallbackDot):
        codes = quantize_weights_once(model, state.variables(), tokens[0][:, :-1])

    def microbatch(carry: _Carry, tokens: jax.Array) -> tuple[_Carry, Metrics]:
        fallback, overwritten, total = carry
        differentiated = {"params": params, OVERWRITE_WITH_GRADIENT: overwritten}
        others = {"fallback": fallback, **codes}
        (_, aux), grads = value_and_grad(differentiated, others, tokens)
        fallback, measured = aux
        # Reduce-scattered here, so that no device holds the complete gradient.
        total = mesh.constrain(optax.tree.add(total, grads["params"]))
        return (fallback, grads[OVERWRITE_WITH_GRADIENT], total), measured

    zeros = optax.tree.zeros_like(state.params)
    carry = state.fallback, state.overwritten, zeros
    return jax.lax.scan(microbatch, carry, tokens)


def _loss(
    model: Llama, differentiated: PyTree, others: PyTree, tokens: jax.Array
) -> tuple[jax.Array, tuple[PyTree, Metrics]]:
    """The loss to differentiate; the new `fallback`, and what is measured."""
    mutable = ["fallback"]
    if model.config.num_experts is not None:
        mutable += ["expert_stats", "losses", "intermediates"]
    variables = {**differentiated, **others}
    inputs, targets = tokens[:, :-1], tokens[:, 1:]
    loss: Any
    loss, updates = model.apply(variables, inputs, targets=targets, mutable=mutable)
    added, measured = _expert_metrics(model.config, updates)
    measured["loss"] = loss
    return loss + added, (updates.get("fallback", {}), measured)


def _expert_metrics(config: LlamaConfig, updates: PyTree) -> tuple[Any, Metrics]:
    """What experts add to the loss, and their metrics; without experts, 0 and no rates.

    The losses are unweighted means over the layers; "load_balance" is 1 if the load and
    the probabilities of all experts are equal. "expert_load" counts the tokens of each
    expert and "expert_rates" has fallback rates by projection, both [layers, experts].
    """
    if config.num_experts is None:
        return 0.0, {"expert_rates": {}}
    (load,) = _leaves(updates["expert_stats"], "load").values()
    (balance,) = _leaves(updates["losses"], "load_balance").values()
    (z,) = _leaves(updates["losses"], "z").values()
    metrics = {"load_balance": balance.mean(), "router_z": z.mean()}
    # The library's loss counts shares of the load that sum to 1, not to top_k.
    weight = config.router_aux_loss_coef * config.top_k
    added = weight * metrics["load_balance"] + Z_LOSS * metrics["router_z"]
    rates = _leaves(updates.get("intermediates", {}), "fallback_rates")
    return added, {**metrics, "expert_load": load, "expert_rates": rates}


def _leaves(tree: PyTree, name: str) -> dict[str, jax.Array]:
    """The arrays of this name by the path of their module; sown ones come in tuples."""
    flat = flax.traverse_util.flatten_dict(tree)
    return {
        "/".join(path[:-1]): leaf[0] if isinstance(leaf, tuple) else leaf
        for path, leaf in flat.items()
        if path[-1] == name
    }


def evaluate(model: Llama, state: TrainState, data: Sequence[Any]) -> float:
    """Returns the mean loss of a state on a fixed set of batches.

    Before the first step it is computed as the first step does: INT8 layers set the
    threshold of each batch by itself, and delayed FP8 has scales of 1.
    """
    tokens = (mesh.distribute(data[i], "batch", None) for i in range(EVAL_BATCHES))
    losses = [_val_loss(model, state.variables(), batch) for batch in tokens]
    return float(jnp.stack(losses).mean())


@partial(jax.jit, static_argnums=0)
def _val_loss(model: Llama, variables: PyTree, tokens: jax.Array) -> jax.Array:
    # Nothing is mutable, so the thresholds do not change.
    loss: Any = model.apply(variables, tokens[:, :-1], targets=tokens[:, 1:])
    return loss
