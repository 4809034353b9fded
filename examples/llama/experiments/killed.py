"""A run that is killed at a random step and resumed ends as one that never was.

python -m examples.llama.experiments.killed SIZE WORK RESULTS
"""

import dataclasses
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np

from examples.llama import checkpoint, metrics, train
from examples.llama.config import Config
from examples.llama.experiments import runs
from examples.llama.experiments.settings import SETTINGS
from examples.llama.step import TrainState, init_state, make_optimizer

# Without it a GPU adds the gradients of the embedding's rows in any order.
DETERMINISTIC = "--xla_gpu_deterministic_ops=true"


def main(size: str, work: Path, results: Path) -> None:
    """Trains twice, once killed, and writes `results/killed.json`."""
    settings = SETTINGS[size]
    data = str(work / "corpus" / "python")
    config = Config(data=data, **settings.pretrain | settings.killed)
    whole, killed = work / "killed" / "whole", work / "killed" / "killed"
    _start(config, whole).wait()
    process = _start(config, killed)
    at = random.randrange(config.save_every + 1, config.steps)
    while len(metrics.read(killed / "metrics.jsonl")) < at:
        if process.poll() is not None:
            raise RuntimeError(f"the run in {killed} ended before it could be killed")
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    reached = len(metrics.read(killed / "metrics.jsonl"))
    _start(config, killed, "--resume").wait()

    states = [_last(config, out) for out in (whole, killed)]
    leaves = [jax.tree.leaves_with_path(state) for state in states]
    differ = [
        jax.tree_util.keystr(path)
        for (path, a), (_, b) in zip(*leaves, strict=True)
        if not np.array_equal(np.asarray(a), np.asarray(b))
    ]
    losses = [
        [record["loss"] for record in metrics.read(out / "metrics.jsonl")]
        for out in (whole, killed)
    ]
    result: dict[str, Any] = {
        "machine": runs.machine(),
        "options": dataclasses.asdict(config),
        "killed_at": reached,
        "arrays": len(leaves[0]),
        "arrays_that_differ": differ,
        "losses_equal": losses[0] == losses[1],
    }
    runs.save(result, results / "killed.json")


def _start(config: Config, out: Path, *more: str) -> subprocess.Popen[bytes]:
    flags = [
        f"--{name.replace('_', '-')}={value}"
        for name, value in dataclasses.asdict(config).items()
        if value is not None
    ]
    command = [sys.executable, "-m", "examples.llama.train", f"--out={out}"]
    xla = f"{os.environ.get('XLA_FLAGS', '')} {DETERMINISTIC}"
    environment = os.environ | {"XLA_FLAGS": xla}
    return subprocess.Popen([*command, *flags, *more], env=environment)


def _last(config: Config, out: Path) -> TrainState:
    model, _, _ = train.build(config)
    optimizer, _ = make_optimizer(config)
    like = init_state(model, optimizer, None, config.seed)
    return checkpoint.restore(out / "checkpoints", like)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]))
