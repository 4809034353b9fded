"""Training runs resume bit for bit, stop on a signal and reject bad options."""

import dataclasses
import errno
import functools
import json
import os
import re
import shutil
import signal
import sys
import threading
import time
from pathlib import Path
from unittest.mock import Mock

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from tqdm import tqdm

from examples.llama import (
    checkpoint,
    flops,
    hf,
    metrics,
    progress,
    run_folder,
    step,
    train,
    training,
)
from examples.llama.build import build, last_state
from examples.llama.config import RECIPES, Config
from examples.llama.errors import UserError
from examples.llama.model import Llama
from examples.llama.train import parse_command
from fbq_jax import FallbackDot, fallback_dot
from tests.examples.make_hf_fixture import FIXTURE
from tests.examples.small import random_params, small_config
from tests.marks import rows_with_first_fast, with_first_fast

pytestmark = pytest.mark.usefixtures("standard_promotion")

INTERRUPT = signal.getsignal(signal.SIGINT)  # before anything has run
SIZES = {"hidden": 16, "ffn": 32, "layers": 2, "heads": 2}
SIZES |= {"seq": 16, "batch": 4, "accumulate": 2}


@pytest.fixture(scope="module")
def config(text):
    every = {"eval_every": 4, "save_every": 4}
    return Config(**SIZES, **every, data=str(text), steps=6, lr=1e-2)


@pytest.fixture(scope="module")
def whole_run(config, tmp_path_factory):
    """The folder of an uninterrupted run."""
    out = tmp_path_factory.mktemp("runs") / "whole"
    train.train(config, out)
    return out


@pytest.fixture(autouse=True)
def no_curves(monkeypatch):
    """Only `whole_run`, whose scope is the module, draws its curves."""
    monkeypatch.setattr(training.plot, "draw_curves", lambda *_: None)


@pytest.fixture
def run(whole_run, tmp_path):
    """A copy of `whole_run`, to change."""
    return Path(shutil.copytree(whole_run, tmp_path / "run"))


def records_of(run):
    """The records of a run, without the speed."""
    records = metrics.read(run / "metrics.jsonl")
    return [record | {"tokens_per_s": None} for record in records]


def stop_after(last, monkeypatch):
    """Sends SIGINT, as Ctrl-C does, during step `last`."""
    show = training.show

    def press(bar, record):
        show(bar, record)
        if record["step"] == last:
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(training, "show", press)


def flags(config, *more):
    given = {**SIZES, "data": config.data, "steps": config.steps, "lr": config.lr}
    given |= {"eval-every": config.eval_every, "save-every": config.save_every}
    return [f"--{name}={value}" for name, value in given.items()] + list(more)


def test_run_learns_and_leaves_its_records(whole_run, config):
    records = records_of(whole_run)
    assert [record["step"] for record in records] == [1, 2, 3, 4, 5, 6]
    assert records[0]["loss"] == pytest.approx(np.log(256), rel=0.02)
    assert records[-1]["loss"] < records[0]["loss"] - 0.1
    assert [r["step"] for r in records if "val_loss" in r] == [4, 6]
    for layer in records[-1]["fallback"].values():
        assert len(layer["rate"]) == config.layers
        assert min(layer["theta"]) > 0
    assert len(records[-1]["fallback"]) == 4
    assert sorted(path.name for path in whole_run.iterdir()) == [
        ".lock",
        "checkpoints",
        "config.json",
        "curves.png",
        "metrics.jsonl",
    ]
    stored = json.loads((whole_run / "config.json").read_text())
    assert stored.items() >= dataclasses.asdict(config).items()
    for stats in last_state(config, whole_run).stats().values():  # of microbatches
        assert stats.count.tolist() == [config.steps * config.accumulate] * 2


def test_a_run_is_validated_before_its_first_step(whole_run, config, capsys):
    before, *_ = metrics.read(whole_run / "metrics.jsonl", first=0)
    assert before == {"step": 0, "val_loss": pytest.approx(np.log(256), rel=0.02)}
    found = metrics.summarize(whole_run)
    assert (found.first_val_loss, found.steps) == (before["val_loss"], 6)
    report = metrics.report(whole_run)
    assert "(mean of the last 6 steps)" in report
    assert f"after training, {before['val_loss']:.4f} before it" in report
    # The same numbers without training, and nothing is written.
    files = {file: file.read_bytes() for file in whole_run.rglob("*") if file.is_file()}
    for argv, loss, of in (
        (flags(config), found.first_val_loss, "a new model"),
        ([f"--out={whole_run}", "--resume"], found.val_loss, f"step 6 of {whole_run}"),
    ):
        assert train.main([*argv, "--eval-only"]) == 0
        output = capsys.readouterr().out
        assert (
            f"fallback: validation loss {loss:.4f} (nats per token) of {of}" in output
        )
        assert "8 batches of 4 x 16 tokens" in output
    assert files == {file: file.read_bytes() for file in files}
    assert {file for file in whole_run.rglob("*") if file.is_file()} == files.keys()


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ("--export=hf", "--eval-only trains nothing to export; leave --export out"),
        ("--out={out}", "--eval-only writes nothing: .* --resume to validate the run"),
        ("--out={out} --resume", "run holds no run to resume"),
        ("--out={whole} --resume --seq=8", "seq = 16, .* seq = 8"),
    ],
)
def test_what_cannot_be_validated_is_one_error(
    whole_run, tmp_path, capsys, argv, message
):
    asked = argv.format(out=tmp_path / "run", whole=whole_run).split()
    assert re.search(message, error_of(capsys, [*asked, "--eval-only"]))
    assert not (tmp_path / "run").exists()


def test_older_runs_have_no_validation_before_training(run):
    log = run / "metrics.jsonl"
    _, *steps = log.read_bytes().splitlines(keepends=True)
    log.write_bytes(b"".join(steps))
    metrics.continue_after(6, log)
    assert log.read_bytes() == b"".join(steps)
    assert "after training\n" in metrics.report(run)
    log.write_bytes(steps[0])
    assert "(of one step)" in metrics.report(run)


PHASES = [
    ("build", "reading the data"),
    ("init_state", "making the initial weights"),
    ("evaluate", "the validation"),
    ("make_train_step", "compiling"),
]


@pytest.mark.parametrize(("name", "waits_for"), PHASES)
def test_a_signal_before_the_first_step_is_answered_and_ends_the_phase(
    config, tmp_path, monkeypatch, capsys, name, waits_for
):
    former, written, done = getattr(training, name), [], []
    # Reading what is captured may lose what a thread writes at the same time.
    monkeypatch.setattr(tqdm, "write", staticmethod(written.append))

    def interrupted(*args):
        written.clear()
        os.kill(os.getpid(), signal.SIGTERM)
        # The answer comes from a thread, while the phase is busy.
        deadline = time.monotonic() + 10
        while not written and time.monotonic() < deadline:
            time.sleep(0.01)
        done.extend(written)
        return former(*args)

    monkeypatch.setattr(training, name, interrupted)
    out = tmp_path / "run"
    assert train.main(flags(config, f"--out={out}")) == 130
    assert done == [f"stopping after {waits_for}; press Ctrl-C again to stop at once"]
    assert "stopped; continue with: " in capsys.readouterr().out
    assert records_of(out) == []
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_a_signal_during_a_checkpoint_takes_no_further_step(
    config, tmp_path, monkeypatch
):
    save = checkpoint.save

    def interrupted(*args):
        os.kill(os.getpid(), signal.SIGINT)
        save(*args)

    monkeypatch.setattr(training.checkpoint, "save", interrupted)
    assert train.main(flags(config, f"--out={tmp_path / 'run'}")) == 130
    assert len(records_of(tmp_path / "run")) == 4
    assert checkpoint.find(tmp_path / "run" / "checkpoints") == (4, [])


def test_a_second_signal_ends_the_process_at_once(monkeypatch, capfd):
    ended = threading.Event()
    exits = Mock(side_effect=lambda _: ended.set())
    monkeypatch.setattr(progress.os, "_exit", exits)
    with progress.stop_requests(lambda: print("continue")) as stop:
        stop.waits_for = "step 3 and a checkpoint"
        assert not stop.is_set()
        for number in signal.SIGTERM, signal.SIGINT:
            os.kill(os.getpid(), number)
            assert stop.is_set()
        assert ended.wait(10)
    exits.assert_called_once_with(130)
    first, second, *_ = capfd.readouterr().out.splitlines()  # exit has returned
    assert first.startswith("stopping after step 3 and a checkpoint; press Ctrl-C")
    assert second == "continue"
    assert signal.getsignal(signal.SIGINT) is INTERRUPT
    assert signal.set_wakeup_fd(-1) == -1


def test_interrupted_run_resumes_bit_for_bit(
    whole_run, config, tmp_path, monkeypatch, capsys
):
    out = f"--out={tmp_path / 'run'}"
    with monkeypatch.context() as patch:
        stop_after(3, patch)
        assert train.main(flags(config, out)) == 130
    printed = capsys.readouterr().out
    assert f"continue with: {sys.orig_argv[0]} -m examples.llama.train" in printed
    assert f"{out} --resume" in printed
    assert signal.getsignal(signal.SIGINT) is INTERRUPT
    assert len(records_of(tmp_path / "run")) == 3
    with (tmp_path / "run" / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "loss": 0.0}\n{"step": 5, "lo')  # of a killed run
    assert train.main([out, "--resume"]) == 0
    assert records_of(tmp_path / "run") == records_of(whole_run)


def test_reading_metrics_less_often_changes_no_number(config, whole_run, tmp_path):
    seldom = dataclasses.replace(config, log_every=5, save_every=0)
    train.train(seldom, tmp_path / "run")
    assert records_of(tmp_path / "run") == records_of(whole_run)
    left = sorted(path.name for path in (tmp_path / "run").iterdir())
    assert left == [".lock", "config.json", "metrics.jsonl"]


def test_the_progress_bar_has_the_seconds_of_a_step():
    record = {"loss": 1.0, "tokens_per_s": 1.0, "seconds": 90.0, "fallback": {}}
    with progress.progress_bar(0, 3, shown=True) as bar:
        progress.show(bar, record)
        # The rate of tqdm would count what is no step.
        assert str(bar).endswith("s/step=90, left=03:00, tokens/s=1]")
    with progress.progress_bar(3, 3, shown=True) as bar:  # a run that has ended
        assert "compiling" not in str(bar)


def test_finished_run_resumes_to_its_report(whole_run, capsys):
    before = (whole_run / "metrics.jsonl").read_bytes()
    assert train.main([f"--out={whole_run}", "--resume"]) == 0
    assert str(whole_run / "curves.png") in capsys.readouterr().out
    assert (whole_run / "metrics.jsonl").read_bytes() == before


def error_of(capsys, argv):
    """The one line that a failing command prints."""
    assert train.main(argv) == 1
    (error,) = capsys.readouterr().err.splitlines()
    return error


I31 = "an integer from 1 to 2147483647"


@pytest.mark.parametrize(
    ("change", "more", "message"),
    [
        # What config.json holds, or options in it.
        (None, [], "holds no run to resume"),
        ('{"recipe": "fallback"}', [], "another version"),
        ("{", [], "config.json is not JSON"),
        ("3", [], "does not hold a JSON object"),
        ('[["recipe", "bf16"]]', [], "does not hold a JSON object"),
        ("[" * 100_000, [], "config.json is not JSON"),
        ({"steps": "5"}, [], f"steps takes {I31}, got '5'"),
        ({"recipe": ["x"]}, [], r"recipe takes text, got \['x'\]"),
        ({"data": 5}, [], "data takes text or None, got 5"),
        ({"data": ""}, [], "data takes the name of a file, got ''"),
        ({"data": "a\0"}, [], "data takes the name of a file, got 'a"),
        ({"data": "\ud800"}, [], "data takes the name of a file, got '"),
        ({"seed": 10**20}, [], "seed takes an integer from 0 to 4294967295, got 1000"),
        ({"lr": 10**400}, [], "lr takes a number from .* to 3.40282e.38, got 1000"),
        ({"saved_bits": 8.0}, [], "takes an integer from 4 to 12 or 0 or None, got 8"),
        ({"reduce": {}}, [], "takes one of float32, .*, int32, int8 or None, got {}"),
        ({"corpus": 5}, [], "be resumed with other data than before: data = "),
        # What the command line says otherwise.
        ({}, ["--recipe=bf16"], "recipe = fallback, .* recipe = bf16"),
        ({}, ["--data={other}"], "data = .*other has .*, and data = .*text had"),
        ({"data": "{other}"}, [], "cannot be resumed with other data than before"),
        ({}, ["--seq=8"], "seq = 16, .* seq = 8: leave the option out"),
        ({}, ["--steps=7"], "steps = 6, .* steps = 7"),
    ],
)
def test_what_cannot_be_resumed_is_one_error(run, text, capsys, change, more, message):
    file, log = run / "config.json", (run / "metrics.jsonl").read_bytes()
    other = text.with_name("other")
    other.write_bytes(text.read_bytes().replace(b"7", b"8", 1))
    if isinstance(change, dict):
        other_data = {"data": str(other)} if change.get("data") == "{other}" else {}
        change_options(run, **change | other_data)
    elif change is None:
        file.unlink()
    else:
        file.write_text(change)
    before = file.exists() and file.read_bytes()
    more = [flag.format(other=other) for flag in more]
    assert re.search(message, error_of(capsys, [f"--out={run}", "--resume", *more]))
    assert (file.exists() and file.read_bytes()) == before
    assert (run / "metrics.jsonl").read_bytes() == log


def test_a_run_does_not_start_again(run, config, capsys):
    error = error_of(capsys, flags(config, f"--out={run}"))
    assert "--resume" in error
    assert "--out" in error
    assert len(records_of(run)) == 6


def test_a_resumed_run_may_change_its_intervals_and_the_path_of_its_data(
    whole_run, run, text, tmp_path
):
    shutil.rmtree(run / "checkpoints" / "6")
    moved = str(shutil.copy(text, tmp_path / "moved"))
    changes = {"data": moved, "log_every": 5, "eval_every": 3, "save_every": 5}
    argv = [f"--{name.replace('_', '-')}={value}" for name, value in changes.items()]
    assert train.main([f"--out={run}", "--resume", *argv]) == 0
    assert records_of(run) == records_of(whole_run)
    assert checkpoint.find(run / "checkpoints") == (6, [])
    assert (run / "checkpoints" / "5").exists()
    before, after = map(run_folder.read_options, (whole_run, run))
    assert after == before | changes


def test_a_damaged_checkpoint_is_skipped_and_written_again(whole_run, run, capsys):
    (run / "checkpoints" / "6" / "default" / "manifest.ocdbt").unlink()
    assert train.main([f"--out={run}", "--resume"]) == 0
    output = capsys.readouterr().out
    assert "checkpoints/6 is damaged" in output
    assert "continues from step 4" in output
    assert records_of(run) == records_of(whole_run)
    repeated = metrics.read(run / "metrics.repeated.jsonl")
    assert repeated == metrics.read(whole_run / "metrics.jsonl")[4:]
    assert checkpoint.find(run / "checkpoints") == (6, [])

    for damaged in "46":
        (run / "checkpoints" / damaged / "default" / "manifest.ocdbt").unlink()
    before = sorted(run.rglob("*"))
    error = error_of(capsys, [f"--out={run}", "--resume"])
    assert "holds no checkpoint that is whole" in error
    assert sorted(run.rglob("*")) == before

    for lose, message in (
        (shutil.rmtree, "checkpoints does not exist, but .* taken 6 steps"),
        (Path.mkdir, "checkpoints is empty, but .* taken 6 steps .*: mount the file"),
    ):
        lose(run / "checkpoints")
        # What is missing was written with the former --save-every.
        argv = [f"--out={run}", "--resume", "--save-every=100"]
        assert re.search(message, error_of(capsys, argv))
        assert records_of(run) == records_of(whole_run)


def test_two_runs_cannot_share_a_folder(config, tmp_path, monkeypatch, capsys):
    out, options = tmp_path / "run", tmp_path / "options"
    enter = functools.partial(run_folder.enter_folder, out, config, build(config)[2])
    with enter(resume=False):
        before = sorted(out.rglob("*"))
        # As in a race, before the other run has written its options; and after.
        (out / "config.json").rename(options)
        assert "another process is training in" in error_of(
            capsys, flags(config, f"--out={out}")
        )
        options.rename(out / "config.json")
        error = error_of(capsys, flags(config, f"--out={out}", "--resume"))
        assert f"another process is training in {out}" in error
        assert sorted(out.rglob("*")) == before
    with enter(resume=True):
        pass
    with pytest.raises(UserError, match="already holds a run"):
        enter(resume=False).__enter__()
    unsupported = Mock(side_effect=OSError(errno.ENOSYS, "Function not implemented"))
    monkeypatch.setattr(run_folder.fcntl, "flock", unsupported)
    with enter(resume=True):
        assert "has no locks" in capsys.readouterr().err


def test_a_new_run_takes_no_files_of_another(config, run, capsys):
    for name in "config.json", "metrics.jsonl":
        (run / name).unlink()
        before = sorted(run.rglob("*"))
        error = error_of(capsys, flags(config, f"--out={run}"))
        assert "of a run without its config.json" in error
        assert sorted(run.rglob("*")) == before


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ("--recipe=fp4", "recipe takes one of bf16, fallback, .*, got 'fp4'"),
        ("--compare=bf16,fp4", "recipe takes one of .* got 'fp4'"),
        ("--compare=bf16 --recipe=block", "leave --recipe out"),
        ("--batch=6 --accumulate=4", r"accumulate takes a divisor of batch \(6\)"),
        ("--steps=0", "steps takes an integer from 1 to 2147483647, got 0"),
        ("--remat=some", "remat takes one of none, codes, full, got 'some'"),
        ("--saved-bits=16", "saved_bits takes an integer from 4 to 12 or 0 or None"),
        ("--reduce=fp8", "reduce takes one of float32, .*, int8 or None, got 'fp8'"),
        ("--reduce=int8 --recipe=bf16", "INT8 recipes only, got 'int8' with bf16"),
        ("--optimizer-codes --recipe=bf16", "INT8 recipes only, got bf16"),
        ("--reduce=int8 --recipe=switchback", "reduce with switchback: .* XLA sums it"),
        ("--reduce=int32 --recipe=block", "reduce with block: .*'int32' only with sc"),
        ("--experts=0", "experts takes an integer from 1 to 2147483647 or None, got 0"),
        ("--experts=4 --top-k=0", f"top_k takes {I31} or None, got 0"),
        ("--experts=4 --top-k=5", r"top_k takes at most num_experts \(4\)"),
        ("--top-k=2", "top_k takes a number of experts: set experts, too"),
        ("--experts=4 --ffn=127", r"top_k takes a divisor of ffn \(127\), got 2"),
        ("--experts=4 --recipe=fp8_current", "experts take any recipe but .* fp8_curr"),
        ("--experts=4 --compare=bf16,fp8_delayed", "experts take any .* fp8_delayed"),
        ("--experts=4 --reduce=int8", "reduce does not apply to the products of expe"),
        ("--from-hf=/nowhere --top-k=2", "--top-k comes from the model"),
        ("--lr=nan", "lr takes a number from 1.17549e-38 to 3.40282e.38, got nan"),
        ("--heads=3", r"num_kv_heads takes a divisor of num_heads \(3\), got 2"),
        ("--data=/nowhere", "/nowhere does not exist"),
        ("--from-hf=/nowhere", "/nowhere"),
        ("--from-hf=/nowhere --hidden=16", "--hidden comes from the model"),
        (f"--from-hf={FIXTURE / 'llama'}", "llama has no tokenizer to read"),
    ],
)
def test_bad_options_are_refused_before_anything_is_written(
    tmp_path, capsys, argv, message
):
    error = error_of(capsys, [f"--out={tmp_path / 'run'}", *argv.split()])
    assert re.search(message, error)
    assert not (tmp_path / "run").exists()


def test_a_run_that_goes_wrong_stops(config, tmp_path, monkeypatch):
    def poisoned(*args):
        state = step.init_state(*args)
        table = state.params["embed"]["embedding"]
        params = state.params | {"embed": {"embedding": table * jnp.nan}}
        return dataclasses.replace(state, params=params)

    def forgetful(*args):
        train_step = step.make_train_step(*args)

        @jax.jit
        def forget(state, tokens):
            new, record = train_step(state, tokens)
            return dataclasses.replace(new, fallback=state.fallback), record

        return forget

    with monkeypatch.context() as patch:
        patch.setattr(training, "init_state", poisoned)
        with pytest.raises(UserError, match="loss is nan at step 1"):
            train.train(config, tmp_path / "poisoned")
    assert [record["loss"] for record in records_of(tmp_path / "poisoned")] == [None]
    assert not list((tmp_path / "poisoned" / "checkpoints").iterdir())
    monkeypatch.setattr(training, "make_train_step", forgetful)
    with pytest.raises(RuntimeError, match="layers/mlp/down"):
        train.train(config, tmp_path / "forgetful")


def test_training_starts_from_a_hugging_face_model(text, tmp_path):
    """test_experts.py has a run that starts from one, and saves one."""
    sizes = small_config(vocab_size=256, max_seq_len=16)
    params = random_params(sizes)
    hf.save(tmp_path / "hf", sizes, params)
    ids = tmp_path / "ids.bin"
    np.frombuffer(text.read_bytes() + b"\xff", np.uint8).astype(np.uint16).tofile(ids)
    given = {"data": str(ids), "from_hf": str(tmp_path / "hf"), "batch": 4}
    config = Config(recipe="bf16", seq=16, **given)
    model, weights, corpus = build(config)
    optimizer, _ = step.make_optimizer(config)
    state = step.init_state(model, optimizer, weights, seed=0)
    jax.tree.map(np.testing.assert_array_equal, state.params, params)
    assert model.config.vocab_size == corpus.vocab_size == 256
    with pytest.raises(UserError, match="seq takes at most 16"):
        build(dataclasses.replace(config, seq=17))


def test_the_initializer_is_compiled_once_and_recipes_start_alike():
    traced = []

    def init(params):
        traced.append(params)
        return optax.EmptyState()

    optimizer = optax.GradientTransformation(init, optax.identity().update)
    params, numbers = [], []
    for seed, dot_general in (0, None), (0, None), (1, None), (0, fallback_dot):
        model = Llama(small_config(), dot_general)
        state = step.init_state(model, optimizer, None, seed)
        params.append(state.params)
        numbers.append(len(traced))
    assert numbers == [numbers[0]] * 3 + [2 * numbers[0]]  # once for each recipe
    first, same, other, of_recipe = params
    jax.tree.map(np.testing.assert_array_equal, first, same)
    jax.tree.map(np.testing.assert_array_equal, first, of_recipe)
    assert np.any(first["embed"]["embedding"] != other["embed"]["embedding"])


def test_accumulation_gives_the_gradient_of_the_whole_batch():
    model, optimizer = Llama(small_config(dtype=jnp.float32)), optax.sgd(1.0)
    train_step = step.make_train_step(model, optimizer, lambda _: jnp.float32(1.0))
    tokens = jax.random.randint(jax.random.key(0), (4, 9), 0, 32)
    results = []
    with jax.numpy_dtype_promotion("strict"):
        for microbatches in 1, 4:
            state = step.init_state(model, optimizer, None, seed=0)
            results.append(train_step(state, tokens.reshape(microbatches, -1, 9)))
    (whole, of_whole), (split, of_split) = results
    assert float(of_split["loss"]) == pytest.approx(float(of_whole["loss"]), rel=1e-6)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6),
        split.params,
        whole.params,
    )


@pytest.mark.parametrize("recipe", ["fallback", "fp8_delayed"])
def test_a_model_is_validated_before_training_as_its_first_step_computes(recipe):
    tokens = jax.random.randint(jax.random.key(0), (2, 9), 0, 32)
    model = Llama(small_config(), RECIPES[recipe])
    state = step.init_state(model, optax.sgd(1.0), None, seed=0)
    found = step.evaluate(model, state, [np.asarray(tokens)] * step.EVAL_BATCHES)
    differentiated = state.variables()
    others = {"fallback": differentiated.pop("fallback")}
    loss, _ = step._loss(model, differentiated, others, tokens)
    assert found == pytest.approx(float(loss), rel=1e-5)


@pytest.mark.parametrize(
    "changes", with_first_fast([{"saved_bits": 10}, {"num_experts": 2}])
)
def test_microbatches_share_the_codes_of_weights(changes, monkeypatch):
    model = Llama(small_config(**changes), fallback_dot)
    state = step.init_state(model, optax.sgd(1.0), None, seed=0)
    tokens = jax.random.randint(jax.random.key(0), (2, 2, 9), 0, 32)

    def trained():
        train_step = step.make_train_step(
            model, optax.sgd(1.0), lambda _: jnp.float32(1.0)
        )
        return train_step(jax.tree.map(jnp.copy, state), tokens)

    with_codes, calls = trained(), []
    monkeypatch.setattr(step, "quantize_weights_once", lambda *_: calls.append(1) or {})
    jax.tree.map(np.testing.assert_array_equal, with_codes, trained())
    assert calls == [1]


def test_an_optimizer_writes_codes(config, whole_run, tmp_path):
    """Losses are those of layers that quantize their weights in each step."""
    # The checkpoint has no codes, or it would not be that of a state without any.
    assert last_state(config, whole_run).codes == {}
    train.train(dataclasses.replace(config, optimizer_codes=False), tmp_path / "run")
    assert records_of(tmp_path / "run") == records_of(whole_run)


@pytest.mark.exhaustive
def test_delayed_fp8_saves_its_scales_and_resumes_bit_for_bit(
    config, tmp_path, monkeypatch
):
    config = dataclasses.replace(
        config, recipe="fp8_delayed", saved_bits=0, steps=3, save_every=2
    )
    train.train(config, tmp_path / "whole")
    with monkeypatch.context() as patch:
        stop_after(2, patch)
        with pytest.raises(KeyboardInterrupt):
            train.train(config, tmp_path / "run")
    train.train(config, tmp_path / "run", resume=True)
    assert records_of(tmp_path / "run") == records_of(tmp_path / "whole")

    state = last_state(config, tmp_path / "run")
    for path, leaf in jax.tree.leaves_with_path(state.overwritten):
        if path[-1].key == "amax_history":  # of each microbatch, and of no validation
            calls = (leaf > 0).sum(axis=-1).tolist()
            assert calls == [config.steps * config.accumulate] * config.layers
    assert len(jax.tree.leaves(state.overwritten)) == 4 * 3 * 2


@pytest.mark.parametrize(
    ("options", "saved", "summed_in"),
    [
        ({}, 10, [None] * 3),
        ({"saved_bits": 0, "reduce": "float32"}, None, ["float32"] * 3),
        ({"recipe": "block", "reduce": "int8"}, 10, [None, None, "int8"]),
        # Its dW is in floats.
        ({"recipe": "switchback", "reduce": "float32"}, 10, ["float32"] * 2 + [None]),
        ({"recipe": "rowwise", "reduce": "int32"}, 10, ["int32"] * 3),
        ({"recipe": "fp8_delayed"}, 10, None),
        ({"recipe": "bf16"}, None, None),
        ({"recipe": "bf16", "saved_bits": 8}, 8, None),
    ],
)
def test_saved_bits_and_reductions_follow_the_recipe(config, options, saved, summed_in):
    model = build(dataclasses.replace(config, **options))[0]
    assert model.config.saved_bits == saved
    assert isinstance(model.dot_general, FallbackDot) == (summed_in is not None)
    if summed_in is not None:
        recipe = model.dot_general.recipe
        gemms = recipe.fwd, recipe.dlhs, recipe.drhs
        assert [gemm.reduce for gemm in gemms] == summed_in


def test_model_flop_utilization_where_the_peak_is_known(
    config, tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(flops, "peak", lambda: 1e9)
    # Other tests have compiled this program.
    argv = flags(config, f"--out={tmp_path / 'run'}", "--save-every=0")
    assert train.main(argv) == 0
    output = capsys.readouterr()
    per_token = flops.per_token(build(config)[0].config, config.seq)
    records = metrics.read(tmp_path / "run" / "metrics.jsonl")
    for record in records:
        expected = record["tokens_per_s"] * per_token / 1e9
        assert record["mfu"] == pytest.approx(expected)
    assert f"mfu={records[-1]['mfu']:.1%}" in output.err
    median = metrics.summarize(tmp_path / "run").mfu
    assert f"tokens/s, {median:.1%} model FLOP utilization" in output.out


@pytest.mark.parametrize(("clip", "norm"), [(1.0, 1.0), (0.5, 0.5), (0.0, 20.0)])
def test_the_optimizer_decays_matrices_clips_and_warms_up(config, clip, norm):
    config = dataclasses.replace(config, clip=clip, steps=100, lr=1.0)
    optimizer, schedule = step.make_optimizer(config)
    names = "kernel", "embedding", "scale", "bias"
    params = {"layers": {name: jnp.ones((2, 4)) for name in names}}
    zeros = optax.tree.zeros_like(params)
    updates, _ = optimizer.update(zeros, optimizer.init(params), params)
    decayed = [name for name, x in updates["layers"].items() if x.any()]
    assert sorted(decayed) == ["embedding", "kernel"]

    params = {"kernel": jnp.ones((2, 2))}
    gradient = {"kernel": jnp.full((2, 2), 10.0)}
    _, (_, (adam, *_)) = optimizer.update(gradient, optimizer.init(params), params)
    assert optax.tree.norm(adam.mu) / 0.1 == pytest.approx(norm, rel=1e-5)

    rates = np.array([float(schedule(jnp.int32(i))) for i in range(101)])
    assert rates.argmax() == 10
    assert rates[[0, 10, 100]].tolist() == pytest.approx([1 / 11, 1.0, 0.1])


def test_presets_and_flags_of_the_command_line():
    command = parse_command(["--preset=small", "--hidden=512"])
    assert command.given["hidden"] == 512
    assert command.given["layers"] == 12
    assert command.out == Path("runs/fallback")
    assert parse_command(["--unroll"]).given == {"unroll": True}
    assert parse_command(["--no-unroll"]).given == {"unroll": False}
    assert parse_command(["--recipe=block"]).out == Path("runs/block")
    assert parse_command(["--compare=bf16,block"]).out == Path("runs/compare")


@pytest.mark.parametrize("more", [[], ["--save-every=1"]])
def test_a_run_stopped_before_its_first_checkpoint_resumes(
    config, whole_run, tmp_path, monkeypatch, capsys, more
):
    out = tmp_path / "run"
    with monkeypatch.context() as patch:
        stop_after(2, patch)
        assert train.main(flags(config, f"--out={out}", "--save-every=0")) == 130
    assert "stopped without a checkpoint; start again with" in capsys.readouterr().out
    assert not (out / "checkpoints").exists()
    assert train.main([f"--out={out}", "--resume", *more]) == 0
    assert (out / "checkpoints").exists() == bool(more)
    assert "starts from step 0: the run has no checkpoint" in capsys.readouterr().out
    assert records_of(out) == records_of(whole_run)


def test_a_stopped_comparison_resumes_with_the_same_options(
    config, whole_run, tmp_path, monkeypatch, capsys
):
    argv = ["--compare=block,fallback", f"--out={tmp_path}", "--resume"]
    with monkeypatch.context() as patch:
        patch.setattr(train, "train", Mock(side_effect=KeyboardInterrupt))
        assert train.main(flags(config, *argv[:2])) == 130
    # An invented run, so that the comparison compiles no further program.
    shutil.copytree(whole_run, tmp_path / "block")
    change_options(tmp_path / "block", recipe="block", log_every=5)
    with monkeypatch.context() as patch:
        trained = train.train
        # The invented run is complete; its checkpoint belongs to another recipe.
        patch.setattr(train, "train", lambda *a, **k: k["resume"] or trained(*a, **k))
        assert train.main(argv) == 0
    options = json.loads((tmp_path / "fallback" / "config.json").read_text())
    assert (options["log_every"], options["steps"]) == (5, config.steps)
    assert records_of(tmp_path / "fallback") == records_of(whole_run)
    assert (tmp_path / "compare.png").exists()
    numbers = json.loads((tmp_path / "compare.json").read_text())
    assert list(numbers["runs"]) == ["block", "fallback"]
    assert numbers["versions"]["jax"] == jax.__version__
    table = {line.split()[0]: line for line in capsys.readouterr().out.splitlines()}
    assert f"{metrics.summarize(whole_run).val_loss:.4f}" in table["fallback"]
    assert "+0.0000" in table["block"]
    change_options(tmp_path / "fallback", lr=0.1)
    assert "they cannot be compared" in error_of(capsys, argv)


def change_options(run, **options):
    file = run / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | options))


@pytest.mark.parametrize(
    "damage",
    with_first_fast(
        [
            lambda lines: [b"3", b"\xff\0", b"[" * 100_000, *lines[3:]],
            lambda lines: [*lines[3:], *lines[:2], lines[0]],
            lambda lines: [*lines[:2], b'{"step": 3, "loss": "x"}', *lines[3:5]],
            lambda _: [],
        ]
    ),
)
def test_missing_metrics_do_not_stop_a_run(whole_run, run, tmp_path, capsys, damage):
    out = run
    shutil.rmtree(out / "checkpoints" / "6")
    log = out / "metrics.jsonl"
    lines = damage(log.read_bytes().splitlines())
    log.write_bytes(b"".join(line + b"\n" for line in lines))
    written = {r["step"] for r in metrics.read(log)}
    assert train.main([f"--out={out}", "--resume"]) == 0
    expected = [r for r in records_of(whole_run) if r["step"] in written | {5, 6}]
    assert records_of(out) == expected
    output = capsys.readouterr().out
    lost = 4 - len(written - {5, 6})
    assert f"lacks {lost} of the 4 steps so far" in output
    kept = log.read_bytes().splitlines()
    moved = out / "metrics.repeated.jsonl"
    kept += moved.read_bytes().splitlines() if moved.exists() else []
    assert set(lines) <= set(kept)  # no line is lost
    train.plot.draw_comparison([whole_run, out], tmp_path / "compare.png")
    assert metrics.summarize(out).val_loss == metrics.summarize(whole_run).val_loss


@pytest.mark.parametrize(
    ("module", "name"),
    rows_with_first_fast(
        [
            (checkpoint, "_checksums"),
            (training.plot, "draw_curves"),
            (metrics, "_plain"),  # writes a line
        ]
    ),
)
def test_a_full_disk_is_one_error_and_the_run_resumes(
    config, whole_run, tmp_path, monkeypatch, capsys, module, name
):
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(tmp_path / "file"))
    out = tmp_path / "run"
    with monkeypatch.context() as patch:
        patch.setattr(module, name, Mock(side_effect=full))
        assert train.main(flags(config, f"--out={out}")) == 1
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("error: ")
    assert "No space left on device" in last
    assert str(tmp_path) in last
    assert train.main([f"--out={out}", "--resume"]) == 0
    assert records_of(out) == records_of(whole_run)


def test_folders_that_cannot_be_used_are_named(config, tmp_path, capsys):
    (tmp_path / "file").write_text("")
    argv = flags(config, f"--out={tmp_path / 'file' / 'run'}")
    assert "run cannot be written" in error_of(capsys, argv)
    data = tmp_path / "data"
    data.mkdir()
    for out in data / "run", data:
        error = error_of(capsys, [f"--data={data}", f"--out={out}"])
        assert "is inside the data" in error
        assert not list(data.iterdir())
    for name in "train.bin", "val.bin":
        np.arange(100, dtype=np.uint16).tofile(data / name)
    (data / "tokenizer.json").write_bytes(b"\xff{")
    error = error_of(capsys, [f"--data={data}", f"--out={tmp_path / 'run'}"])
    assert f"{data / 'tokenizer.json'} is not JSON" in error
