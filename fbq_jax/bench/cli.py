"""What the benchmarks' command lines share: options, checks, output and exit status."""

import argparse
import dataclasses
import functools
import importlib
import re
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from types import ModuleType
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

    Returns:
      0 for success, 1 for a measurement that failed, 2 for a usage error.
    """
    try:
        action()
    except (*_USAGE_ERRORS, *_FAILED_MEASUREMENTS, UnfinishedError) as error:
        print(f"{program}: {error}", file=sys.stderr)
        return 2 if isinstance(error, _USAGE_ERRORS) else 1
    return 0


def add_sections(parser: argparse.ArgumentParser, sections: Mapping[str, str]) -> Any:
    """Adds a subcommand for each section, and ``all``.

    Args:
      parser: gets the subcommands.
      sections: name to what the section measures.

    Returns:
      The parser's subcommands, to which the caller may add others.
    """
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, text in {**sections, "all": "all of these"}.items():
        command = commands.add_parser(name, help=text, description=f"Measures {text}.")
        command.add_argument(
            "--out",
            type=Path,
            metavar="FILE",
            help="the JSON file to write this section into; it replaces the section of "
            "this name, the others stay (default: bench-DEVICE.json)",
        )
        command.add_argument(
            "--implementation",
            choices=dispatch.IMPLEMENTATIONS,
            help="the implementation of the library's ops (default: chosen by device)",
        )
        command.add_argument(
            "--quick", action="store_true", help="half the sizes, fewer samples"
        )
        if name in sections:
            sizes = report.HEADINGS[name].shape.replace(" ", "")
            command.add_argument(
                "--shape",
                type=functools.partial(_read_shape, sizes),
                action="append",
                metavar=sizes,
                help="measures these sizes instead; may be repeated",
            )
    return commands


def add_writer(
    commands: Any, name: str, text: str, description: str, default: Path
) -> None:
    """Adds a command that writes a file of another kind.

    Args:
      commands: the subcommands, as ``add_sections`` returns them.
      name: the name of the command.
      text: what it does, in a line.
      description: what it does, and what it needs.
      default: the file that it writes by default.
    """
    command = commands.add_parser(name, help=text, description=description)
    command.add_argument(
        "--out",
        type=Path,
        metavar="FILE",
        default=default,
        help="the JSON file to write (default: %(default)s)",
    )


def _read_shape(sizes: str, text: str) -> tuple[int, ...]:
    """Reads sizes that are separated by commas, such as ``"8192,4096,4096"``."""
    count = sizes.count(",") + 1
    if re.fullmatch(r"[1-9]\d*(,[1-9]\d*)*", text) and text.count(",") + 1 == count:
        return tuple(map(int, text.split(",")))
    raise argparse.ArgumentTypeError(
        f"takes {count} positive integers {sizes}; got {text!r}"
    )


def run(
    package: str,
    sections: Collection[str],
    options: argparse.Namespace,
    uses: Mapping[str, Callable[[Path], object]] | None = None,
) -> None:
    """Measures the section that the options name, or all.

    Of all sections, one that fails leaves the rows that it measured, and the others are
    measured. A section that the file already has stays until the new one is complete;
    until then, the new rows are in ``results.part``.

    Args:
      package: the package with a module for each section.
      sections: the sections that ``all`` measures, in order.
      options: the parsed arguments of ``add_sections``.
      uses: by section, what to do with the JSON file once it has the complete section.

    Raises:
      UsageError: if there is no accelerator, or the implementation does not run on it.
      ResultsError: if the results cannot be stored, or would replace those of more
        sizes in a file that was not named.
      UnfinishedError: if some of all sections failed.
    """
    _check_device(options.implementation)
    path: Path = options.out or results.default_path()
    results.check_writable(path)
    if options.out is None:
        _check_keeps(path, sections, options)

    def measure_section(name: str) -> None:
        _measure(name, importlib.import_module(f"{package}.{name}"), path, options)
        if uses is not None and name in uses:
            uses[name](path)

    if options.command != "all":
        measure_section(options.command)
        print(f"\nwritten to {path}")
        return
    failed = [name for name in sections if not _succeeds(name, measure_section)]
    print(f"\nwritten to {path}{_how_to_send(options)}")
    if failed:
        raise UnfinishedError(f"not finished: {', '.join(failed)} (see above)")


def _succeeds(name: str, measure_section: Callable[[str], None]) -> bool:
    """Measures a section and returns whether it succeeded; stderr says why not."""
    try:
        measure_section(name)
    except (*_FAILED_MEASUREMENTS, results.ResultsError) as error:
        print(f"{name} stopped: {error}", file=sys.stderr, flush=True)
        return False
    return True


def _how_to_send(options: argparse.Namespace) -> str:
    """What to do with complete results, after the file's name."""
    if options.quick or options.implementation is not None:
        return ""
    return (
        "\nTo share the results of this GPU, open a pull request that adds the file "
        "under\nfbq_jax/bench/results/ (docs/develop/measuring.md, Measuring your own "
        "card)."
    )


def _check_device(implementation: str | None) -> None:
    if jax.default_backend() == "cpu":
        raise UsageError("measuring needs a GPU or a TPU; JAX has the CPU only")
    try:
        dispatch.choose("matmul", (128,) * 3, implementation=implementation)
    except ValueError as error:
        raise UsageError(str(error)) from error


def _check_keeps(
    path: Path, sections: Collection[str], options: argparse.Namespace
) -> None:
    """Checks that fewer or smaller sizes replace no section that has other rows."""
    stored = results.load(path) if path.exists() else {}
    shapes = None if options.command == "all" else options.shape
    for name in sections if options.command == "all" else [options.command]:
        if name not in stored:
            continue
        if shapes and {row.shape for row in stored[name]["rows"]}.difference(shapes):
            option = "--shape"
        elif options.quick and not stored[name]["quick"]:
            option = "--quick"
        else:
            continue
        raise results.ResultsError(
            f"{path} has rows of the section {name} that {option} would replace: write "
            "the new ones into another file, with --out"
        )


def _measure(
    name: str, section: ModuleType, path: Path, options: argparse.Namespace
) -> None:
    quick = options.quick
    print(report.text_head(name), flush=True)
    content = results.section([], quick=quick)
    is_stored = path.exists() and name in results.load(path)
    unfinished = results.part(path, name) if is_stored else path
    rows = section.rows(
        _shapes(section, options),
        implementation=options.implementation,
        effort=measure.QUICK if quick else measure.FULL,
    )
    try:
        for row in rows:
            print(report.text_row(name, row), flush=True)
            content["rows"].append(dataclasses.asdict(row))
            # Stored after each row, so that an interrupted run leaves what it measured.
            results.merge(unfinished, name, content)
    except jax.errors.JaxRuntimeError as error:
        reason = str(error).partition("\n")[0]
        if reason.startswith("RESOURCE_EXHAUSTED"):
            raise measure.UnsupportedError(
                f"{reason}; --shape takes sizes that fit into the memory"
            ) from error
        raise measure.UnsupportedError(reason) from error
    if is_stored and content["rows"]:
        results.merge(path, name, content)
        unfinished.unlink()


def _shapes(
    section: ModuleType, options: argparse.Namespace
) -> Sequence[tuple[int, ...]]:
    if options.command != "all" and options.shape:
        shapes: list[tuple[int, ...]] = options.shape
        return shapes
    if options.quick:
        return [tuple(max(1, size // 2) for size in shape) for shape in section.SHAPES]
    return section.SHAPES
