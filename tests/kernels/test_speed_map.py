"""Predictions between and beyond measured shapes, and the file of a map."""

import itertools
import json
import math

import pytest

from fbq_jax.kernels import speed_map
from fbq_jax.kernels.speed_map import SpeedMap

TOKENS, WIDTHS = (64, 256, 4096), (64, 256, 1024)
SHAPES = [
    (M, K, N)
    for M in TOKENS
    for K, N in itertools.combinations_with_replacement(WIDTHS, 2)
]


def power(M, K, N):
    """A speedup that is linear in the logarithms of M, K and N."""
    return 0.01 * M**0.25 * (K * N) ** 0.125


def map_of(speedup, shapes=SHAPES):
    by_shape = {shape: speedup(*shape) for shape in shapes}
    half = {shape: value / 2 for shape, value in by_shape.items()}
    return SpeedMap("Some GPU", "triton", {"block": by_shape, "fallback": half})


@pytest.mark.parametrize(
    ("sizes", "same"),
    [
        *[
            (shape, shape)
            for shape in [(64, 64, 64), (256, 64, 1024), (4096, 1024, 64)]
        ],
        *[
            (shape, shape)
            for shape in [(100, 64, 64), (300, 77, 500), (4000, 1000, 70)]
        ],
        # Beyond the map, a size counts as its end.
        ((1, 1, 64), (64, 64, 64)),
        ((10**6, 64, 10**5), (4096, 64, 1024)),
    ],
)
def test_logarithms_are_interpolated(sizes, same):
    """Layers ``(K, N)`` and ``(N, K)`` are alike."""
    found, (M, K, N) = map_of(power), sizes
    for shape in (sizes, (M, N, K)):
        assert found.predict("block", shape) == pytest.approx(power(*same))
        assert found.predict("fallback", shape) == pytest.approx(power(*same) / 2)


def test_a_prediction_lies_between_its_neighbours():
    """It is monotone between them, where measurements are noisy too."""
    noisy = map_of(lambda M, K, N: 1.0 + 0.1 * math.sin(M + 3 * K + 7 * N))
    around = [noisy.predict("block", (M, 256, 1024)) for M in (256, 4096)]
    between = [noisy.predict("block", (M, 256, 1024)) for M in range(256, 4097, 160)]
    assert between in (sorted(between), sorted(between, reverse=True))
    assert min(around) <= min(between) <= max(between) <= max(around)


def test_a_missing_shape_has_the_highest_speedup_inside_it():
    shapes = [shape for shape in SHAPES if math.prod(shape) < 4096 * 256 * 1024]
    found = map_of(power, shapes)
    for missing in ((4096, 256, 1024), (4096, 1024, 1024)):
        assert found.predict("block", missing) == pytest.approx(power(4096, 256, 256))


def test_a_map_is_saved_and_loaded(tmp_path, monkeypatch):
    monkeypatch.setattr(speed_map, "DIRECTORY", tmp_path / "maps")
    assert speed_map.load("Some GPU") is None
    found = map_of(power)
    speed_map.save(speed_map.path("Some GPU"), found)
    assert speed_map.load("Some GPU") == found
    (file,) = (tmp_path / "maps").iterdir()
    assert file.name == "some-gpu.json"
    assert json.loads(file.read_text())["speedups"]["block"].keys() >= {"64x64x1024"}


@pytest.mark.parametrize(
    "speedups",
    [
        {},
        {"block": {}},
        {"block": {(64, 64, 256): 1.0}},
        {"block": {(64, 64, 64): 1.0}, "fallback": {}},
    ],
)
def test_an_incomplete_map_is_refused(speedups, tmp_path):
    with pytest.raises(ValueError, match="include the smallest M with the smallest K"):
        speed_map.save(tmp_path / "map.json", SpeedMap("GPU", "triton", speedups))
