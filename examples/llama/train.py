"""Trains a Llama with INT8 linear layers and shows how it goes.

    python -m examples.llama.train

takes minutes on two CPU cores, learns from the source of Python's standard library
and leaves in runs/fallback: metrics.jsonl, curves.png, config.json and checkpoints.
`--help` lists the options; `--compare bf16,block,fallback` sets recipes side by side.
"""

import dataclasses
import json
import math
import shlex
import shutil
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import jax
import optax
from tqdm import tqdm

from examples.llama import checkpoint, flops, hf, mesh, metrics, plot
from examples.llama.config import (
    SAVED_BITS,
    Command,
    Config,
    ConfigError,
    parse_command,
)
from examples.llama.data import (
    Corpus,
    DataError,
    batches,
    is_token_ids,
    load_corpus,
)
from examples.llama.model import Llama, LlamaConfig
from examples.llama.step import (
    PyTree,
    TrainState,
    init_state,
    make_eval,
    make_optimizer,
    make_train_step,
)
from fbq_jax import FallbackDot, assert_live

# What config.json holds beside the options: of the data, and the order of the columns
# in a checkpoint's kernels, in which older ones differ.
_FACTS = {"corpus", "columns"}
COLUMNS = "in turns"


class RunError(RuntimeError):
    """A run cannot start in its folder, or cannot go on."""


class DivergedError(RunError):
    """A loss or a gradient is no longer finite."""


def build(config: Config) -> tuple[Llama, PyTree | None, Corpus]:
    """Returns the model, the weights to start from (None: new ones) and the data."""
    data = None if config.data is None else Path(config.data)
    if config.from_hf is None:
        weights, corpus = None, load_corpus(data)
        try:
            sizes = LlamaConfig(
                vocab_size=corpus.vocab_size,
                hidden_size=config.hidden,
                intermediate_size=config.ffn,
                num_layers=config.layers,
                num_heads=config.heads,
                num_kv_heads=config.kv_heads,
                max_seq_len=config.seq,
            )
        except ValueError as error:
            raise ConfigError(str(error)) from error
    else:
        sizes, weights = hf.load(config.from_hf)
        tokenizer = None
        if not is_token_ids(data):
            tokenizer = hf.load_tokenizer(config.from_hf)
            if tokenizer is None:
                raise DataError(
                    f"{config.from_hf} has no tokenizer.json to read text with; add "
                    "it, or give --data a .bin file of the model's token ids"
                )
        corpus = load_corpus(data, tokenizer)
        corpus.check_fits(sizes.vocab_size)
        if config.seq > sizes.max_seq_len:
            raise ConfigError(
                f"seq takes at most {sizes.max_seq_len} with the model in "
                f"{config.from_hf}, got {config.seq}"
            )
    dot_general, saved_bits = config.dot_general(), config.saved_bits
    if saved_bits is None and dot_general is not None:
        saved_bits = SAVED_BITS
    sizes = dataclasses.replace(
        sizes, remat=config.remat, saved_bits=saved_bits or None
    )
    return Llama(sizes, dot_general), weights, corpus


def train(config: Config, out: Path, *, resume: bool = False) -> None:
    """Trains one model.

    Args:
        config: What to train.
        out: The run's folder: a new one, or the one to resume.
        resume: Whether to continue the run in `out`. Its steps are then, bit for bit,
            those of a run that was never interrupted.

    Raises:
        ConfigError: The model cannot be built; or, to resume, `config` is another.
        DataError: The data cannot be read or does not fit.
        RestoreError: The checkpoint to resume is damaged.
        MetricsError: The records of the steps before it are.
        RunError: `out` is in use, or the loss is no longer finite.
        KeyboardInterrupt: The run was told to stop; it can be resumed.
    """
    check_folder(out, config, resume)
    mesh.wait("checked")
    mesh.check_batch(config.batch // config.accumulate)
    model, weights, corpus = build(config)
    sizes = {"seq": config.seq, "batch": config.batch}
    train_data = batches(corpus, "train", seed=config.seed, **sizes)
    evaluate = make_eval(model, batches(corpus, "val", seed=0, **sizes))
    optimizer, schedule = make_optimizer(config)
    train_step = make_train_step(model, optimizer, schedule)

    state = init_state(model, optimizer, weights, config.seed)
    if mesh.is_first():
        enter_folder(out, config, corpus, resume)
    mesh.wait("entered")
    if resume and checkpoint.any_in(out / "checkpoints"):
        state = checkpoint.restore(out / "checkpoints", state)
    first = int(state.step)
    dot_general, stats_before = model.dot_general, state.stats()
    recipe = dot_general.recipe if isinstance(dot_general, FallbackDot) else None
    flops_per_token, peak = flops.per_token(model.config, config.seq), flops.peak()
    devices = mesh.size()
    if mesh.is_first():
        print(
            f"{config.recipe}: {optax.tree.size(state.params):,} parameters on "
            f"{devices} {jax.default_backend()}{'s' * (devices > 1)}, "
            f"{len(corpus.train):,} training tokens"
        )
    with (
        open_log(out / "metrics.jsonl", first) as log,
        tqdm(
            initial=first,
            total=config.steps,
            unit="step",
            disable=not mesh.is_first(),
        ) as bar,
        stop_requests() as stop,
    ):
        waiting: list[dict[str, Any]] = []
        started, stopped = time.perf_counter(), False
        for step in range(first + 1, config.steps + 1):
            tokens = train_data[step - 1]
            tokens = tokens.reshape(config.accumulate, -1, config.seq + 1)
            tokens = mesh.distribute(tokens, None, "batch", None)
            state, measured = train_step(state, tokens)
            waiting.append({"step": step, **measured})
            last = step == config.steps
            evaluates = last or step % config.eval_every == 0
            saves = config.save_every and (last or step % config.save_every == 0)
            looks = step == first + 1 or step % config.log_every == 0
            # Several processes must agree on it, which they do where all look.
            looks |= stop.is_set() and jax.process_count() == 1
            if not (looks or evaluates or saves):
                continue  # and the device need not wait for the host
            records = jax.device_get(waiting)
            waiting.clear()
            seconds = (time.perf_counter() - started) / len(records)
            for record in records:
                record["tokens_per_s"] = config.batch * config.seq / seconds
                if peak is not None:
                    achieved = record["tokens_per_s"] * flops_per_token
                    record["mfu"] = achieved / (peak * devices)
            if evaluates:
                records[-1]["val_loss"] = evaluate(state)
            for record in records:
                if log is not None:
                    log.write(record)
                show(bar, record)
                check_finite(record, out)
            if step == first + 1 and recipe is not None:
                assert_live(stats_before, state.stats())
            stopped = mesh.any_of(stop.is_set())
            if saves or (stopped and config.save_every):
                checkpoint.save(out / "checkpoints", step, state)
                if mesh.is_first():
                    plot.draw_curves(out, recipe)
            if stopped and not last:
                raise KeyboardInterrupt
            started = time.perf_counter()
    if config.from_hf is not None and config.save_every:
        export(config.from_hf, model.config, state, out / "hf")
    if stopped:  # in its last step: there may be other runs to come
        raise KeyboardInterrupt


def export(source: str, config: LlamaConfig, state: TrainState, folder: Path) -> None:
    """Writes a tuned model as Hugging Face does, with the tokenizer that it had."""
    params = mesh.collect(state.params)
    if mesh.is_first() and not folder.exists():
        hf.save(folder, config, params)
        if (tokenizer := Path(source) / "tokenizer.json").exists():
            shutil.copy(tokenizer, folder)


def check_finite(record: dict[str, Any], out: Path) -> None:
    """Raises DivergedError if a number of a step is a NaN or an Inf."""
    for name in ("loss", "grad_norm", "val_loss"):
        if not math.isfinite(record.get(name, 0.0)):
            raise DivergedError(
                f"{name} is {record[name]} at step {record['step']} (all steps are in "
                f"{out / 'metrics.jsonl'}); try a smaller --lr, another --out"
            )


def open_log(file: Path, after_step: int) -> AbstractContextManager[Any]:
    """The run's records, to go on after a step; None in all processes but the first."""
    if not mesh.is_first():
        return nullcontext()
    return metrics.MetricsLog(file, after_step)


def check_folder(out: Path, config: Config, resume: bool) -> None:
    """Raises RunError if a run cannot be in `out`, before anything is read."""
    if resume:
        read_options(out)
    elif (out / "config.json").exists():
        raise RunError(
            f"{out} already holds a run: continue it with --resume, or choose another "
            "folder with --out"
        )
    if config.data is not None and Path(config.data).resolve() in out.resolve().parents:
        raise RunError(
            f"{out} is inside the data, {config.data}, which the run's own files would "
            "change; choose another folder with --out"
        )


def enter_folder(out: Path, config: Config, corpus: Corpus, resume: bool) -> None:
    """Writes config.json to a new run's folder, or compares it with a resumed run's."""
    file = out / "config.json"
    options = dataclasses.asdict(config) | {
        "corpus": corpus.fingerprint(),
        "columns": COLUMNS,
    }
    if resume:
        for name, started_with in read_options(out).items():
            if options[name] != started_with:
                raise ConfigError(
                    f"the run in {out} has {name} = {started_with}, so it cannot be "
                    f"resumed with {name} = {options[name]}"
                )
        return
    part = file.with_suffix(".part")
    try:
        out.mkdir(parents=True, exist_ok=True)
        part.write_text(json.dumps(options, indent=2) + "\n")
    except OSError as error:
        raise RunError(f"{out} cannot be a run's folder: {error.strerror}") from error
    part.replace(file)


def read_options(out: Path) -> dict[str, Any]:
    """The options of the run in `out`, and the fingerprint of its corpus."""
    file = out / "config.json"
    if not file.exists():
        raise RunError(f"{out} holds no run to resume: {file} does not exist")
    try:
        options = dict(json.loads(file.read_text()))
    except (ValueError, TypeError) as error:
        raise RunError(f"{file} is damaged: {error}") from error
    known = {option.name for option in dataclasses.fields(Config)} | _FACTS
    if options.keys() != known:
        raise RunError(
            f"{file} is of another version of this example, which differs in "
            f"{', '.join(sorted(options.keys() ^ known))}"
        )
    return options


@contextmanager
def stop_requests() -> Iterator[threading.Event]:
    """An event that Ctrl-C or SIGTERM sets; a second one interrupts at once."""
    event = threading.Event()

    def request(signum: int, _: object) -> None:
        tqdm.write("stopping after this step; once more stops at once")
        event.set()
        signal.signal(signum, signal.default_int_handler)

    signals = signal.SIGINT, signal.SIGTERM
    previous = [signal.signal(signum, request) for signum in signals]
    try:
        yield event
    finally:
        for signum, handler in zip(signals, previous, strict=True):
            signal.signal(signum, handler)


def show(bar: tqdm, record: dict[str, Any]) -> None:
    """Advances the progress bar by a step."""
    shown = {
        "loss": f"{record['loss']:.3f}",
        "tokens/s": f"{record['tokens_per_s']:,.0f}",
    }
    if "mfu" in record:
        shown["mfu"] = f"{record['mfu']:.1%}"
    if rates := [layer["rate"].mean() for layer in record["fallback"].values()]:
        shown["fallback"] = f"{sum(rates) / len(rates):.0%}"
    bar.set_postfix(shown, refresh=False)
    bar.update()


def configure(command: Command, started: Path | None, **fixed: Any) -> Config:
    """The options of a run; what was not given, the run in `started` decides."""
    defaults = read_options(started) if started else command.defaults
    defaults = {name: defaults[name] for name in defaults.keys() - _FACTS}
    return Config(**{**defaults, **command.given, **fixed})


def check_comparable(configs: dict[Path, Config]) -> None:
    """Raises ConfigError if runs differ in more than their recipe."""
    (first, reference), *others = configs.items()
    for out, config in others:
        for name, value in dataclasses.asdict(reference).items():
            if name != "recipe" and getattr(config, name) != value:
                raise ConfigError(
                    f"{first} has {name} = {value} and {out} has "
                    f"{getattr(config, name)}: they cannot be compared"
                )


def main(argv: list[str] | None = None) -> int:
    """Does what the command line asks for; returns the exit status."""
    argv = sys.argv[1:] if argv is None else argv
    fixed: dict[Path, dict[str, Any]] = {}
    try:
        mesh.join(argv)
        command = parse_command(argv)
        devices = mesh.make(command.mesh)
        fixed = {command.out: {}}
        if command.compare:
            fixed = {command.out / name: {"recipe": name} for name in command.compare}
        # To resume a comparison is also to start the runs that it had not come to,
        # with the options of those that it had.
        started = [out for out in fixed if (out / "config.json").exists()]
        resume = {
            out: command.resume and (out in started or not started) for out in fixed
        }
        configs = {
            out: configure(
                command,
                (out if resume[out] else started[0]) if command.resume else None,
                **fixed[out],
            )
            for out in fixed
        }
        check_comparable(configs)
        for out, config in configs.items():
            check_folder(out, config, resume[out])
        with mesh.use(devices):
            for out, config in configs.items():
                train(config, out, resume=resume[out])
                if mesh.is_first():
                    print(metrics.report(out))
        if command.compare and mesh.is_first():
            plot.draw_comparison(list(configs), command.out / "compare.png")
            metrics.write_comparison(list(configs), command.out / "compare.json")
            print(metrics.compare(list(configs)))
            print(f"picture: {command.out / 'compare.png'}")
            print(f"numbers: {command.out / 'compare.json'}")
    except KeyboardInterrupt:
        again = argv if "--resume" in argv else [*argv, "--resume"]
        if not any((out / "config.json").exists() for out in fixed):
            again = argv
        print(
            f"stopped; go on with: python -m examples.llama.train {shlex.join(again)}"
        )
        return 130
    except (
        ConfigError,
        DataError,
        RunError,
        mesh.MeshError,
        checkpoint.RestoreError,
        metrics.MetricsError,
        hf.CheckpointError,
    ) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
