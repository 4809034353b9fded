"""Checkpoints are exact, the last two remain, and damage is detected."""

import dataclasses
import os
import re
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from examples.llama import checkpoint
from examples.llama.errors import UserError
from examples.llama.step import TrainState

ROOT = Path(__file__).parents[2]


def train_state(seed):
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


def assert_equal(actual, expected):
    jax.tree.map(np.testing.assert_array_equal, actual, expected)
    dtypes = (jax.tree.map(lambda leaf: leaf.dtype, x) for x in (actual, expected))
    assert next(dtypes) == next(dtypes)


def largest_file(folder):
    files = [path for path in folder.rglob("*") if path.is_file()]
    return max(files, key=lambda path: path.stat().st_size)


def test_round_trips_are_exact_and_the_last_two_are_kept(tmp_path):
    bf16 = dataclasses.replace(train_state(10), fallback={}, overwritten={})
    for step, state in (1, train_state(1)), (2, train_state(2)), (10, bf16):
        checkpoint.save(tmp_path, step, state)
        assert_equal(checkpoint.restore(tmp_path, state), state)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["10", "2"]


def test_a_whole_checkpoint_stays_until_the_next_one_is_whole(tmp_path, monkeypatch):
    """Of step 2, writing was interrupted, and again of step 3."""
    for step in 1, 2:
        checkpoint.save(tmp_path, step, train_state(step))
    (tmp_path / "2" / "SHA256SUMS").unlink()

    def interrupt(_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "_checksums", interrupt)
        with pytest.raises(KeyboardInterrupt):
            checkpoint.save(tmp_path, 3, train_state(3))
    step_found, skipped = checkpoint.find(tmp_path)
    assert step_found == 1
    assert len(skipped) == 2
    checkpoint.save(tmp_path, 4, train_state(4))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["1", "4"]


def truncate(file):
    file.write_bytes(file.read_bytes()[:-1])


def flip_a_bit(file):
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


@pytest.mark.parametrize("damage", [truncate, flip_a_bit, Path.unlink])
def test_a_damaged_checkpoint_is_skipped_and_named(tmp_path, damage):
    checkpoint.save(tmp_path, 1, train_state(1))
    checkpoint.save(tmp_path, 2, train_state(2))
    damage(largest_file(tmp_path / "2"))
    before = sorted(tmp_path.rglob("*"))
    step, (problem,) = checkpoint.find(tmp_path)
    assert step == 1
    assert f"{tmp_path / '2'} is damaged: its files do not match" in problem
    with pytest.raises(UserError, match=r"2 is damaged.*--resume writes"):
        checkpoint.restore(tmp_path, train_state(0))  # never an older one in silence
    assert sorted(tmp_path.rglob("*")) == before
    damage(largest_file(tmp_path / "1"))
    with pytest.raises(UserError, match=r"no checkpoint that is whole"):
        checkpoint.find(tmp_path)
    assert checkpoint.find(tmp_path / "none") == (None, [])
    with pytest.raises(UserError, match=r"holds no checkpoint$"):
        checkpoint.restore(tmp_path / "none", train_state(0))


@pytest.mark.parametrize(
    ("sums", "problem"), [(None, "incomplete"), (b"\xff\0", "damaged")]
)
def test_a_checkpoint_without_its_checksums(tmp_path, sums, problem):
    for step in 4, 5:
        checkpoint.save(tmp_path, step, train_state(step))
    file = tmp_path / "5" / "SHA256SUMS"
    file.unlink() if sums is None else file.write_bytes(sums)
    step, (reason,) = checkpoint.find(tmp_path)
    assert step == 4
    assert f"{tmp_path / '5'} is {problem}" in reason
    if sums is not None:
        return
    for again in 4, 2:  # in place of the incomplete ones
        (tmp_path / "4" / "SHA256SUMS").unlink()
        assert checkpoint.find(tmp_path).step is None  # starts from the beginning
        other = train_state(again + 10)
        checkpoint.save(tmp_path, again, other)
        assert checkpoint.find(tmp_path) == (again, [])
        assert_equal(checkpoint.restore(tmp_path, train_state(0)), other)


# Limits the size of files, as a disk does that is full. In a process of its own, since
# TensorStore still writes after it has reported an error.
FULL_DISK = """
import resource, sys
from pathlib import Path
import jax.numpy as jnp
from examples.llama import checkpoint
from examples.llama.errors import UserError

state = {str(n): jnp.arange(n, n + 3000) for n in range(20)}
for limit in 1024, 4096, 10_000:
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
    try:
        checkpoint.save(Path(sys.argv[1]), 2, state)
    except UserError as error:
        print("error:", error, file=sys.stderr)
"""


def test_a_checkpoint_that_cannot_be_written_is_one_error(tmp_path):
    checkpoint.save(tmp_path, 1, train_state(1))
    failed = subprocess.run(
        [sys.executable, "-c", FULL_DISK, str(tmp_path)],
        cwd=ROOT,
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert failed.returncode == 0
    lines = failed.stderr.splitlines()
    assert len(lines) == 3
    for line in lines:
        assert f"error: the checkpoint {tmp_path / '2'} cannot be written" in line
        assert len(line) < 2000
        assert "continue with --resume" in line
    assert checkpoint.find(tmp_path).step == 1
    checkpoint.save(tmp_path, 2, train_state(2))  # there is room again
    assert checkpoint.find(tmp_path) == (2, [])


@pytest.mark.parametrize("change", [lambda x: x[1:], lambda x: {"other": x}])
def test_another_structure_or_shape_is_one_short_error(tmp_path, change):
    state = {str(n): jnp.arange(n, n + 3000) for n in range(20)}
    checkpoint.save(tmp_path, 1, state)
    message = f"the checkpoint {tmp_path / '1'} belongs to another model or"
    with pytest.raises(UserError, match=re.escape(message)) as raised:
        checkpoint.restore(tmp_path, {name: change(x) for name, x in state.items()})
    assert len(str(raised.value)) < 2000
