"""Every field of a recipe is checked when it is built."""

import dataclasses
import inspect
import pickle
import pydoc
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

from fbq_jax import FLOAT_GEMM, Gemm, Recipe, RecipeError, recipes

ROOT = Path(__file__).parents[3]


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
        ("alpha", 1.0 + 1e-10, "above 1, in float32"),
        ("alpha", float("inf"), "above 1"),
        ("alpha", 10**400, "above 1, in float32"),
        ("alpha", "fast", "above 1"),
        ("start", 0.0, "'first_batch' or"),
        ("start", -1.0, "'first_batch' or"),
        ("start", 1e-50, "'first_batch' or"),
        ("start", "second_batch", "'first_batch' or"),
        ("fwd", "nearest", "a Gemm"),
        ("codes", "float8_e5m2", "('int8', 'float8_e4m3fn')"),
        ("where_slower", "bf16", "one of ('quantize', 'float')"),
    ],
)
def test_a_bad_field_is_named_with_the_accepted_values(field, value, takes):
    with pytest.raises(RecipeError, match=rf"^Recipe\.{field} takes ") as error:
        Recipe(**{field: value})
    assert takes in str(error.value)
    assert repr(value) in str(error.value)


IN_ROWS = Recipe(criterion=None, fwd=Gemm(scales="row"))


@pytest.mark.parametrize(
    ("how", "is_invariant"),
    [
        ({}, True),
        ({"fwd": Gemm(scales=("row", "tensor"))}, True),
        ({"fwd": Gemm(scales=("row_block", "block"))}, True),
        ({"dlhs": FLOAT_GEMM, "drhs": Gemm(scales="tensor")}, True),
        ({"fwd": Gemm(scales=("tensor", "row"))}, False),
        ({"fwd": Gemm(scales=("block", "row_block"))}, False),
        ({"fwd": Gemm(lhs="stochastic", scales="row")}, False),
        ({"fwd": Gemm(rhs="stochastic", scales="row")}, False),
        ({"fwd": FLOAT_GEMM}, False),  # XLA sums it, in an order of its own
        ({"fwd": Gemm(), "criterion": "absmax"}, False),
    ],
)
def test_a_recipe_is_batch_invariant_if_tokens_share_nothing(how, is_invariant):
    assert dataclasses.replace(IN_ROWS, **how).batch_invariant == is_invariant


def test_numbers_of_numpy():
    numbers = {"alpha": np.float32(1.5), "start": np.float32(2.0)}
    rates = np.float32(0.25), np.float32(0.5)
    assert Recipe(**numbers, target_rate=rates) == Recipe(
        alpha=1.5, start=2.0, target_rate=(0.25, 0.5)
    )


NEAREST = Gemm()


@pytest.mark.parametrize(
    "fields",
    [
        {"block": 64},
        {"block": (128, 128, 256)},
        {"drhs": FLOAT_GEMM},
        {"dlhs": Gemm(scales="row")},
        {"codes": "float8_e4m3fn", "criterion": None, "dlhs": NEAREST, "drhs": NEAREST},
    ],
)
def test_a_layer_stays_in_float_only_where_maps_are_measured(fields):
    with pytest.raises(
        RecipeError, match=r"^Recipe\.where_slower takes 'quantize' unl"
    ):
        Recipe(**fields, where_slower="float")
    assert Recipe(where_slower="float") != Recipe()


FLOATS = {"lhs": None, "rhs": None}
ROW = Gemm(scales="row")
ROWS_AND_BLOCKS = Gemm(scales=("row_block", "block"))
NOISY, NOISY_GRAD = Gemm(lhs="stochastic"), Gemm(rhs="stochastic")
FP8 = vars(recipes.fp8_row_block)


@pytest.mark.parametrize(
    ("fields", "named", "takes"),
    [
        # Roundings that cannot share codes.
        ({"fwd": Gemm(lhs="floor")}, "fwd.lhs", ""),
        ({"fwd": Gemm(lhs="stochastic")}, "fwd.lhs", ""),
        ({"fwd": Gemm(rhs="stochastic")}, "dlhs.rhs", ""),
        ({"drhs": Gemm(lhs="stochastic")}, "drhs.rhs", ""),
        ({"fwd": Gemm(scales="column")}, "fwd.scales", "'row_block', 'row', 'tensor'"),
        ({"fwd": Gemm(scales=["row", "row"])}, "fwd.scales", "or a pair of them"),
        ({"fwd": Gemm(scales=("row", "block"))}, "fwd.scales", "for neither"),
        ({"fwd": ROW}, "fwd.scales", "'block' with fallback"),
        ({"fwd": ROWS_AND_BLOCKS}, "fwd.scales", "'block' with fallback"),
        ({"drhs": Gemm(scales=("row_block", "row"))}, "drhs.scales", "for neither"),
        ({"drhs": Gemm(scales="row_block", shards=2)}, "drhs.shards", "1, except in"),
        (
            {
                "criterion": None,
                "bound": 127.5,
                "fwd": ROWS_AND_BLOCKS,
                "dlhs": ROW,
                "drhs": ROW,
            },
            "bound",
            "127.0 with block scales, as in fwd",
        ),
        ({"fwd": FLOAT_GEMM}, "fwd.lhs", "'nearest' with fallback"),
        ({"drhs": Gemm(rhs=None)}, "drhs.rhs", "a rounding if lhs has one"),
        ({"drhs": Gemm(lhs=None)}, "drhs.rhs", "None if lhs is"),
        ({"drhs": Gemm(**FLOATS, scales="row")}, "drhs.scales", "nothing"),
        ({"drhs": Gemm(**FLOATS, shards=2)}, "drhs.shards", "1, except in a drhs"),
        ({"drhs": Gemm(shards=2)}, "drhs.shards", "without block scales"),
        ({"dlhs": Gemm(scales="row", shards=2)}, "dlhs.shards", "1, except in a drhs"),
        ({"drhs": Gemm(scales="row", shards=0)}, "drhs.shards", "an integer from 1"),
        ({"drhs": Gemm(scales="row", shards=True)}, "drhs.shards", "an integer"),
        ({"drhs": Gemm(scales="row", shards=2**31)}, "drhs.shards", "to 2147483647"),
        ({"drhs": Gemm(**FLOATS, keeps="int8")}, "drhs.keeps", "'floats', 'codes'"),
        ({"drhs": Gemm(keeps="codes")}, "drhs.keeps", "'floats' unless lhs and rhs"),
        ({"fwd": Gemm(**FLOATS, keeps="codes")}, "fwd.keeps", "'floats' in fwd"),
        (
            {
                "criterion": None,
                "fwd": FLOAT_GEMM,
                "drhs": Gemm(**FLOATS, keeps="codes"),
            },
            "drhs.keeps",
            "fwd is unquantized and has no codes",
        ),
        ({"bound": 128.0}, "bound", "one of (127.0, 127.5)"),
        ({"bound": 127.5}, "bound", "as in fwd, dlhs, drhs"),
        (
            {"bound": 127.5, "criterion": None, "fwd": ROW, "drhs": ROW},
            "bound",
            "127.0 with block scales, as in dlhs",
        ),
        # What FP8 codes do not support.
        (FP8 | {"block": (128, 256, 128)}, "block", "(32, 64, 128) with codes in FP8"),
        (FP8 | {"criterion": "absmax", "fwd": NEAREST}, "criterion", "no second term"),
        (FP8 | {"dlhs": NOISY}, "dlhs.lhs", "'nearest' with codes in FP8"),
        (FP8 | {"drhs": NOISY_GRAD}, "drhs.rhs", "'nearest' with codes in FP8"),
        (FP8 | {"fwd": ROW}, "fwd.scales", "'block' or 'row_block' with codes in FP8"),
    ],
)
def test_bad_combinations_are_named(fields, named, takes):
    with pytest.raises(RecipeError, match=rf"^Recipe\.{named} takes ") as error:
        Recipe(**fields)
    assert takes in str(error.value)


def test_fp8_codes_take_a_float_gemm_and_small_blocks():
    other = dataclasses.replace(recipes.fp8_row_block, drhs=FLOAT_GEMM, block=32)
    assert other.codes == "float8_e4m3fn"


def test_scales_are_a_pair():
    assert Gemm(scales="row") == Gemm(scales=("row", "row"))
    lhs, rhs = Gemm(rhs="stochastic", scales=("row", "tensor")).quantizers
    assert lhs == ("nearest", "row", 1)
    assert rhs == ("stochastic", "tensor", 1)
    assert FLOAT_GEMM.quantizers == (None, None)


def test_an_unknown_field_gets_the_list_of_fields():
    with pytest.raises(TypeError, match="no field 'blok'; its fields are: block, "):
        Recipe(blok=128)
    with pytest.raises(
        TypeError, match="Gemm has no field 'side'; its fields are: lhs"
    ):
        Gemm(side=128)


@pytest.mark.parametrize("cls", [Recipe, Gemm])
def test_signatures_show_the_fields_and_their_defaults(cls):
    """Where editors and the API page take them from."""
    parameters = inspect.signature(cls).parameters
    fields = {field.name: field.default for field in dataclasses.fields(cls)}
    assert {name: p.default for name, p in parameters.items()} == fields
    kinds = {parameter.kind for parameter in parameters.values()}
    assert kinds == {inspect.Parameter.KEYWORD_ONLY}
    first = next(iter(fields))
    # Newer versions of Python write a field to a line.
    shown = "".join(pydoc.plain(pydoc.render_doc(cls)).replace("|", "").split())
    assert f"{cls.__name__}(*,{first}:" in shown


@pytest.mark.exhaustive
def test_type_checkers_know_the_fields_and_the_recipes():
    code = "import fbq_jax; fbq_jax.Recipe(blok=1); fbq_jax.recipes.falback"
    command = [sys.executable, "-m", "mypy", "--follow-imports=silent", "-c", code]
    output = subprocess.run(command, cwd=ROOT, capture_output=True, text=True).stdout
    assert 'Unexpected keyword argument "blok" for "Recipe"' in output
    assert 'no attribute "falback"' in output


def test_a_misspelled_recipe_gets_the_names():
    with pytest.raises(AttributeError, match=r"'falback'\. Did you mean 'fallback'\?"):
        _ = recipes.falback
    with pytest.raises(AttributeError, match=r"'xyz'\. The named recipes are f"):
        _ = recipes.xyz


def test_recipes_are_values():
    assert recipes.fallback == Recipe()
    assert hash(recipes.block) == hash(Recipe(criterion=None))
    assert dataclasses.replace(recipes.fallback, criterion=None) == recipes.block
    with pytest.raises(dataclasses.FrozenInstanceError):
        recipes.fallback.alpha = 2.0
    with pytest.raises(TypeError):
        Recipe(128)


def test_block_shape_gives_the_blocks_of_all_operands():
    recipe = Recipe(block=(32, 64, 256))
    assert recipe.lhs_block == (32, 64)
    assert recipe.rhs_block == (64, 256)
    assert recipe.grad_block == (32, 256)


def test_a_recipe_is_no_op():
    layer = nn.Dense(4, dot_general=recipes.block)
    with pytest.raises(TypeError, match=r"takes dot_general=FallbackDot\(recipe\)"):
        layer.init(jax.random.key(0), jnp.ones((2, 4)))


def test_errors_can_be_pickled():
    with pytest.raises(RecipeError) as error:
        Recipe(alpha=0.5)
    assert str(pickle.loads(pickle.dumps(error.value))) == str(error.value)
