"""Plots are drawn from the records of runs."""

import json

import numpy as np
import pytest
from matplotlib.image import imread

from examples.llama import plot
from fbq_jax import recipes
from tests.marks import with_first_fast

PROJECTIONS = ("layers/attention/qkv", "layers/mlp/down")
LAYERS = 3


def write_run(folder, steps, offset=0.0):
    folder.mkdir()
    rates = np.random.default_rng(0).uniform(0.1, 0.9, (steps, LAYERS))
    with (folder / "metrics.jsonl").open("w") as file:
        for step in range(1, steps + 1):
            layers = {"rate": rates[step - 1].tolist(), "theta": [1.0] * LAYERS}
            record = {"step": step, "loss": 5 / step + offset}
            if step % 5 == 0:
                record["val_loss"] = 6 / step
            record["fallback"] = dict.fromkeys(PROJECTIONS, layers)
            file.write(json.dumps(record) + "\n")
    return folder


@pytest.fixture
def figures(monkeypatch):
    """The figures that the test draws, in order."""
    drawn = []

    def save(figure, path):
        drawn.append(figure)
        figure.draw_without_rendering()
        path.touch()

    monkeypatch.setattr(plot, "save", save)
    return drawn


def test_every_layer_of_every_projection_has_a_curve(tmp_path, figures):
    plot.draw_curves(write_run(tmp_path / "run", 20), recipes.fallback)
    panels = {axes.get_title(): axes for axes in figures[0].get_axes()}
    for title in "attention/qkv", "mlp/down":
        assert len(panels[title].lines) == LAYERS
        (band,) = panels[title].patches
        assert (band.get_y(), band.get_height()) == pytest.approx((0.1, 0.2))
    labels = [text.get_text() for text in panels["Loss (run)"].get_legend().get_texts()]
    assert labels == ["training", "validation"]
    assert panels["Loss (run)"].lines[-1].get_xdata().tolist() == [5, 10, 15, 20]


def add_experts(run, *, rates):
    """Adds the load, and the fallback rates, of four experts to the records."""
    log = run / "metrics.jsonl"
    records = [json.loads(line) for line in log.read_text().splitlines()]
    for index, record in enumerate(records):
        record["expert_load"] = [[8, 4, 2 + index, 2]] * LAYERS
        if rates:
            down = record["fallback"]["layers/mlp/down"]
            down = down | {"expert_rates": [[0.0, 0.5, 1.0, index / 20]] * LAYERS}
            record["fallback"]["layers/mlp/down"] = down
    log.write_text("".join(json.dumps(record) + "\n" for record in records))


@pytest.mark.parametrize("recipe", [None, recipes.block, recipes.fallback])
def test_experts_have_a_row_with_their_load_and_their_rates(tmp_path, figures, recipe):
    run = write_run(tmp_path / "run", 40)
    add_experts(run, rates=recipe is recipes.fallback)
    plot.draw_curves(write_run(tmp_path / "dense", 20), recipe)
    plot.draw_curves(run, recipe)
    dense, panels = (
        {axes.get_title(): axes for axes in figure.get_axes()} for figure in figures
    )
    if recipe is not recipes.fallback:
        assert list(dense) == ["Loss (dense)"]
    busiest = panels["largest load / mean"].lines
    assert len(busiest) == LAYERS
    assert busiest[0].get_ydata()[0] == 8 / 4  # before experts get more
    assert busiest[0].get_ydata()[-1] == pytest.approx(41 * 4 / 55, rel=0.05)
    (load,) = panels["load / mean"].images
    # Means over the last two steps.
    expected = np.mean([[8, 4, 40, 2], [8, 4, 41, 2]], axis=0) / np.mean([54, 55]) * 4
    np.testing.assert_allclose(load.get_array()[0], expected, rtol=1e-3)
    assert load.get_array().shape == (LAYERS, 4)
    if recipe is not recipes.fallback:
        assert not any("fallback rate" in title for title in panels)
    else:
        (rates,) = panels["fallback rate, down"].images
        np.testing.assert_allclose(rates.get_array()[0], [0, 0.5, 1, 38.5 / 20])
        assert len(panels["mlp/down"].lines) == LAYERS


@pytest.mark.parametrize("steps", with_first_fast([20, 1, 2, 3]))
def test_curves_are_a_picture(tmp_path, steps):
    run = write_run(tmp_path / "run", steps)
    plot.draw_curves(run, recipes.fallback)
    assert imread(run / "curves.png").std() > 0.01
    assert {file.name for file in run.iterdir()} == {"curves.png", "metrics.jsonl"}


def test_comparison_shows_differences_to_the_first(tmp_path, figures):
    runs = [write_run(tmp_path / "a", 20), write_run(tmp_path / "b", 20, offset=0.25)]
    plot.draw_comparison(runs, tmp_path / "compare.png")
    losses, differences = figures[0].get_axes()
    a, b = (text.get_text() for text in losses.get_legend().get_texts())
    assert a.startswith("a ")
    assert b.endswith(" (+0.2500)")
    a, b = (line.get_ydata() for line in differences.lines)
    np.testing.assert_array_equal(a, np.zeros(20))
    np.testing.assert_allclose(b, np.full(20, 0.25))


def test_smoothing_keeps_constants_and_the_start():
    np.testing.assert_allclose(plot.smooth(np.full(100, 3.0)), np.full(100, 3.0))
    descent = np.linspace(5.0, 1.0, 100)
    np.testing.assert_allclose(plot.smooth(descent)[:98], descent[:98])
