"""The options of a run."""

# ruff: noqa: RUF009  (the defaults of options are constants)

import dataclasses
from typing import Annotated, Literal

from examples.grpo import task
from examples.llama import fields, invariant
from examples.llama.errors import UserError
from examples.llama.fields import Positive, Range, Seed, Size, option
from examples.llama.model import Llama
from examples.llama.model_config import LlamaConfig
from examples.llama.projections import DotGeneral
from fbq_jax import FallbackDot, recipes

# The dot_general of each recipe; None is jax.lax.dot_general in bfloat16.
RECIPES: dict[str, DotGeneral | None] = {
    "bf16": None,
    **{name: FallbackDot(recipe) for name, recipe in recipes.NAMED.items()},
}
_Recipe = Annotated[str, Literal[*RECIPES]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """All options that determine a run's numbers. Each field is a flag."""

    recipe: _Recipe = option(
        "rowwise", f"recipe of the trainer's projections: {', '.join(RECIPES)}"
    )
    rollout: _Recipe | None = option(
        None, "recipe of the model that samples (default: the trainer's)"
    )
    invariant: bool | None = option(
        None,
        "both models compute a token's log-probability with the same bits "
        "(default: if their recipe is one, and batch-invariant)",
    )
    seed: Seed = option(0, "seed of the weights, the prompts and the answers")
    steps: Size = option(80, "rollouts, each with its updates")
    prompts: Size = option(128, "prompts of a rollout")
    samples: Size = option(8, "answers that are sampled for each prompt")
    updates: Size = option(2, "updates after each rollout, each with all answers")
    clip: Positive = option(0.2, "how far a ratio counts from 1 on")
    lr: Positive = option(1e-3, "learning rate of the updates")
    warmup: Annotated[float, Range(float, 0, 1)] = option(
        0.2, "share of right answers up to which the model first trains on answers"
    )
    warmup_lr: Positive = option(3e-3, "learning rate of that training")

    def __post_init__(self) -> None:
        fields.check(self)
        dots = [RECIPES[self.recipe], RECIPES[self.rollout or self.recipe]]
        if self.invariant is None:
            chosen = dots[0] == dots[1] and invariant.supports(dots[0])
            object.__setattr__(self, "invariant", chosen)
        elif self.invariant:
            invariant.checked(dots[0])
            if dots[0] != dots[1]:
                got = f"got {self.recipe} and {self.rollout}"
                raise UserError(f"invariant takes one recipe for both models, {got}")

    def models(self) -> tuple[Llama, Llama]:
        """Returns the model that trains and the model that samples."""
        sizes = LlamaConfig(
            vocab_size=len(task.CHARACTERS),
            hidden_size=128,
            intermediate_size=256,
            num_layers=2,
            num_heads=4,
            num_kv_heads=2,
            max_seq_len=task.PROMPT + task.ANSWER,
            invariant=bool(self.invariant),
        )
        rollout = self.rollout or self.recipe
        return Llama(sizes, RECIPES[self.recipe]), Llama(sizes, RECIPES[rollout])
