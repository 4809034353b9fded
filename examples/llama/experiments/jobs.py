"""A queue of processes, each on one GPU or on several, with a time limit."""

import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

# The exit status of a process that was stopped and can continue later.
STOPPED = 130
# Seconds that a process has to write a checkpoint after it is told to stop.
GRACE = 60.0


class JobError(RuntimeError):
    """A process failed, or there are too few GPUs."""


def do(
    commands: Mapping[str, Sequence[str]],
    needs: Mapping[str, str],
    logs: Path,
    *,
    gpus: int,
    until: float,
    gpus_each: int = 1,
) -> list[str]:
    """Runs commands as processes, at most one per GPU.

    Args:
        commands: The commands by name, in order of priority.
        needs: The command that must finish before another one starts, by the name of
            the latter. Names that are not in `commands` count as finished.
        logs: The folder of the processes' output and of their shared compilation cache.
        gpus: The number of GPUs; 0 runs one process at a time on the CPU.
        until: The time, by `time.monotonic`, at which running processes are stopped.
        gpus_each: The number of GPUs of each process.

    Returns:
        The names of the commands that did not finish.

    Raises:
        JobError: A process failed, or CUDA_VISIBLE_DEVICES lists fewer GPUs, or there
            are fewer than a process needs. If a process fails, the others still run;
            the message names its log.
        KeyboardInterrupt: Ctrl-C. All running processes have been stopped.
    """
    logs.mkdir(parents=True, exist_ok=True)
    queue = _Queue(commands, needs, logs, _devices(gpus, gpus_each))
    try:
        while time.monotonic() < until and not queue.is_empty():
            if not queue.start_next():
                time.sleep(0.1)
                queue.collect([STOPPED])
    finally:
        queue.stop()
    queue.collect([STOPPED, -signal.SIGTERM, -signal.SIGKILL])
    if queue.failed:
        files = ", ".join(str(logs / f"{name}.log") for name in queue.failed)
        raise JobError(f"failed: {', '.join(queue.failed)}; see {files}")
    return queue.unfinished


class _Queue:
    """The waiting and the running processes.

    Attributes:
        unfinished: The names of the commands that have not finished.
        failed: The names of the commands that failed.
    """

    def __init__(
        self,
        commands: Mapping[str, Sequence[str]],
        needs: Mapping[str, str],
        logs: Path,
        devices: Sequence[str],
    ) -> None:
        self.unfinished: list[str] = list(commands)
        self.failed: list[str] = []
        self._commands, self._needs, self._logs = commands, needs, logs
        self._waiting = list(commands)
        self._free: list[str | None] = [*devices] or [None]
        self._running: dict[str, tuple[subprocess.Popen[bytes], str | None]] = {}

    def _ready(self) -> list[str]:
        blocked_by = self._needs.get
        return [n for n in self._waiting if blocked_by(n) not in self.unfinished]

    def is_empty(self) -> bool:
        """Whether nothing is running and nothing can start."""
        return not (self._running or self._ready())

    def start_next(self) -> bool:
        """Starts the next process if a device is free; whether it did."""
        ready = self._ready()
        if not (ready and self._free):
            return False
        name, device = ready[0], self._free.pop(0)
        self._waiting.remove(name)
        print(name + (f" on GPU {device}" if device else ""), flush=True)
        process = _start(self._commands[name], self._logs, name, device)
        self._running[name] = process, device
        return True

    def collect(self, stopped: Sequence[int]) -> None:
        """Removes ended processes; `stopped` are statuses that are not failures."""
        for name, (process, device) in list(self._running.items()):
            if (status := process.poll()) is None:
                continue
            del self._running[name]
            self._free.append(device)
            if status == 0:
                self.unfinished.remove(name)
                print(f"{name} is done", flush=True)
            elif status in stopped:
                print(f"{name} stopped", flush=True)
            else:
                self.failed.append(name)
                print(f"{name} failed with status {status}", flush=True)

    def stop(self) -> None:
        """Stops all running processes."""
        _stop([process for process, _ in self._running.values()])


def _devices(gpus: int, each: int) -> list[str]:
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
    return [",".join(names[first : first + each]) for first in firsts]


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
