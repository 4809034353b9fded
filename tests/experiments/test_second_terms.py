"""Rounded operands of the experiment on second terms and finer scales."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments import result_files, second_terms
from experiments.second_terms import Operand
from fbq_jax import dot_general, recipes

X = jax.random.normal(jax.random.key(0), (200, 300))
W = jax.random.normal(jax.random.key(1), (300, 100))


@pytest.mark.parametrize(
    ("name", "bits", "rows"),
    [
        ("block", 8, 128),
        ("row_block_lhs", 8, 1),
        ("fp8_row_block_lhs", None, 1),
    ],
)
def test_values_are_those_of_the_library(name, bits, rows):
    scheme = Operand(bits, rows), Operand(bits, 128)
    recipe = recipes.NAMED[name]
    expected, _ = dot_general(X, W, (((1,), (0,)), ((), ())), recipe=recipe)
    actual = second_terms.multiply(scheme, X, W)
    np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("metric", ["absmax", "error", "relative"])
def test_a_second_term_is_for_the_worst_blocks(metric):
    planted = X.at[3, 5].set(1e3)
    before, after = (
        jnp.abs(second_terms.rounded(planted, how) - planted)
        for how in (Operand(8, 128), Operand(8, 128, 0.2, metric))
    )
    improved = {
        (int(i) // 128, int(j) // 128)
        for i, j in zip(*jnp.where(after < before), strict=True)
    }
    # Of six blocks, the one with the outlier, and the next one.
    assert len(improved) in (1, 2)
    assert (0, 0) in improved


def test_rows_of_blocks_have_a_scale_besides():
    scaled = X * 2.0 ** (jnp.arange(200)[:, None] / 8)  # which scales of rows undo
    values = second_terms.rounded(scaled, Operand(8, 128, by_row=True))
    error = jnp.abs(values - scaled) / jnp.abs(scaled).max(axis=1, keepdims=True)
    assert float(error.max()) < 1 / 127
    plain = second_terms.rounded(scaled, Operand(8, 128))
    assert float(jnp.abs(plain[0]).max()) == 0


def test_planted_outliers_leave_the_product_as_it_is():
    assert max(second_terms.errors((None, None)).values()) < 1e-5
    found = second_terms.errors((Operand(8, 128), None))
    assert sorted(found.values()) == [found[str(size)] for size in (0, 58, 606, 6559)]
    assert found["6559"] > 10 * found["0"]


def test_the_command_writes_the_errors_of_each_scheme(tmp_path, monkeypatch):
    few = dict(list(second_terms.schemes().items())[:2])
    monkeypatch.setattr(second_terms, "schemes", lambda: few)
    second_terms.main([f"--out={tmp_path / 'errors.json'}"])
    rows = result_files.read(tmp_path / "errors.json")["rows"]
    assert [row["what"] for row in rows] == [*few]
    assert all(row["errors"]["606"] > row["errors"]["0"] for row in rows)
