"""A queue: as many processes at a time as there are GPUs, until the time is up."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from examples.llama.experiments.runs import STOPPED, Run

# Seconds that a run has to write a checkpoint once it is told to stop.
GRACE = 60.0


def do(
    jobs: Mapping[str, Sequence[Run]], work: Path, *, gpus: int, until: float
) -> list[str]:
    """Does jobs, each in a process of its own, and each process on a GPU of its own.

    Runs that are done are left out, those that were stopped go on. What a process
    prints goes to `work/<job>.log`.

    Args:
        jobs: Runs that share a process, in the order in which they matter.
        work: Folder of what need not be kept.
        gpus: Number of GPUs; 0 has one process on the CPU.
        until: When running jobs are told to stop, by `time.monotonic`.

    Returns:
        The names of the jobs that are not finished.

    Raises:
        RuntimeError: A process failed; names its log. The others have gone on.
    """
    left = {
        name: [run for run in runs if not run.is_done()] for name, runs in jobs.items()
    }
    queue = [name for name, runs in left.items() if runs]
    free = list(range(max(1, gpus)))
    running: dict[str, tuple[subprocess.Popen[bytes], int]] = {}
    unfinished, failed, stopping = list(queue), [], False
    while running or (queue and not stopping):
        while queue and free and not stopping:
            name, gpu = queue.pop(0), free.pop(0)
            running[name] = _start(name, left[name], work, gpu if gpus else None), gpu
            print(f"{name} on GPU {gpu}" if gpus else name, flush=True)
        time.sleep(0.2)
        now = time.monotonic()
        if now > until and not stopping:
            stopping = True
            for process, _ in running.values():
                process.send_signal(signal.SIGTERM)
        for name, (process, gpu) in list(running.items()):
            if now > until + GRACE:
                process.kill()
            if (status := process.poll()) is None:
                continue
            del running[name]
            free.append(gpu)
            if status == 0:
                unfinished.remove(name)
            elif not stopping and status != STOPPED:
                failed.append(name)
            ended = "is done" if status == 0 else f"failed (status {status})"
            if stopping or status == STOPPED:
                ended = "stopped" if status else ended
            print(f"{name} {ended}", flush=True)
    if failed:
        logs = ", ".join(str(work / f"{name}.log") for name in failed)
        raise RuntimeError(f"failed: {', '.join(failed)}; see {logs}")
    return unfinished


def _start(
    name: str, runs: Sequence[Run], work: Path, gpu: int | None
) -> subprocess.Popen[bytes]:
    work.mkdir(parents=True, exist_ok=True)
    job = work / f"{name}.json"
    job.write_text(json.dumps([run.to_json() for run in runs], indent=2) + "\n")
    # Runs of the same shapes compile once, also in different processes.
    environment = {
        "JAX_COMPILATION_CACHE_DIR": str(work.absolute() / "compiled"),
        "XLA_PYTHON_CLIENT_MEM_FRACTION": "0.92",
    } | os.environ
    if gpu is not None:
        environment["CUDA_VISIBLE_DEVICES"] = str(gpu)
    with (work / f"{name}.log").open("ab") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "examples.llama.experiments.runs", str(job)],
            stdout=log,
            stderr=log,
            env=environment,
        )
