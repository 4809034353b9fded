"""The folder of a run: its lock and its config.json."""

import dataclasses
import errno
import fcntl
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from examples.llama import atomic
from examples.llama.config import Config
from examples.llama.data import Corpus
from examples.llama.errors import UserError, writing
from examples.llama.hf.files import read_json

# Entries of config.json beside the options: the fingerprint of the data, and the order
# of the QKV columns, which differs in older checkpoints.
FACTS = {"corpus", "columns"}
COLUMNS = "in turns"

# Options that a resumed run may change; the path may be another one of the same data.
CHANGEABLE = {"data", "log_every", "eval_every", "check_every", "save_every"}


def checkpoints(out: Path) -> Path:
    """The folder of the checkpoints of the run in `out`."""
    return out / "checkpoints"


def has_run(out: Path) -> bool:
    """Whether a run has started in `out`."""
    return (out / "config.json").exists()


def check_folder(out: Path, config: Config, resume: bool) -> None:
    """Raises UserError if a run cannot be in `out`, before its data is read."""
    if resume:
        read_options(out)
    elif has_run(out):
        raise UserError(
            f"{out} already holds a run or a model: --resume it, or set another --out"
        )
    elif (out / "metrics.jsonl").exists() or any(checkpoints(out).glob("*")):
        raise UserError(
            f"{out} holds metrics or checkpoints of a run without its config.json"
        )
    if config.data and out.resolve().is_relative_to(Path(config.data).resolve()):
        raise UserError(f"{out} is inside the data, {config.data}: set another --out")


@contextmanager
def enter_folder(
    out: Path, config: Config, corpus: Corpus, resume: bool
) -> Iterator[None]:
    """Keeps other runs out of the folder until the end of the block.

    It writes the config.json of a new run, or checks a resumed run against its own. Of
    the processes of one run, only the first enters.
    """
    with writing(out):
        out.mkdir(parents=True, exist_ok=True)
        lock = (out / ".lock").open("ab")
    with lock:
        with writing(out):
            _lock(lock.fileno(), out)
        check_folder(out, config, resume)  # again: another run may have come and gone
        if resume:
            check_same(out, config, corpus)
        else:
            write_options(out, config, corpus)
        yield


def check_same(out: Path, config: Config, corpus: Corpus) -> None:
    """Raises UserError if the run in `out` has other options, or other data."""
    options, stored = _options(config, corpus), read_options(out)
    if options["corpus"] != stored["corpus"]:
        now = f"data = {config.data} has {options['corpus']}"
        before = f"data = {stored['data']} had {stored['corpus']}"
        other = "be resumed with other data than before"
        raise UserError(f"{out} cannot {other}: {now}, and {before}")
    for name, value in stored.items():
        if name not in CHANGEABLE and options[name] != value:
            other = f"{name} = {options[name]}"
            raise UserError(
                f"{out} has {name} = {value}, so it cannot be resumed with {other}: "
                "leave the option out, or start a run in another --out"
            )


def _lock(file: int, out: Path) -> None:
    """Takes the lock, which the kernel releases when the process ends in any way."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise UserError(
            f"another process is training in {out}: stop it, or set another --out"
        ) from None
    except OSError as error:
        if error.errno not in (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP):
            raise
        what = f"the file system of {out} has no locks ({error.strerror})"
        print(f"warning: {what}: start no other run in it", file=sys.stderr)


def _options(config: Config, corpus: Corpus) -> dict[str, Any]:
    facts = {"corpus": corpus.fingerprint(), "columns": COLUMNS}
    return dataclasses.asdict(config) | facts


def write_options(out: Path, config: Config, corpus: Corpus) -> None:
    """Writes the options of the run in `out` and the fingerprint of its corpus.

    A resumed run, whose options may have changed, writes them when it has looked for
    its checkpoints, which were written with the former options.
    """
    with writing(out):
        if config.save_every:  # before the run exists: no run lacks the folder
            checkpoints(out).mkdir(exist_ok=True)
        text = json.dumps(_options(config, corpus), indent=2)
        atomic.write(out / "config.json", text + "\n")


def read_config(out: Path) -> Config:
    """Reads and checks the options of the run in `out`."""
    options = read_options(out)
    try:
        return Config(**{name: options[name] for name in options.keys() - FACTS})
    except UserError as error:
        raise UserError(f"{out / 'config.json'}: {error}") from error


def read_options(out: Path) -> dict[str, Any]:
    """Reads the options of the run in `out` and the fingerprint of its corpus."""
    file = out / "config.json"
    if not file.exists():
        raise UserError(f"{out} holds no run to resume: {file} does not exist")
    options = read_json(file)
    known = {option.name for option in dataclasses.fields(Config)} | FACTS
    if options.keys() != known:
        names = ", ".join(sorted(options.keys() ^ known))
        raise UserError(
            f"another version of this example wrote {file}; they differ in {names}"
        )
    return options
