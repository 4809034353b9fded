"""Names of an earlier version."""

import pytest

from fbq_jax import int8_flow, nnx, recipes


@pytest.mark.parametrize(
    ("earlier", "new", "get", "expected"),
    [
        (
            "fbq_jax.nnx.apply_rules",
            "fbq_jax.nnx.quantize",
            lambda: nnx.apply_rules,
            nnx.quantize,
        ),
        (
            "fbq_jax.int8_flow.Residual",
            "fbq_jax.int8_flow.SkipConnection",
            lambda: int8_flow.Residual,
            int8_flow.SkipConnection,
        ),
        (
            "Recipe.sides",
            "Recipe.block_shape",
            lambda: recipes.fallback.sides,
            (128, 128, 128),
        ),
    ],
)
def test_an_earlier_name_works_and_warns(earlier, new, get, expected):
    message = f"^{earlier} was renamed to {new}; a later version will not have it$"
    with pytest.warns(DeprecationWarning, match=message) as warned:
        assert get() == expected
    assert warned[0].filename == __file__


def test_other_names_are_missing():
    with pytest.raises(AttributeError, match=r"'fbq_jax\.nnx' has no .* 'dots'$"):
        nnx.dots  # noqa: B018
