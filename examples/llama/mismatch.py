"""Measures how much log-probabilities in sampling and in training differ.

    python -m examples.llama.mismatch runs/mine --recipes bf16,rowwise

A frozen model samples tokens with a cache, for all prompts at once, and scores them for
one prompt after the other. A training step scores them, too. The weights are those of a
run or new ones. `--help` lists the options.
"""

import argparse
import dataclasses
import itertools
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from examples.llama import atomic, build, invariant, run_folder, train
from examples.llama.config import RECIPES, Config
from examples.llama.errors import UserError, exit_status
from examples.llama.invariant import log_probabilities
from examples.llama.model import Llama, empty_cache
from fbq_jax import FallbackDot, freeze
from fbq_jax.bench.results import versions

_PROMPT = 16  # tokens


def measure(
    model: Llama, variables: Any, prompts: jax.Array, count: int
) -> dict[str, float]:
    """The largest ``|log ratio|`` of training to sampling, of ``count`` tokens."""
    # The first step of training sets thresholds.
    step = jax.jit(lambda v: model.apply(v, prompts, mutable=["fallback"]))
    rollout = variables = variables | step(variables)[1]
    if isinstance(model.dot_general, FallbackDot):
        rollout = freeze(model, variables, prompts)

    @jax.jit
    def sample(variables: Any, prompts: jax.Array, given: Any = None) -> Any:
        """Draws tokens or takes given ones; returns them and their scores, [B, S]."""

        def step(carry: Any, i: Any) -> Any:
            logits, cache = model.apply(variables, *carry)
            token = jax.random.categorical(jax.random.key(i), logits)
            if given is not None:
                token = jax.lax.dynamic_slice_in_dim(given, i, 1, axis=1)
            return (token, cache), (token, log_probabilities(logits, token))

        cache = empty_cache(model.config, len(prompts), _PROMPT + count)
        carry, first = step((prompts, cache), 0)
        _, others = jax.lax.scan(step, carry, jnp.arange(1, count))
        others = jax.tree.map(lambda x: x[..., 0].T, others)
        return jax.tree.map(lambda *x: jnp.concatenate(x, axis=1), first, others)

    @jax.jit
    def score(params: Any, tokens: jax.Array) -> Any:
        def loss(params: Any) -> Any:
            changed = {**variables, "params": params}
            found: Any = model.apply(changed, tokens[:, :-1], mutable=["fallback"])
            scores = log_probabilities(found[0], tokens[:, 1:])[:, _PROMPT - 1 :]
            return scores.mean(), scores

        return jax.value_and_grad(loss, has_aux=True)(params)

    tokens, at_once = sample(rollout, prompts)
    (_, trained), _ = score(variables["params"], jnp.hstack([prompts, tokens]))
    pairs = zip(prompts[:, None], tokens[:, None], strict=True)
    alone = jnp.concatenate([sample(rollout, *pair)[1] for pair in pairs])
    found = {"at_once": at_once, "one_by_one": alone}
    return {name: float(jnp.abs(trained - x).max()) for name, x in found.items()}


def compare(asked: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Measures each recipe, and its invariant model if there is one."""
    names, seq = asked.recipes.split(","), _PROMPT + asked.tokens
    if unknown := sorted(set(names) - RECIPES.keys()):
        raise UserError(f"recipes takes {', '.join(RECIPES)}, got {unknown[0]}")
    preset = train.PRESETS["tiny" if jax.default_backend() == "cpu" else "small"]
    config, trained = Config(**preset | {"seq": seq}), {}
    sizes = config.sizes(vocab_size=256)
    if asked.folder is not None:
        config = run_folder.read_config(asked.folder)
        sizes = build.build_model(config).config
        trained = {"params": build.last_state(config, asked.folder).params}
    if seq > (longest := sizes.max_seq_len):
        raise UserError(f"tokens takes at most {longest - _PROMPT}")
    key = jax.random.key(0)
    prompts = jax.random.randint(key, (asked.prompts, _PROMPT), 0, sizes.vocab_size)
    for recipe, is_invariant in itertools.product(names, (False, True)):
        options = {"recipe": recipe, "invariant": is_invariant}
        if is_invariant and not invariant.supports(RECIPES[recipe]):
            continue
        changed = dataclasses.replace(config, **options, optimizer_codes=False)
        model = build.with_recipe(changed, sizes)
        variables = jax.jit(model.init)(key, prompts) | trained
        yield options | measure(model, variables, prompts, asked.tokens)


def run(asked: argparse.Namespace) -> None:
    """Prints what the command line asks for, and writes it to a file."""
    rows = []
    print("largest |log ratio|  invariant  at once    one by one")
    for row in compare(asked):
        rows.append(row)
        print("{:<21}{!s:<11}{:<11.3g}{:.3g}".format(*row.values()))
    if asked.json is not None:
        found = {"prompts": asked.prompts, "tokens": asked.tokens, "rows": rows}
        found |= {"device": jax.devices()[0].device_kind, "versions": versions()}
        atomic.write(asked.json, json.dumps(found, indent=2) + "\n")


def main(argv: list[str] | None = None) -> int:
    """Runs the command line and returns the exit status."""
    parser = argparse.ArgumentParser("python -m examples.llama.mismatch")
    add = parser.add_argument
    add("folder", type=Path, nargs="?", help="folder of a run (default: a new model)")
    add("--recipes", default="bf16,rowwise", help="recipes (default: bf16,rowwise)")
    add("--prompts", type=int, default=8, help="number of prompts (default: 8)")
    add("--tokens", type=int, default=64, help="tokens after each (default: 64)")
    add("--json", type=Path, help="file to write")
    asked = parser.parse_args(argv)
    return exit_status(lambda: run(asked))


if __name__ == "__main__":
    sys.exit(main())
