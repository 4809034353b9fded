"""The progress bar of a run, and requests to stop it."""

import os
import signal
import socket
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from tqdm import tqdm

from examples.llama import mesh

T = TypeVar("T")

_SIGNALS = signal.SIGINT, signal.SIGTERM
_FORMAT = "{l_bar}{bar}| {n_fmt}/{total_fmt} [{elapsed}{postfix}]"


def progress_bar(done: int, steps: int, *, shown: bool) -> tqdm:
    """The progress bar of a run."""
    # tqdm's own rate would count validations, checkpoints and compiling as steps.
    return tqdm(initial=done, total=steps, bar_format=_FORMAT, disable=not shown)


def show(bar: tqdm, record: dict[str, Any]) -> None:
    """Advances the progress bar by one step and shows the metrics of that step."""
    seconds, steps_left = record["seconds"], (bar.total or 0) - bar.n - 1
    shown = {"loss": f"{record['loss']:.3f}", "s/step": f"{seconds:.3g}"}
    shown["left"] = tqdm.format_interval(seconds * steps_left)
    shown["tokens/s"] = f"{record['tokens_per_s']:,.0f}"
    if "mfu" in record:
        shown["mfu"] = f"{record['mfu']:.1%}"
    # A layer whose recipe has no fallback has no threshold.
    layers = [x for x in record["fallback"].values() if (x["theta"] >= 0.0).any()]
    if rates := [layer["rate"].mean() for layer in layers]:
        shown["fallback"] = f"{sum(rates) / len(rates):.0%}"
    bar.set_postfix(shown, refresh=False)
    bar.update()


class StopRequests(threading.Event):
    """Whether Ctrl-C or SIGTERM has asked the program to stop."""

    waits_for = "setting up"  # what a stop waits for, in words

    def check(self) -> None:
        """Raises KeyboardInterrupt in all processes if one was asked to stop."""
        if mesh.any_of(self.is_set()):
            raise KeyboardInterrupt


@contextmanager
def stop_requests(
    last_words: Callable[[], None] = lambda: None,
) -> Iterator[StopRequests]:
    """Turns Ctrl-C and SIGTERM into requests to stop, until the end of the block.

    A thread answers at once, because the main thread may be inside a call that returns
    to Python minutes later, such as a compilation. A second signal ends the process,
    after `last_words`: every file is safe, because a run survives being killed.
    """
    requests = StopRequests()
    signals, written = socket.socketpair()

    def answer() -> None:
        again = "press Ctrl-C again to stop at once"
        answered = False
        while number := signals.recv(1):
            if number[0] not in _SIGNALS:
                continue
            if answered:
                last_words()
                os._exit(130)
            answered = True
            tqdm.write(f"stopping after {requests.waits_for}; {again}")

    thread = threading.Thread(target=answer, daemon=True)
    thread.start()
    written.setblocking(False)
    # Python writes the number of a signal there when it arrives.
    former = signal.set_wakeup_fd(written.fileno(), warn_on_full_buffer=False)
    handlers = [signal.signal(number, lambda *_: requests.set()) for number in _SIGNALS]
    try:
        yield requests
    finally:
        for number, handler in zip(_SIGNALS, handlers, strict=True):
            signal.signal(number, handler)
        signal.set_wakeup_fd(former)
        written.close()
        thread.join()
        signals.close()


def interruptible(items: Iterable[T]) -> Iterator[T]:
    """Yields items, between which Ctrl-C or SIGTERM raises KeyboardInterrupt.

    Otherwise Python raises it in whatever runs first after a long call of a library,
    such as a callback of JAX at a garbage collection, where it is ignored.
    """
    with stop_requests() as stop:
        stop.waits_for = "reading the data"
        for item in items:
            yield item
            if stop.is_set():
                raise KeyboardInterrupt
