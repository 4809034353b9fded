"""What a run does: its options, their presets and the command line."""

import argparse
import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax

from examples.llama.mesh import PARSER
from examples.llama.model import REMAT
from examples.llama.projections import DotGeneral
from fbq_jax import FallbackDot, Fp8Dot, RecipeError, nonlinear, recipes
from fbq_jax.recipes.schema import REDUCES

# What multiplies in the layers; None is jax.lax.dot_general, in bfloat16.
RECIPES: dict[str, DotGeneral | None] = {
    "bf16": None,
    **{name: FallbackDot(recipe) for name, recipe in recipes.NAMED.items()},
    "fp8_delayed": Fp8Dot(scaling="delayed"),
    "fp8_current": Fp8Dot(scaling="current"),
}

# What the norms and gates of a quantized model keep of a value.
SAVED_BITS = 10

# Sizes are multiples of 128, so that the blocks of a quantized matrix are whole.
PRESETS: dict[str, dict[str, Any]] = {
    "tiny": {},  # the defaults below: minutes on two CPU cores
    "small": {  # 150 million parameters: minutes on one GPU
        "hidden": 1024,
        "ffn": 2816,
        "layers": 12,
        "heads": 16,
        "kv_heads": 4,
        "batch": 32,
        "accumulate": 4,
        "seq": 1024,
        "steps": 300,
        "lr": 6e-4,
        "eval_every": 100,
        "save_every": 100,
    },
}

# The options that --from-hf takes from the model it loads.
MODEL_SIZES = ("hidden", "ffn", "layers", "heads", "kv_heads")


class ConfigError(ValueError):
    """An option has a value that is not accepted."""


def _option(default: Any, meaning: str) -> Any:
    return field(default=default, metadata={"help": meaning})


@dataclass(frozen=True, kw_only=True)
class Config:
    """Everything that decides a run's numbers; each field is a flag of train.py.

    Raises:
        ConfigError: A field is out of range; names it and what it takes.
    """

    recipe: str = _option("fallback", f"how layers multiply: {', '.join(RECIPES)}")
    data: str | None = _option(
        None,
        "file, folder, nanoGPT .bin or folder with train.bin and val.bin; without it, "
        "Python's standard library",
    )
    from_hf: str | None = _option(
        None,
        "folder of a Hugging Face Llama or Qwen2: sizes, weights, tokenizer",
    )
    seed: int = _option(0, "seed of the initial weights and of the order of the data")
    hidden: int = _option(256, "width of the residual stream")
    ffn: int = _option(768, "width of the MLP")
    layers: int = _option(4, "number of layers")
    heads: int = _option(4, "number of query heads")
    kv_heads: int = _option(2, "number of key and value heads")
    remat: str = _option(
        "none",
        "what layers recompute in the backward pass: none of it, all but codes "
        "(codes), or all (full)",
    )
    saved_bits: int | None = _option(
        None,
        "bits of a value that norms and gates keep for the backward pass; 0 keeps "
        f"floats (default: {SAVED_BITS}, and 0 with --recipe bf16)",
    )
    reduce: str | None = _option(
        None,
        "what several devices sum their parts of an INT8 product in: "
        f"{', '.join(REDUCES)} (int8: of a kernel's gradient only; default: the "
        "model's dtype, in which XLA sums all others)",
    )
    batch: int = _option(8, "sequences in a step")
    accumulate: int = _option(1, "microbatches that a step's batch is split into")
    seq: int = _option(256, "tokens in a sequence")
    steps: int = _option(150, "optimizer steps; the first tenth warms up")
    lr: float = _option(2e-3, "peak learning rate; 2e-5 with --from-hf")
    clip: float = _option(1.0, "largest norm of a step's gradient; 0 clips nothing")
    log_every: int = _option(1, "steps between looks at the device, which then waits")
    eval_every: int = _option(50, "steps between validations")
    save_every: int = _option(
        50, "steps between checkpoints; 0 for a run that leaves its records alone"
    )

    def __post_init__(self) -> None:
        if self.recipe not in RECIPES:
            raise ConfigError(
                f"recipe takes one of {', '.join(RECIPES)}, got {self.recipe!r}"
            )
        if self.remat not in REMAT:
            raise ConfigError(
                f"remat takes one of {', '.join(REMAT)}, got {self.remat!r}"
            )
        if self.saved_bits not in (None, 0, *nonlinear.BITS):
            raise ConfigError(
                f"saved_bits takes 0 or an integer from {nonlinear.BITS[0]} to "
                f"{nonlinear.BITS[-1]}, got {self.saved_bits}"
            )
        if self.reduce not in (None, *REDUCES):
            raise ConfigError(
                f"reduce takes one of {', '.join(REDUCES)}, got {self.reduce!r}"
            )
        try:
            self.dot_general()
        except RecipeError as error:
            raise ConfigError(f"reduce with {self.recipe}: {error}") from error
        for option in dataclasses.fields(self):
            value = getattr(self, option.name)
            lowest = int(option.name not in ("seed", "save_every"))
            if option.type is int and value < lowest:
                raise ConfigError(
                    f"{option.name} takes an integer from {lowest} on, got {value}"
                )
        if not 0 < self.lr < math.inf:
            raise ConfigError(f"lr takes a finite positive number, got {self.lr}")
        if not 0 <= self.clip < math.inf:
            raise ConfigError(f"clip takes a finite number from 0 on, got {self.clip}")
        if self.batch % self.accumulate:
            raise ConfigError(
                f"accumulate takes a divisor of batch ({self.batch}), "
                f"got {self.accumulate}"
            )

    def dot_general(self) -> DotGeneral | None:
        """What multiplies, with products summed as `reduce` says; None for bf16."""
        dot_general = RECIPES[self.recipe]
        if self.reduce is None:
            return dot_general
        if not isinstance(dot_general, FallbackDot):
            raise ConfigError(
                f"reduce is of INT8 recipes, got {self.reduce!r} with {self.recipe}: "
                "leave it out there, XLA sums what is not in INT8"
            )
        recipe = dot_general.recipe
        gemms = {name: getattr(recipe, name) for name in ("fwd", "dlhs", "drhs")}
        names = [name for name, gemm in gemms.items() if not gemm.in_floats]
        reduce: Any = self.reduce
        summed = {
            name: dataclasses.replace(gemms[name], reduce=reduce)
            for name in (["drhs"] if reduce == "int8" else names)
        }
        return FallbackDot(dataclasses.replace(recipe, **summed))


@dataclass(frozen=True)
class Command:
    """What the command line asks for.

    Attributes:
        out: Folder of the run, or of a comparison's runs.
        resume: Whether to continue what is there.
        compare: Recipes to train one after another; empty for a single run.
        mesh: The devices to train on, as `mesh.make` reads them.
        given: The options of `Config` that were given, by name.
        defaults: Values for the options that were not.
    """

    out: Path
    resume: bool
    compare: tuple[str, ...]
    mesh: str
    given: dict[str, Any]
    defaults: dict[str, Any]


def parse_command(argv: Sequence[str] | None = None) -> Command:
    """Reads the command line.

    Args:
        argv: The arguments; None reads those of the process.

    Returns:
        The command. Which options were left out matters: a resumed run takes those
        from the run it resumes.

    Raises:
        ConfigError: Two flags contradict each other.
    """
    parser = argparse.ArgumentParser(
        prog="python -m examples.llama.train",
        description="Trains a Llama in INT8 (FP8, bf16) and draws how it went.",
        parents=[PARSER],
    )
    parsers: dict[Any, type] = {int: int, float: float, int | None: int}
    for option in dataclasses.fields(Config):
        default = "" if option.default is None else f" (default: {option.default})"
        parser.add_argument(
            "--" + option.name.replace("_", "-"),
            default=argparse.SUPPRESS,
            help=option.metadata["help"] + default,
            type=parsers.get(option.type, str),
        )
    parser.add_argument(
        "--preset",
        choices=PRESETS,
        help="other defaults (default: tiny on a CPU, small on an accelerator)",
    )
    parser.add_argument(
        "--compare",
        metavar="RECIPES",
        help="train with each of these recipes, such as bf16,block,fallback, on the "
        "same data and seed",
    )
    parser.add_argument(
        "--out",
        type=Path,
        help="folder of the run (default: runs/<recipe>, or runs/compare)",
    )
    parser.add_argument(
        "--resume", action="store_true", help="continue the run in --out, bit for bit"
    )
    given = vars(parser.parse_args(argv))
    preset, compare = given.pop("preset"), given.pop("compare")
    out, resume = given.pop("out"), given.pop("resume")
    mesh, _ = given.pop("mesh"), given.pop("hosts")

    if "from_hf" in given:
        for name in MODEL_SIZES:
            if name in given:
                raise ConfigError(f"--{name} comes from the model of --from-hf")
    if compare is not None and "recipe" in given:
        raise ConfigError("--compare names the recipes itself; leave --recipe out")
    names = [name.strip() for name in compare.split(",")] if compare else []
    if compare is not None and not 2 <= len(names) == len(set(names)):
        raise ConfigError(f"--compare takes two or more recipes, got {compare!r}")
    compare = tuple(names)
    if preset is None:
        preset = "tiny" if jax.default_backend() == "cpu" else "small"
        defaults = PRESETS[preset]
    else:
        given, defaults = PRESETS[preset] | given, {}
    if "from_hf" in given:
        defaults = defaults | {"lr": 2e-5}
    if out is None:
        name = "compare" if compare else given.get("recipe", Config.recipe)
        out = Path("runs") / name
    return Command(out, resume, compare, mesh, given, defaults)
