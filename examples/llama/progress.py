"""The progress bar of a run, and requests to stop it."""

import os
import signal
import socket
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from tqdm import tqdm

T = TypeVar("T")

_SIGNALS = signal.SIGINT, signal.SIGTERM
_FORMAT = "{l_bar}{bar}| {n_fmt}/{total_fmt} [{elapsed}{postfix}]"


def progress_bar(done: int, steps: int, *, shown: bool) -> tqdm:
    """The progress bar of a run; until the first `show` it says that JAX compiles."""
    text = "compiling" if done < steps else None
    # tqdm's own rate would count validations, checkpoints and compiling as steps.
    return tqdm(
        **{"initial": done, "total": steps, "bar_format": _FORMAT},
        **{"postfix": text, "disable": not shown},
    )


def show(bar: tqdm, record: dict[str, Any]) -> None:
    """Advances the progress bar by one step and shows the metrics of that step."""
    shown = {"loss": f"{record['loss']:.3f}"}
    if (seconds := record.get("seconds")) is not None:
        shown["s/step"] = f"{seconds:.3g}"
        shown["left"] = tqdm.format_interval(seconds * (bar.total - bar.n - 1))
    shown["tokens/s"] = f"{record['tokens_per_s']:,.0f}"
    if "mfu" in record:
        shown["mfu"] = f"{record['mfu']:.1%}"
    # A layer whose recipe has no fallback has no threshold.
    layers = [x for x in record["fallback"].values() if (x["theta"] >= 0.0).any()]
    if rates := [layer["rate"].mean() for layer in layers]:
        shown["fallback"] = f"{sum(rates) / len(rates):.0%}"
    bar.set_postfix(shown, refresh=False)
    bar.update()


def interruptible(items: Iterable[T]) -> Iterator[T]:
    """Yields items, between which Ctrl-C or SIGTERM raises KeyboardInterrupt.

    Otherwise Python raises it in whatever runs first after a long call of a library,
    such as a callback of JAX at a garbage collection, where it is ignored.
    """
    signaled = threading.Event()
    with _handled(lambda *_: signaled.set()):
        for item in items:
            yield item
            if signaled.is_set():
                raise KeyboardInterrupt


class StopRequests:
    """Ctrl-C and SIGTERM: the first asks a program to stop, a second one ends it.

    A thread answers at once. The main thread may be inside a call that returns to
    Python only minutes later, such as a compilation.

    Attributes:
        waits_for: What a stop waits for, in words. None is for work of which nothing
            is kept: the first signal raises KeyboardInterrupt.
    """

    def __init__(self, last_words: Callable[[], None]) -> None:
        """A second signal calls `last_words` before the process ends."""
        self.waits_for: str | None = None
        self._last_words = last_words
        self._requested = threading.Event()

    def is_set(self) -> bool:
        """Whether there was a signal."""
        return self._requested.is_set()

    def check(self) -> None:
        """Raises KeyboardInterrupt if there was a signal."""
        if self.is_set():
            raise KeyboardInterrupt

    def interrupt(self, *_: object) -> None:
        """Handles a signal in the main thread."""
        self._requested.set()
        if self.waits_for is None:
            raise KeyboardInterrupt

    def answer(self, signals: socket.socket) -> None:
        """Answers the signals whose numbers arrive, until the socket is closed."""
        answered = False
        while number := signals.recv(1):
            if number[0] not in _SIGNALS:
                continue
            if answered:
                self._last_words()
                os._exit(130)  # every file is safe: a run survives being killed
            answered = True
            self._requested.set()
            after = f" after {self.waits_for}" if self.waits_for else ""
            tqdm.write(f"stopping{after}; press Ctrl-C again to stop at once")


@contextmanager
def stop_requests(
    last_words: Callable[[], None] = lambda: None,
) -> Iterator[StopRequests]:
    """Turns Ctrl-C and SIGTERM into requests to stop, until the end of the block."""
    requests = StopRequests(last_words)
    signals, written = socket.socketpair()
    with signals, _handled(requests.interrupt):
        thread = threading.Thread(target=requests.answer, args=[signals], daemon=True)
        thread.start()
        written.setblocking(False)
        # Python writes the number of a signal there when it arrives.
        former = signal.set_wakeup_fd(written.fileno(), warn_on_full_buffer=False)
        try:
            yield requests
        finally:
            signal.set_wakeup_fd(former)
            written.close()
            thread.join()


@contextmanager
def _handled(handler: Callable[[int, Any], object]) -> Iterator[None]:
    previous = [signal.signal(signum, handler) for signum in _SIGNALS]
    try:
        yield
    finally:
        for signum, former in zip(_SIGNALS, previous, strict=True):
            signal.signal(signum, former)
