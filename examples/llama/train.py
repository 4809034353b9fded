"""Trains a Llama with INT8 linear layers and plots its losses.

    python -m examples.llama.train

It trains for minutes on two CPU cores, on the source of Python's standard library, and
writes metrics.jsonl, curves.png, config.json and checkpoints to runs/fallback. `--help`
lists the options; `--compare bf16,block,fallback` compares recipes.
"""

import dataclasses
import shlex
import sys
from pathlib import Path
from typing import Any

from examples.llama import checkpoint, hf, mesh, metrics, plot
from examples.llama.command_line import Command, parse_command
from examples.llama.config import Config, ConfigError
from examples.llama.data import DataError
from examples.llama.run_folder import (
    FACTS,
    RunError,
    check_folder,
    checkpoints,
    has_run,
    read_options,
)
from examples.llama.training import train
from fbq_jax.export import ExportError

ERRORS = (
    ConfigError,
    DataError,
    RunError,
    mesh.MeshError,
    checkpoint.RestoreError,
    checkpoint.SaveError,
    metrics.MetricsError,
    hf.CheckpointError,
    ExportError,
)


def run_folders(command: Command) -> dict[Path, dict[str, Any]]:
    """Returns the folder of each run, and the options that the folder determines."""
    if not command.compare:
        return {command.out: {}}
    return {command.out / name: {"recipe": name} for name in command.compare}


def configure(command: Command, like: Path | None, **fixed: Any) -> Config:
    """Returns the options of a run.

    Args:
        command: The command line.
        like: The folder of a run that provides the options that are not given; None
            takes them from the defaults.
        **fixed: Options that override the command line.
    """
    defaults = read_options(like) if like else command.defaults
    defaults = {name: defaults[name] for name in defaults.keys() - FACTS}
    return Config(**{**defaults, **command.given, **fixed})


def check_comparable(configs: dict[Path, Config]) -> None:
    """Raises ConfigError if runs differ in more than their recipe."""
    (first, reference), *others = configs.items()
    for out, config in others:
        for name, value in dataclasses.asdict(reference).items():
            if name != "recipe" and getattr(config, name) != value:
                raise ConfigError(
                    f"{first} has {name} = {value} and {out} has "
                    f"{getattr(config, name)}: they cannot be compared"
                )


def plan(command: Command) -> dict[Path, tuple[Config, bool]]:
    """Returns the options of each run, and whether to resume it.

    A resumed comparison also starts the runs that it had not reached, with the options
    of the runs that it had started.
    """
    folders = run_folders(command)
    existing = [out for out in folders if has_run(out)]
    configs, resumes = {}, {}
    for out, fixed in folders.items():
        resumes[out] = command.resume and (out in existing or not existing)
        like = None
        if command.resume:
            like = out if resumes[out] else existing[0]
        configs[out] = configure(command, like, **fixed)
    check_comparable(configs)
    for out, config in configs.items():
        check_folder(out, config, resumes[out])
    return {out: (config, resumes[out]) for out, config in configs.items()}


def run(command: Command) -> None:
    """Trains what the command line asks for, and prints the reports."""
    devices = mesh.make(command.mesh)
    runs = plan(command)
    with mesh.use(devices):
        for out, (config, resume) in runs.items():
            train(config, out, resume=resume, export=command.export)
            if mesh.is_first():
                print(metrics.report(out))
    if command.compare and mesh.is_first():
        picture, numbers = command.out / "compare.png", command.out / "compare.json"
        plot.draw_comparison(list(runs), picture)
        metrics.write_comparison(list(runs), numbers)
        print(metrics.compare(list(runs)))
        print(f"picture: {picture}")
        print(f"numbers: {numbers}")


def main(argv: list[str] | None = None) -> int:
    """Runs the command line and returns the exit status."""
    argv = sys.argv[1:] if argv is None else argv
    command = None
    try:
        mesh.join(argv)
        command = parse_command(argv)
        run(command)
    except KeyboardInterrupt:
        again, how = argv, "stopped; continue"
        if command is not None and any(map(has_run, run_folders(command))):
            again = argv if "--resume" in argv else [*argv, "--resume"]
            if not any(checkpoints(out).exists() for out in run_folders(command)):
                how = "stopped without a checkpoint; start again"
        # As it was typed, since the Python of a virtual environment need not be on the
        # path.
        python = sys.orig_argv[0]
        print(
            f"{how} with: " + shlex.join([python, "-m", "examples.llama.train", *again])
        )
        return 130
    except (*ERRORS, OSError) as error:  # OSError names its file
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
