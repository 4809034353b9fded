"""How the rows of groups are assigned to tiles."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from fbq_jax.kernels.tiles import (
    assign_tiles,
    from_tiles,
    gather_tiles,
    group_ends,
)

M, ROWS = 32, 200
X = jax.random.normal(jax.random.key(0), (ROWS, 3))
SIZES = [
    (70, 0, 33, 1, 80, 0),  # The last 16 rows are in no group.
    (0, 0, 32, 0, 168, 0),  # One group fills its tile; groups at both ends are empty.
    (0, 0, 0, 0, 0, 0),
    (0, 0, 100, 150, 7, 0),  # The sizes exceed the number of rows.
    (1,) * 200,  # The largest possible number of tiles.
]


@jax.jit
def round_trip(sizes):
    tiles = assign_tiles(sizes, ROWS, M)
    copied = gather_tiles(X, tiles.first_rows, tiles.row_counts, M)
    is_row = jnp.arange(M)[None, :] < tiles.row_counts[:, None]
    products = jnp.where(is_row[:, :, None], copied, jnp.nan)  # others have no meaning
    return tiles, copied, from_tiles(products, tiles)


@pytest.mark.parametrize(
    "sizes", SIZES, ids=lambda sizes: f"{len(sizes)} groups, {sum(sizes)} rows"
)
def test_tiles_hold_the_rows_of_each_group_in_order(sizes):
    tiles, copied, back = jax.device_get(round_trip(jnp.array(sizes, jnp.uint32)))
    ends = np.minimum(np.cumsum(sizes), ROWS)
    expected = []
    for group, (start, end) in enumerate(zip([0, *ends[:-1]], ends, strict=True)):
        for first in range(start, end, M):
            expected.append((group, first, min(M, end - first)))
    assert len(expected) <= len(tiles.groups)
    for t, (group, first, count) in enumerate(expected):
        assert tiles.groups[t] == group
        assert tiles.row_counts[t] == count
        np.testing.assert_array_equal(copied[t, :count], X[first : first + count])
        assert not np.any(copied[t, count:])
    assert np.all(tiles.groups[len(expected) :] == len(sizes))
    assert not np.any(tiles.row_counts[len(expected) :])

    np.testing.assert_array_equal(back[: ends[-1]], X[: ends[-1]])
    assert not np.any(back[ends[-1] :])


LARGEST = 2**31 - 1
DTYPES = [jnp.int8, jnp.uint8, jnp.int16, jnp.int32, jnp.uint32, jnp.int64, jnp.uint64]


sizes_near_limits = st.one_of(
    st.integers(0, 300),
    st.sampled_from([2**7, 2**15, 2**31, 2**32, 2**63, 2**64]).flatmap(
        lambda limit: st.integers(limit - 9, limit + 9)
    ),
    st.integers(-(2**63), -1),
)


@settings(max_examples=50, deadline=None, derandomize=True)
@given(
    st.lists(sizes_near_limits, min_size=1, max_size=9),
    st.one_of(st.integers(0, 300), st.integers(LARGEST - 9, LARGEST)),
    st.sampled_from(DTYPES),
)
@example([LARGEST] * 9, LARGEST, jnp.int32)
@example([LARGEST // 2] * 9, LARGEST, jnp.uint32)
@example([2**32 - 1, 1], 10, jnp.uint32)
def test_sums_of_any_sizes_end_at_the_last_row(sizes, rows, dtype):
    """Against sums of Python's integers, which have no largest one."""
    limits = jnp.iinfo(dtype)
    sizes = [min(max(size, int(limits.min)), int(limits.max)) for size in sizes]
    sums = itertools.accumulate(max(size, 0) for size in sizes)
    want = [min(end, rows) for end in sums]
    with jax.enable_x64(True):
        got = group_ends(jnp.array(sizes, dtype), rows)
    assert (got.tolist(), got.dtype) == (want, jnp.int32)
    # NumPy's 64 bits count even if JAX has only 32.
    assert group_ends(np.array(sizes, dtype), rows).tolist() == want
