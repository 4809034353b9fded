"""The programs that change the model: supervised warm-up, and GRPO's update."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

import fbq_jax
from examples.grpo import objective, task
from examples.grpo.rollout import Rollout
from examples.llama.invariant import log_probabilities
from examples.llama.model import Llama
from fbq_jax import FallbackDot

Metrics = dict[str, jax.Array]
_RAMP = 20  # updates before the learning rate is the full one


class State(NamedTuple):
    """What an update changes."""

    params: Any  # float32
    fallback: Any  # the state of quantized layers; empty if there are none
    opt_state: optax.OptState

    def variables(self) -> dict[str, Any]:
        """Returns the variables of the model."""
        return {"params": self.params, "fallback": self.fallback}


@functools.cache
def make_optimizer(lr: float) -> optax.GradientTransformation:
    """Returns Adam. Its first steps are short, because its moments are of few."""
    schedule = optax.linear_schedule(lr / _RAMP, lr, _RAMP - 1)
    return optax.chain(optax.clip_by_global_norm(1.0), optax.adam(schedule))


@functools.partial(jax.jit, static_argnums=(0, 1))
def init(
    model: Llama, optimizer: optax.GradientTransformation, key: jax.Array
) -> State:
    """Returns a new model with its optimizer's state."""
    variables = model.init(key, jnp.zeros((1, 1), jnp.int32))
    params = variables["params"]
    return State(params, variables.get("fallback", {}), optimizer.init(params))


@functools.partial(jax.jit, static_argnums=0)
def freeze(model: Llama, variables: Any) -> Any:
    """Returns the variables with the codes of the weights; unchanged in bfloat16."""
    if not isinstance(model.dot_general, FallbackDot):
        return variables
    return fbq_jax.freeze(model, variables, jnp.zeros((1, 1), jnp.int32))


@functools.partial(jax.jit, static_argnums=(0, 1))
def imitate(
    model: Llama,
    optimizer: optax.GradientTransformation,
    state: State,
    prompts: jax.Array,
) -> tuple[State, jax.Array]:
    """Takes a supervised step; returns the mean probability of a right answer."""
    tokens = jnp.concatenate([prompts, task.solve(prompts)], axis=1)

    def loss(found: jax.Array) -> tuple[jax.Array, jax.Array]:
        return -found.mean(), jnp.exp(found.sum(axis=1)).mean()

    return _descend(model, optimizer, state, tokens, loss)


@functools.partial(jax.jit, static_argnums=(0, 1))
def update(
    model: Llama,
    optimizer: optax.GradientTransformation,
    state: State,
    rollout: Rollout,
    advantages: jax.Array,
    clip: float,
) -> tuple[State, Metrics]:
    """Takes a step of GRPO; measures log-ratios before it.

    Args:
        model: The model.
        optimizer: The optimizer.
        state: The state, which the rollout may be older than.
        rollout: Sampled answers.
        advantages: float32 [B], one for each answer.
        clip: As `objective.clipped_loss` takes it.
    """

    def loss(found: jax.Array) -> tuple[jax.Array, Metrics]:
        log_ratios = found - rollout.log_probabilities
        value, clipped = objective.clipped_loss(log_ratios, advantages, clip)
        sizes = jnp.abs(log_ratios)
        measured = {"max_log_ratio": sizes.max(), "mean_log_ratio": sizes.mean()}
        return value, {"loss": value, "clipped": clipped, **measured}

    return _descend(model, optimizer, state, rollout.tokens, loss)


def _descend(
    model: Llama,
    optimizer: optax.GradientTransformation,
    state: State,
    tokens: jax.Array,
    loss: Callable[[jax.Array], tuple[jax.Array, Any]],
) -> tuple[State, Any]:
    """Takes a step down a loss of the log-probabilities of answers, [B, ANSWER].

    Returns what the loss returns beside its value.
    """

    def loss_of(params: Any) -> tuple[jax.Array, Any]:
        variables = {"params": params, "fallback": state.fallback}
        logits, updates = model.apply(variables, tokens[:, :-1], mutable=["fallback"])
        answers = tokens[:, task.PROMPT :]
        found = log_probabilities(logits[:, task.PROMPT - 1 :], answers)
        value, measured = loss(found)
        return value, (updates.get("fallback", {}), measured)

    grads, (fallback, measured) = jax.grad(loss_of, has_aux=True)(state.params)
    changes, opt_state = optimizer.update(grads, state.opt_state)
    params = optax.apply_updates(state.params, changes)
    return State(params, fallback, opt_state), measured
