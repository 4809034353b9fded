"""The experiment that compares the errors of recipes as outliers grow."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments import errors


def committed():
    return json.loads(errors.RESULTS.read_text())["recipe_errors"]


def test_the_recommended_recipe_keeps_its_promises():
    """The committed errors of the recipe that the page of errors recommends."""
    found = {
        row["data"]: row["errors"]
        for row in committed()
        if row["what"] == "row_block_lhs"
    }
    assert found["up to 606"]["dw_in"] < 0.04
    assert found["up to 6559"]["dw_in"] < 0.05
    assert found["606, 1/2 of blocks"]["y_token"] < 0.05
    assert found["606, 1/2 of blocks"]["dw_in"] < 0.05


def test_the_file_has_every_recipe_on_every_operand():
    found = [(row["what"], row["data"]) for row in committed()]
    data = list(dict.fromkeys(where for _, where in found))
    names = errors.compared_recipes()
    assert set(found) >= {(name, where) for name in names for where in data}


@pytest.mark.exhaustive
def test_rows(monkeypatch):
    names = {"row_block_lhs": errors.compared_recipes()["row_block_lhs"]}
    monkeypatch.setattr(errors, "compared_recipes", lambda: names)
    found = {row["data"]: row for row in errors.rows((256, 256, 128))}
    assert list(found) == list(dict.fromkeys(row["data"] for row in committed()))
    gaussian = found["Gaussian"]
    assert gaussian["saved_bytes"] == pytest.approx(256, rel=0.05)
    assert all(0.0 < error < 0.05 for error in gaussian["errors"].values())


def test_swiglu_has_the_requested_outliers():
    x = errors.swiglu(jax.random.key(0), (512, 1024), 606.0, 256).astype(jnp.float32)
    assert float(jnp.max(jnp.abs(x))) == float(jnp.bfloat16(606.0))
    outliers = jnp.abs(x) >= 20.0
    assert 0 < int(jnp.sum(outliers)) < 1e-3 * x.size
    assert set(np.flatnonzero(outliers.any(0)) % 256) == {0}
