"""The sizes of the experiments: as reported, or small enough for a CPU."""

import dataclasses
import itertools
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Sizes of the experiments.

    Attributes:
        vocab_size: The vocabulary size of the tokenizer.
        parity: The recipe and the seed of each run in `parity`, the most informative
            first, in case time runs out.
        tuned: The recipes in `outliers`, in the same order.
        pretrain: The options of the runs in `parity`.
        finetune: Options of the runs in `outliers` that differ from `pretrain`.
        longer: Options of the runs in `longer` that differ from `pretrain`.
        longer_lrs: Their learning rates; each recipe has a run with each.
        killed: Options of the runs in `killed` that differ from `pretrain`.
        mesh: The devices of each run in `parity`, as for `--mesh`; empty for one.
        studied: The number of sequences whose activations are studied. 0 if there is
            only `parity`, whose model is then not kept.
        outliers: The largest planted activations, one model each.
        gradient_factor: The factor of planted gradients, in a model of their own; None
            for no such model.
    """

    vocab_size: int
    parity: tuple[tuple[str, int], ...]
    tuned: tuple[str, ...]
    pretrain: dict[str, Any]
    finetune: dict[str, Any]
    longer: dict[str, Any]
    longer_lrs: tuple[float, ...]
    killed: dict[str, Any]
    mesh: str = ""
    studied: int
    # The largest activations reported for GPT2-XL, Llama-3.1 and Qwen-2.5.
    outliers: tuple[int, ...] = (58, 606, 6559)
    gradient_factor: int | None = None


_RECIPES = (
    *("bf16", "fallback", "block", "jetfire", "rowwise", "fp8_delayed", "per_tensor"),
    *("fallback_rowwise_bwd", "switchback"),
)

# 128 million parameters and 100.7 million tokens, 65 536 per step.
FULL = Settings(
    vocab_size=16384,
    parity=(*((recipe, 0) for recipe in _RECIPES), ("bf16", 1)),
    tuned=_RECIPES,
    pretrain={"hidden": 1024, "ffn": 2816, "layers": 8, "heads": 8, "kv_heads": 4}
    | {"seq": 1024, "batch": 64, "steps": 1536, "lr": 1e-3}
    | {"log_every": 16, "eval_every": 96, "save_every": 1536},
    finetune={"batch": 32, "steps": 64, "lr": 2e-5, "eval_every": 64, "save_every": 0},
    # Five times as many steps, with fewer tokens, so that they take minutes.
    longer={"batch": 4, "steps": 7680, "clip": 0.0}
    | {"log_every": 64, "eval_every": 768, "save_every": 7680},
    longer_lrs=(1e-2,),
    killed={"batch": 16, "steps": 96, "log_every": 1, "save_every": 32},
    studied=4,
)

# A quarter of the steps, after which the model has no large outliers of its own.
QUARTER = dataclasses.replace(
    FULL,
    parity=(("bf16", 0),),
    tuned=(
        "bf16",
        "row_block_lhs",
        "row_block_equalized",
        "fp8_row_block_lhs",
        "fallback",
        "jetfire",
        "block",
    ),
    pretrain=FULL.pretrain | {"steps": 384, "save_every": 0},
    gradient_factor=64,
)

# Several seeds at full length, which tell recipes apart.
SEEDS = dataclasses.replace(
    FULL,
    parity=tuple(
        itertools.product(
            (
                *("bf16", "row_block_lhs", "fallback", "fp8_row_block_lhs", "block"),
                *("rowwise", "fp8_delayed"),
            ),
            range(4),
        )
    ),
    pretrain=FULL.pretrain | {"save_every": 0},
    longer=FULL.longer | {"save_every": 0},
    longer_lrs=(1e-3, 3e-3),
)

# 1.06 billion parameters and 67 million tokens, so that a run should take less than
# half an hour on an H100 and fit into its 80 GB.
LARGER = dataclasses.replace(
    FULL,
    parity=(("bf16", 0), ("row_block_lhs", 0)),
    pretrain={"hidden": 2048, "ffn": 5632, "layers": 22, "heads": 16, "kv_heads": 4}
    | {"seq": 2048, "batch": 16, "accumulate": 4, "steps": 2048, "lr": 4e-4}
    | {"log_every": 16, "eval_every": 256, "save_every": 0},
    studied=0,
)

# 300 million tokens, with 8 sequences at a time on each of four GPUs.
LARGER_ON_FOUR = dataclasses.replace(
    LARGER,
    mesh="fsdp=4",
    pretrain=LARGER.pretrain | {"batch": 64, "accumulate": 2, "steps": 2290},
)

TOY = Settings(
    vocab_size=512,
    parity=FULL.parity,
    tuned=FULL.tuned,
    pretrain={"hidden": 64, "ffn": 128, "layers": 2, "heads": 2, "kv_heads": 1}
    | {"seq": 32, "batch": 4, "steps": 8, "lr": 1e-2}
    | {"log_every": 2, "eval_every": 4, "save_every": 8},
    finetune={"steps": 2, "lr": 2e-5, "eval_every": 2, "save_every": 0},
    longer={"steps": 16, "clip": 0.0, "eval_every": 8, "save_every": 16},
    longer_lrs=(3e-1,),
    killed={"log_every": 1, "save_every": 3},
    studied=4,
    gradient_factor=64,
)

SETTINGS = {
    "full": FULL,
    "quarter": QUARTER,
    "seeds": SEEDS,
    "larger": LARGER,
    "larger-on-four": LARGER_ON_FOUR,
    "toy": TOY,
}
