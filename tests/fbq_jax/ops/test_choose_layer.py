"""Whether a layer is quantized: by the map of the GPU, with the reason."""

import dataclasses
import types

import jax
import jax.numpy as jnp
import pytest
from jax import export

from fbq_jax import Recipe, dispatch, recipes
from fbq_jax.kernels import speed_map
from fbq_jax.kernels.speed_map import SpeedMap
from fbq_jax.ops.backends import Mosaic, Triton

SLOWER = {(64, 64, 64): 0.5, (4096, 64, 64): 2.0}
SMALL, FAST, SLOW = (
    (64, 64, 64),
    (4096, 64, 64),
    (512, 64, 64),
)  # 512 lies between 64 and 4096 in logarithms


@pytest.fixture
def gpu(tmp_path, monkeypatch):
    """A machine with a GPU that has a map."""
    device = types.SimpleNamespace(device_kind="Some GPU", compute_capability="8.0")
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(jax, "devices", lambda: [device])
    monkeypatch.setattr(Triton, "refusal", lambda *_: None)
    monkeypatch.setattr(Mosaic, "refusal", lambda *_: "it needs a Hopper GPU")
    monkeypatch.setattr(speed_map, "DIRECTORY", tmp_path)
    faster = {shape: 2 * speedup for shape, speedup in SLOWER.items()}
    found = SpeedMap("Some GPU", "triton", {"block": faster, "fallback": SLOWER})
    speed_map.save(speed_map.path("Some GPU"), found)
    return device


PREDICTS = "the map of Some GPU predicts {} times bf16's speed"
LEFT = "; Recipe(where_slower='float') would leave the layer in float"
FLOAT = dataclasses.replace(recipes.fallback, where_slower="float")
OTHER = Recipe(target_rate=(0.0, 0.5), criterion="l1")


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize(
    ("recipe", "sizes", "quantized", "speedup", "more"),
    [
        (FLOAT, SMALL, False, "0.50", ", and where_slower='float'"),
        (FLOAT, FAST, True, "2.00", ""),
        (FLOAT, SLOW, True, "1.00", ""),
        (recipes.fallback, SMALL, True, "0.50", LEFT),
        # Recipes without fallback are predicted by block.
        (recipes.block, SMALL, True, "1.00", ""),
        (OTHER, SMALL, True, "0.50", LEFT),
    ],
)
def test_the_map_decides_where_the_recipe_leaves_it_the_choice(
    recipe, sizes, quantized, speedup, more
):
    choice = dispatch.choose_layer(recipe, sizes)
    assert choice.quantized == quantized
    assert choice.speedup == pytest.approx(float(speedup))
    assert choice.reason == PREDICTS.format(speedup) + more


@pytest.mark.parametrize(
    ("recipe", "sizes", "error", "message"),
    [
        ("fallback", FAST, TypeError, "takes a Recipe, such as .*; got 'fallback'"),
        (recipes.fallback, (64, 64), ValueError, r"\(M, K, N\).*; got \(64, 64\)"),
        (recipes.fallback, (64, 0, 64), ValueError, "at least 1; got"),
    ],
)
def test_wrong_arguments_are_named(recipe, sizes, error, message):
    with pytest.raises(error, match=message):
        dispatch.choose_layer(recipe, sizes)


@pytest.mark.usefixtures("gpu")
def test_a_map_predicts_for_numbers_only():
    sizes = export.symbolic_shape("b*s, 64, 64")
    with pytest.raises(ValueError, match=r"size b\*s of a layer is .*'quantize'"):
        dispatch.choose_layer(recipes.fallback, sizes)


@pytest.mark.parametrize(
    ("recipe", "options", "reason"),
    [
        (recipes.jetfire, {}, "recipes with scales per 128x128 block in all GEMMs"),
        (recipes.rowwise, {}, "recipes with scales per 128x128 block in all GEMMs"),
        (recipes.block, {"dtype": jnp.float32}, "in 16 bits, not in float32"),
        (
            recipes.block,
            {"implementation": "reference"},
            "the map of Some GPU is of triton, not of reference",
        ),
    ],
)
@pytest.mark.usefixtures("gpu")
def test_a_layer_outside_the_map_is_quantized(recipe, options, reason):
    choice = dispatch.choose_layer(recipe, (64, 64, 64), **options)
    assert (choice.quantized, choice.speedup) == (True, None)
    assert choice.reason.endswith(reason)


def test_a_gpu_without_a_map_says_how_to_measure_one(gpu):
    gpu.device_kind = "Another GPU"
    assert dispatch.choose_layer(recipes.block, (64, 64, 64)) == (
        True,
        None,
        "there is no map for Another GPU: run python -m fbq_jax.bench map",
        False,
    )


@pytest.mark.skipif(jax.default_backend() == "gpu", reason="there is a GPU")
def test_other_platforms_have_no_map():
    choice = dispatch.choose_layer(recipes.block, (64, 64, 64))
    assert choice.quantized
    assert choice.reason == "there is no map for cpu: maps are of GPUs"


@pytest.mark.parametrize("name", ["rowwise", "row_block_lhs", "block", "per_tensor"])
def test_a_layer_is_batch_invariant_if_its_recipe_is(name):
    recipe = recipes.NAMED[name]
    choice = dispatch.choose_layer(recipe, (64, 64, 64))
    assert choice.batch_invariant == recipe.batch_invariant == name.startswith("row")


@pytest.mark.usefixtures("gpu")
def test_an_unknown_implementation_is_named():
    with pytest.raises(ValueError, match="'cublas' is not an implementation"):
        dispatch.choose_layer(recipes.block, (4, 4, 4), implementation="cublas")
