"""Trains one model: the loop over steps, with metrics, validation and checkpoints."""

import math
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax

from examples.llama import checkpoint, flops, hf, mesh, metrics, plot, run_folder
from examples.llama.build import build
from examples.llama.config import Config
from examples.llama.data import batches
from examples.llama.errors import UserError
from examples.llama.model import Llama
from examples.llama.progress import progress_bar, show, stop_requests
from examples.llama.projections import why_not_fused
from examples.llama.run_folder import checkpoints
from examples.llama.step import (
    TrainState,
    evaluate,
    init_state,
    make_optimizer,
    make_train_step,
)
from examples.llama.text import tokenizer_source
from fbq_jax import FallbackDot, assert_live, freeze


class DivergedError(UserError):
    """A loss or a gradient is no longer finite."""


def train(
    config: Config, out: Path, *, resume: bool = False, export: str | None = None
) -> None:
    """Trains one model; Ctrl-C or SIGTERM stops it with a KeyboardInterrupt.

    Args:
        config: The options of the run.
        out: The folder of the run: a new one, or the one to resume.
        resume: Whether to continue the run in `out`, bit for bit. `config` may differ
            in `run_folder.CHANGEABLE`.
        export: One of ``fbq_jax.export.FORMATS``: after the last step, the model is
            also written to the folder of this name in `out`. None writes none.

    Nothing is written if what is asked for is not possible.
    """
    run_folder.check_folder(out, config, resume)
    mesh.wait("checked")
    mesh.check_batch(config.batch // config.accumulate)
    model, weights, corpus = build(config)
    if export is not None:
        with tokenizer_source(config, model.config) as like:
            hf.check_exportable(export, model, like=like)
    sizes = {"seq": config.seq, "batch": config.batch}
    data = batches(corpus, "train", seed=config.seed, **sizes)
    val_data = batches(corpus, "val", seed=0, **sizes)
    state = init_state(model, make_optimizer(config)[0], weights, config.seed)
    first = mesh.is_first()  # enters the folder and prints for all processes
    with (
        run_folder.enter_folder(out, config, corpus, resume) if first else nullcontext()
    ):
        mesh.wait("entered")
        if resume:
            state = _latest_state(out, state)
        if first:
            if resume:
                run_folder.write_options(out, config, corpus)
            _describe(config, model, optax.tree.size(state.params), len(corpus.train))
        state, stopped = _take_steps(config, out, model, state, data, val_data)
        if config.from_hf is not None and config.save_every:
            params, tuned = mesh.collect(state.params), out / "hf"
            if first and not tuned.exists():
                hf.save(tuned, model.config, params, like=config.from_hf)
        if export is not None and not stopped:
            _export(export, config, model, state, out / export)
    if stopped:  # during the last step: the caller must not start another run
        raise KeyboardInterrupt


def _describe(config: Config, model: Llama, parameters: int, tokens: int) -> None:
    used, found, backend = mesh.size(), jax.device_count(), jax.default_backend()
    where = f"{used} {backend}{'s' * (used > 1)}"
    print(f"{config.recipe}: {parameters:,} parameters on {where}, {tokens:,} tokens")
    if used < found:
        print(f"note: {used} of {found} devices in use; --mesh data={found} uses all")
    if reason := why_not_fused(model.config, model.dot_general):
        print(f"note: {reason}")
    if config.from_hf is not None and (name := hf.quantization(config.from_hf)):
        print(f"note: {config.from_hf} is INT8 ({name}); training starts in floats")


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


def _take_steps(
    config: Config, out: Path, model: Llama, state: TrainState, data: Any, val_data: Any
) -> tuple[TrainState, bool]:
    """Takes the remaining steps on batches of `data`.

    Returns the last state, and whether a signal arrived during the last step. One
    before raises KeyboardInterrupt.
    """
    first, log, is_first = int(state.step) + 1, out / "metrics.jsonl", mesh.is_first()
    dot_general = model.dot_general
    recipe = dot_general.recipe if isinstance(dot_general, FallbackDot) else None
    train_step = make_train_step(model, *make_optimizer(config))
    stats_before, stopped = state.stats(), False
    if is_first:
        metrics.continue_after(first - 1, log)
    with (
        progress_bar(first - 1, config.steps, shown=is_first) as bar,
        stop_requests() as stop,
    ):
        pending: list[dict[str, Any]] = []
        started = time.perf_counter()
        for step in range(first, config.steps + 1):
            tokens = data[step - 1].reshape(config.accumulate, -1, config.seq + 1)
            tokens = mesh.distribute(tokens, None, "batch", None)
            state, measured = train_step(state, tokens)
            pending.append({"step": step, **measured})
            last = step == config.steps
            evaluates = last or step % config.eval_every == 0
            saves = config.save_every and (last or step % config.save_every == 0)
            reads = step == first or step % config.log_every == 0
            # Several processes must agree when to stop, so they wait for a read.
            reads |= stop.is_set() and jax.process_count() == 1
            if not (reads or evaluates or saves):
                continue  # without waiting for the device
            records, pending = jax.device_get(pending), []
            seconds = (time.perf_counter() - started) / len(records)
            if evaluates:
                records[-1]["val_loss"] = evaluate(model, state, val_data)
            for record in records:
                record |= _speed(config, model, seconds)
                if is_first:
                    metrics.append(record, log)
                show(bar, record)
                check_finite(record, out)
            if step == first and recipe is not None:
                assert_live(stats_before, state.stats())
            stopped = mesh.any_of(stop.is_set())
            if saves or (stopped and config.save_every):
                checkpoint.save(checkpoints(out), step, state)
                if is_first:
                    plot.draw_curves(out, recipe)
            if stopped and not last:
                raise KeyboardInterrupt
            started = time.perf_counter()
    return state, stopped


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


def _export(
    name: str, config: Config, model: Llama, state: TrainState, folder: Path
) -> None:
    """Writes the codes of a model for serving engines; an export is not repeated."""
    variables = {"params": state.params, "fallback": state.fallback}
    tokens = jax.ShapeDtypeStruct((1, config.seq), jnp.int32)
    frozen = mesh.collect(freeze(model, variables, tokens))
    if not mesh.is_first():
        return
    if folder.exists():
        print(f"{folder} exists and stays as it is")
        return
    with tokenizer_source(config, model.config) as like:
        hf.export(folder, name, model, frozen, like=like)
        has_tokenizer = like is not None and hf.load_tokenizer(like) is not None
    print(f"exported: {folder}")
    if name == "gguf" and not has_tokenizer:
        print("note: without a tokenizer, only llama.cpp's library reads the file")
