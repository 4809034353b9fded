"""The command lines of both benchmarks, without measuring anything."""

import contextlib
import importlib
import json

import jax
import pytest

from experiments.bench import __main__ as llama
from fbq_jax.bench import __main__ as library
from fbq_jax.bench import measure, report, results
from tests.fbq_jax.bench.tools import some_rows

PROGRAMS = {"fbq_jax.bench": library, "experiments.bench": llama}


@pytest.fixture
def gpu(monkeypatch):
    """A machine with a GPU, whose benchmarks take no time."""
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    for package, program in PROGRAMS.items():
        for name in program.SECTIONS:
            monkeypatch.setattr(
                importlib.import_module(f"{package}.{name}"),
                "rows",
                lambda *_, name=name, **__: iter(some_rows(name)),
            )


@pytest.mark.usefixtures("gpu")
def test_all_measures_and_stores_every_section(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for program in PROGRAMS.values():
        assert program.main(["all", "--quick", "--implementation", "reference"]) == 0
        assert "written to bench-cpu-partial.json" in capsys.readouterr().out
    assert (*library.SECTIONS, *llama.SECTIONS) == tuple(report.HEADINGS)
    file = tmp_path / "bench-cpu-partial.json"
    sections = results.load(file)
    assert {name: sections[name]["rows"][1].what for name in sections} == {
        name: name for name in report.HEADINGS
    }
    assert json.loads(file.read_text()).keys() >= {"losses"}
    assert list(tmp_path.iterdir()) == [file]


@pytest.mark.usefixtures("gpu")
def test_a_section_that_needs_too_much_memory_says_so(tmp_path, monkeypatch, capsys):
    def rows(*_, **__):
        yield some_rows()[0]
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory\ndetails")

    monkeypatch.setattr(importlib.import_module("fbq_jax.bench.gemm"), "rows", rows)
    bench_map = importlib.import_module("fbq_jax.bench.map")
    monkeypatch.setattr(bench_map, "install", lambda _: "a file")
    out, what = tmp_path / "bench.json", "RESOURCE_EXHAUSTED: Out of memory"
    reason = f"{what}; --shape takes sizes that fit into the memory"
    assert library.main(["gemm", "--out", str(out)]) == 1
    assert capsys.readouterr().err == f"fbq_jax.bench: {reason}\n"
    part = results.load(tmp_path / "bench.json.gemm.part")
    assert [row.what for row in part["gemm"]["rows"]] == ["bf16"]
    # The others are measured all the same.
    assert library.main(["all", "--out", str(out)]) == 1
    assert capsys.readouterr().err.splitlines() == [
        f"gemm stopped: {reason}",
        "fbq_jax.bench: not finished: gemm (see above)",
    ]
    assert set(results.load(out)) == set(library.SECTIONS) - {"gemm"}


WHOLE = [(4096, 4096, 4096), (8192, 8192, 8192)]
HALF = [(2048, 2048, 2048), (4096, 4096, 4096)]


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize(
    ("options", "shapes", "file"),
    [
        ([], WHOLE, "bench-cpu.json"),
        (["--quick"], HALF, "bench-cpu-partial.json"),
        (["--quick", "--out", "bench.json"], HALF, "bench.json"),
        (
            *(["--shape", "7,8,9", "--shape", "1,2,3"], [(7, 8, 9), (1, 2, 3)]),
            "bench-cpu-partial.json",
        ),
    ],
)
def test_the_shapes_that_are_measured(options, shapes, file, tmp_path, monkeypatch):
    """Fewer sizes have a file of their own."""

    def rows(measured, **_):
        assert list(measured) == shapes
        return some_rows()

    monkeypatch.setattr(importlib.import_module("fbq_jax.bench.gemm"), "rows", rows)
    monkeypatch.chdir(tmp_path)
    assert library.main(["gemm", "--implementation", "reference", *options]) == 0
    assert [found.name for found in tmp_path.iterdir()] == [file]


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("error", [measure.WrongResultError("no"), KeyboardInterrupt()])
def test_a_stored_section_stays_until_the_new_one_is_complete(
    error, tmp_path, monkeypatch, capsys
):
    out = tmp_path / "bench.json"
    command = ["gemm", "--implementation", "reference", "--out", str(out)]
    assert library.main(command) == 0
    gemm = importlib.import_module("fbq_jax.bench.gemm")
    stops = True

    def rows(*_, **__):
        for row in some_rows("new"):
            assert results.load(out)["gemm"]["rows"] == some_rows("gemm")
            yield row
            if stops:
                raise error

    monkeypatch.setattr(gemm, "rows", rows)
    with contextlib.suppress(KeyboardInterrupt):
        assert library.main(command) == 1
        assert capsys.readouterr().err == "fbq_jax.bench: no\n"
    assert results.load(out)["gemm"]["rows"] == some_rows("gemm")
    part = tmp_path / "bench.json.gemm.part"
    assert results.load(part)["gemm"]["rows"] == some_rows("new")[:1]
    stops = False
    assert library.main(command) == 0
    assert results.load(out)["gemm"]["rows"] == some_rows("new")
    assert list(tmp_path.iterdir()) == [out]


@pytest.mark.usefixtures("gpu")
def test_a_file_that_cannot_be_written_is_refused_before_measuring(tmp_path, capsys):
    other = tmp_path / "other.json"
    other.write_text('{"answer": 42}')
    for path, message in (
        (tmp_path / "no" / "file.json", "there is no folder"),
        (other, "does not hold benchmark results"),
    ):
        command = ["gemm", "--implementation", "reference", "--out", str(path)]
        assert library.main(command) == 2
        out, err = capsys.readouterr()
        assert message in err
        assert err.count("\n") == 1
        assert not out
    assert other.read_text() == '{"answer": 42}'


@pytest.mark.skipif(jax.default_backend() == "gpu", reason="there is one")
@pytest.mark.parametrize("program", PROGRAMS)
def test_measuring_needs_an_accelerator(program, capsys):
    section = next(iter(PROGRAMS[program].SECTIONS))
    assert PROGRAMS[program].main([section]) == 2
    assert capsys.readouterr().err == (
        f"{program}: measuring needs a GPU or a TPU; JAX has the CPU only\n"
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "required: COMMAND"),
        (["speed"], "invalid choice: 'speed'"),
        (["gemm", "--implementation", "cublas"], "invalid choice: 'cublas'"),
        (["gemm", "--shape", "8,8"], "takes 3 positive integers M,N,K; got '8,8'"),
        (["gemm", "--shape", "8,0,8"], "positive integers M,N,K; got '8,0,8'"),
    ],
)
def test_a_usage_error_names_the_choice(arguments, message, capsys):
    with pytest.raises(SystemExit, match="2"):
        library.main(arguments)
    assert message in capsys.readouterr().err
