"""``python -m examples.llama.bench``: measures blocks and training steps of the Llama.

``python -m fbq_jax.bench table`` prints the results.
"""

import argparse
import sys
from collections.abc import Sequence

from examples.llama.bench import compile_tpu
from fbq_jax.bench import cli, tpu

SECTIONS = {
    "block": "a Llama block, forward and backward, and its memory",
    "profile": "the kernels of a Llama block",
    "train": "an optimizer step of a Llama with a billion parameters",
    "accumulation": "such a step that accumulates the gradients of microbatches",
    "scaling": "an optimizer step on one GPU and on several",
    "parity": "how far losses on several GPUs are from those on one",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line and returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m examples.llama.bench",
        description="Measures the Llama example on this machine's GPUs.",
    )
    commands = cli.add_sections(parser, SECTIONS)
    cli.add_writer(
        commands,
        "compile-tpu",
        "compiles an optimizer step for TPUs, and estimates its cycles",
        "Compiles an optimizer step of a Llama for several generations of TPUs, by "
        "several recipes, and estimates its cycles from the compiled code. Other "
        "tables in the file stay. Needs libtpu (pip install 'fbq-jax[tpu]'), but no "
        "TPU.",
        tpu.DEFAULT_PATH,
    )
    options = parser.parse_args(arguments)
    return cli.exit_status("examples.llama.bench", lambda: _run(options))


def _run(options: argparse.Namespace) -> None:
    if options.command == "compile-tpu":
        compile_tpu.run(options.out)
    else:
        cli.run("examples.llama.bench", SECTIONS, options)


if __name__ == "__main__":
    sys.exit(main())
