"""The tables of models of users, from invented results."""

from pathlib import Path
from typing import Any

from experiments import model_tables
from experiments.result_files import save


def write(folder: Path, **files: list[dict[str, Any]]) -> Path:
    for name, rows in files.items():
        save({"rows": rows}, folder / f"{name.replace('_', '-')}.json")
    return folder


def test_losses_without_training_and_after_it(tmp_path: Path) -> None:
    assert model_tables.added_losses(tmp_path) == ""
    losses = [
        {"what": what, "added": added, "standard_error": 0.001}
        for what, added in (("bf16", 0.0), ("block", 0.05), ("chosen", 0.0))
    ]
    tuned = [
        {"what": what, "seed": seed, "val_loss": {"2": 2.0 + seed + added}}
        for seed in (0, 1)
        for what, added in (("bf16", 0.0), ("block", 0.04), ("auto", 0.001))
    ]
    found = model_tables.added_losses(write(tmp_path, losses=losses, tuned=tuned))
    assert found.splitlines()[2:] == [
        "| block | +0.0500 ± 0.0010 | +0.0400, +0.0400 |",
        "| chosen | +0.0000 ± 0.0010 | +0.0010, +0.0010 |",
    ]


def test_schemes_are_side_by_side_in_int8_and_fp8(tmp_path: Path) -> None:
    added = {"bf16": 0.0, "INT8: blocks": 0.04, "FP8: blocks": 0.03}
    losses = [{"what": what, "added": x} for what, x in added.items()]
    errors = [
        {"what": f"{codes}: {scheme}", "errors": {"0": 0.01, "58": 0.02}}
        for codes in ("INT8", "FP8")
        for scheme in ("not shown", "blocks", "others")
    ]
    assert model_tables.schemes(tmp_path) == ""
    write(tmp_path, schemes=losses, scheme_errors=errors)
    found = model_tables.schemes(tmp_path, ("others", "blocks"))
    assert found.splitlines()[2:] == [
        "| others |  | 0.010, 0.020 |  | 0.010, 0.020 |",
        "| blocks | +0.0400 | 0.010, 0.020 | +0.0300 | 0.010, 0.020 |",
    ]


def test_steps_are_compared_with_the_fastest_in_bf16(tmp_path: Path) -> None:
    def a_step(what: str, speed: float, **kernels: float) -> dict[str, Any]:
        row = {
            "what": f"{what}, remat none, fp8 moments",
            "batch": 1,
            "kernels": kernels,
        }
        ms = sum(kernels.values()) + 1
        row |= {"peak_bytes": 9e10, "ms": ms, "tokens_per_s": speed}
        return row | {"model_tflops": speed / 10}

    too_large = {"what": "bf16", "batch": 1, "peak_bytes": 1.75e11}
    fast = a_step("fallback", 2000.0, kernel_mosaic_gpu=4.0, quantize_norm=1.0, a=2.0)
    bf16 = a_step("bf16", 1000.0, nvjet_sm90=9.0, cudnn=3.0)
    elsewhere = a_step("bf16", 500.0, nvjet_sm90=18.0)
    faster = a_step("fallback", 750.0, kernel_mosaic_gpu=10.0)
    two = [elsewhere, faster]
    write(tmp_path, llama_3_8b=[too_large, bf16, fast], llama_3_8b_2=two)
    _, _, *rows = model_tables.steps(tmp_path).splitlines()
    assert rows[0] == "| bf16 | 1 | 175 | does not fit |  |  |  |"
    assert rows[2].endswith("| 1 | 90 | 8 | 2,000 | 200 | 2.00 |")
    assert rows[4].endswith("| 1.50 |")
    _, _, *parts = model_tables.parts(tmp_path).splitlines()
    columns = [[int(cell) for cell in row.split("|")[2:-1]] for row in parts]
    bf16_ms, *_, fallback_ms = zip(*columns, strict=True)
    assert bf16_ms == (0, 9, 3, 0, 0, 1, 13)
    assert fallback_ms == (4, 0, 0, 1, 2, 1, 8)


def test_the_errors_of_planted_layers_are_told_apart(tmp_path: Path) -> None:
    def a_layer(number: int, error: float) -> list[Any]:
        candidates = [["block", error, 0.1, 0.1, 2.0]]
        path = f"layer_{number}/mlp/down"
        return [path, [1, 1, 1], 1, 5.0, 0.0, candidates, "block", "", 3.0]

    layers = [a_layer(3, 0.09), a_layer(4, 0.03), a_layer(8, 0.11), a_layer(9, 0.04)]
    runs = [
        {"recipe": recipe, "seed": 0, "loss": loss, "tokens_per_s": 1000.0}
        for recipe, loss in (("bf16", 1.0), ("chosen", 1.1))
    ]
    rows = [{"report": {"layers": layers}}, *runs]
    found = model_tables.planted(write(tmp_path, planted=rows))
    assert "| chosen | +0.1000 | 1,000 |" in found
    assert "0.090 and 0.110 where outliers are planted, 0.030 to 0.040 in" in found


def test_predicted_times_are_compared_with_measured_ones(tmp_path: Path) -> None:
    layers = [["layers/mlp/down", [1, 1, 1], 1, 5.0, 0.0, [], None, "", 3.0]]
    report = {"layers": layers, "float_ms": 3.0, "chosen_ms": 2.0}
    rows = [{"model": "2 layers", "report": report, "predicted_ms": 2.1}]
    *_, row = model_tables.predictions(write(tmp_path, speed=rows)).splitlines()
    assert row == "| 2 layers | mlp/down: float | 3.00 | 2.10 | 2.00 | +5.0% | 1.50 |"


def test_pretraining_is_compared_with_bf16_of_the_same_seed(tmp_path: Path) -> None:
    rows = [
        {"size": "1B", "recipe": recipe, "seed": seed, "tokens_per_s": speed}
        | {"val_loss": {"2": seed + added}}
        for seed in (0, 1)
        for recipe, added, speed in (("bf16", 3.0, 100.0), ("auto", 3.01, 150.0))
    ]
    *_, row = model_tables.pretraining(write(tmp_path, pretraining=rows)).splitlines()
    assert row == "| 1B | auto | +0.0100, +0.0100 | 150 | 1.50 |"


def test_several_devices_are_compared_with_one(tmp_path: Path) -> None:
    of = {
        n: [
            {"what": what, "devices": n, "peak_bytes": 1e10, "ms": 3.0}
            | {"tokens_per_s": speed, "kernels": {"nccl_all": 2.0, "cudnn": 2.0}}
            for what, speed in (("bf16", 100.0 * n), ("fallback", 190.0 * n**0.5))
        ]
        for n in (1, 4)
    }
    write(tmp_path, llama_3_8b_fsdp_1=of[1], llama_3_8b_fsdp_4=of[4])
    *_, row = model_tables.devices(tmp_path).splitlines()
    assert row == "| fallback | 4 | 10 | 3 | 95 | 50.0% |"
    *_, collectives, overlap, step = model_tables.parts_by_devices(tmp_path).split("\n")
    assert collectives.startswith("| collectives (NCCL) | 2 | 2 |")
    assert overlap.startswith("| between kernels, or less where kernels overlap | -1 |")
    assert step == "| the step | 3 | 3 | 3 | 3 |"
