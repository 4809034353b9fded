"""Compares a run that is killed at a random step and resumed with a complete run.

Both must end with the same arrays, bit for bit.
"""

import dataclasses
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np

from examples.llama import metrics
from examples.llama.build import last_state
from examples.llama.config import Config
from experiments import result_files, runs
from experiments.settings import Experiment

# Without this flag a GPU sums the gradients of the embedding in any order.
DETERMINISTIC = "--xla_gpu_exclude_nondeterministic_ops=true"


def run(experiment: Experiment) -> None:
    """Trains twice, kills one of the runs, and writes `killed.json`.

    Raises:
        RuntimeError: A run failed, or ended before it could be killed.
    """
    settings = experiment.settings
    data = {"data": str(experiment.text("python"))}
    options = settings.pretrain | settings.killed | data
    config = Config(**options)
    folder = experiment.work / "killed"
    if folder.exists():  # a stopped comparison starts over, because it is short
        shutil.rmtree(folder)
    outs = folder / "whole", folder / "killed"
    logs = [out / "metrics.jsonl" for out in outs]
    _train(options, outs[0])
    # After the first checkpoint.
    step = random.randrange(config.save_every + 1, config.steps)
    _train(options, outs[1], kill_at=step)
    reached = len(metrics.read(logs[1]))
    _train(options, outs[1], "--resume")

    leaves = [jax.tree.leaves_with_path(last_state(config, out)) for out in outs]
    differ = [
        jax.tree_util.keystr(path)
        for (path, a), (_, b) in zip(*leaves, strict=True)
        if not np.array_equal(np.asarray(a), np.asarray(b))
    ]
    losses = [[record["loss"] for record in metrics.read(log)] for log in logs]
    result = {
        "machine": runs.machine(),
        "options": dataclasses.asdict(config),
        "killed_at": reached,
        "arrays": len(leaves[0]),
        "arrays_that_differ": differ,
        "losses_equal": losses[0] == losses[1],
    }
    result_files.save(result, experiment.results / "killed.json")


def _train(
    options: dict[str, Any], out: Path, *more: str, kill_at: int | None = None
) -> None:
    """Trains in a process, which is killed once it has taken a number of steps."""
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in options.items()]
    command = [sys.executable, "-m", "examples.llama.train", f"--out={out}", *flags]
    xla = f"{os.environ.get('XLA_FLAGS', '')} {DETERMINISTIC}"
    environment = os.environ | {"XLA_FLAGS": xla}
    process = subprocess.Popen([*command, *more], env=environment)
    try:
        while process.poll() is None:
            time.sleep(0.01)
            if kill_at and len(metrics.read(out / "metrics.jsonl")) >= kill_at:
                break
    finally:  # it does not outlive this one
        process.kill()
        status = process.wait()
    if status != (-signal.SIGKILL if kill_at else 0):
        raise RuntimeError(f"the run in {out} ended with status {status}")
