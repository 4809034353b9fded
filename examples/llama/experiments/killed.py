"""Compares a run that is killed at a random step and resumed with a complete run.

    python -m examples.llama.experiments.killed SIZE WORK RESULTS

Both runs must end with the same arrays, bit for bit.
"""

import dataclasses
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import numpy as np

from examples.llama import metrics
from examples.llama.config import Config
from examples.llama.experiments import runs
from examples.llama.experiments.jobs import STOPPED
from examples.llama.experiments.settings import SETTINGS, Settings
from examples.llama.training import last_state

# Without this flag a GPU sums the gradients of the embedding in any order.
DETERMINISTIC = "--xla_gpu_exclude_nondeterministic_ops=true"


def main(size: str, work: Path, results: Path) -> int:
    """Trains twice, kills one of the runs, and writes `results/killed.json`.

    Returns:
        The exit status.

    Raises:
        RuntimeError: A run failed, or ended before it could be killed.
    """
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        runs.save(_compare(SETTINGS[size], work), results / "killed.json")
    except KeyboardInterrupt:
        return STOPPED
    return 0


def _compare(settings: Settings, work: Path) -> dict[str, Any]:
    data = str(work / "corpus" / "python")
    config = Config(data=data, **settings.pretrain | settings.killed)
    folder = work / "killed"
    if folder.exists():  # a stopped comparison starts over, because it is short
        shutil.rmtree(folder)
    outs = folder / "whole", folder / "killed"
    _train(config, outs[0])
    _train_and_kill(config, outs[1])
    logs = [out / "metrics.jsonl" for out in outs]
    reached = len(metrics.read(logs[1]))
    _train(config, outs[1], "--resume")

    leaves = [jax.tree.leaves_with_path(last_state(config, out)) for out in outs]
    differ = [
        jax.tree_util.keystr(path)
        for (path, a), (_, b) in zip(*leaves, strict=True)
        if not np.array_equal(np.asarray(a), np.asarray(b))
    ]
    losses = [[record["loss"] for record in metrics.read(log)] for log in logs]
    return {
        "machine": runs.machine(),
        "options": dataclasses.asdict(config),
        "killed_at": reached,
        "arrays": len(leaves[0]),
        "arrays_that_differ": differ,
        "losses_equal": losses[0] == losses[1],
    }


def _train_and_kill(config: Config, out: Path) -> None:
    """Kills a run at a random step after its first checkpoint."""
    step = random.randrange(config.save_every + 1, config.steps)
    with _training(config, out) as process:
        while len(metrics.read(out / "metrics.jsonl")) < step:
            if process.poll() is not None:
                break
            time.sleep(0.01)
        process.kill()
        if (status := process.wait()) != -signal.SIGKILL:
            raise RuntimeError(
                f"the run in {out} ended with status {status} before it was killed"
            )


def _train(config: Config, out: Path, *more: str) -> None:
    with _training(config, out, *more) as process:
        if status := process.wait():
            raise RuntimeError(f"the run in {out} failed with status {status}")


@contextmanager
def _training(
    config: Config, out: Path, *more: str
) -> Iterator[subprocess.Popen[bytes]]:
    """Starts a training process that does not outlive the block."""
    flags = [
        f"--{name.replace('_', '-')}={value}"
        for name, value in dataclasses.asdict(config).items()
        if value is not None
    ]
    command = [sys.executable, "-m", "examples.llama.train", f"--out={out}"]
    xla = f"{os.environ.get('XLA_FLAGS', '')} {DETERMINISTIC}"
    environment = os.environ | {"XLA_FLAGS": xla}
    process = subprocess.Popen([*command, *flags, *more], env=environment)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3])))
