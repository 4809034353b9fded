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
        JobError: A process failed; names its log. The others have gone on. Or there
            are fewer GPUs in CUDA_VISIBLE_DEVICES.
        KeyboardInterrupt: Ctrl-C. The running processes were told to stop, and have.
    """
    free: list[str | None] = [*_devices(gpus)] or [None]
    logs.mkdir(parents=True, exist_ok=True)
    queue = list(commands)
    running: dict[str, tuple[subprocess.Popen[bytes], str | None]] = {}
    unfinished, failed = list(queue), []

    def look(stopped: Sequence[int]) -> None:
        for name, (process, device) in list(running.items()):
            if (status := process.poll()) is None:
                continue
            del running[name]
            free.append(device)
            if status == 0:
                unfinished.remove(name)
                print(f"{name} is done", flush=True)
            elif status in stopped:
                print(f"{name} stopped", flush=True)
            else:
                failed.append(name)
                print(f"{name} failed, with status {status}", flush=True)

    try:
        while time.monotonic() < until:
            ready = [name for name in queue if needs.get(name) not in unfinished]
            if not (running or ready):
                break
            if ready and free:
                name, device = ready[0], free.pop(0)
                queue.remove(name)
                print(name + (f" on GPU {device}" if device else ""), flush=True)
                running[name] = _start(commands[name], logs, name, device), device
                continue
            time.sleep(0.1)
            look([STOPPED])
    finally:
        _stop([process for process, _ in running.values()])
    look([STOPPED, -signal.SIGTERM, -signal.SIGKILL])
    if failed:
        names = ", ".join(str(logs / f"{name}.log") for name in failed)
        raise JobError(f"failed: {', '.join(failed)}; see {names}")
    return unfinished


def _devices(gpus: int) -> list[str]:
    """The first GPUs of those that may be used, as CUDA_VISIBLE_DEVICES names them."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return list(map(str, range(gpus)))
    names = visible.split(",") if visible else []
    if len(names) < gpus:
        raise JobError(
            f"CUDA_VISIBLE_DEVICES={visible} has {len(names)} GPUs, not {gpus}"
        )
    return names[:gpus]


def _start(
    command: Sequence[str], logs: Path, name: str, device: str | None
) -> subprocess.Popen[bytes]:
    environment = {
        "JAX_COMPILATION_CACHE_DIR": str(logs.absolute() / "compiled"),
        "XLA_PYTHON_CLIENT_MEM_FRACTION": "0.92",
    } | os.environ
    if device is not None:
        environment["CUDA_VISIBLE_DEVICES"] = device
    with (logs / f"{name}.log").open("ab") as log:
        return subprocess.Popen(command, stdout=log, stderr=log, env=environment)


def _stop(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """Tells processes to stop, and kills those that have not by `GRACE`."""
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
