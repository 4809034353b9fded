"""The map of speeds, at sizes that a CPU computes with the reference."""

import importlib
import types
from unittest.mock import Mock

import jax
import pytest

from fbq_jax import recipes
from fbq_jax.bench import cli, layers, matmuls, results
from fbq_jax.bench import map as bench_map
from fbq_jax.bench.__main__ import SECTIONS, main
from fbq_jax.bench.measure import Timing, UnsupportedError, WrongResultError
from fbq_jax.kernels import speed_map
from tests.fbq_jax.bench.tools import OPTIONS, check_rates, float_backward

SHAPES = [(64, 32, 32), (16, 32, 64)]
NAMED = {name: float_backward(recipes.NAMED[name]) for name in layers.RECIPES}


@pytest.fixture
def small(monkeypatch):
    """Measures few layers, by recipes that compile fast."""
    named = types.SimpleNamespace(NAMED=NAMED)
    monkeypatch.setattr(layers, "recipes", named)
    monkeypatch.setattr(matmuls, "recipes", named)
    monkeypatch.setattr(bench_map, "_DEPTH", 2)


@pytest.mark.exhaustive
@pytest.mark.usefixtures("small")
def test_rows():
    rows = list(bench_map.rows(SHAPES, **OPTIONS))
    check_rates(rows, lambda row: 2 * row.shape[0] * row.shape[1] * row.shape[2] * 5)
    assert sorted((row.shape, row.what) for row in rows) == sorted(
        (shape, what) for shape in SHAPES for what in ("bf16", "block", "fallback")
    )
    baselines = {row.shape: row for row in rows if row.what == "bf16"}
    for row in rows:
        assert row.ratio == pytest.approx(baselines[row.shape].ms / row.ms)
        assert row.errors["loss"] <= 0.1
        assert (row.fallback is not None) == (row.what == "fallback")


@pytest.mark.usefixtures("small")
def test_a_wrong_step_is_refused(monkeypatch):
    def stacks(depth, _):
        dot = lambda x, w, dims, **_: 2 * jax.lax.dot_general(x, w, dims)  # noqa: E731
        yield layers.linen_stack("mine", "xla", depth, dot_general=dot)

    monkeypatch.setattr(layers, "linen", stacks)
    with pytest.raises(WrongResultError, match=r"^loss of mine at .* is wrong"):
        list(bench_map.rows(SHAPES[:1], **OPTIONS))


@pytest.mark.usefixtures("small")
def test_shapes_that_need_too_much_memory_are_named(monkeypatch, capsys):
    small = types.SimpleNamespace(memory_stats=lambda: {"bytes_limit": 1e5})
    monkeypatch.setattr(jax, "devices", lambda: [small])
    assert list(bench_map._that_fit([(16, 8, 8), (16, 64, 64)])) == [(16, 8, 8)]
    assert capsys.readouterr().err.startswith("without 16, 64, 64: it needs 1.6e+05 b")


def section(quick=False, shapes=SHAPES):
    """A section with a speedup of 0.5 for ``block`` and 0.25 for ``fallback``."""
    rows = [
        results.row(
            Timing(1 / ratio, 1.0, "calls"),
            1e9,
            what=what,
            implementation="xla" if what == "bf16" else "triton",
            shape=shape,
            ratio=ratio,
        )
        for shape in shapes
        for what, ratio in (("bf16", 1.0), ("block", 0.5), ("fallback", 0.25))
    ]
    return results.section(rows, quick=quick)


@pytest.fixture
def stored(tmp_path, monkeypatch):
    """Stores a section in a file; maps are installed in an empty folder."""
    monkeypatch.setattr(speed_map, "DIRECTORY", tmp_path / "maps")

    def store(content):
        results.merge(tmp_path / "bench.json", "map", content)
        return str(tmp_path / "bench.json")

    return store


def test_a_measured_map_is_installed(stored, capsys):
    # A shape without all recipes is left out.
    content = section(shapes=[(16, 32, 32), *SHAPES, (64, 64, 64)])
    file = stored(content | {"rows": content["rows"][:-1]})
    assert main(["install-map", file]) == 0
    assert "maps/cpu.json" in capsys.readouterr().out
    found = speed_map.load("cpu")
    assert (found.device, found.backend) == ("cpu", "triton")
    assert found.speedups["fallback"] == dict.fromkeys([(16, 32, 32), *SHAPES], 0.25)
    assert found.predict("block", (16, 64, 32)) == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (section(quick=True), "a map of a quick run is too coarse"),
        (section(), "a speed map takes recipes with the same shapes"),
        (section(shapes=[]), "a speed map takes recipes with the same shapes"),
    ],
)
def test_a_map_that_cannot_be_used_is_refused(content, message, stored, capsys):
    assert main(["install-map", stored(content)]) == 2
    assert message in capsys.readouterr().err
    assert not speed_map.DIRECTORY.exists()


@pytest.fixture
def measured(monkeypatch):
    """A machine with a GPU, where each section measures the rows of a map."""
    monkeypatch.setattr(cli, "_check_device", lambda _: None)
    rows = [results.Row(**row) for row in section(shapes=[(16, 32, 32)])["rows"]]
    for name in SECTIONS:
        module = importlib.import_module(f"fbq_jax.bench.{name}")
        monkeypatch.setattr(module, "rows", lambda *_, **__: iter(rows))


@pytest.mark.usefixtures("stored", "measured")
def test_the_command_installs_what_it_measured(tmp_path, capsys):
    command = ["map", "--out", str(tmp_path / "new.json")]
    for partial in (
        ["--quick"],
        ["--shape", "16,32,32"],
        ["--implementation", "reference"],
    ):
        assert main([*command, *partial]) == 0
        assert speed_map.load("cpu") is None
    assert main(command) == 0
    assert speed_map.load("cpu").speedups["block"] == {(16, 32, 32): 0.5}
    assert "installed as" in capsys.readouterr().out


@pytest.mark.usefixtures("stored", "measured")
def test_a_map_that_fails_does_not_stop_the_other_sections(
    tmp_path, monkeypatch, capsys
):
    out = tmp_path / "all.json"
    (tmp_path / "file").touch()
    with monkeypatch.context() as patch:
        patch.setattr(
            bench_map, "rows", Mock(side_effect=UnsupportedError("no kernel"))
        )
        assert main(["all", "--out", str(out)]) == 1
    assert "map stopped: no kernel\n" in capsys.readouterr().err
    assert set(results.load(out)) == set(SECTIONS) - {"map"}
    assert speed_map.load("cpu") is None
    monkeypatch.setattr(speed_map, "DIRECTORY", tmp_path / "file" / "maps")
    assert main(["all", "--out", str(out)]) == 1
    assert "map stopped: cannot write" in capsys.readouterr().err
    assert set(results.load(out)) == set(SECTIONS)


def test_table(stored, capsys):
    assert main(["table", stored(section())]) == 0
    *_, head, _, first, second = capsys.readouterr().out.splitlines()
    names = "block, M = 16 | block, M = 64 | fallback, M = 16 | fallback, M = 64"
    assert head == f"| K, N | {names} |"
    assert first == "| 32, 32 |  | 0.50 |  | 0.25 |"
    assert second == "| 32, 64 | 0.50 |  | 0.25 |  |"
