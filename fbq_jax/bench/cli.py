"""What the benchmarks' command lines share: options, checks, output and exit status."""

import argparse
import dataclasses
import functools
import importlib
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax

from fbq_jax.bench import measure, report, results
from fbq_jax.ops import dispatch


class UsageError(Exception):
    """The command line asks for something that cannot be done here."""


class UnfinishedError(Exception):
    """Some of several sections could not be measured."""


_USAGE_ERRORS = (UsageError, results.ResultsError, ModuleNotFoundError)
_FAILED_MEASUREMENTS = (measure.WrongResultError, measure.UnsupportedError)


def exit_status(program: str, action: Callable[[], object]) -> int:
    """Runs an action and reports the expected errors in one line on stderr.

    Returns 0 for success, 1 for a measurement that failed, 2 for a usage error.
    """
    try:
        action()
    except (*_USAGE_ERRORS, *_FAILED_MEASUREMENTS, UnfinishedError) as error:
        print(f"{program}: {error}", file=sys.stderr)
        return 2 if isinstance(error, _USAGE_ERRORS) else 1
    return 0


def add_sections(parser: argparse.ArgumentParser, sections: Sequence[str]) -> Any:
    """Adds a subcommand for each section, and ``all``; returns the subcommands."""
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name in (*sections, "all"):
        text = report.HEADINGS[name].title if name in sections else "all of these"
        command = commands.add_parser(name, help=text, description=text)
        add = command.add_argument
        text = "the JSON file to write this section into; the others in it stay "
        text += (
            "(default: bench-DEVICE.json, and bench-DEVICE-partial.json with --quick "
        )
        add("--out", type=Path, metavar="FILE", help=text + "or --shape)")
        text = "the implementation of the library's ops (default: chosen by device)"
        add("--implementation", choices=dispatch.IMPLEMENTATIONS, help=text)
        add("--quick", action="store_true", help="half the sizes, fewer samples")
        command.set_defaults(shape=None)
        if name in sections:
            sizes = report.HEADINGS[name].shape.replace(" ", "")
            read, text = functools.partial(read_shape, sizes), "measures these sizes "
            text += "instead; may be repeated"
            add("--shape", type=read, action="append", metavar=sizes, help=text)
    return commands


def read_shape(sizes: str, text: str) -> tuple[int, ...]:
    """Reads sizes that are separated by commas, such as ``"8192,4096,4096"``."""
    count = sizes.count(",") + 1
    if re.fullmatch(r"[1-9]\d*(,[1-9]\d*)*", text) and text.count(",") + 1 == count:
        return tuple(map(int, text.split(",")))
    takes = f"takes {count} positive integers {sizes}"
    raise argparse.ArgumentTypeError(f"{takes}; got {text!r}")


def run(package: str, sections: Sequence[str], options: argparse.Namespace) -> None:
    """Measures the section that the options name, or all.

    A section that fails leaves its rows in a file beside the results; of all sections,
    which are modules of the package, the others are measured.

    Raises:
      UsageError: there is no accelerator, or the implementation does not run on it.
      ResultsError: the results cannot be stored.
      UnfinishedError: some of all sections failed.
    """
    _check_device(options.implementation)
    is_partial = options.quick or options.shape
    path: Path = options.out or results.default_path("-partial" if is_partial else "")
    results.check_writable(path)
    if options.command != "all":
        _measure(options.command, package, path, options)
        print(f"\nwritten to {path}")
        return
    failed = []
    for name in sections:
        try:
            _measure(name, package, path, options)
        except (*_FAILED_MEASUREMENTS, results.ResultsError) as error:
            print(f"{name} stopped: {error}", file=sys.stderr, flush=True)
            failed.append(name)
    print(f"\nwritten to {path}")
    if not is_partial and options.implementation is None:
        print(
            "To share the results of this GPU, open a pull request that adds the file "
            "under\nfbq_jax/bench/results/ (docs/performance/benchmarks.md, Measuring "
            "your own card)."
        )
    if failed:
        raise UnfinishedError(f"not finished: {', '.join(failed)} (see above)")


def _check_device(implementation: str | None) -> None:
    if jax.default_backend() == "cpu":
        raise UsageError("measuring needs a GPU or a TPU; JAX has the CPU only")
    try:
        dispatch.choose("matmul", (128,) * 3, implementation=implementation)
    except ValueError as error:
        raise UsageError(str(error)) from error


def _measure(name: str, package: str, path: Path, options: argparse.Namespace) -> None:
    section = importlib.import_module(f"{package}.{name}")
    print(report.text_head(name), flush=True)
    content = results.section([], quick=options.quick)
    # Stored after each row, so that an interrupted run leaves what it measured.
    part = path.with_name(f"{path.name}.{name}.part")
    shapes = section.SHAPES
    if options.quick:
        shapes = [tuple(max(1, size // 2) for size in shape) for shape in shapes]
    rows = section.rows(
        options.shape or shapes,
        implementation=options.implementation,
        effort=measure.QUICK if options.quick else measure.FULL,
    )
    try:
        for row in rows:
            print(report.text_row(row), flush=True)
            content["rows"].append(dataclasses.asdict(row))
            results.merge(part, name, content)
    except jax.errors.JaxRuntimeError as error:
        reason = str(error).partition("\n")[0]
        if reason.startswith("RESOURCE_EXHAUSTED"):
            reason += "; --shape takes sizes that fit into the memory"
        raise measure.UnsupportedError(reason) from error
    results.merge(path, name, content)
    part.unlink(missing_ok=True)
    # Layers read the map: it has all shapes, with the kernels that layers choose.
    if name == "map" and not (options.quick or options.shape or options.implementation):
        print(f"installed as {section.install(results.load(path)[name])}")
