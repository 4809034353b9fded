"""Trains a Llama with INT8 linear layers and plots its losses.

    python -m examples.llama.train

It trains for minutes on two CPU cores, on the source of Python's standard library, and
writes metrics.jsonl, curves.png, config.json and checkpoints to runs/fallback. `--help`
lists the options; `--compare bf16,block,fallback` compares recipes.
"""

import argparse
import dataclasses
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax

from examples.llama import fields, hf, mesh, metrics, plot, run_folder
from examples.llama.choosing import RECIPES_FILE
from examples.llama.config import AUTO, Config
from examples.llama.errors import UserError, replace_unprintable
from examples.llama.progress import StopRequests, stop_requests
from examples.llama.run_folder import has_run
from examples.llama.training import train, validate
from fbq_jax.export import ExportError

# Sizes are multiples of 128: quantized matrices consist of complete blocks.
PRESETS: dict[str, dict[str, Any]] = {
    "tiny": {},  # the defaults of Config: minutes on two CPU cores
    # 150 million parameters: minutes on one GPU
    "small": {"hidden": 1024, "ffn": 2816, "layers": 12, "heads": 16, "kv_heads": 4}
    | {"batch": 32, "accumulate": 4, "seq": 1024, "steps": 300, "lr": 6e-4}
    | {"eval_every": 100, "save_every": 100},
}

# The options that --from-hf takes from the model that it loads.
MODEL_SIZES = ("hidden", "ffn", "layers", "heads", "kv_heads", "experts", "top_k")


class Command(NamedTuple):
    """What the command line asks for."""

    runs: dict[Path, dict[str, str]]  # folders; with --compare, their recipes
    out: Path  # the folder of the run, or of the runs of a comparison
    resume: bool
    export: str | None  # the format to export the trained model in
    eval_only: bool  # whether to print the validation loss only
    mesh: str  # the devices to train on, in the format of `mesh.make`
    given: dict[str, Any]  # the options of `Config` that the command line sets
    defaults: dict[str, Any]  # of others, which a resumed run takes from its folder


def parse_command(argv: Sequence[str] | None = None) -> Command:
    """Reads the command line; None means the arguments of the process."""
    asked = _parser().parse_args(argv)
    given = fields.given(asked, Config)
    for name in MODEL_SIZES if "from_hf" in given else ():
        if name in given:
            flag = name.replace("_", "-")
            raise UserError(f"--{flag} comes from the model of --from-hf")
    compared = []
    if asked.compare is not None:
        compared = [name.strip() for name in asked.compare.split(",")]
        if "recipe" in given:
            raise UserError("--compare names the recipes; leave --recipe out")
        if not 2 <= len(compared) == len(set(compared)):
            got = repr(asked.compare)
            raise UserError(f"--compare takes two or more different recipes, got {got}")
        if asked.export is not None:
            raise UserError("--export takes one run; leave --compare out")
    if asked.eval_only and asked.export is not None:
        raise UserError("--eval-only trains nothing to export; leave --export out")
    if asked.eval_only and asked.out is not None and not asked.resume:
        raise UserError(
            "--eval-only writes nothing: leave --out out, or add --resume to validate "
            f"the run in {asked.out}"
        )
    defaults: dict[str, Any] = {}
    if asked.preset is not None:
        given = PRESETS[asked.preset] | given
    else:
        defaults |= PRESETS["tiny" if jax.default_backend() == "cpu" else "small"]
    if "from_hf" in given:
        defaults["lr"] = 2e-5
    name = "compare" if compared else given.get("recipe", Config.recipe)
    name = "rules" if "=" in name else name
    out = asked.out or Path("runs") / name
    runs = {out / name: {"recipe": name} for name in compared} or {out: {}}
    return Command(
        *(runs, out, asked.resume, asked.export, asked.eval_only, asked.mesh),
        *(given, defaults),
    )


def _parser() -> argparse.ArgumentParser:
    text = "Trains a Llama in INT8, FP8 or bf16 and plots its losses."
    prog = "python -m examples.llama.train"
    parser = argparse.ArgumentParser(prog, description=text, parents=[mesh.PARSER])
    fields.add_options(parser, Config)
    add = parser.add_argument
    text = "defaults (default: tiny on a CPU, small on an accelerator)"
    add("--preset", choices=PRESETS, help=text)
    text = "train with each of these recipes, such as bf16,block,fallback"
    add("--compare", metavar="RECIPES", help=text)
    text = "folder of the run (default: runs/<recipe>, or runs/compare)"
    add("--out", type=Path, help=text)
    add("--resume", action="store_true", help="continue the run in --out, bit for bit")
    text = "also write the trained model to this folder in --out: INT8 codes for "
    text += "serving, or floats (hf); with --resume, of a run that has ended"
    add("--export", choices=hf.FORMATS, help=text)
    text = "print the validation loss of the model before training, or of the run in "
    text += "--out with --resume; trains and writes nothing"
    add("--eval-only", action="store_true", help=text)
    return parser


def configure(command: Command, like: Path | None, **fixed: Any) -> Config:
    """Returns the options of a run; `fixed` ones override the command line.

    Options that are not given are those of the run in ``like``, or the defaults.
    """
    defaults = run_folder.read_options(like) if like else command.defaults
    defaults = {name: defaults[name] for name in defaults.keys() - run_folder.FACTS}
    return Config(**{**defaults, **command.given, **fixed})


def plan(command: Command) -> dict[Path, tuple[Config, bool]]:
    """Returns the options of each run, and whether to resume it.

    A resumed comparison also starts the runs that it had not reached, with the options
    of the others. Runs that differ in more than their recipe are an error.
    """
    existing = [out for out in command.runs if has_run(out)]
    runs: dict[Path, tuple[Config, bool]] = {}
    for out, fixed in command.runs.items():
        resume = command.resume and (out in existing or not existing)
        like = (out if resume else existing[0]) if command.resume else None
        asked = fixed.get("recipe"), command.given.get("recipe")
        if resume and AUTO in asked and (out / RECIPES_FILE).exists():
            fixed = {"recipe": run_folder.read_options(out)["recipe"]}  # its rules
        config = configure(command, like, **fixed)
        runs[out] = config, resume
        first, (reference, _) = next(iter(runs.items()))
        for name, value in dataclasses.asdict(reference).items():
            if name != "recipe" and (other := getattr(config, name)) != value:
                differ = f"{first} has {name} = {value} and {out} has {other}"
                raise UserError(f"{differ}: they cannot be compared")
    for out, (config, resume) in runs.items():
        if resume or not command.eval_only:
            run_folder.check_folder(out, config, resume)
    return runs


def run(command: Command, stop: StopRequests) -> None:
    """Trains what the command line asks for, and prints the reports."""
    devices = mesh.make(command.mesh)
    runs = plan(command)
    with mesh.use(devices):
        for out, (config, resume) in runs.items():
            stop.check()
            if command.eval_only:
                validate(config, out, resume=resume, stop=stop)
                continue
            train(config, out, resume=resume, export=command.export, stop=stop)
            if mesh.is_first():
                print(metrics.report(out))
    if len(runs) > 1 and not command.eval_only and mesh.is_first():
        picture, numbers = command.out / "compare.png", command.out / "compare.json"
        plot.draw_comparison(list(runs), picture)
        metrics.write_comparison(list(runs), numbers)
        print(metrics.compare(list(runs)))
        print(f"picture: {picture}\nnumbers: {numbers}")


def main(argv: list[str] | None = None) -> int:
    """Runs the command line and returns the exit status."""
    argv = sys.argv[1:] if argv is None else argv
    runs: dict[Path, dict[str, str]] = {}
    replace_unprintable()

    def say_how_to_continue() -> None:
        again, how = argv, "stopped; continue"
        if any(map(has_run, runs)) and "--eval-only" not in argv:
            again = argv if "--resume" in argv else [*argv, "--resume"]
            if not any(run_folder.checkpoints(out).exists() for out in runs):
                how = "stopped without a checkpoint; start again"
        # As it was typed: the Python of a virtual environment need not be on the path.
        typed = [sys.orig_argv[0], "-m", "examples.llama.train", *again]
        print(f"{how} with: {shlex.join(typed)}", flush=True)

    try:
        mesh.join(argv)  # before, because it also handles SIGTERM
        with stop_requests(say_how_to_continue) as stop:
            command = parse_command(argv)
            runs = command.runs
            run(command, stop)
    except KeyboardInterrupt:
        say_how_to_continue()
        return 130
    except (UserError, ExportError, OSError) as error:  # OSError names its file
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
