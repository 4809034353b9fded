"""The progress bar of a run, and requests to stop it."""

import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from tqdm import tqdm

T = TypeVar("T")


def progress_bar(done: int, steps: int, *, shown: bool) -> tqdm:
    """The progress bar of a run; until the first `show` it says that JAX compiles."""
    text = "compiling" if done < steps else None
    return tqdm(initial=done, total=steps, unit="step", postfix=text, disable=not shown)


def show(bar: tqdm, record: dict[str, Any]) -> None:
    """Advances the progress bar by one step and shows the metrics of that step."""
    shown = {"loss": f"{record['loss']:.3f}"}
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


@contextmanager
def stop_requests() -> Iterator[threading.Event]:
    """Yields an event that Ctrl-C or SIGTERM sets; a second signal interrupts."""
    event = threading.Event()

    def request(signum: int, _: object) -> None:
        tqdm.write("stopping after this step; press Ctrl-C again to stop at once")
        event.set()
        signal.signal(signum, signal.default_int_handler)

    with _handled(request):
        yield event


@contextmanager
def _handled(handler: Callable[[int, Any], object]) -> Iterator[None]:
    signals = signal.SIGINT, signal.SIGTERM
    previous = [signal.signal(signum, handler) for signum in signals]
    try:
        yield
    finally:
        for signum, former in zip(signals, previous, strict=True):
            signal.signal(signum, former)
