"""How rows in groups are cut into tiles."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fbq_jax.kernels.grouped_reference import cut, from_tiles, to_tiles

M, ROWS = 32, 200
X = jax.random.normal(jax.random.key(0), (ROWS, 3))
SIZES = [
    (70, 0, 33, 1, 80, 0),  # of 200: the last rows are in no group
    (0, 0, 32, 0, 168, 0),  # whole tiles, empty groups at both ends
    (0, 0, 0, 0, 0, 0),
    (0, 0, 100, 150, 7, 0),  # of which 100 rows are there
    (1,) * 200,  # as many tiles as there can be
]


@jax.jit
def there_and_back(sizes):
    tiles = cut(sizes, ROWS, M)
    return tiles, from_tiles(to_tiles(X, tiles), tiles)


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_tiles_hold_each_group_s_rows_in_order(sizes):
    tiles, back = there_and_back(jnp.array(sizes, jnp.uint32))
    ends = np.minimum(np.cumsum(sizes), ROWS)
    expected = []
    for group, (start, end) in enumerate(zip([0, *ends[:-1]], ends, strict=True)):
        for first in range(start, end, M):
            row = np.arange(first, first + M)
            expected.append((group, np.where(row < end, row, ROWS)))
    assert tiles.used == len(expected) <= len(tiles.groups)
    for t, (group, row) in enumerate(expected):
        assert tiles.groups[t] == group
        np.testing.assert_array_equal(tiles.rows[t], row)
    assert np.all(np.asarray(tiles.rows[len(expected) :]) == ROWS)

    np.testing.assert_array_equal(back[: ends[-1]], X[: ends[-1]])
    assert not np.any(back[ends[-1] :])


def test_no_rows():
    tiles = cut(jnp.array([0, 0]), 0, 32)
    assert to_tiles(jnp.zeros((0, 5)), tiles).shape == (0, 32, 5)
    assert from_tiles(jnp.zeros((0, 32, 5)), tiles).shape == (0, 5)
