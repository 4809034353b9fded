"""``python -m fbq_jax.bench``: measures the library's ops and shows results."""

import argparse
import importlib
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fbq_jax.bench import cli, compiled, errors, models, report, results, tpu

SECTIONS = {
    "step": "a training step of Flax layers, which is what users get",
    "step_profile": "the kernels of such a step, one by one",
    "map": "where INT8 is faster than bf16: training steps over a grid of shapes",
    "gemm": "the block-scaled INT8 GEMM against bf16",
    "quantize": "quantization against a copy",
    "linear": "a linear layer, in Flax and in parts, against bf16 and other libraries",
    "grouped": "the products of experts, each with its own rows, against bf16",
    "moe": "a whole mixture of experts in a training step, against bf16",
    "moe_scaling": "a mixture of experts on one device and on several",
    "serve": "frozen layers of a Llama, for prompts and for decoding, against bf16",
    "recipes": "every recipe on activations with outliers",
}
# The modules that draw sections. They need Matplotlib, which is optional.
PICTURES = {
    "recipes": "fbq_jax.bench.picture",
    "map": "fbq_jax.bench.map_picture",
    "block": "fbq_jax.bench.block_picture",
}
# The modules that write a file of another kind, for which they need no GPU.
_WRITERS = {
    "compile": compiled,
    "compile-tpu": tpu,
    "models": models,
    "errors": errors,
}
LLAMA = "python -m examples.llama.bench"
# Commands that need the Llama example, under their present and their former names.
_MOVED = {name: name for name in ("block", "profile", "train", "scaling", "parity")}
_MOVED |= {"scale": "scaling", "losses": "parity"}


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line and returns the exit status."""
    arguments = sys.argv[1:] if arguments is None else arguments
    return cli.exit_status("fbq_jax.bench", lambda: _run(arguments))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m fbq_jax.bench",
        description="Measures this library on this machine's GPU and shows results.",
        epilog=f"In a clone of the repository, {LLAMA} measures the Llama example.",
    )
    commands = cli.add_sections(parser, SECTIONS)
    cli.add_writer(
        commands,
        "compile",
        "compiles the Triton kernels for several GPUs, and estimates their speed",
        "Compiles the Triton kernels for GPUs from Ampere on, and estimates the speed "
        "of a linear layer from the compiled code and published rates. Needs Triton "
        "(pip install 'triton==3.6.*'), but no GPU.",
        _WRITERS["compile"].DEFAULT_PATH,
    )
    cli.add_writer(
        commands,
        "compile-tpu",
        "compiles linear layers for TPUs, and estimates their cycles",
        "Compiles a linear layer for several generations of TPUs, by several recipes, "
        "and estimates its cycles from the compiled code. Needs libtpu (pip install "
        "'fbq-jax[tpu]'), but no TPU.",
        _WRITERS["compile-tpu"].DEFAULT_PATH,
    )
    cli.add_writer(
        commands,
        "models",
        "quantizes public models, and compares their losses with Qwix's",
        "Quantizes the public models whose packages are installed (pip install "
        "'fbq-jax[models]'), by this library and by Qwix, and trains them for two "
        "steps. Rows of other models in the file stay. Needs no GPU.",
        _WRITERS["models"].DEFAULT_PATH,
    )
    cli.add_writer(
        commands,
        "errors",
        "compares the errors of recipes as outliers grow",
        "Compares the errors of recipes, with and without a name, as outliers grow in "
        "X, W or dY. Needs no GPU.",
        _WRITERS["errors"].DEFAULT_PATH,
    )
    table = commands.add_parser("table", help="prints a JSON file's tables as Markdown")
    table.add_argument("file", type=Path, metavar="FILE")
    picture = commands.add_parser("picture", help="plots a section of a JSON file")
    picture.add_argument("file", type=Path, metavar="FILE")
    picture.add_argument("picture", type=Path, metavar="PICTURE")
    picture.add_argument(
        "--section", choices=PICTURES, default="recipes", help="default: recipes"
    )
    install = commands.add_parser(
        "install-map",
        help="makes a JSON file's map the one that the library reads on such a GPU",
    )
    install.add_argument("file", type=Path, metavar="FILE")
    return parser


def _run(arguments: Sequence[str]) -> None:
    if arguments and arguments[0] in _MOVED:
        raise cli.UsageError(
            f"{arguments[0]} measures the Llama example: in a clone of the repository, "
            f"run {LLAMA} {_MOVED[arguments[0]]}"
        )
    options = _parser().parse_args(arguments)
    if options.command == "table":
        print(_tables(options.file))
    elif options.command in _WRITERS:
        _WRITERS[options.command].run(options.out)
        print(f"\nwritten to {options.out}: python -m fbq_jax.bench table prints it")
    elif options.command == "picture":
        _draw(options.file, options.section, options.picture)
    elif options.command == "install-map":
        _install_map(options.file)
    else:
        _run_sections(options)


def _run_sections(options: argparse.Namespace) -> None:
    if options.command == "map":
        # Its processes share the GPU's memory with this one, which measures nothing.
        os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
    # Layers read the map, so it has all shapes, with the kernels that layers choose.
    narrowed = options.quick, options.implementation, vars(options).get("shape")
    uses = {} if any(narrowed) else {"map": _install_map}
    cli.run("fbq_jax.bench", SECTIONS, options, uses)


def _tables(file: Path) -> str:
    try:
        for writer in _WRITERS.values():
            if (content := writer.load(file)) is not None:
                return writer.markdown(content)
        return report.markdown(results.load(file))
    except (TypeError, KeyError, ValueError, AttributeError) as error:
        raise results.ResultsError(
            f"{file} does not hold benchmark results: {error!r}"
        ) from error


def _install_map(file: Path) -> None:
    from fbq_jax.bench import map as speed_map

    print(f"installed as {speed_map.install(_section(file, 'map'))}")


def _draw(file: Path, section: str, path: Path) -> None:
    """Draws a section; the picture's suffix selects one of Matplotlib's formats."""
    try:
        drawing = importlib.import_module(PICTURES[section])
    except ModuleNotFoundError as error:
        reason = "picture needs Matplotlib: pip install matplotlib"
        raise cli.UsageError(reason) from error
    figure = drawing.draw(_section(file, section)["rows"])
    try:
        figure.savefig(path, dpi=120)
    except (OSError, ValueError) as error:
        raise results.ResultsError(f"cannot write {path}: {error}") from error


def _section(file: Path, name: str) -> dict[str, Any]:
    """A section of a JSON file."""
    sections = results.load(file)
    if name not in sections:
        raise results.ResultsError(f"{file} has no section {name}")
    section: dict[str, Any] = sections[name]
    return section


if __name__ == "__main__":
    sys.exit(main())
