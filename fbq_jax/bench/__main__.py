"""``python -m fbq_jax.bench``: measures on this machine's GPU, and shows results."""

import argparse
import dataclasses
import importlib
import sys
from collections.abc import Sequence
from pathlib import Path

import jax

from fbq_jax.bench import measure, report, results
from fbq_jax.ops import dispatch


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit status."""
    options = _parser().parse_args(arguments)
    try:
        if options.command == "table":
            print(report.markdown(results.load(options.file)))
        elif options.command == "picture":
            _draw(options)
        else:
            _run(options)
    except (results.ResultsError, _UsageError, ModuleNotFoundError) as error:
        return _fail(error, 2)
    except (measure.WrongResultError, measure.NoKernelsError) as error:
        return _fail(error, 1)
    return 0


class _UsageError(Exception):
    """What was asked for cannot be done here."""


def _fail(error: Exception, status: int) -> int:
    print(f"fbq_jax.bench: {error}", file=sys.stderr)
    return status


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m fbq_jax.bench",
        description="Measures on this machine's GPU, and shows results.",
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    sections = {
        "gemm": "the block-scaled INT8 GEMM beside bf16",
        "quantize": "quantization beside a copy",
        "linear": "a linear layer, forward and backward, beside bf16 and others' INT8",
        "recipes": "every recipe, on activations with outliers",
        "block": "a Llama block, forward and backward, and its memory",
        "profile": "the kernels of such a block",
        "train": "an optimizer step of a Llama of a billion parameters",
        "scale": "such a step on several GPUs",
        "losses": "whether training on several GPUs has the losses of one",
        "all": "all of these",
    }
    for name, text in sections.items():
        command = commands.add_parser(name, help=text, description=f"Measures {text}.")
        command.add_argument(
            "--out",
            type=Path,
            metavar="FILE",
            help="the JSON file that gets the results and keeps its other sections "
            "(default: bench-DEVICE.json)",
        )
        command.add_argument(
            "--implementation",
            choices=dispatch.IMPLEMENTATIONS,
            help="of this library's ops (default: what it chooses here)",
        )
        command.add_argument(
            "--quick", action="store_true", help="half the sizes, fewer samples"
        )
    table = commands.add_parser("table", help="prints a JSON file's tables as Markdown")
    table.add_argument("file", type=Path, metavar="FILE")
    picture = commands.add_parser("picture", help="draws a JSON file's section recipes")
    picture.add_argument("file", type=Path, metavar="FILE")
    picture.add_argument("picture", type=Path, metavar="PICTURE")
    return parser


def _draw(options: argparse.Namespace) -> None:
    # Here, for it needs Matplotlib.
    from fbq_jax.bench import picture

    sections = results.load(options.file)
    if "recipes" not in sections:
        raise results.ResultsError(f"{options.file} has no section recipes")
    picture.draw(sections["recipes"]["rows"], options.picture)


def _run(options: argparse.Namespace) -> None:
    """Measures, prints and stores one section after the other."""
    if (backend := jax.default_backend()) != "gpu":
        raise _UsageError(f"measuring needs a GPU; JAX's default backend is {backend}")
    try:
        dispatch.choose("matmul", (128,) * 3, implementation=options.implementation)
    except ValueError as error:
        raise _UsageError(str(error)) from error
    path = options.out or results.default_path()
    results.check_writable(path)
    quick = options.quick
    effort = measure.QUICK if quick else measure.FULL
    for name in results.SECTIONS if options.command == "all" else [options.command]:
        try:
            section = importlib.import_module(f"fbq_jax.bench.{name}")
        except ModuleNotFoundError as error:
            if options.command != "all":
                raise
            print(f"without {name}: {error}", file=sys.stderr)
            continue
        print(report.text_head(name), flush=True)
        shapes = [tuple(n // 2 for n in s) if quick else s for s in section.SHAPES]
        content = results.section([], quick=quick)
        for row in section.rows(
            shapes, implementation=options.implementation, effort=effort
        ):
            print(report.text_row(name, row), flush=True)
            content["rows"].append(dataclasses.asdict(row))
            # Each time, so that a run that is stopped leaves what it measured.
            results.merge(path, name, content)
    print(f"\nwritten to {path}")


if __name__ == "__main__":
    sys.exit(main())
