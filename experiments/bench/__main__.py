"""``python -m experiments.bench``: measures blocks and training steps of the Llama.

``python -m fbq_jax.bench table`` prints the results.
"""

import argparse
import sys
from collections.abc import Sequence

from fbq_jax.bench import cli

SECTIONS = (
    "block",
    "profile",
    "train",
    "accumulation",
    "invariant",
    "scaling",
    "parity",
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line and returns the exit status."""
    program = "experiments.bench"
    parser = argparse.ArgumentParser(
        prog=f"python -m {program}",
        description="Measures the Llama example on this machine's GPUs.",
    )
    cli.add_sections(parser, SECTIONS)
    options = parser.parse_args(arguments)
    return cli.exit_status(program, lambda: cli.run(program, SECTIONS, options))


if __name__ == "__main__":
    sys.exit(main())
