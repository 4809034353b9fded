"""The sizes of the experiments: as reported, or small enough for a CPU."""

import dataclasses
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

# The recipes of the experiments, in the order of their colors. Results of other
# recipes, which the library had once, are not shown.
RECIPES = (
    *("bf16", "fallback", "block", "jetfire", "rowwise", "fp8_delayed", "per_tensor"),
    *("fallback_rowwise_bwd", "switchback", "row_block_lhs", "fp8_row_block_lhs"),
)
# The trained model, and the one with outliers in its gradients.
TRAINED, GRADIENTS = "trained", "gradients"


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Sizes of the experiments. What a size does not have is empty."""

    stages: tuple[str, ...]
    vocab_size: int = 16384
    # The recipe and the seed of each run in `parity`, the most informative first, in
    # case time runs out; and the options of these runs.
    parity: tuple[tuple[str, int], ...]
    pretrain: dict[str, Any]
    mesh: str = ""  # their devices, as for `--mesh`; empty for one
    gpus_each: int = 1
    # The recipes in `outliers`. Other options differ from `pretrain` as listed.
    tuned: tuple[str, ...] = ()
    finetune: dict[str, Any] = field(default_factory=dict)
    # Each recipe has a run with each of these learning rates in `longer`.
    longer_lrs: tuple[float, ...] = ()
    longer: dict[str, Any] = field(default_factory=dict)
    killed: dict[str, Any] = field(default_factory=dict)
    studies: tuple[str, ...] = ()
    studied: int = 4  # sequences
    # The largest planted activations, one model each: by default those reported for
    # GPT2-XL, Llama-3.1 and Qwen-2.5; and the factor of planted gradients.
    outliers: tuple[int, ...] = (58, 606, 6559)
    gradient_factor: int | None = None

    @property
    def models(self) -> tuple[str, ...]:
        """The names of the trained model and of the models with outliers."""
        gradients = () if self.gradient_factor is None else (GRADIENTS,)
        return TRAINED, *map(str, self.outliers), *gradients


_CURVES = "error", "criteria", "operands", "passes", "nonlinear", "perplexity"

# 128 million parameters and 100.7 million tokens, 65 536 per step.
FULL = Settings(
    stages=("parity", "studies", "outliers", "longer", "killed"),
    parity=(*((recipe, 0) for recipe in RECIPES[:9]), ("bf16", 1)),
    tuned=RECIPES[:9],
    studies=(*_CURVES, "blocks"),
    pretrain={"hidden": 1024, "ffn": 2816, "layers": 8, "heads": 8, "kv_heads": 4}
    | {"seq": 1024, "batch": 64, "steps": 1536, "lr": 1e-3}
    | {"log_every": 16, "eval_every": 96, "save_every": 1536},
    finetune={"batch": 32, "steps": 64, "lr": 2e-5, "eval_every": 64, "save_every": 0},
    # Five times as many steps, with fewer tokens, so that they take minutes.
    longer={"batch": 4, "steps": 7680, "clip": 0.0}
    | {"log_every": 64, "eval_every": 768, "save_every": 7680},
    longer_lrs=(1e-2,),
    killed={"batch": 16, "steps": 96, "log_every": 1, "save_every": 32},
)

# A quarter of the steps, after which the model has no large outliers of its own.
QUARTER = dataclasses.replace(
    FULL,
    stages=("parity", "studies", "outliers"),
    parity=(("bf16", 0),),
    tuned=("bf16", *RECIPES[-2:], "fallback", "jetfire", "block"),
    studies=("recipes", "blocks"),
    pretrain=FULL.pretrain | {"steps": 384, "save_every": 384},
    gradient_factor=64,
)

# Several seeds at full length, which tell recipes apart.
SEEDS = dataclasses.replace(
    FULL,
    stages=("parity", "longer"),
    parity=tuple(
        (recipe, seed)
        for recipe in (
            *("bf16", "row_block_lhs", "fallback", "fp8_row_block_lhs", "block"),
            *("rowwise", "fp8_delayed"),
        )
        for seed in range(4)
    ),
    pretrain=FULL.pretrain | {"save_every": 0},
    longer=FULL.longer | {"save_every": 0},
    longer_lrs=(1e-3, 3e-3),
)

# 1.06 billion parameters and 67 million tokens, so that a run should take less than
# half an hour on an H100 and fit into its 80 GB.
LARGER = Settings(
    stages=("parity",),
    parity=(("bf16", 0), ("row_block_lhs", 0)),
    pretrain={"hidden": 2048, "ffn": 5632, "layers": 22, "heads": 16, "kv_heads": 4}
    | {"seq": 2048, "batch": 16, "accumulate": 4, "steps": 2048, "lr": 4e-4}
    | {"log_every": 16, "eval_every": 256, "save_every": 0},
)

# 300 million tokens, with 8 sequences at a time on each of four GPUs.
LARGER_ON_FOUR = dataclasses.replace(
    LARGER,
    mesh="fsdp=4",
    gpus_each=4,
    pretrain=LARGER.pretrain | {"batch": 64, "accumulate": 2, "steps": 2290},
)

TOY = dataclasses.replace(
    FULL,
    vocab_size=512,
    studies=(*_CURVES, "blocks", "recipes"),
    pretrain={"hidden": 64, "ffn": 128, "layers": 2, "heads": 2, "kv_heads": 1}
    | {"seq": 32, "batch": 4, "steps": 8, "lr": 1e-2}
    | {"log_every": 2, "eval_every": 4, "save_every": 8},
    finetune={"steps": 2, "lr": 2e-5, "eval_every": 2, "save_every": 0},
    longer={"steps": 16, "clip": 0.0, "eval_every": 8, "save_every": 16},
    longer_lrs=(3e-1,),
    killed={"log_every": 1, "save_every": 3},
    gradient_factor=64,
)

SIZES = {
    "full": FULL,
    "quarter": QUARTER,
    "seeds": SEEDS,
    "larger": LARGER,
    "larger-on-four": LARGER_ON_FOUR,
    "toy": TOY,
}


@dataclass(frozen=True)
class Experiment:
    """The experiments of one size and their folders."""

    settings: Settings
    work: Path  # of the corpus, the runs and their logs
    results: Path  # of the JSON files

    @property
    def corpus(self) -> Path:
        """The folder of the corpus with the tokenizer of this size."""
        return self.work / f"corpus-{self.settings.vocab_size}"

    def text(self, domain: str) -> Path:
        """Returns the folder of the token ids of "python" or "cpp"."""
        return self.corpus / domain

    def model(self, name: str) -> Path:
        """Returns the folder of one of `Settings.models`."""
        return self.work / "models" / name
