"""The experiments: corpus, queue, outliers and page (see also test_studies.py)."""

import hashlib
import itertools
import json
import math
import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from matplotlib.figure import Figure

from examples.llama import metrics, run_folder, training
from examples.llama.config import Config
from examples.llama.data import load_corpus
from examples.llama.experiments import (
    __main__,
    corpus,
    jobs,
    longer,
    outliers,
    page,
    parity,
    pictures,
    plant,
    probe,
    result_files,
    run_pictures,
    run_tables,
    runs,
    studies,
)
from examples.llama.experiments.settings import (
    FULL,
    LARGER,
    QUARTER,
    SEEDS,
    SETTINGS,
    TOY,
)
from examples.llama.experiments.studies import criteria, error, gradients
from examples.llama.experiments.studies.perplexity import BLOCK_SIDES
from examples.llama.model import Llama
from examples.llama.step import cross_entropy
from tests.examples.small import random_params, small_config

MODEL = small_config(intermediate_size=128, dtype=jnp.float32)


@pytest.fixture(scope="module")
def tokens() -> jax.Array:
    return jax.random.randint(jax.random.key(1), (2, 17), 0, MODEL.vocab_size)


@pytest.fixture(scope="module")
def params() -> Any:
    return random_params(MODEL)


def write_empty_corpus(folder: Path) -> None:
    """Writes what `experiments` reads of a corpus for the toy size."""
    folder.mkdir(parents=True)
    (folder / corpus.FACTS).write_text("{}")
    (folder / "vocab_size").write_text(f"{TOY.vocab_size}\n")


def test_corpus_is_split_by_file_without_duplicates(tmp_path: Path) -> None:
    (tmp_path / "lib").mkdir()
    for i in range(40):
        (tmp_path / "lib" / f"{i:02}.py").write_text(f"print({i})\n")
        (tmp_path / "lib" / f"{i:02}.h").write_text(f"int f{i}();\n")
    (tmp_path / "lib" / "again.py").write_text("print(19)\n")
    (tmp_path / "lib" / "no.py").write_bytes(b"\xff")
    corpus.prepare(tmp_path / "corpus", 270, [tmp_path / "lib"])
    read = load_corpus(tmp_path / "corpus" / "python")
    assert read.vocab_size == 270
    tokenizer = corpus.Tokenizer.from_file(
        str(tmp_path / "corpus" / "python" / "tokenizer.json")
    )
    held_out = tokenizer.decode(read.val.tolist(), skip_special_tokens=False)
    assert held_out == "".join(f"print({i})\n{corpus.END}" for i in (19, 39))
    assert tokenizer.decode(read.train.tolist()).count("print(19)") == 0
    facts = json.loads((tmp_path / "corpus" / "facts.json").read_text())
    assert facts["cpp"]["train"]["files"] == 38
    assert facts["python"]["train"]["tokens"] == len(read.train)
    for name, suffix in (("train", "bin"), ("val", "bin"), ("tokenizer", "json")):
        file = f"{name}.{suffix}"
        content = (tmp_path / "corpus" / "python" / file).read_bytes()
        digest = hashlib.sha256(content).hexdigest()
        assert facts["python"][name]["sha256"] == digest
    corpus.prepare(tmp_path / "corpus", 270)  # is there
    with pytest.raises(result_files.ResultsError, match="tokenizer of 270 tokens, and"):
        corpus.prepare(tmp_path / "corpus", 271)


def python(code: str) -> list[str]:
    return [sys.executable, "-c", code]


def do(
    commands: dict[str, list[str]],
    logs: Path,
    *,
    needs: dict[str, str] | None = None,
    gpus: int = 0,
    each: int = 1,
    seconds: float = 60.0,
) -> list[str]:
    until = time.monotonic() + seconds
    return jobs.do(commands, needs or {}, logs, gpus=gpus, until=until, gpus_each=each)


def test_jobs_share_the_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,6")
    code = "import os; print(os.environ['CUDA_VISIBLE_DEVICES'], flush=True)"
    commands = {name: python(code) for name in ("a", "b", "c")}
    assert do(commands, tmp_path, gpus=2) == []
    used = [(tmp_path / f"{name}.log").read_text().strip() for name in commands]
    assert used[:2] == ["4", "6"]
    assert used[2] in ("4", "6")
    with pytest.raises(jobs.JobError, match="=4,6 has 2 GPUs, not 3"):
        do(commands, tmp_path, gpus=3)


def test_a_job_may_have_several_gpus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,4,6")
    code = "import os; print(os.environ['CUDA_VISIBLE_DEVICES'], flush=True)"
    assert do({"a": python(code)}, tmp_path, gpus=3, each=2) == []
    assert (tmp_path / "a.log").read_text().strip() == "1,4"
    with pytest.raises(jobs.JobError, match="each run needs 4 GPUs; --gpus gives 3"):
        do({"a": python(code)}, tmp_path, gpus=3, each=4)


def test_jobs_wait_for_the_jobs_they_need(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    commands = {name: python("") for name in ("a", "b", "c")}
    needs = {"a": "b", "b": "elsewhere"}
    assert do(commands, tmp_path, needs=needs) == []
    started = [line for line in capsys.readouterr().out.split() if len(line) == 1]
    assert started == ["b", "b", "a", "a", "c", "c"]  # started and done

    commands["b"] = python("raise ValueError")
    with pytest.raises(jobs.JobError, match="failed: b; see"):
        do(commands, tmp_path, needs=needs)
    assert "a is done" not in capsys.readouterr().out


def test_jobs_stop_when_time_is_up(tmp_path: Path) -> None:
    commands = {"a": python("import time; time.sleep(60)"), "b": python("")}
    assert do(commands, tmp_path, seconds=0.3) == ["a", "b"]


def test_jobs_do_not_outlive_the_queue(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started, real = [], jobs._start

    def start(*given: Any) -> Any:
        started.append(real(*given))
        return started[0]

    def interrupt(_: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(jobs, "_start", start)
    monkeypatch.setattr(jobs.time, "sleep", interrupt)
    with pytest.raises(KeyboardInterrupt):
        do({"a": ["sleep", "60"]}, tmp_path)
    assert started[0].returncode == -signal.SIGTERM


def test_a_job_that_fails_as_it_is_stopped_has_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jobs, "_stop", lambda processes: [p.wait() for p in processes])
    with pytest.raises(jobs.JobError, match="failed: a"):
        do({"a": python("raise ValueError")}, tmp_path, seconds=0.1)


def test_a_job_that_fails_is_named_and_the_others_are_done(tmp_path: Path) -> None:
    done = tmp_path / "done"
    touch = python(f"open({str(done)!r}, 'w')")
    commands = {"a": python("raise ValueError"), "b": touch}
    with pytest.raises(jobs.JobError, match=r"failed: a; see .*a\.log"):
        do(commands, tmp_path)
    assert done.exists()


def test_runs_are_continued_and_done_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = Config(steps=2, log_every=1)
    about = {"model": "58"}
    asked = runs.Run(
        config, tmp_path / "run", tmp_path / "run.json", about, mesh="fsdp=2"
    )
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
    file = tmp_path / "runs.json"
    for status in (jobs.STOPPED, 0):
        command = runs.command([asked], file)
        assert command[-1] == str(file)
        assert runs.main(file) == status
        stored = json.loads(asked.result.read_text())
        assert stored["done"] == (status == 0)
    assert resumed == [False, True]
    assert stored["model"] == "58"
    assert stored["machine"]["mesh"] == "fsdp=2"
    assert stored["val_loss"] == {"1": 3.0, "2": 3.0}
    assert stored["fallback"]["layers/mlp/down"]["rate"] == [[0.25], [0.25]]
    assert runs.command([asked], file) == []

    # Only a process that took a step records its peak memory.
    monkeypatch.setattr(runs, "peak_bytes", lambda: 7)
    for records, peak in (metrics.read(asked.out / "metrics.jsonl"), None), ([], 7):
        runs.write(asked, records, done=True, about={})
        assert json.loads(asked.result.read_text())["peak_bytes"] == peak


def test_a_diverged_run_is_done_and_a_failed_one_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = runs.Run(Config(steps=2), tmp_path / "run", tmp_path / "run.json")

    def fail(error: Exception) -> Any:
        def train(*_: Any, **__: Any) -> None:
            raise error

        return train

    monkeypatch.setattr(runs, "write", lambda *_, about, **__: written.append(about))
    written: list[dict[str, Any]] = []
    monkeypatch.setattr(training, "train", fail(run_folder.RunError("in use")))
    with pytest.raises(run_folder.RunError, match="in use"):
        runs.do(asked)
    monkeypatch.setattr(training, "train", fail(training.DivergedError("loss is nan")))
    runs.do(asked)
    assert written == [{"diverged": "loss is nan"}]
    monkeypatch.undo()
    with pytest.raises(training.DivergedError, match="grad_norm is nan at step 3"):
        training.check_finite({"step": 3, "grad_norm": math.nan}, asked.out)


def test_base_is_trained_again_where_its_model_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = ["studies", "--size=toy", "--only=study", f"--work={tmp_path}"]
    asked += [f"--results={tmp_path / 'results'}"]
    queues = []

    def do(commands: Any, *_: Any, **__: Any) -> list[str]:
        (stored,) = json.loads(Path(commands["base"][-1]).read_text())
        queues.append(Path(stored["result"]).relative_to(tmp_path))
        runs.save({"done": True, "options": {}}, Path(stored["result"]))
        return []

    monkeypatch.setattr(jobs, "do", do)
    write_empty_corpus(tmp_path / "corpus")
    for _ in range(3):
        assert __main__.main(asked) == 0
    # It is the run of `parity`, whose existing result is not overwritten.
    assert list(map(str, queues)) == ["results/parity/bf16-0.json", *["base.json"] * 2]


def test_each_stage_has_a_run_for_each_recipe_and_seed(tmp_path: Path) -> None:
    def runs_of(command: list[str]) -> list[Any]:
        stored: list[Any] = json.loads(Path(command[-1]).read_text())
        return stored

    folders = tmp_path / "work", tmp_path / "results"
    pretraining = parity.commands(SEEDS, *folders)
    assert len(runs_of(pretraining["parity-bf16-0"])) == 1
    assert len(runs_of(pretraining["parity-bf16"])) == 3
    assert len(runs_of(pretraining["parity-row_block_lhs"])) == 4
    stored = [run for command in pretraining.values() for run in runs_of(command)]
    assert len(stored) == len(SEEDS.parity) == 28
    # Other runs need the model of the first only.
    saves = [run["config"]["save_every"] for run in stored]
    assert saves == [SEEDS.pretrain["steps"]] + [0] * 27
    (larger,) = runs_of(parity.commands(LARGER, *folders)["parity-bf16-0"])
    assert larger["config"]["save_every"] == 0
    assert len(parity.commands(TOY, *folders)) == 10
    assert len(longer.commands(TOY, *folders)) == 9
    of_lrs = longer.commands(SEEDS, *folders)
    rates = [
        run["config"]["lr"] for command in of_lrs.values() for run in runs_of(command)
    ]
    assert rates == [1e-3] * 7 + [3e-3] * 7
    of_recipe = outliers.commands(TOY, *folders)
    assert len(of_recipe) == 9
    for name, number in ("bf16", 15), ("fallback", 12):
        assert len(runs_of(of_recipe[f"outliers-{name}"])) == number


@pytest.mark.exhaustive
def test_probed_operands_give_the_gradients_of_the_projections(
    params: Any, tokens: jax.Array
) -> None:
    @jax.jit
    def gradient(params: Any) -> Any:
        def loss(params: Any) -> jax.Array:
            logits: Any = Llama(MODEL).apply({"params": params}, tokens[:, :-1])
            return cross_entropy(logits, tokens[:, 1:])

        return jax.grad(loss)(params)

    grads = gradient(params)["layers"]
    for name, of in probe.operands(MODEL, params, tokens).items():
        grad = grads
        for key in probe.PROJECTIONS[name]:
            grad = grad[key]
        dw = jnp.einsum("lmk,lmn->lkn", of.x, of.dy)
        expected = grad["kernel"].reshape(dw.shape)
        np.testing.assert_allclose(dw, expected, rtol=1e-4, atol=1e-7)


@pytest.mark.exhaustive
def test_outliers_are_planted_and_change_nothing(
    params: Any, tokens: jax.Array
) -> None:
    apply = jax.jit(lambda params: Llama(MODEL).apply({"params": params}, tokens))
    x = probe.operands(MODEL, params, tokens)["down"].x
    for largest in (58, 6559):
        planted = plant.plant(params, x, largest)
        peaks = jnp.abs(probe.operands(MODEL, planted.params, tokens)["down"].x)
        of_channels = jnp.sort(peaks.max(axis=1), axis=1)
        highest = of_channels[:, -plant.CHANNELS :]
        assert highest.min() > largest / math.sqrt(2) / 1.01
        assert highest.max() < largest * math.sqrt(2) * 1.01
        rest = of_channels[:, : -plant.CHANNELS]
        assert rest.max() <= jnp.abs(x).max()
        np.testing.assert_array_equal(apply(planted.params), apply(params))
    # Nothing changes if all channels are larger already.
    assert plant.plant(params, x, float(jnp.abs(x).min())).factors.max() == 1.0


@pytest.mark.exhaustive
def test_planted_gradients_grow_and_change_nothing(
    params: Any, tokens: jax.Array
) -> None:
    apply = jax.jit(lambda params: Llama(MODEL).apply({"params": params}, tokens))

    def gradient_of_up(params: Any) -> jax.Array:
        of = probe.operands(MODEL, params, tokens)
        return outliers._gradient_of_up(of)

    dy = gradient_of_up(params)
    planted = plant.plant_gradients(params, dy, 64)
    grown = jnp.abs(gradient_of_up(planted.params)).max(axis=1)
    expected = jnp.abs(dy).max(axis=1)
    layers = jnp.arange(len(dy))[:, None]
    expected = expected.at[layers, planted.channels].multiply(64)
    np.testing.assert_allclose(grown, expected, rtol=1e-6)
    np.testing.assert_array_equal(planted.factors, 1 / 64)
    np.testing.assert_array_equal(apply(planted.params), apply(params))


def a_run(recipe: str, **more: Any) -> dict[str, Any]:
    rates = [[0.2, 0.4]] * 20
    of_layers = {"layers/mlp/down": {"rate": rates, "theta": rates}}
    return {
        "done": True,
        "options": {"recipe": recipe, "steps": 20, "batch": 4, "seq": 8, "lr": 0.1}
        | {"corpus": {"train": 320}},
        "machine": {"device": "a device"},
        "steps": 20,
        "tokens_per_s": 1000.0,
        "peak_bytes": 2 * 10**9,
        "loss": [5.0 / step + len(recipe) / 1000 for step in range(1, 21)],
        "val_loss": {"10": 4.0, "20": 3.0 + len(recipe) / 1000},
        "looks": list(range(1, 21)),
        "fallback": of_layers if recipe == "fallback" else {},
    } | more


def write_results(results: Path) -> None:
    """Writes invented results of all experiments."""
    for recipe in ("bf16", "fallback"):
        for seed in range(2):
            runs.save(a_run(recipe), results / "parity" / f"{recipe}-{seed}.json")
        for lr in 0.1, 0.2:
            of_lr = a_run(recipe)
            of_lr["options"]["lr"] = lr
            runs.save(of_lr, results / "longer" / f"{recipe}-{lr}.json")
        for seed, model in itertools.product(range(3), ("58", "606")):
            name = f"{model}-{recipe}-{seed}.json"
            run = a_run(recipe, model=model, weights=f"of {model}")
            run["options"]["seed"] = seed
            run["val_loss"]["20"] += seed / 10  # equal for all recipes
            runs.save(run, results / "outliers" / name)
    # The gradient was not finite, but all losses are.
    diverged = a_run("block", diverged="grad_norm is nan at step 20")
    for stage in ("parity", "longer"):
        runs.save(diverged, results / stage / "block-0.json")
    stopped = a_run("rowwise", done=False, steps=9)
    runs.save(stopped, results / "parity" / "rowwise-0.json")
    of_model = {"largest": 60.0, "val_loss": {"python": 3.0, "cpp": 4.0}}
    models = "trained", "58", "606"
    weights = {model: f"of {model}" for model in models}
    planted = {model: of_model | {"weights": weights[model]} for model in models}
    runs.save(planted, results / "planted.json")

    def rising(columns: Sequence[Any]) -> list[float]:
        return np.linspace(0.1, 0.9, len(columns)).tolist()

    of_errors = {"plain": rising(error.PLAIN), "fallback": rising(error.FALLBACK)}
    by_criterion = dict.fromkeys(("absmax", "l1"), rising(criteria.RATES))
    by_operand = dict.fromkeys(gradients.OPERANDS, rising(gradients.BITS))
    by_pass = dict.fromkeys(("forward", "both"), rising(gradients.RATES))
    sides = rising(BLOCK_SIDES)
    of_studies = {
        "error": {"down": of_errors},
        "criteria": {"down": by_criterion},
        "operands": by_operand,
        "passes": by_pass,
        "nonlinear": rising(gradients.SAVED_BITS),
        "perplexity": {"float": 8.0, "block": sides, "fallback": sides},
        "recipes": {"block": {"perplexity": 8.0, "gradient": 1e-3}},
        "blocks": {"down": [["0100", "0101"], ["0010", "0010"]]},
        "start": {"first_batch": {"rate": [0.5, 0.2], "theta": [1.0, 2.0]}},
    }
    assert of_studies.keys() == studies.STUDIES.keys()
    for name, of in of_studies.items():
        study = {"weights": weights, "found": dict.fromkeys(models, of)}
        runs.save(study, results / "studies" / f"{name}.json")
    part = {"files": 38, "bytes": 6543, "tokens": 1234, "sha256": "0fa9"}
    read = {"train": part, "val": part, "tokenizer": {"sha256": "b2c4"}}
    runs.save({"python": read}, results / "corpus.json")
    killed = {"killed_at": 7, "options": {"steps": 9}, "arrays": 5}
    killed |= {"arrays_that_differ": [], "losses_equal": True}
    runs.save(killed, results / "killed.json")


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> dict[str, Figure]:
    """The figures that are saved during the test, by name; their files are empty."""
    figures: dict[str, Figure] = {}

    def save(figure: Figure, path: Path) -> None:
        figures[path.stem] = figure
        path.touch()

    monkeypatch.setattr(pictures, "save", save)
    return figures


def test_page_is_drawn_from_the_results_alone(
    tmp_path: Path, drawn: dict[str, Figure]
) -> None:
    results = tmp_path / "results"
    results.mkdir()
    tables = results / __main__.OTHER_PAGE
    argv = ["draw", f"--results={results}"]
    assert __main__.main(argv) == 0
    assert not drawn
    assert tables.read_text().count(page.NOT_RUN) == len(page.TABLES)

    write_results(results)
    for _ in range(2):  # the second time in place of the first
        assert __main__.main(argv) == 0
        text = tables.read_text()
        assert page.NOT_RUN not in text
        assert drawn.keys() == pictures.PICTURES.keys()
        assert text.count("![") == len(drawn)
    (axes,) = drawn["outliers"].axes
    # Three seeds of each of two models.
    heights = [
        y for line in axes.lines if line.get_marker() == "o" for y in line.get_ydata()
    ]
    np.testing.assert_allclose(heights, [0.004] * 6)
    assert "| fallback-0 | 3.0080 | +0.0040 | +0.13% | +1.54% | 1,000 | 2.0 |" in text
    assert "| bf16 | 3.10400 ± 0.10000 | 3.10400 ± 0.10000 |" in text
    assert "| fallback | +0.00400 ± 0.00000 | +0.00400 ± 0.00000 |" in text
    assert "| block-0 (diverged at step 20) | nan |  |  |  | 1,000 | 2.0 |" in text
    assert "| rowwise-0 (stopped at step 9) | 3.0070 |  |  |  | 1,000 | 2.0 |" in text
    assert "| block | 0.1 | 20 | at step 20 | nan |" in text
    assert "| trained | absmax | 1.0e-01 |" in text
    assert "| trained | block | 8 | 0.1 |" in text
    # The busiest columns of the 2 layers differ; they have 4 of the 5 blocks.
    assert "| trained | down | 31.2% | 80.0% in 1 of 4 |" in text
    assert "| threshold at step 20 / at step 1 |" in text
    assert "| first_batch | 2 |" in text
    assert "| `python/train.bin` | 38 | 6,543 | 1,234 | `0fa9` |" in text
    assert "| `python/tokenizer.json` |  |  |  | `b2c4` |" in text
    assert "5 of the 5 arrays of the last checkpoint are bit-equal" in text


def test_stages_that_were_stopped_are_drawn(
    tmp_path: Path, drawn: dict[str, Figure]
) -> None:
    write_results(tmp_path)
    for name in ("606-bf16-0", "606-bf16-1", "606-fallback-2", "58-fallback-2"):
        (tmp_path / "outliers" / f"{name}.json").unlink()
    assert __main__.main(["draw", f"--results={tmp_path}"]) == 0
    assert drawn.keys() == pictures.PICTURES.keys()
    text = (tmp_path / __main__.OTHER_PAGE).read_text()
    # For 58, seeds 0 and 1 have both recipes; for 606 no seed has.
    assert "| fallback | +0.00400 ± 0.00000 |  |" in text
    for run in (tmp_path / "outliers").glob("*-bf16-*.json"):
        run.unlink()
    nothing = a_run("bf16", loss=[None] * 20)
    runs.save(nothing, tmp_path / "longer" / "bf16-0.1.json")
    assert __main__.main(["draw", f"--results={tmp_path}"]) == 0
    for run in (tmp_path / "longer").iterdir():
        run.unlink()
    runs.save(nothing, tmp_path / "longer" / "bf16-0.1.json")
    assert __main__.main(["draw", f"--results={tmp_path}"]) == 0


def test_pairs_of_seeds_tell_real_differences(tmp_path: Path) -> None:
    added = {"block": (0.001, 0.002, 0.003, 0.002), "rowwise": (0.001, -0.002, 0.0)}
    for recipe, of_seeds in {"bf16": (0.0,) * 4, **added}.items():
        for seed, more in enumerate(of_seeds):
            loss = (3.0 + seed) * (1 + more)
            run = a_run(recipe, loss=[loss] * 20, val_loss={"20": loss})
            runs.save(run, tmp_path / "parity" / f"{recipe}-{seed}.json")
    lines = run_tables.paired(tmp_path).splitlines()
    # The standard errors are 0.041 % and 0.088 %; Student's factors are 3.18 and 4.30.
    assert lines[2] == "| block | 4 | +0.200% | ± 0.130% | +0.200% | ± 0.130% |"
    assert lines[3] == "| rowwise | 3 | -0.033% | ± 0.379% | -0.033% | ± 0.379% |"
    matrix = run_tables.pairs(tmp_path).splitlines()
    assert matrix[2].startswith("| bf16 |  | **-0.20** | +0.03 |")
    (tmp_path / "parity" / "bf16-0.json").unlink()
    runs.save(a_run("bf16", done=False), tmp_path / "parity" / "bf16-1.json")
    lines = run_tables.paired(tmp_path).splitlines()
    assert [line.split(" | ")[:2] for line in lines[2:]] == [["| block", "2"]]


def test_runs_on_other_devices_are_not_compared_in_speed(tmp_path: Path) -> None:
    faster = {"device": "another", "mesh": "fsdp=2"}
    for run in a_run("bf16"), a_run("block", machine=faster, tokens_per_s=2000.0):
        file = tmp_path / "parity" / f"{run['options']['recipe']}-0.json"
        runs.save(run, file)
    machines = "device a device (bf16-0) and another (block-0), mesh none (bf16-0) and"
    assert machines in run_tables.parity(tmp_path)
    rows = run_tables.cost(tmp_path).splitlines()[2:]
    assert rows[0].startswith("| bf16-0 (a device) | 1 | 1.00 |")
    assert rows[1].startswith("| block-0 (another) | 0 |  |")
    figure = run_pictures.cost(result_files.runs(tmp_path, "parity"))
    legend = figure.axes[0].get_legend()
    assert legend is not None
    shown = [text.get_text() for text in legend.get_texts()]
    assert shown == ["bf16-0 (a device)", "block-0 (another)"]


def test_every_recipe_has_its_own_color() -> None:
    recipes = {*FULL.tuned, *QUARTER.tuned, *dict(SEEDS.parity)}
    styles = {recipe: run_pictures.recipe_style(recipe) for recipe in recipes}
    assert len({style["color"] for style in styles.values()}) == len(recipes)
    of_seeds = [run_pictures.recipe_style(f"bf16-{seed}") for seed in range(2)]
    assert of_seeds[0] == styles["bf16"]
    assert of_seeds[1]["color"] == styles["bf16"]["color"]
    assert of_seeds[1]["linestyle"] != styles["bf16"]["linestyle"]


@pytest.mark.parametrize("results", __main__.PAGES, ids=lambda path: path.name)
def test_the_page_matches_the_results(results: Path, tmp_path: Path) -> None:
    committed, copy = __main__.PAGES[results], tmp_path / "page.md"
    copy.write_text(committed.read_text())
    page.fill(copy, results)
    folder = os.path.relpath(results, tmp_path)
    of_page = os.path.relpath(results, committed.parent)
    text = copy.read_text().replace(f"]({folder}/", f"]({of_page}/")
    assert text == committed.read_text()
    copy.write_text("<!-- nonsense -->\n<!-- end -->")
    with pytest.raises(result_files.ResultsError, match="a place for nonsense"):
        page.fill(copy, results)


def test_results_of_other_texts_or_models_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_results(tmp_path)
    planted = result_files.one(tmp_path, "planted")
    planted["58"]["weights"] = "others"
    runs.save(planted, tmp_path / "planted.json")
    with pytest.raises(result_files.ResultsError, match="SHA-256 of 58, not others"):
        result_files.runs(tmp_path, "outliers")
    with pytest.raises(result_files.ResultsError, match="belongs to another model 58"):
        result_files.study(tmp_path, "error")
    other = a_run("block")
    other["options"]["corpus"] = {"train": 321}
    runs.save(other, tmp_path / "parity" / "block-0.json")
    assert __main__.main(["draw", f"--results={tmp_path}"]) == 1
    error = capsys.readouterr().err
    assert "block-0.json belongs to another text" in error
    assert "'train': 321}, not {'train': 320}" in error


def test_runs_on_another_text_are_not_added_to_results(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_empty_corpus(tmp_path / "work" / "corpus")
    (tmp_path / "results").mkdir()
    (tmp_path / "results" / result_files.CORPUS).write_text('{"python": {}}')
    argv = ["parity", "--size=toy", f"--work={tmp_path / 'work'}"]
    assert __main__.main([*argv, f"--results={tmp_path / 'results'}"]) == 1
    assert "corpus.json differs from" in capsys.readouterr().err


def test_results_of_other_options_are_refused(tmp_path: Path) -> None:
    config = Config(hidden=64, heads=2, kv_heads=1)
    run = runs.Run(config, tmp_path / "run", tmp_path / "run.json")
    stored = {"done": True, "options": {"hidden": 64, "data": "elsewhere"}}
    runs.save(stored, run.result)
    assert run.is_done()
    runs.save({"done": True, "options": {"hidden": 128}}, run.result)
    with pytest.raises(result_files.ResultsError, match="has hidden = 128, and this r"):
        run.is_done()
    run.result.write_text("{")
    with pytest.raises(result_files.ResultsError, match="json is damaged"):
        run.is_done()


@pytest.mark.parametrize("size", SETTINGS)
def test_committed_results_have_the_options_of_their_size(
    size: str, tmp_path: Path
) -> None:
    results = __main__.RESULTS / ("" if size == "full" else size)
    left = parity.commands(SETTINGS[size], tmp_path, results)
    assert bool(left) == (size in ("quarter", "toy"))  # others have all runs


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("--only=(", "takes a regular expression, got '('"),
        ("--gpus=-1", "takes an integer from 0, got '-1'"),
        ("--limit=nan", "takes a positive number, got 'nan'"),
    ],
)
def test_wrong_options_are_named(
    capsys: pytest.CaptureFixture[str], option: str, message: str
) -> None:
    with pytest.raises(SystemExit):
        __main__.main(["parity", option])
    assert message in capsys.readouterr().err


def test_results_to_draw_must_exist(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert __main__.main(["draw", f"--results={tmp_path / 'typo'}"]) == 1
    assert "there is no folder" in capsys.readouterr().err
    assert not (tmp_path / "typo").exists()


def test_a_larger_model_is_not_studied(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        __main__.main(["parity", "studies", "longer", "--size=larger"])
    error = "--size larger has no longer and no studies, only parity"
    assert error in capsys.readouterr().err


@pytest.mark.parametrize(
    ("loss", "step"),
    [
        ([3.0, 2.0, 1.0] * 100, None),
        ([2.0] * 100 + [3.1] * 100, 123),
        ([2.0] * 99 + [None], 100),
    ],
)
def test_divergence_is_a_lasting_rise(loss: list[Any], step: int | None) -> None:
    assert run_tables.diverged_at(loss) == step
