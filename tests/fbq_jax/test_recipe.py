"""Every field of a recipe is checked when it is built."""

import dataclasses
import pickle

import pytest

from fbq_jax import Gemm, Recipe, RecipeError, recipes


@pytest.mark.parametrize(
    ("field", "value", "takes"),
    [
        ("block", 100, "one of (32, 64, 128, 256)"),
        ("block", (128, 128), "three of them"),
        ("block", [128, 128, 128], "three of them"),
        ("block", (128, 128.0, 128), "three of them"),
        ("criterion", "max", "'absmax', 'l1', 'l1_rel'"),
        ("target_rate", (0.3, 0.1), "low < high"),
        ("target_rate", (0.1, float("nan")), "low < high"),
        ("target_rate", 0.2, "a pair"),
        ("alpha", 1.0, "above 1"),
        ("alpha", float("inf"), "above 1"),
        ("alpha", "fast", "above 1"),
        ("start", 0.0, "'first_batch' or"),
        ("start", -1.0, "'first_batch' or"),
        ("start", 1e-50, "'first_batch' or"),
        ("start", "second_batch", "'first_batch' or"),
        ("fwd", "nearest", "a Gemm"),
    ],
)
def test_a_bad_field_is_named_with_what_it_takes(field, value, takes):
    with pytest.raises(RecipeError, match=rf"^Recipe\.{field} takes ") as error:
        Recipe(**{field: value})
    assert takes in str(error.value)
    assert repr(value) in str(error.value)


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"fwd": Gemm(lhs="floor")}, "fwd.lhs"),
        ({"fwd": Gemm(lhs="stochastic")}, "fwd.lhs"),
        ({"fwd": Gemm(rhs="stochastic")}, "dlhs.rhs"),
        ({"drhs": Gemm(lhs="stochastic")}, "drhs.rhs"),
    ],
)
def test_roundings_that_cannot_share_codes_are_refused(fields, named):
    with pytest.raises(RecipeError, match=rf"^Recipe\.{named} takes "):
        Recipe(**fields)


def test_an_unknown_field_gets_the_list_of_fields():
    with pytest.raises(TypeError, match="no field 'blok'; its fields are: block, "):
        Recipe(blok=128)


def test_recipes_are_values():
    assert recipes.fallback == Recipe()
    assert hash(recipes.block) == hash(Recipe(criterion=None))
    assert dataclasses.replace(recipes.fallback, criterion=None) == recipes.block
    with pytest.raises(dataclasses.FrozenInstanceError):
        recipes.fallback.alpha = 2.0
    with pytest.raises(TypeError):
        Recipe(128)


def test_sides_give_the_blocks_of_all_three_operands():
    recipe = Recipe(block=(32, 64, 256))
    assert recipe.lhs_block == (32, 64)
    assert recipe.rhs_block == (64, 256)
    assert recipe.grad_block == (32, 256)


def test_errors_can_be_pickled():
    with pytest.raises(RecipeError) as error:
        Recipe(alpha=0.5)
    assert str(pickle.loads(pickle.dumps(error.value))) == str(error.value)
