"""A queue: as many processes at a time as there are GPUs, until the time is up."""

import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

# A process that was told to stop, and can go on later, exits with it.
STOPPED = 130
# Seconds that a process has to write a checkpoint once it is told to stop.
GRACE = 60.0


class JobError(RuntimeError):
    """A process failed."""


def do(
    commands: Mapping[str, Sequence[str]],
    needs: Mapping[str, str],
    logs: Path,
    *,
    gpus: int,
    until: float,
) -> list[str]:
    """Does commands, each in a process of its own, each process on a GPU of its own.

    Args:
        commands: By name, in the order in which they matter.
        needs: Which of them, if there is such a one, has to be finished before another.
        logs: Folder of what they print; also of what they compile, which those that
            compile the same need not do again.
        gpus: Number of GPUs; 0 has one process on the CPU.
        until: When running processes are told to stop, by `time.monotonic`.

    Returns:
        The names of the commands that are not finished.

    Raises:
        JobError: A process failed; names its log. The others have gone on.
    """
    logs.mkdir(parents=True, exist_ok=True)
    queue, free = list(commands), list(range(max(1, gpus)))
    running: dict[str, tuple[subprocess.Popen[bytes], int]] = {}
    unfinished, failed, stopping = list(queue), [], False
    while True:
        ready = [name for name in queue if needs.get(name) not in unfinished]
        if not running and (stopping or not ready):
            break
        if ready and free and not stopping:
            name, gpu = ready[0], free.pop(0)
            queue.remove(name)
            print(f"{name} on GPU {gpu}" if gpus else name, flush=True)
            process = _start(commands[name], logs, name, gpu if gpus else None)
            running[name] = process, gpu
            continue
        time.sleep(0.1)
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
                print(f"{name} is done", flush=True)
            elif stopping or status == STOPPED:
                print(f"{name} stopped", flush=True)
            else:
                failed.append(name)
                print(f"{name} failed, with status {status}", flush=True)
    if failed:
        names = ", ".join(str(logs / f"{name}.log") for name in failed)
        raise JobError(f"failed: {', '.join(failed)}; see {names}")
    return unfinished


def _start(
    command: Sequence[str], logs: Path, name: str, gpu: int | None
) -> subprocess.Popen[bytes]:
    environment = {
        "JAX_COMPILATION_CACHE_DIR": str(logs.absolute() / "compiled"),
        "XLA_PYTHON_CLIENT_MEM_FRACTION": "0.92",
    } | os.environ
    if gpu is not None:
        environment["CUDA_VISIBLE_DEVICES"] = str(gpu)
    with (logs / f"{name}.log").open("ab") as log:
        return subprocess.Popen(command, stdout=log, stderr=log, env=environment)
