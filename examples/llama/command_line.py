"""The command line of train.py."""

import argparse
import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

from examples.llama.config import Config, ConfigError
from examples.llama.mesh import PARSER
from fbq_jax.export import FORMATS

# Sizes are multiples of 128, so that quantized matrices consist of complete blocks.
PRESETS: dict[str, dict[str, Any]] = {
    "tiny": {},  # the defaults of Config: minutes on two CPU cores
    # 150 million parameters: minutes on one GPU
    "small": {"hidden": 1024, "ffn": 2816, "layers": 12, "heads": 16, "kv_heads": 4}
    | {"batch": 32, "accumulate": 4, "seq": 1024, "steps": 300, "lr": 6e-4}
    | {"eval_every": 100, "save_every": 100},
}

# The options that --from-hf takes from the model that it loads.
MODEL_SIZES = ("hidden", "ffn", "layers", "heads", "kv_heads", "experts", "top_k")


@dataclass(frozen=True)
class Command:
    """What the command line asks for.

    Attributes:
        out: The folder of the run, or of the runs of a comparison.
        resume: Whether to continue the run in `out`.
        compare: The recipes to train one after another; empty for a single run.
        export: The format to export the trained model in; None exports nothing.
        mesh: The devices to train on, in the format of `mesh.make`.
        given: The options of `Config` that the command line sets, by name.
        defaults: Values of options that the command line does not set.
    """

    out: Path
    resume: bool
    compare: tuple[str, ...]
    export: str | None
    mesh: str
    given: dict[str, Any]
    defaults: dict[str, Any]


def parse_command(argv: Sequence[str] | None = None) -> Command:
    """Reads the command line.

    Args:
        argv: The arguments; None means the process's own.

    Returns:
        The command. It keeps given options apart from defaults, because a resumed run
        takes the options that are not given from its own folder.

    Raises:
        ConfigError: Two flags contradict each other.
    """
    given = vars(_parser().parse_args(argv))
    preset, names = given.pop("preset"), given.pop("compare")
    out, resume, export = given.pop("out"), given.pop("resume"), given.pop("export")
    mesh, _ = given.pop("mesh"), given.pop("hosts")

    for name in MODEL_SIZES:
        if "from_hf" in given and name in given:
            flag = name.replace("_", "-")
            raise ConfigError(f"--{flag} comes from the model of --from-hf")
    compare = _recipes_to_compare(names, given)
    if compare and export is not None:
        raise ConfigError("--export takes one run; leave --compare out")
    defaults: dict[str, Any] = {}
    if preset is not None:
        given = PRESETS[preset] | given
    else:
        preset = "tiny" if jax.default_backend() == "cpu" else "small"
        defaults = PRESETS[preset]
    if "from_hf" in given:
        defaults = defaults | {"lr": 2e-5}
    if out is None:
        name = "compare" if compare else given.get("recipe", Config.recipe)
        out = Path("runs") / name
    return Command(out, resume, compare, export, mesh, given, defaults)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m examples.llama.train",
        description="Trains a Llama in INT8, FP8 or bf16 and plots its losses.",
        parents=[PARSER],
    )
    takes: dict[Any, dict[str, Any]] = {
        int: {"type": int},
        int | None: {"type": int},
        float: {"type": float},
        bool: {"action": argparse.BooleanOptionalAction},
    }
    for option in dataclasses.fields(Config):
        default = "" if option.default is None else f" (default: {option.default})"
        parser.add_argument(
            "--" + option.name.replace("_", "-"),
            default=argparse.SUPPRESS,
            help=option.metadata["help"] + default,
            **takes.get(option.type, {}),
        )
    parser.add_argument(
        "--preset",
        choices=PRESETS,
        help="set of defaults (default: tiny on a CPU, small on an accelerator)",
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
    parser.add_argument(
        "--export",
        choices=FORMATS,
        help="also write the trained model's INT8 codes to a folder of this name in "
        "--out, for a serving engine; with --resume, of a run that has ended",
    )
    return parser


def _recipes_to_compare(names: str | None, given: dict[str, Any]) -> tuple[str, ...]:
    """The recipes that --compare lists; none without it."""
    if names is None:
        return ()
    if "recipe" in given:
        raise ConfigError("--compare names the recipes; leave --recipe out")
    recipes = tuple(name.strip() for name in names.split(","))
    if not 2 <= len(recipes) == len(set(recipes)):
        raise ConfigError(
            f"--compare takes two or more different recipes, got {names!r}"
        )
    return recipes
