"""Checkpoints are exact, the last two remain, and damage is detected."""

import dataclasses
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from examples.llama import checkpoint
from examples.llama.step import TrainState


def train_state(seed: int) -> TrainState:
    weights = jax.random.normal(jax.random.key(seed), (64, 32))
    params = {"layer": {"kernel": weights}}
    slot = {"theta": jnp.float32(seed), "count": jnp.uint32(seed)}
    return TrainState(
        step=jnp.int32(seed),
        params=params,
        fallback={"layer": {"dot_general": slot}},
        overwritten={"layer": {"dot_general": {"scale": jnp.float32(seed)}}},
        opt_state=optax.adamw(1e-3).init(params),
    )


def assert_equal(actual: Any, expected: Any) -> None:
    jax.tree.map(np.testing.assert_array_equal, actual, expected)
    dtypes = (jax.tree.map(lambda leaf: leaf.dtype, x) for x in (actual, expected))
    assert next(dtypes) == next(dtypes)


def largest_file(folder: Path) -> Path:
    files = [path for path in folder.rglob("*") if path.is_file()]
    return max(files, key=lambda path: path.stat().st_size)


def test_round_trip_is_exact(tmp_path: Path) -> None:
    checkpoint.save(tmp_path, 3, train_state(3))
    assert_equal(checkpoint.restore(tmp_path, train_state(0)), train_state(3))


def test_bf16_run_has_no_fallback_state(tmp_path: Path) -> None:
    state = dataclasses.replace(train_state(1), fallback={}, overwritten={})
    checkpoint.save(tmp_path, 1, state)
    assert_equal(checkpoint.restore(tmp_path, state), state)


def test_last_two_are_kept(tmp_path: Path) -> None:
    for step in 1, 2, 10:
        checkpoint.save(tmp_path, step, train_state(step))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["10", "2"]
    assert int(checkpoint.restore(tmp_path, train_state(0)).step) == 10


def test_no_checkpoint_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(checkpoint.RestoreError, match="holds no checkpoint"):
        checkpoint.restore(tmp_path / "checkpoints", train_state(0))


def truncate(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-1])


def flip_a_bit(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


@pytest.mark.parametrize("damage", [truncate, flip_a_bit, Path.unlink])
def test_damage_is_an_error_with_a_remedy(tmp_path: Path, damage: Any) -> None:
    checkpoint.save(tmp_path, 1, train_state(1))
    checkpoint.save(tmp_path, 2, train_state(2))
    damage(largest_file(tmp_path / "2"))
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(
        checkpoint.RestoreError,
        match=rf"{tmp_path / '2'} is damaged.*Delete it to continue from step 1",
    ):
        checkpoint.restore(tmp_path, train_state(0))
    assert sorted(tmp_path.rglob("*")) == before


def test_remedy_for_the_only_checkpoint(tmp_path: Path) -> None:
    checkpoint.save(tmp_path, 1, train_state(1))
    (tmp_path / "1" / "SHA256SUMS").unlink()
    with pytest.raises(checkpoint.RestoreError, match="start again"):
        checkpoint.restore(tmp_path, train_state(0))


def test_another_structure_is_an_error(tmp_path: Path) -> None:
    checkpoint.save(tmp_path, 1, train_state(1))
    like = dataclasses.replace(train_state(0), overwritten={"scale": jnp.ones(3)})
    with pytest.raises(checkpoint.RestoreError, match="belongs to another model or"):
        checkpoint.restore(tmp_path, like)
