"""A run: supervised warm-up, then rollouts of the frozen model, and updates."""

import statistics
import time
from collections.abc import Iterator
from typing import Any

import jax

from examples.grpo import objective, step, task
from examples.grpo.config import Config
from examples.grpo.rollout import sample
from examples.llama.errors import UserError

_BATCH, _LONGEST = 256, 2000  # of the warm-up: prompts, and most steps

Record = dict[str, Any]


def train(config: Config) -> Iterator[Record]:
    """Trains a model; yields a record of the warm-up, step 0, and of each step.

    A step is a rollout and its updates. A record has the mean reward of the rollout,
    the largest and the mean absolute log-ratio before the first update, and means of
    the loss and of the clipped share over the updates.
    """
    trainer, sampler = config.models()
    keys = _keys(config.seed)
    # The state of a model that samples with another recipe than the trainer's.
    fallback = step.init(sampler, step.make_optimizer(config.lr), next(keys)).fallback
    state, record = _warm_up(config, keys)
    yield record
    optimizer = step.make_optimizer(config.lr)
    state = state._replace(opt_state=optimizer.init(state.params))
    for index in range(1, config.steps + 1):
        start = time.perf_counter()
        variables = state.variables()
        if sampler != trainer:
            variables["fallback"] = fallback
        rollout = sample(
            sampler,
            step.freeze(sampler, variables),
            task.draw(next(keys), config.prompts),
            next(keys),
            samples=config.samples,
            length=task.ANSWER,
        )
        rewards = task.reward(rollout.tokens).reshape(-1, config.samples)
        advantages = objective.advantages(rewards).ravel()
        measured = []
        for _ in range(config.updates):
            state, metrics = step.update(
                trainer, optimizer, state, rollout, advantages, config.clip
            )
            measured.append(metrics)
        yield {
            "step": index,
            "reward": float(rewards.mean()),
            "max_log_ratio": float(measured[0]["max_log_ratio"]),
            "mean_log_ratio": float(measured[0]["mean_log_ratio"]),
            **{
                name: statistics.fmean(float(metrics[name]) for metrics in measured)
                for name in ("loss", "clipped")
            },
            "seconds": time.perf_counter() - start,
        }


def _warm_up(config: Config, keys: Iterator[jax.Array]) -> tuple[step.State, Record]:
    """Trains a new model on answers until it gives a share of the right ones."""
    start = time.perf_counter()
    model, optimizer = config.models()[0], step.make_optimizer(config.warmup_lr)
    state = step.init(model, optimizer, next(keys))
    for index in range(1, _LONGEST + 1):
        prompts = task.draw(next(keys), _BATCH)
        state, share = step.imitate(model, optimizer, state, prompts)
        if share >= config.warmup:
            seconds = time.perf_counter() - start
            record = {"step": 0, "warmup_steps": index, "reward": float(share)}
            return state, {**record, "seconds": seconds}
    raise UserError(
        f"after {_LONGEST} steps on answers the model gives {share:.0%} of the right "
        f"ones, not {config.warmup:.0%}: lower --warmup or --warmup-lr"
    )


def _keys(seed: int) -> Iterator[jax.Array]:
    key = jax.random.key(seed)
    while True:
        key, drawn = jax.random.split(key)
        yield drawn
