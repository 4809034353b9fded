"""``python -m fbq_jax.bench``: measures the library's ops and shows results."""

import argparse
import importlib
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fbq_jax.bench import cli, report, results
from fbq_jax.contrib import needs

SECTIONS = ("step", "map", "gemm", "linear", "grouped", "moe", "serve")
LLAMA = "python -m experiments.bench"


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line and returns the exit status."""
    return cli.exit_status("fbq_jax.bench", lambda: _run(arguments))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m fbq_jax.bench",
        description="Measures this library on this machine's GPU and shows results.",
        epilog=f"In a clone of the repository, {LLAMA} measures the Llama example.",
    )
    commands = cli.add_sections(parser, SECTIONS)
    table = commands.add_parser("table", help="prints a JSON file's tables as Markdown")
    table.add_argument("file", type=Path, metavar="FILE")
    picture = commands.add_parser("picture", help="plots the map of a JSON file")
    picture.add_argument("file", type=Path, metavar="FILE")
    picture.add_argument("picture", type=Path, metavar="PICTURE")
    text = "makes a JSON file's map the one that the library reads on such a GPU"
    install = commands.add_parser("install-map", help=text)
    install.add_argument("file", type=Path, metavar="FILE")
    return parser


def _run(arguments: Sequence[str] | None) -> None:
    options = _parser().parse_args(arguments)
    if options.command == "table":
        print(report.markdown(results.load(options.file)))
    elif options.command == "picture":
        _draw(options.file, options.picture)
    elif options.command == "install-map":
        from fbq_jax.bench import map as speed_map

        print(f"installed as {speed_map.install(_map(options.file))}")
    else:
        cli.run("fbq_jax.bench", SECTIONS, options)


def _draw(file: Path, path: Path) -> None:
    """Draws the map; the picture's suffix selects one of Matplotlib's formats."""
    try:
        with needs("matplotlib", extra="examples"):
            picture = importlib.import_module("fbq_jax.bench.picture")
    except ModuleNotFoundError as error:
        raise cli.UsageError(str(error)) from error
    figure = picture.draw(_map(file)["rows"])
    try:
        figure.savefig(path, dpi=120)
    except (OSError, ValueError) as error:
        raise results.ResultsError(f"cannot write {path}: {error}") from error


def _map(file: Path) -> dict[str, Any]:
    """The section ``map`` of a JSON file."""
    sections = results.load(file)
    if "map" not in sections:
        raise results.ResultsError(f"{file} has no section map")
    section: dict[str, Any] = sections["map"]
    return section


if __name__ == "__main__":
    sys.exit(main())
