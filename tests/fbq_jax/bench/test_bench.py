"""The benchmark's command, at sizes that a CPU multiplies by the definition."""

import dataclasses
import importlib.util
import json
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fbq_jax.bench
from fbq_jax import ops, recipes
from fbq_jax.bench import (
    block,
    contenders,
    data,
    gemm,
    linear,
    llama,
    losses,
    measure,
    memory,
    profile,
    quantize,
    report,
    results,
    scale,
    train,
)
from fbq_jax.bench import recipes as bench_recipes
from fbq_jax.bench.__main__ import main
from fbq_jax.bench.measure import Timing
from fbq_jax.ops import dispatch

EFFORT = measure.Effort(warm_up_s=0.0, samples=2, batch_s=0.0, rest_s=0.0, launches=2)
WHAT = ("bf16", "bf16, again")  # of what test_scale measures
HOW = {"implementation": "reference", "effort": EFFORT}
SECTIONS = [importlib.import_module(f"fbq_jax.bench.{n}") for n in results.SECTIONS]


def check_speeds(rows, work_per_ms):
    """Times are positive, and rates and ratios follow from them."""
    for row in rows:
        assert row.ms > 0.0
        assert row.burst_ms > 0.0
        assert row.burst_of == "calls"
        assert row.rate == pytest.approx(work_per_ms(row) / row.ms / 1e9)


def test_gemm():
    shape = (256, 128, 512)
    rows = list(gemm.rows([shape], [0.25, 0.5], **HOW))
    check_speeds(rows, lambda _: 2 * 256 * 128 * 512)
    bf16, *int8 = rows
    assert (bf16.what, bf16.implementation) == ("bf16", "xla")
    assert (bf16.ratio, bf16.burst_ratio) == (1.0, 1.0)
    for row, rate in zip(int8, [0.25, 0.5], strict=True):
        assert (row.shape, row.fallback) == (shape, rate)
        assert row.ratio == pytest.approx(bf16.ms / row.ms)
        assert row.burst_ratio == pytest.approx(bf16.burst_ms / row.burst_ms)


def test_quantize():
    shape = (500, 1024)
    copy, *rows = quantize.rows([shape], [0.0, 0.5], (64, 256), **HOW)
    assert copy.rate == pytest.approx(4 * 64 * 256 / copy.ms / 1e9)
    elements, blocks = 500 * 1024, 4 * 8
    stored = {
        "nearest": lambda _: 2 * elements + 8 * blocks,
        "stochastic": lambda _: 2 * elements + 8 * blocks,
        "fallback": lambda row: (2 + row.fallback) * elements + 16 * blocks,
    }
    check_speeds(rows, lambda row: 2 * elements + stored[row.what](row))
    assert [row.fallback for row in rows] == [None, None, 0.0, pytest.approx(0.5, 0.1)]
    assert all(row.ratio == pytest.approx(row.rate / copy.rate) for row in rows)


@pytest.mark.filterwarnings("ignore:Implicit conversion of an array:DeprecationWarning")
def test_linear(monkeypatch):
    only = types.SimpleNamespace(NAMED={"block": recipes.block})
    monkeypatch.setattr(contenders, "recipes", only)
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        # AQT and Qwix, where they are installed, promote.
        measured = list(linear.rows([(256, 640, 128)], **HOW))
    rows = {row.what: row for row in measured}
    check_speeds(measured, lambda _: 6 * 256 * 640 * 128)
    assert {"bf16", "block", "Flax Fp8DotGeneral"} <= set(rows)
    for name, row in rows.items():
        assert set(row.errors) == {"y", "dx", "dw"}, name
        assert all(0.0 < error < 0.2 for error in row.errors.values())
        assert row.compile_s > 0.0
    assert rows["bf16"].errors["dw"] < 0.01 < rows["block"].errors["dw"]


def test_recipes(monkeypatch):
    named = {name: recipes.NAMED[name] for name in ("block", "fallback")}
    monkeypatch.setattr(recipes, "NAMED", named)
    monkeypatch.setattr(bench_recipes, "OUTLIERS", {"up to 6559": (6559.0, 256)})
    shape = 256, 512, 128
    rows = {(row.what, row.data): row for row in bench_recipes.rows([shape], **HOW)}
    check_speeds(rows.values(), lambda _: 6 * 256 * 512 * 128)
    names = ["bf16", *named, "fp8_delayed", "fp8_current", "llm_int8"]
    assert list(rows) == [(n, x) for n in names for x in ("Gaussian", "up to 6559")]
    token = {name: rows[name, "up to 6559"].errors["token"] for name in names}
    # What an outlier does to the tokens without one, but in its block or tensor.
    assert token["bf16"] < 0.003
    assert token["block"] > 3 * token["fallback"] > 0.01
    assert max(rows["bf16", "Gaussian"].errors.values()) < 0.003
    assert rows["block", "Gaussian"].saved_bytes == pytest.approx(512, rel=0.05)
    assert rows["bf16", "Gaussian"].saved_bytes == pytest.approx(1024, abs=1)
    assert rows["block", "Gaussian"].ratio == pytest.approx(
        rows["bf16", "Gaussian"].ms / rows["block", "Gaussian"].ms
    )


def test_the_largest_outlier_is_what_was_asked_for():
    x = data.swiglu(jax.random.key(0), (512, 1024), 606.0, 256).astype(jnp.float32)
    assert float(jnp.max(jnp.abs(x))) == float(jnp.bfloat16(606.0))
    outliers = jnp.abs(x) >= 20.0
    assert 0 < int(jnp.sum(outliers)) < 1e-3 * x.size
    assert set(np.flatnonzero(outliers.any(0)) % 256) == {0}


@pytest.fixture
def few_recipes(monkeypatch):
    few = {"bf16": None, "fallback": recipes.fallback}
    monkeypatch.setattr(llama, "recipes", lambda: few)
    with jax.numpy_dtype_promotion("standard"):  # Optax and JAX's attention promote
        yield


def test_block(few_recipes, monkeypatch):
    del few_recipes
    monkeypatch.setattr(block, "REMATS", (("bf16", "full"),))
    shape = 256, 384, 256
    measured = list(block.rows([shape], **HOW))
    # Two heads, that share keys and values; a vocabulary of one word.
    weights = 256 * 256 * 3 + 256 * 384 * 3 + 256
    check_speeds(measured, lambda _: 6 * 256 * (weights + 128 * 256))
    bf16, row, full = measured
    assert (bf16.what, row.what, row.shape) == ("bf16", "fallback", shape)
    assert full.what == "bf16, remat full"
    assert max(full.errors.values()) < 0.01
    assert full.saved_bytes < row.saved_bytes
    assert set(row.errors) == {"y", "dx"}
    assert bf16.errors["dx"] == 0.0 < row.errors["dx"]
    assert bf16.fallback is None
    assert 0.05 < row.fallback < 0.5
    assert row.saved_bytes < 0.62 * bf16.saved_bytes
    assert row.peak_bytes > 0
    assert row.compile_s > 0.0


def test_profile(few_recipes, monkeypatch):
    del few_recipes
    program = types.SimpleNamespace(by="xla", step=None, operands=())
    monkeypatch.setattr(block, "prepare", lambda *_: program)
    kernels = [("a", 5.0), ("b", 3.0), ("a", 1.0), ("c", 0.01)]
    monkeypatch.setattr(measure, "kernels", lambda *_: kernels)
    rows = list(profile.rows([(256, 384, 512)], **HOW))
    names = ["all kernels", "a", "b", "shorter ones"]
    assert [row.what.rpartition(": ")[2] for row in rows] == 2 * names
    assert [row.ms for row in rows[4:]] == pytest.approx([9.01, 6.0, 3.0, 0.01])
    assert sum(row.rate for row in rows[5:]) == pytest.approx(100.0)


def test_train(few_recipes, monkeypatch):
    del few_recipes
    # Twice the same: that recipes are built right the test of a block shows.
    monkeypatch.setattr(llama, "recipes", lambda: {"bf16": None, "again": None})
    monkeypatch.setattr(llama, "VOCABULARY", 256)
    measured = list(train.rows([(128, 256, 1, 2)], **HOW))
    weights = 128 * 128 * 4 + 128 * 256 * 3 + 256 * 128
    check_speeds(measured, lambda _: 6 * 2 * 128 * (weights + 128 * 128))
    bf16, row = measured
    assert bf16.errors == row.errors == {"loss": 0.0, "grad_norm": 0.0}
    assert row.peak_bytes > 0


@pytest.fixture
def tiny_steps(monkeypatch):
    """A model of one array, whose steps sum tokens over as many as five devices."""

    @jax.jit
    def step(state, tokens):
        loss = jnp.mean(tokens.astype(jnp.float32)) + state.params
        new = dataclasses.replace(state, params=state.params + 0.25)
        return new, {"loss": loss}

    def trainer(config, dot_general, *, learns=False):
        state = llama.step.TrainState(jnp.int32(0), jnp.float32(1.0), {}, {}, ())
        assert dot_general is None
        assert learns == (config.max_seq_len == losses.SEQUENCE)
        assert config.saved_bits is None
        return jax.device_put(state, llama.mesh.shardings(state)), step

    monkeypatch.setattr(llama, "trainer", trainer)
    monkeypatch.setattr(jax, "device_count", lambda: 5)


def test_scale(tiny_steps, monkeypatch):
    del tiny_steps
    monkeypatch.setattr(scale, "RECIPES", {"bf16": None})
    monkeypatch.setattr(scale, "SUMS", {"bf16, again": None})
    speeds = list(scale.rows([(128, 256, 1, 2)], **HOW))
    assert [(row.mesh, row.what) for row in speeds] == [
        ("one device", "bf16"),
        *((f"{axis}=4", what) for axis in scale.AXES for what in WHAT),
        *((f"{axis}=2", WHAT[0]) for axis in scale.AXES),
    ]
    for row in speeds:
        devices = int(row.mesh[-1]) if "=" in row.mesh else 1
        assert row.shape == (128, 256, 1, 2 * devices)
        assert row.tokens_s == pytest.approx(2 * devices * 128 / row.ms * 1e3)
        assert row.efficiency == pytest.approx(speeds[0].ms / row.ms)


def test_losses(tiny_steps, monkeypatch):
    del tiny_steps
    monkeypatch.setattr(losses, "RECIPES", {"float32": (None, jnp.float32)})
    runs = list(losses.rows([(128, 256, 1, 8)], **HOW))
    assert [row.mesh for row in runs] == ["one device", "fsdp=2", "data=2,fsdp=2"]
    for row in runs:
        assert row.errors["one device"] < 1e-6
        assert row.errors["repeat"] == 0.0
    assert runs[0].errors["nudged"] < 1e-6
    assert "nudged" not in runs[1].errors


def test_losses_that_differ_are_told(tiny_steps, monkeypatch):
    del tiny_steps
    monkeypatch.setattr(losses, "RECIPES", {"float32": (None, jnp.float32)})
    monkeypatch.setattr(jax, "device_count", lambda: 1)

    def move(state, seed):
        moved = state.params - 0.5 * (seed == losses.NUDGES - 1)
        return dataclasses.replace(state, params=moved)

    monkeypatch.setattr(losses, "_nudged", move)
    (row,) = losses.rows([(128, 256, 1, 8)], **HOW)
    tokens = data.walks(losses.VOCABULARY, (losses.STEPS, 1, 8, losses.SEQUENCE + 1))
    losses_of_one = tokens.mean(axis=(1, 2, 3)) + 1.0 + 0.25 * np.arange(losses.STEPS)
    assert row.errors["nudged"] == pytest.approx(0.5 / losses_of_one.min(), rel=1e-3)


def test_nudges_are_last_bits():
    weights = np.float32([[1.5, -3.0, 1e-3, 0.0], [7.5, 1e9, -6.5, 2.5]])
    state = llama.step.TrainState(jnp.int32(0), {"w": weights}, {}, {}, ())
    one, other = (losses._nudged(state, seed).params["w"] for seed in range(2))
    for nudged in (one, other):
        up, down = (np.nextafter(weights, np.float32(s * np.inf)) for s in (1, -1))
        assert np.all((nudged == up) | (nudged == down))
    assert np.any(one != other)


def test_walks_can_be_learned():
    tokens = data.walks(50, (30, 40))
    assert tokens.shape == (30, 40)
    follow = set(zip(tokens[:, :-1].flat, tokens[:, 1:].flat, strict=True))
    assert 100 < len(follow) <= 200


def test_saved_bytes():
    w = jnp.ones((64, 32), jnp.bfloat16)
    x = jnp.ones((4, 16, 64), jnp.bfloat16)

    def saved(function):
        return memory.saved_bytes(function, w, x)

    # Of each row, to a few bytes that name an output.
    assert saved(lambda w, x: x @ w) == pytest.approx(16 * 64 * 2, abs=32)
    assert saved(lambda w, x: jnp.sin(x) @ w) == pytest.approx(16 * 64 * 4, abs=32)


def test_recipes_with_fast_kernels_are_timed():
    x = data.activation(jax.random.key(0), (640, 1024))
    own = {contender.name: contender for contender in contenders.own(x, "reference")}
    assert list(own) == ["fallback", "block", "fallback_rowwise_bwd"]
    assert list(llama.recipes()) == ["bf16", *own]
    assert own["fallback"].fallback == pytest.approx(0.2, 0.1)
    assert own["block"].fallback is None


def test_libraries_that_are_not_installed_are_named(capsys):
    found = {contender.name for contender in contenders.others()}
    said = capsys.readouterr().err
    for package, name in (("qwix", "Qwix INT8"), ("aqt", "AQT INT8")):
        installed = importlib.util.find_spec(package) is not None
        assert (name in found) == installed
        assert (f"without {package}_int8: " in said) != installed


@pytest.fixture
def spoil(monkeypatch):
    """Makes one op wrong, by one, in one place, where the implementation is free."""

    def spoil_op(spoilt_op):
        choose = dispatch.choose

        def choose_spoilt(op, sides, *, implementation):
            if implementation in (None, "spoilt"):
                return dispatch.Choice(op, "spoilt", "for the test")
            return choose(op, sides, implementation=implementation)

        monkeypatch.setattr(dispatch, "choose", choose_spoilt)
        for name in ("quantize", "quantize_fallback", "block_metric", "matmul"):
            replacement = by_definition(getattr(ops, name), name == spoilt_op)
            monkeypatch.setattr(ops, name, replacement)

    def by_definition(op, is_spoilt):
        def replacement(*args, implementation, **options):
            out = op(*args, implementation="reference", **options)
            if implementation == "reference" or not is_spoilt:
                return out
            leaves, tree = jax.tree.flatten(out)
            leaves[0] = leaves[0].at[0, 0, 0].add(1)
            return jax.tree.unflatten(tree, leaves)

        return replacement

    return spoil_op


def test_a_wrong_gemm_is_not_timed(spoil):
    spoil("matmul")
    rows = gemm.rows([(128, 128, 128)], [0.0], implementation=None, effort=EFFORT)
    with pytest.raises(
        measure.WrongResultError, match="by spoilt with float32 output is"
    ):
        list(rows)


def test_wrong_codes_are_not_timed(spoil):
    spoil("quantize_fallback")
    rows = quantize.rows(
        [(128, 128)], [0.0], (8, 8), implementation=None, effort=EFFORT
    )
    with pytest.raises(measure.WrongResultError, match=r"fallback .* by spoilt is"):
        list(rows)


def test_a_wrong_layer_is_not_timed(monkeypatch):
    other = contenders.bf16()._replace(
        name="mine", definition=lambda x, w, *_: x @ (1.01 * w)
    )
    monkeypatch.setattr(contenders, "bf16", lambda: other)
    with pytest.raises(measure.WrongResultError, match=r"y of mine by xla is wrong"):
        list(linear.rows([(16, 8, 4)], **HOW))


def test_a_nan_is_wrong():
    with pytest.raises(measure.WrongResultError, match=r"error .* is nan"):
        measure.require(float("nan"), 1e-5, "it")


def some_rows(what="INT8"):
    baseline = results.row(
        Timing(2.0, 1.0, "kernels"), 4e9, what="bf16", implementation="xla", shape=(1,)
    )
    row = results.row(
        Timing(1.0, 0.8, "kernels"),
        4e9,
        baseline,
        what=what,
        implementation="mosaic",
        shape=(1, 2, 3),
        fallback=0.2,
        errors={"y": 1e-3},
    )
    return [baseline, row]


def test_a_section_replaces_its_own_and_keeps_the_others(tmp_path):
    path = tmp_path / "bench.json"
    for name, what in (("linear", "a"), ("gemm", "b"), ("linear", "c")):
        content = results.section(some_rows(what), quick=False)
        results.merge(path, name, content)
    sections = results.load(path)
    assert list(sections) == ["gemm", "linear"]
    assert [row.what for row in sections["gemm"]["rows"]] == ["bf16", "b"]
    assert sections["linear"]["rows"] == some_rows("c")
    assert sections["gemm"]["versions"]["jax"] == jax.__version__
    assert list(tmp_path.iterdir()) == [path]


def test_ratios():
    _, row = some_rows()
    assert (row.rate, row.ratio, row.burst_ratio) == (4.0, 2.0, 1.25)


def test_table(tmp_path, capsys):
    path = tmp_path / "bench.json"
    results.merge(path, "gemm", results.section(some_rows(), quick=True))
    assert main(["table", str(path)]) == 0
    caption, _, head, rule, _, row = capsys.readouterr().out.splitlines()
    assert "on cpu" in caption
    assert "quick" in caption
    assert head.startswith(
        "| what | by | M, N, K | fell back | ms | TFLOP/s | / bf16 |"
    )
    assert rule.count("---") == head.count("|") - 1
    assert row == (
        "| INT8 | mosaic | 1, 2, 3 | 20.0% | 1.000 | 4 | 2.00 | 1.25 | y 1.0e-03 |"
    )


def test_picture(tmp_path, capsys):
    path, picture = tmp_path / "bench.json", tmp_path / "recipes.png"
    assert main(["picture", str(path), str(picture)]) == 2
    rows = [
        dataclasses.replace(row, data=on, errors={"token": e, "dx": e, "channel": e})
        for row in some_rows()
        for on, e in (("Gaussian", 1e-3), ("up to 58", 2e-2))
    ]
    results.merge(path, "gemm", results.section(rows, quick=False))
    assert main(["picture", str(path), str(picture)]) == 2
    assert "has no section recipes" in capsys.readouterr().err
    results.merge(path, "recipes", results.section(rows, quick=False))
    assert main(["picture", str(path), str(tmp_path / "recipes.what")]) == 2
    assert "cannot write" in capsys.readouterr().err
    assert main(["picture", str(path), str(picture)]) == 0
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_plain_rows_are_aligned():
    _, title, head = report.text_head("gemm").split("\n")
    assert "GEMM" in title
    for row in some_rows():
        assert report.text_row("gemm", row).index(f"{row.ms:.3f}") == head.index("ms ")


@pytest.fixture
def gpu(monkeypatch):
    """As on a GPU whose benchmark takes no time."""
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    for module in SECTIONS:
        name = module.__name__
        monkeypatch.setattr(
            module, "rows", lambda *_, name=name, **__: iter(some_rows(name))
        )


def test_all_measures_and_stores_every_section(tmp_path, monkeypatch, gpu, capsys):
    del gpu
    monkeypatch.chdir(tmp_path)
    assert main(["all", "--quick", "--implementation", "reference"]) == 0
    assert "written to bench-cpu.json" in capsys.readouterr().out
    sections = json.loads((tmp_path / "bench-cpu.json").read_text())
    for name in results.SECTIONS:
        assert sections[name]["rows"][1]["what"] == f"fbq_jax.bench.{name}"


def test_all_goes_without_the_examples(tmp_path, monkeypatch, gpu, capsys):
    del gpu
    for name in ("block", "profile", "train", "scale", "losses", "llama"):
        monkeypatch.delitem(sys.modules, f"fbq_jax.bench.{name}")
        monkeypatch.delattr(fbq_jax.bench, name)
    monkeypatch.setitem(sys.modules, "examples.llama", None)
    how = ["--implementation", "reference", "--out", str(tmp_path / "bench.json")]
    assert main(["all", *how]) == 0
    assert capsys.readouterr().err.count("without ") == 5
    left = ["gemm", "quantize", "linear", "recipes"]
    assert list(results.load(tmp_path / "bench.json")) == left
    assert main(["block", *how]) == 2
    assert "run this in a checkout" in capsys.readouterr().err


def test_what_cannot_be_stored_is_said_before_measuring(tmp_path, gpu, capsys):
    del gpu
    other = tmp_path / "other.json"
    other.write_text('{"answer": 42}')
    for path, said in (
        (tmp_path / "no" / "file.json", "there is no folder"),
        (other, "does not hold results"),
    ):
        command = ["gemm", "--implementation", "reference", "--out", str(path)]
        assert main(command) == 2
        out, err = capsys.readouterr()
        assert said in err
        assert err.count("\n") == 1
        assert not out
    assert other.read_text() == '{"answer": 42}'


@pytest.mark.skipif(jax.default_backend() == "gpu", reason="there is one")
def test_measuring_needs_a_gpu(capsys):
    assert main(["gemm"]) == 2
    assert capsys.readouterr().err == (
        "fbq_jax.bench: measuring needs a GPU; JAX's default backend is "
        f"{jax.default_backend()}\n"
    )


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "required: COMMAND"),
        (["speed"], "invalid choice: 'speed'"),
        (["gemm", "--implementation", "cublas"], "invalid choice: 'cublas'"),
    ],
)
def test_an_unknown_command_says_what_there_is(arguments, said, capsys):
    with pytest.raises(SystemExit, match="2"):
        main(arguments)
    assert said in capsys.readouterr().err


def test_a_table_of_nothing(tmp_path, capsys):
    assert main(["table", str(tmp_path / "none.json")]) == 2
    assert "No such file" in capsys.readouterr().err
