"""Trains one model: the loop over steps, with metrics, validation and checkpoints."""

import dataclasses
import math
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from examples.llama import (
    checkpoint,
    choosing,
    flops,
    hf,
    mesh,
    metrics,
    plot,
    run_folder,
)
from examples.llama.build import build, with_recipe
from examples.llama.config import AUTO, Config
from examples.llama.data import Corpus, batches
from examples.llama.errors import UserError
from examples.llama.model import Llama
from examples.llama.progress import StopRequests, progress_bar, show, stop_requests
from examples.llama.projections import DotGeneral, fuses, why_not_fused
from examples.llama.run_folder import checkpoints
from examples.llama.step import (
    EVAL_BATCHES,
    TrainState,
    add_codes,
    evaluate,
    init_state,
    make_optimizer,
    make_train_step,
)
from examples.llama.text import tokenizer_source
from fbq_jax import FallbackDot, RulesDot, assert_live, freeze, optim
from fbq_jax.choice import ChoiceReport


class DivergedError(UserError):
    """A loss or a gradient is no longer finite."""


class _Run(NamedTuple):
    """A run: its options, its folder, its model and its data."""

    config: Config
    out: Path
    model: Llama
    corpus: Corpus
    batches: Any
    val_batches: Any
    report: ChoiceReport | None  # of the rules that were found

    def batch(self, step: int) -> Any:
        """The tokens of a step [N, B/N, S+1], for N microbatches."""
        config = self.config
        tokens = self.batches[step - 1].reshape(config.accumulate, -1, config.seq + 1)
        return mesh.distribute(tokens, None, "batch", None)


def _prepare(config: Config, out: Path, stop: StopRequests) -> tuple[_Run, TrainState]:
    """Returns a run and its state before the first step."""
    stop.waits_for = "reading the data"
    mesh.check_batch(config.batch // config.accumulate)
    model, weights, corpus = build(config)
    sizes = {"seq": config.seq, "batch": config.batch}
    train_batches = batches(corpus, "train", seed=config.seed, **sizes)
    val_batches = batches(corpus, "val", seed=0, **sizes)
    run = _Run(config, out, model, corpus, train_batches, val_batches, None)
    stop.check()
    if config.recipe == AUTO:
        stop.waits_for = "the choice of recipes"
        optimizer, _ = make_optimizer(dataclasses.replace(config, optimizer_codes=None))
        state = init_state(model, optimizer, weights, config.seed)
        report = choosing.choose(model, state.params, run.batch(1)[0])
        config = choosing.with_rules(config, report)
        model = with_recipe(config, model.config)
        run = run._replace(config=config, model=model, report=report)
        stop.check()
    if config.optimizer_codes is None:
        # Measured: faster where all layers read codes.
        all_read = all(fuses(model.config, op) for op in _ops(model.dot_general))
        run = run._replace(config=dataclasses.replace(config, optimizer_codes=all_read))
    stop.waits_for = "making the initial weights"
    state = init_state(model, make_optimizer(run.config)[0], weights, config.seed)
    return run, state


def _ops(dot_general: DotGeneral | None) -> list[DotGeneral | None]:
    """What a ``dot_general`` gives to layers: itself, or the ops of its rules."""
    if not isinstance(dot_general, RulesDot):
        return [dot_general]
    recipes = dict(dot_general.rules).values()
    return [None if recipe is None else FallbackDot(recipe) for recipe in recipes]


def train(
    config: Config,
    out: Path,
    *,
    resume: bool = False,
    export: str | None = None,
    stop: StopRequests | None = None,
) -> None:
    """Trains one model; Ctrl-C or SIGTERM stops it with a KeyboardInterrupt.

    Args:
        config: The options of the run.
        out: The folder of the run: a new one, or the one to resume.
        resume: Whether to continue the run in `out`, bit for bit. `config` may differ
            in `run_folder.CHANGEABLE`.
        export: One of ``hf.FORMATS``: after the last step, the model is also written to
            the folder of this name in `out`. A run that starts from a Hugging Face
            model always writes "hf", unless it saves no checkpoints.
        stop: The program's requests to stop; None handles the signals here.

    Nothing is written if what is asked for is not possible.
    """
    with nullcontext(stop) if stop else stop_requests() as stop:
        run_folder.check_folder(out, config, resume)
        mesh.wait("checked")
        run, state = _prepare(config, out, stop)
        config = dataclasses.replace(config, recipe=run.config.recipe)
        exports = [export] if export else []
        if config.from_hf is not None and config.save_every and export != "hf":
            exports.insert(0, "hf")
        for name in exports:
            with tokenizer_source(config, run.model.config) as like:
                hf.check_exportable(name, run.model, like=like)
        folders = [out / name for name in exports]
        if not resume:
            _check_new(folders)
        stop.check()
        first = mesh.is_first()  # enters the folder and prints for all processes
        entered = run_folder.enter_folder(out, config, run.corpus, resume)
        with entered if first else nullcontext():
            mesh.wait("entered")
            if resume:
                state = _latest_state(out, state)
                if int(state.step) < config.steps:
                    _check_new(folders)
            if first:
                if resume:
                    run_folder.write_options(out, config, run.corpus)
                if run.report is not None:
                    print(run.report)
                    if config.save_every:
                        choosing.write(run.report, out)
                _describe(run, optax.tree.size(state.params))
            state = _take_steps(run, state, stop)
            for folder in folders:
                stop.waits_for = f"writing {folder}"
                _export(run, state, folder)


def _check_new(folders: list[Path]) -> None:
    """Raises UserError if a folder exists that a run is to write after its last step.

    An export of a run that has ended stays as it is.
    """
    for folder in folders:
        if folder.exists():
            why = "exists, and the run will write its model there"
            raise UserError(f"{folder} {why}: move it away, or set another --out")


def validate(config: Config, out: Path, *, resume: bool, stop: StopRequests) -> None:
    """Prints the validation loss of a run before its first step; writes nothing.

    With `resume`, it is the loss after the latest checkpoint of the run in `out`.
    """
    run, state = _prepare(config, out, stop)
    of = config.from_hf or "a new model"
    if resume:
        run_folder.check_same(out, config, run.corpus)
        state = _latest_state(out, state)
        of = f"step {int(state.step)} of {out}"
    stop.waits_for = "the validation"
    loss = evaluate(run.model, state, run.val_batches)
    if mesh.is_first():
        print(f"{config.recipe}: validation loss {loss:.4f} (nats per token) of {of}")
        tokens = f"{EVAL_BATCHES} batches of {config.batch} x {config.seq} tokens"
        print(f"  {tokens}; {len(run.corpus.val):,} tokens are held out")


def _describe(run: _Run, parameters: int) -> None:
    config, model, tokens = run.config, run.model, len(run.corpus.train)
    used, found, backend = mesh.size(), jax.device_count(), jax.default_backend()
    where = f"{used} {backend}{'s' * (used > 1)}"
    print(f"{config.recipe}: {parameters:,} parameters on {where}, {tokens:,} tokens")
    if used < found:
        print(f"note: {used} of {found} devices in use; --mesh data={found} uses all")
    if reason := why_not_fused(model.config, model.dot_general):
        print(f"note: {reason}")
    if config.from_hf is not None and (name := hf.quantization(config.from_hf)):
        print(f"note: {config.from_hf} is in {name}; training starts in floats")


def _latest_state(out: Path, start: TrainState) -> TrainState:
    """The state to resume from, which the first process chooses for all."""
    step = 0
    if mesh.is_first():
        found = checkpoint.find(checkpoints(out))
        step = found.step or 0
        for problem in found.skipped:
            print(f"skipped: {problem}")
        if found.skipped:
            print(f"continues from step {step}, and writes the skipped ones again")
        elif not step:
            _check_nothing_is_missing(out)
            print("starts from step 0: the run has no checkpoint")
    step = mesh.from_first(step)
    return checkpoint.read(checkpoints(out), step, start) if step else start


def _check_nothing_is_missing(out: Path) -> None:
    """Raises UserError if a run without checkpoints must have written one."""
    log, folder = out / "metrics.jsonl", checkpoints(out)
    config = run_folder.read_config(out)  # of the steps so far
    taken = max((record["step"] for record in metrics.read(log)), default=0)
    saved = taken > min(config.save_every, config.steps) or not folder.exists()
    if config.save_every and taken and saved:
        problem = "is empty" if folder.exists() else "does not exist"
        raise UserError(
            f"{folder} {problem}, but the run has taken {taken} steps ({log}): mount "
            "the file system that holds its checkpoints, or set another --out"
        )


def _take_steps(run: _Run, state: TrainState, stop: StopRequests) -> TrainState:
    """Takes the remaining steps and returns the last state.

    A signal raises KeyboardInterrupt after its step, with a checkpoint.
    """
    config, out, model = run.config, run.out, run.model
    first, log, is_first = int(state.step) + 1, out / "metrics.jsonl", mesh.is_first()
    dot_general = model.dot_general
    recipe = dot_general.recipe if isinstance(dot_general, FallbackDot) else None
    stats_before = state.stats()
    if is_first:
        metrics.continue_after(first - 1, log)
    if first > config.steps:
        return state
    report = run.report if config.check_every else None
    if report is None and config.check_every:
        report = choosing.resume(out, model, state.params, run.batch(first)[0])
    optimizer, schedule = make_optimizer(config)
    state = add_codes(model, optimizer, state)

    and_save = " and a checkpoint" if config.save_every else ""
    with progress_bar(first - 1, config.steps, shown=is_first) as bar:
        if first == 1:
            bar.set_postfix_str("validating")
            stop.waits_for = "the validation"
            before = {"step": 0, "val_loss": evaluate(model, state, run.val_batches)}
            if is_first:
                metrics.append(before, log)
            stop.check()
        bar.set_postfix_str("compiling")
        stop.waits_for = "compiling"
        started = time.perf_counter()
        jitted = make_train_step(model, optimizer, schedule)
        train_step = jitted.lower(state, run.batch(first)).compile()
        if is_first:
            bar.write(f"compiled in {time.perf_counter() - started:.1f} s")
        stop.check()
        pending: list[dict[str, Any]] = []
        started = time.perf_counter()
        for step in range(first, config.steps + 1):
            stop.waits_for = f"step {step}{and_save}"
            state, measured = train_step(state, run.batch(step))
            pending.append({"step": step, **measured})
            last = step == config.steps
            evaluates = last or step % config.eval_every == 0
            saves = config.save_every and (last or step % config.save_every == 0)
            checks = report is not None and step % config.check_every == 0
            reads = step == first or step % config.log_every == 0
            # Several processes must agree when to stop, so they wait for a read.
            reads |= stop.is_set() and jax.process_count() == 1
            if not (reads or evaluates or saves or checks):
                continue  # without waiting for the device
            records, pending = jax.device_get(pending), []
            seconds = (time.perf_counter() - started) / len(records)
            if evaluates:
                stop.waits_for = f"the validation{and_save}"
                records[-1]["val_loss"] = evaluate(model, state, run.val_batches)
            for record in records:
                record |= _speed(config, model, seconds)
                if is_first:
                    metrics.append(record, log)
                show(bar, record | {"seconds": seconds})
                check_finite(record, out)
            if step == first and stats_before:
                assert_live(stats_before, state.stats())
                if state.codes:
                    optim.assert_live(state.params, state.codes)
            if report is not None and checks:
                stop.waits_for = "a look at the layers"
                tokens = run.batch(step)[0]
                for text in choosing.check(report, state.params, tokens):
                    bar.write(f"warning: {text}")
            if saves or (mesh.any_of(stop.is_set()) and config.save_every):
                stop.waits_for = f"the checkpoint of step {step}"
                saved = dataclasses.replace(state, codes={})
                checkpoint.save(checkpoints(out), step, saved)
                if is_first:
                    plot.draw_curves(out, recipe)
            stop.check()
            started = time.perf_counter()
    return state


def _speed(config: Config, model: Llama, seconds: float) -> dict[str, float]:
    """The metrics of steps that took so long each."""
    tokens_per_s = config.batch * config.seq / seconds
    if (peak := flops.peak()) is None:
        return {"tokens_per_s": tokens_per_s}
    flops_per_s = tokens_per_s * flops.per_token(model.config, config.seq)
    return {"tokens_per_s": tokens_per_s, "mfu": flops_per_s / (peak * mesh.size())}


def check_finite(record: dict[str, Any], out: Path) -> None:
    """Raises DivergedError if a loss or the gradient norm of a step is not finite."""
    for name in ("loss", "grad_norm", "val_loss"):
        if not math.isfinite(record.get(name, 0.0)):
            where = f"{name} is {record[name]} at step {record['step']} of {out}"
            raise DivergedError(f"{where}; try a smaller --lr and another --out")


def _export(run: _Run, state: TrainState, folder: Path) -> None:
    """Writes a model in the format that names the folder; one that exists stays."""
    config, model = run.config, run.model
    variables = {"params": state.params, "fallback": state.fallback}
    if folder.name != "hf":
        tokens = jax.ShapeDtypeStruct((1, config.seq), jnp.int32)
        variables = freeze(model, variables, tokens)
    variables = mesh.collect(variables)
    if not mesh.is_first():
        return
    if folder.exists():
        print(f"{folder} exists and stays as it is")
        return
    with tokenizer_source(config, model.config) as like:
        hf.export(folder, folder.name, model, variables, like=like)
        has_tokenizer = like is not None and hf.load_tokenizer(like) is not None
    print(f"exported: {folder}")
    if folder.name == "gguf" and not has_tokenizer:
        print("note: without a tokenizer, only llama.cpp's library reads the file")
