"""Trains by GRPO: warm-up, rollouts of the frozen model, and updates."""

import functools
import itertools
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

import fbq_jax
from examples.grpo import objective, task
from examples.grpo.config import Config
from examples.grpo.rollout import Rollout, sample
from examples.llama.errors import UserError
from examples.llama.invariant import log_probabilities
from examples.llama.model import Llama
from fbq_jax import FallbackDot

RAMP = 20  # updates until the learning rate is the full one
WARMUP_BATCH, WARMUP_STEPS = 256, 1000
Metrics = dict[str, Any]


class State(NamedTuple):
    """What an update changes."""

    params: Any  # float32
    fallback: Any  # the state of INT8 layers; empty if there are none
    opt_state: optax.OptState

    def variables(self) -> dict[str, Any]:
        """Returns the variables of the model."""
        return {"params": self.params, "fallback": self.fallback}


def train(config: Config) -> Iterator[Metrics]:
    """Yields the metrics of the warm-up, as step 0, and of each step."""
    trainer, sampler = config.models()
    keys = map(functools.partial(jax.random.fold_in, jax.random.key(config.seed)),
               itertools.count())
    tokens = jax.ShapeDtypeStruct((1, 1), jnp.int32)
    state, steps, share = warm_up(trainer, config, keys)
    yield {"step": 0, "warmup_steps": steps, "reward": share}
    optimizer = _optimizer(config.lr)
    state = state._replace(opt_state=optimizer.init(state.params))
    # Layers whose thresholds do not move have the state of a new model.
    fresh = sampler.init(next(keys), jnp.zeros((1, 1), jnp.int32)).get("fallback", {})
    for step in range(1, config.steps + 1):
        start = time.perf_counter()
        prompts = task.draw(next(keys), config.prompts)
        variables = state.variables()
        if sampler != trainer:
            variables["fallback"] = fresh
        found = sample(
            sampler, freeze(sampler, variables), prompts, next(keys),
            samples=config.samples, length=task.ANSWER,
        )
        rewards = task.reward(found.tokens)
        gains = objective.advantages(rewards.reshape(config.prompts, config.samples))
        measured = []
        for _ in range(config.updates):
            state, metrics = update(trainer, optimizer, config.clip, state, found, gains.ravel())
            measured.append(metrics)
        measured = jax.device_get(measured)
        yield {
            "step": step,
            "reward": float(rewards.mean()),
            "max_log_ratio": measured[0]["max_log_ratio"].item(),
            "mean_log_ratio": measured[0]["mean_log_ratio"].item(),
            "clipped": sum(m["clipped"].item() for m in measured) / len(measured),
            "loss": sum(m["loss"].item() for m in measured) / len(measured),
            "seconds": time.perf_counter() - start,
        }


@functools.cache
def _optimizer(lr: float) -> optax.GradientTransformation:
    """Adam; its first steps are short, because Adam knows the gradients' sizes late."""
    schedule = optax.linear_schedule(lr / RAMP, lr, RAMP - 1)
    return optax.chain(optax.clip_by_global_norm(1.0), optax.adam(schedule))


@functools.partial(jax.jit, static_argnums=0)
def freeze(model: Llama, variables: Any) -> Any:
    if not isinstance(model.dot_general, FallbackDot):
        return variables
    return fbq_jax.freeze(model, variables, jnp.zeros((1, 1), jnp.int32))


def score(model: Llama, params: Any, fallback: Any, tokens: jax.Array) -> tuple[jax.Array, Any]:
    logits, updates = model.apply(
        {"params": params, "fallback": fallback}, tokens[:, :-1], mutable=["fallback"]
    )
    found = log_probabilities(
        logits[:, task.PROMPT - 1 :], tokens[:, task.PROMPT :]
    )
    return found, updates.get("fallback", {})


def warm_up(model, config, keys):
    optimizer = _optimizer(config.warmup_lr)
    variables = model.init(next(keys), jnp.zeros((1, 1), jnp.int32))
    params = variables["params"]
    state = State(params, variables.get("fallback", {}), optimizer.init(params))
    for step in range(WARMUP_STEPS):
        prompts = task.draw(next(keys), WARMUP_BATCH)
        state, share = imitate(model, optimizer, state, prompts)
        if share >= config.warmup:
            return state, step + 1, float(share)
    raise UserError("x")


@functools.partial(jax.jit, static_argnums=(0, 1))
def imitate(model, optimizer, state, prompts):
    tokens = jnp.concatenate([prompts, task.solve(prompts)], axis=1)

    def loss(params):
        found, fallback = score(model, params, state.fallback, tokens)
        return -found.mean(), (fallback, jnp.exp(found.sum(axis=1)).mean())

    grads, (fallback, share) = jax.grad(loss, has_aux=True)(state.params)
    updates, opt_state = optimizer.update(grads, state.opt_state)
    return State(optax.apply_updates(state.params, updates), fallback, opt_state), share


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def update(model, optimizer, clip, state, rollout: Rollout, gains):
    def loss(params):
        found, fallback = score(model, params, state.fallback, rollout.tokens)
        log_ratios = found - rollout.log_probabilities
        value, clipped = objective.clipped_loss(log_ratios, gains, clip)
        return value, (fallback, log_ratios, clipped)

    (value, (fallback, log_ratios, clipped)), grads = jax.value_and_grad(loss, has_aux=True)(state.params)
    updates, opt_state = optimizer.update(grads, state.opt_state)
    m = {"loss": value, "clipped": clipped,
         "max_log_ratio": jnp.abs(log_ratios).max(), "mean_log_ratio": jnp.abs(log_ratios).mean()}
    return State(optax.apply_updates(state.params, updates), fallback, opt_state), m
