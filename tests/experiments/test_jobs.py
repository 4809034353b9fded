"""What runs, in which order, in which process, and what is done already."""

import dataclasses
import functools
import hashlib
import json
import math
import signal
import sys
from pathlib import Path
from unittest.mock import Mock

import jax
import numpy as np
import pytest

from examples.llama import metrics, run_folder, training
from examples.llama.config import Config
from examples.llama.data import load_corpus
from examples.llama.errors import UserError
from experiments import (
    __main__,
    corpus,
    jobs,
    killed,
    page,
    processes,
    result_files,
    runs,
)
from experiments.settings import LARGER, SEEDS, SIZES, TOY, Experiment, Settings


def experiment(settings: Settings, folder: Path) -> Experiment:
    return Experiment(settings, folder / "work", folder / "results")


def write_empty_corpus(work: Path) -> None:
    folder = Experiment(TOY, work, work).corpus
    folder.mkdir(parents=True)
    (folder / corpus.FACTS).write_text("{}")


def test_corpus_is_split_by_file_without_duplicates(tmp_path: Path) -> None:
    (tmp_path / "lib").mkdir()
    for i in range(40):
        (tmp_path / "lib" / f"{i:02}.py").write_text(f"print({i})\n")
        (tmp_path / "lib" / f"{i:02}.h").write_text(f"int f{i}();\n")
    (tmp_path / "lib" / "again.py").write_text("print(19)\n")
    (tmp_path / "lib" / "no.py").write_bytes(b"\xff")
    folder = tmp_path / "corpus"
    corpus.prepare(folder, 270, [tmp_path / "lib"])
    read = load_corpus(folder / "python")
    assert read.vocab_size == 270
    tokenizer = corpus.Tokenizer.from_file(str(folder / "python" / "tokenizer.json"))
    held_out = tokenizer.decode(read.val.tolist(), skip_special_tokens=False)
    assert held_out == "".join(f"print({i})\n{corpus.END}" for i in (19, 39))
    assert tokenizer.decode(read.train.tolist()).count("print(19)") == 0
    facts = json.loads((folder / corpus.FACTS).read_text())
    assert facts["cpp"]["train"]["files"] == 38
    assert facts["python"]["train"]["tokens"] == len(read.train)
    for name, suffix in (("train", "bin"), ("val", "bin"), ("tokenizer", "json")):
        content = (folder / "python" / f"{name}.{suffix}").read_bytes()
        digest = hashlib.sha256(content).hexdigest()
        assert facts["python"][name]["sha256"] == digest
    corpus.prepare(folder, 270)  # is there


def python(code: str) -> list[str]:
    return [sys.executable, "-c", code]


PRINT_GPUS = python("import os; print(os.environ['CUDA_VISIBLE_DEVICES'], flush=True)")


def test_processes_share_the_gpus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def used(name: str) -> str:
        return (tmp_path / f"{name}.log").read_text().strip()

    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,4,6")
    processes.do(dict.fromkeys("abcd", PRINT_GPUS), {}, tmp_path, gpus=3)
    assert [used(name) for name in "abc"] == ["1", "4", "6"]
    assert used("d") in ("1", "4", "6")
    processes.do({"e": PRINT_GPUS}, {}, tmp_path, gpus=3, gpus_each=2)
    assert used("e") == "1,4"
    do = functools.partial(processes.do, {"a": PRINT_GPUS}, {}, tmp_path)
    with pytest.raises(processes.JobError, match="=1,4,6 has 3 GPUs, not 4"):
        do(gpus=4)
    with pytest.raises(processes.JobError, match="each run needs 4 GPUs; --gpus gives"):
        do(gpus=3, gpus_each=4)


def test_processes_wait_for_what_they_need(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    commands = {name: python("") for name in ("a", "b", "c")}
    needs = {"a": ["b"], "b": ["elsewhere"]}
    processes.do(commands, needs, tmp_path, gpus=0)
    started = [line for line in capsys.readouterr().out.split() if len(line) == 1]
    assert started == ["b", "b", "a", "a", "c", "c"]  # started and done

    commands["b"] = python("raise ValueError")
    with pytest.raises(processes.JobError, match=r"failed: b; see .*b\.log"):
        processes.do(commands, needs, tmp_path, gpus=0)
    shown = capsys.readouterr().out
    assert "a is done" not in shown
    assert "c is done" in shown


def test_processes_do_not_outlive_an_interruption(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started, start = [], processes._start
    monkeypatch.setattr(
        processes, "_start", lambda *given: started.append(start(*given)) or started[0]
    )
    monkeypatch.setattr(processes.time, "sleep", Mock(side_effect=KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        processes.do({"a": ["sleep", "60"]}, {}, tmp_path, gpus=0)
    assert started[0].returncode == -signal.SIGTERM


def test_runs_are_continued_and_done_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = tmp_path / "model.safetensors"
    weights.touch()
    config = Config(steps=2, log_every=1, from_hf=str(tmp_path))
    run = runs.Run(config, tmp_path / "run", tmp_path / "run.json", "58", "fsdp=2")
    resumed = []

    def fake(config: Config, out: Path, *, resume: bool) -> None:
        resumed.append(resume)
        assert dict(jax.sharding.get_abstract_mesh().shape) == {"fsdp": 2}
        steps = config.steps if resume else 1
        out.mkdir(exist_ok=True)
        (out / "config.json").write_text("{}")
        rates = {"layers/mlp/down": {"rate": [0.25], "theta": [1.0]}}
        records = [
            {"step": step, "loss": 2.0, "grad_norm": 1.0, "tokens_per_s": 5.0}
            | {"fallback": rates, "val_loss": 3.0}
            for step in range(1, steps + 1)
        ]
        lines = "".join(json.dumps(record) + "\n" for record in records)
        (out / "metrics.jsonl").write_text(lines)
        if not resume:
            raise KeyboardInterrupt

    monkeypatch.setattr(training, "train", fake)
    monkeypatch.setattr(run_folder, "read_options", lambda _: {})
    with pytest.raises(KeyboardInterrupt):
        runs.do([run])
    assert not runs.are_done([run])
    for _ in range(2):
        runs.do([run])
    assert runs.are_done([run])
    assert resumed == [False, True]
    stored = json.loads(run.result.read_text())
    assert stored["model"] == "58"
    assert stored["weights"] == hashlib.sha256(b"").hexdigest()
    assert stored["machine"]["mesh"] == "fsdp=2"
    assert stored["val_loss"] == {"1": 3.0, "2": 3.0}
    assert stored["fallback"]["layers/mlp/down"]["rate"] == [[0.25], [0.25]]

    # Only a process that took a step records its peak memory.
    monkeypatch.setattr(runs, "peak_bytes", lambda: 7)
    for records, peak in (metrics.read(run.out / "metrics.jsonl"), None), ([], 7):
        runs.write(run, records, done=True)
        assert json.loads(run.result.read_text())["peak_bytes"] == peak


def test_a_diverged_run_is_done_and_a_failed_one_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = runs.Run(Config(steps=2), tmp_path / "run", tmp_path / "run.json")
    errors = UserError("in use"), training.DivergedError("loss is nan")
    write = Mock()
    with monkeypatch.context() as patch:
        patch.setattr(training, "train", Mock(side_effect=errors))
        patch.setattr(runs, "write", write)
        with pytest.raises(UserError, match="in use"):
            runs.do([run])
        runs.do([run])
    (call,) = write.call_args_list
    assert call.kwargs == {"done": True, "diverged": "loss is nan"}
    with pytest.raises(training.DivergedError, match="grad_norm is nan at step 3"):
        training.check_finite({"step": 3, "grad_norm": math.nan}, run.out)


def test_results_of_other_options_are_refused(tmp_path: Path) -> None:
    config = Config(hidden=64, heads=2, kv_heads=1)
    run = runs.Run(config, tmp_path / "run", tmp_path / "run.json")
    stored = {"done": True, "options": {"hidden": 64, "data": "elsewhere"}}
    result_files.save(stored, run.result)
    assert run.is_done()
    result_files.save({"done": True, "options": {"hidden": 128}}, run.result)
    with pytest.raises(result_files.ResultsError, match="has hidden = 128, and this r"):
        run.is_done()
    run.result.write_text("{")
    with pytest.raises(result_files.ResultsError, match="json is damaged"):
        run.is_done()


def test_each_stage_has_a_run_for_each_recipe_and_seed(tmp_path: Path) -> None:
    groups = runs.pretraining(experiment(SEEDS, tmp_path))
    assert {n: len(group) for n, group in groups.items()} == {
        **{"bf16-0": 1, "bf16": 3},
        **dict.fromkeys(["row_block_lhs", "fallback", "fp8_row_block_lhs"], 4),
        **dict.fromkeys(["block", "rowwise", "fp8_delayed"], 4),
    }
    of_lrs = runs.longer(experiment(SEEDS, tmp_path)).values()
    rates = [run.config.lr for (run,) in of_lrs]
    assert rates == [1e-3] * 7 + [3e-3] * 7
    of_recipe = runs.fine_tuning(experiment(TOY, tmp_path))
    assert len(of_recipe) == 9
    assert len(of_recipe["bf16"]) == 15
    assert len(of_recipe["fallback"]) == 12
    known = jobs.jobs(experiment(LARGER, tmp_path))
    assert list(known) == ["parity-bf16-0", "models", "parity-row_block_lhs"]


def test_jobs_bring_what_they_need(tmp_path: Path) -> None:
    toy = experiment(TOY, tmp_path)
    known = jobs.jobs(toy)
    study = "studies-error"
    base = "parity-bf16-0"
    assert jobs.choose(known, [study]) == [base, "models", study]
    result = toy.results / "parity" / "bf16-0.json"
    result_files.save({"done": True, "options": {}}, result)
    # Its checkpoint may be gone, which the models need and train for again.
    assert jobs.choose(known, [study, base]) == ["models", study]
    for name in TOY.models:
        toy.model(name).mkdir(parents=True)
    result_files.save({}, toy.results / "planted.json")
    assert jobs.choose(known, [study]) == [study]
    result_files.save({}, toy.results / "studies" / "error.json")
    assert jobs.choose(known, [study]) == []


def test_the_command_line_queues_jobs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    queued = []
    monkeypatch.setattr(
        processes, "do", lambda *given, **options: queued.append((*given, options))
    )
    write_empty_corpus(tmp_path)
    results = tmp_path / "results"
    argv = ["longer", "--size=toy", f"--work={tmp_path}", f"--results={results}"]
    assert __main__.main([*argv, "--only=*-bf16-*", "--gpus=3"]) == 0
    ((commands, needs, logs, options),) = queued
    name = "longer-bf16-0.3"
    assert list(commands) == [name]
    assert commands[name][-4:] == ["toy", str(tmp_path), str(results), name]
    assert needs == {name: ()}
    assert logs == tmp_path / "logs"
    assert options == {"gpus": 3, "gpus_each": 1}


def test_runs_on_another_text_are_not_added_to_results(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_empty_corpus(tmp_path / "work")
    result_files.save({"python": {}}, tmp_path / "results" / result_files.CORPUS)
    argv = ["parity", "--size=toy", f"--work={tmp_path / 'work'}"]
    assert __main__.main([*argv, f"--results={tmp_path / 'results'}"]) == 1
    assert "corpus.json differs from" in capsys.readouterr().err


@pytest.mark.parametrize("size", SIZES)
def test_committed_results_have_the_options_of_their_size(
    size: str, tmp_path: Path
) -> None:
    groups = runs.pretraining(Experiment(SIZES[size], tmp_path, page.RESULTS / size))
    done = [runs.are_done(group) for group in groups.values()]
    assert all(done) == (size not in ("quarter", "toy"))  # others have all runs


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ("parity --gpus=-1", "invalid choice: -1"),
        ("parity studies --size=larger", "--size larger has no studies, only parity"),
    ],
)
def test_wrong_options_are_named(
    capsys: pytest.CaptureFixture[str], argv: str, message: str
) -> None:
    with pytest.raises(SystemExit):
        __main__.main(argv.split())
    assert message in capsys.readouterr().err


@pytest.mark.exhaustive
def test_a_killed_run_ends_as_the_whole_one(tmp_path: Path) -> None:
    # The example's tests resume runs of the other recipes.
    sizes = {"hidden": 16, "ffn": 32, "layers": 1, "seq": 16, "recipe": "bf16"}
    settings = dataclasses.replace(TOY, pretrain=TOY.pretrain | sizes)
    experiment = Experiment(settings, tmp_path, tmp_path)
    text = experiment.text("python")
    text.mkdir(parents=True)
    for part in "train", "val":
        (np.arange(2000, dtype=np.uint16) % 50).tofile(text / f"{part}.bin")
    killed.run(experiment)
    found = json.loads((tmp_path / "killed.json").read_text())
    assert 3 < found["killed_at"] <= 8
    assert found["arrays"] > 10
    assert found["arrays_that_differ"] == []
    assert found["losses_equal"]
