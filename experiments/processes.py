"""Runs processes, each on one GPU or on several."""

import os
import subprocess
import time
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

# Seconds that a process has to write a checkpoint after it is told to stop.
GRACE = 60.0

Process = subprocess.Popen[bytes]


class JobError(RuntimeError):
    """A process failed, or there are too few GPUs."""


def do(
    commands: Mapping[str, Sequence[str]],
    needs: Mapping[str, Collection[str]],
    logs: Path,
    *,
    gpus: int,
    gpus_each: int = 1,
) -> None:
    """Runs commands as processes, at most one per GPU.

    Args:
        commands: The commands by name, in order of priority.
        needs: The commands that must finish before another one starts, by the name of
            the latter. Names that are not in `commands` count as finished.
        logs: The folder of the processes' output and of their shared compilation cache.
        gpus: The number of GPUs; 0 runs one process at a time on the CPU.
        gpus_each: The number of GPUs of each process.

    Raises:
        JobError: A process failed, or was stopped, or there are too few GPUs. The
            others have run; the message names the log.
        KeyboardInterrupt: Ctrl-C. All running processes have been stopped.
    """
    logs.mkdir(parents=True, exist_ok=True)
    free = _devices(gpus, gpus_each)
    waiting, unfinished, failed = list(commands), set(commands), list[str]()
    running: dict[str, tuple[Process, str | None]] = {}

    def ready() -> list[str]:
        return [n for n in waiting if unfinished.isdisjoint(needs.get(n, ()))]

    def collect() -> None:
        for name, (process, device) in list(running.items()):
            if (status := process.poll()) is None:
                continue
            del running[name]
            free.append(device)
            if status:
                failed.append(name)
            else:
                unfinished.remove(name)
            how = f"ended with status {status}" if status else "is done"
            print(f"{name} {how}", flush=True)

    try:
        while running or ready():
            if free and (names := ready()):
                waiting.remove(name := names[0])
                device = free.pop(0)
                print(name + (f" on GPU {device}" if device else ""), flush=True)
                process = _start(commands[name], logs, name, device)
                running[name] = process, device
            else:
                time.sleep(0.1)
                collect()
    finally:
        _stop([process for process, _ in running.values()])
    if failed:
        files = ", ".join(str(logs / f"{name}.log") for name in failed)
        raise JobError(f"failed: {', '.join(failed)}; see {files}")


def _devices(gpus: int, each: int) -> list[str | None]:
    """Returns the first usable GPUs by process, as CUDA_VISIBLE_DEVICES names them."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = list(map(str, range(gpus)))
    if visible is not None:
        names = visible.split(",") if visible else []
    if len(names) < gpus:
        raise JobError(
            f"CUDA_VISIBLE_DEVICES={visible} has {len(names)} GPUs, not {gpus}"
        )
    if 0 < gpus < each:
        raise JobError(f"each run needs {each} GPUs; --gpus gives {gpus}")
    firsts = range(0, gpus - each + 1, each)
    return [",".join(names[first : first + each]) for first in firsts] or [None]


def _start(
    command: Sequence[str], logs: Path, name: str, device: str | None
) -> Process:
    environment = {
        "JAX_COMPILATION_CACHE_DIR": str(logs.absolute() / "compiled"),
        "XLA_PYTHON_CLIENT_MEM_FRACTION": "0.92",
    } | os.environ
    if device is not None:
        environment["CUDA_VISIBLE_DEVICES"] = device
    with (logs / f"{name}.log").open("ab") as log:
        return subprocess.Popen(command, stdout=log, stderr=log, env=environment)


def _stop(processes: Sequence[Process]) -> None:
    """Terminates processes; kills any that still runs after `GRACE` seconds."""
    for process in processes:
        process.terminate()
    until = time.monotonic() + GRACE
    try:
        for process in processes:
            process.wait(max(0.0, until - time.monotonic()))
    except subprocess.TimeoutExpired:
        pass
    finally:
        for process in processes:
            process.kill()
            process.wait()
