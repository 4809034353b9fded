"""Tables, pictures and pages come from the JSON results alone."""

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.figure import Figure

from experiments import __main__, page, result_files, tables
from experiments.result_files import ResultsError, save
from experiments.studies import STUDIES, of_inputs, of_models


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
            save(a_run(recipe), results / "parity" / f"{recipe}-{seed}.json")
        for lr in 0.1, 0.2:
            of_lr = a_run(recipe)
            of_lr["options"]["lr"] = lr
            save(of_lr, results / "longer" / f"{recipe}-{lr}.json")
        for seed, model in itertools.product(range(3), ("58", "606")):
            run = a_run(recipe, model=model, weights=f"of {model}")
            run["options"]["seed"] = seed
            run["val_loss"]["20"] += seed / 10  # equal for all recipes
            save(run, results / "outliers" / f"{model}-{recipe}-{seed}.json")
    # The gradient was not finite, but all losses are.
    diverged = a_run("block", diverged="grad_norm is nan at step 20")
    for stage in ("parity", "longer"):
        save(diverged, results / stage / "block-0.json")
    stopped = a_run("rowwise", done=False, steps=9)
    save(stopped, results / "parity" / "rowwise-0.json")
    save(a_run("no recipe any more"), results / "parity" / "former-0.json")
    models = "trained", "58", "606"
    weights = {model: f"of {model}" for model in models}
    planted = {model: {"largest": 60.0, "weights": weights[model]} for model in models}
    save(planted, results / "planted.json")
    stands_out = {"what": "down", "layer": 0, "largest": 9.0, "share": 0.1}
    save({"rows": [stands_out]}, results / "outliers.json")

    def rising(columns: Sequence[Any]) -> list[float]:
        return np.linspace(0.1, 0.9, len(columns)).tolist()

    sides = rising(of_models.BLOCK_SIDES)
    of_recipe = {"perplexity": 8.0, "gradient": 1e-3}
    bits = {"plain": of_inputs.BITS, "fallback": of_inputs.FALLBACK_BITS}
    of_studies = {
        "error": {"down": {name: rising(columns) for name, columns in bits.items()}},
        "criteria": {"down": {"absmax": rising(of_inputs.RATES)}},
        "operands": dict.fromkeys(of_models.OPERANDS, rising(of_models.BITS)),
        "passes": dict.fromkeys((*of_models.PASSES, "b"), rising(of_models.RATES)),
        "nonlinear": rising(of_models.SAVED_BITS),
        "perplexity": {"float": 8.0, "block": sides, "fallback": sides},
        "recipes": {"float32": of_recipe, "block": of_recipe, "former": of_recipe},
        "blocks": {"down": [["0100", "0101"], ["0010", "0010"]]},
    }
    assert of_studies.keys() == STUDIES.keys()
    for name, of in of_studies.items():
        study = {"weights": weights, "found": dict.fromkeys(models, of)}
        save(study, results / "studies" / f"{name}.json")
    killed = {"killed_at": 7, "options": {"steps": 9}, "arrays": 5}
    killed |= {"arrays_that_differ": [], "losses_equal": True}
    save(killed, results / "killed.json")


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> dict[str, Figure]:
    """The figures that are saved during the test, by name; their files are empty."""
    figures: dict[str, Figure] = {}

    def save(figure: Figure, path: Path) -> None:
        figures[path.stem] = figure
        path.touch()

    monkeypatch.setattr(page, "save", save)
    return figures


def test_the_page_is_drawn_from_the_results_alone(
    tmp_path: Path, drawn: dict[str, Figure]
) -> None:
    results = tmp_path / "results"
    results.mkdir()
    file = results / page.OTHER_PAGE
    argv = ["draw", f"--results={results}"]
    assert __main__.main(argv) == 0
    assert not drawn
    assert file.read_text().count(page.NOT_RUN) == len(page.NAMES)

    write_results(results)
    assert __main__.main(argv) == 0
    text = file.read_text()
    assert page.NOT_RUN not in text
    assert drawn.keys() == page.PICTURES.keys()
    assert text.count("![") == len(drawn)
    (axes,) = drawn["outliers"].axes
    # Three seeds of each of two models.
    dots = [line for line in axes.lines if line.get_marker() == "o"]
    heights = [y for line in dots for y in line.get_ydata()]
    np.testing.assert_allclose(heights, [0.004] * 6)
    passes = drawn["passes"].axes
    assert [axis.get_title() for axis in passes] == ["trained", "planted 606"]
    assert [line.get_label() for line in passes[0].lines] == [*of_models.PASSES]
    for row in (
        "| fallback-0 | 3.0080 | +0.13% | +1.54% | 1.00 | 1 | 1,000 | 2.0 |",
        "| block-0 (diverged at step 20) | nan |  |  |  |  | 1,000 | 2.0 |",
        "| rowwise-0 (stopped at step 9) | 3.0070 |  |  |  |  | 1,000 | 2.0 |",
        "| bf16 | 3.10400 ± 0.10000 | 3.10400 ± 0.10000 |",
        "| fallback | +0.00400 ± 0.00000 | +0.00400 ± 0.00000 |",
        "| block | at step 20 | nan |  |  |",
        "| fallback | no | 3.0080 | no | 3.0080 |",
        "| block | 8 | 8 | 1.0e-03 | 1.0e-03 |",
        # The busiest columns of the 2 layers differ; they have 4 of the 5 blocks.
        "| trained | down | 31.2% | 80.0% in 1 of 4 |",
    ):
        assert row in text
    assert "former" not in text
    assert "| 606 | down" not in text  # as trained
    assert "5 of the 5 arrays of the last checkpoint are bit-equal" in text


def test_stages_that_were_stopped_are_drawn(
    tmp_path: Path, drawn: dict[str, Figure]
) -> None:
    write_results(tmp_path)
    for name in ("606-bf16-0", "606-bf16-1", "606-fallback-2", "58-fallback-2"):
        (tmp_path / "outliers" / f"{name}.json").unlink()
    page.draw(tmp_path)
    assert drawn.keys() == page.PICTURES.keys()
    text = (tmp_path / page.OTHER_PAGE).read_text()
    # For 58, seeds 0 and 1 have both recipes; for 606 no seed has.
    assert "| fallback | +0.00400 ± 0.00000 |  |" in text
    for run in *tmp_path.glob("outliers/*-bf16-*"), *tmp_path.glob("longer/*"):
        run.unlink()
    save(a_run("bf16", loss=[None] * 20), tmp_path / "longer" / "bf16-0.1.json")
    page.draw(tmp_path)


def test_pairs_of_seeds_tell_real_differences(tmp_path: Path) -> None:
    added = {"block": (0.001, 0.002, 0.003, 0.002), "rowwise": (0.001, -0.002, 0.0)}
    for recipe, of_seeds in {"bf16": (0.0,) * 4, **added}.items():
        for seed, more in enumerate(of_seeds):
            loss = (3.0 + seed) * (1 + more)
            run = a_run(recipe, loss=[loss] * 20, val_loss={"20": loss})
            save(run, tmp_path / "parity" / f"{recipe}-{seed}.json")
    lines = tables.paired(tmp_path).splitlines()
    # The standard errors are 0.041 % and 0.088 %; Student's factors are 3.18 and 4.30.
    assert lines[2] == "| block | 4 | +0.200% | ± 0.130% | +0.200% | ± 0.130% |"
    assert lines[3] == "| rowwise | 3 | -0.033% | ± 0.379% | -0.033% | ± 0.379% |"
    (tmp_path / "parity" / "bf16-0.json").unlink()
    save(a_run("bf16", done=False), tmp_path / "parity" / "bf16-1.json")
    lines = tables.paired(tmp_path).splitlines()
    assert [line.split(" | ")[:2] for line in lines[2:]] == [["| block", "2"]]


def test_runs_on_other_devices_are_not_compared_in_speed(tmp_path: Path) -> None:
    faster = {"device": "another", "mesh": "fsdp=2"}
    for run in a_run("bf16"), a_run("block", machine=faster, tokens_per_s=2000.0):
        save(run, tmp_path / "parity" / f"{run['options']['recipe']}-0.json")
    text = tables.parity(tmp_path)
    machines = "device a device (bf16-0) and another (block-0), mesh none (bf16-0) and"
    assert machines in text
    assert "| bf16-0 | 3.0040 | +0.00% | +0.00% | 1.00 | 1 | 1,000 |" in text
    assert "| block-0 | 3.0050 | +0.03% | +0.38% |  |  | 2,000 |" in text


@pytest.mark.parametrize("committed", page.PAGES, ids=lambda path: path.name)
def test_the_pages_match_the_results(committed: Path) -> None:
    text = committed.read_text()
    assert page.fill(committed, text) == text
    with pytest.raises(ResultsError, match="a place for nonsense; there are parity"):
        page.fill(committed, "<!-- full/nonsense -->\n<!-- end -->")


def test_results_of_other_texts_or_models_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_results(tmp_path)
    planted = result_files.one(tmp_path, "planted")
    planted["58"]["weights"] = "others"
    save(planted, tmp_path / "planted.json")
    with pytest.raises(ResultsError, match="SHA-256 of 58, not others"):
        result_files.runs(tmp_path, "outliers")
    with pytest.raises(ResultsError, match="belongs to another model 58"):
        result_files.study(tmp_path, "error")
    write_results(tmp_path)
    other = a_run("block")
    other["options"]["corpus"] = {"train": 321}
    save(other, tmp_path / "parity" / "block-0.json")
    assert __main__.main(["draw", f"--results={tmp_path}"]) == 1
    error = capsys.readouterr().err
    assert "block-0.json belongs to another text" in error
    assert "'train': 321}, not {'train': 320}" in error
    assert __main__.main(["draw", f"--results={tmp_path / 'typo'}"]) == 1
    assert "there is no folder" in capsys.readouterr().err
    assert not (tmp_path / "typo").exists()


@pytest.mark.parametrize(
    ("loss", "step"),
    [
        ([3.0, 2.0, 1.0] * 100, None),
        ([2.0] * 100 + [3.1] * 100, 123),
        ([2.0] * 99 + [None], 100),
    ],
)
def test_divergence_is_a_lasting_rise(loss: list[Any], step: int | None) -> None:
    assert tables.diverged_at(loss) == step
