"""Which rows are carried through the layers, against sets of prefixes."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from calib_cluster.rewards.sharing import branches, distinct, set_keys

keys = st.integers(1, 4).flatmap(
    lambda layers: st.lists(
        st.lists(st.integers(0, 2), min_size=layers, max_size=layers), min_size=1, max_size=12
    )
)


@given(keys)
@settings(max_examples=100, deadline=None)
def test_every_layer_has_one_row_for_each_distinct_prefix(rows):
    table = np.array(rows)
    steps, last = branches(table)
    before = [()]
    for layer, step in enumerate(steps):
        assert len(step.draws) == len({tuple(row[: layer + 1]) for row in rows})
        prefixes = [tuple(rows[draw][: layer + 1]) for draw in step.draws]
        parents = [before[parent] for parent in step.parents]
        assert [prefix[:-1] for prefix in prefixes] == parents
        before = prefixes
    assert [before[row] for row in last] == [tuple(row) for row in rows]


@given(keys)
@settings(max_examples=100, deadline=None)
def test_distinct_draws_are_named_once_and_sorted(rows):
    draws, inverse = distinct(np.array(rows))
    named = [tuple(rows[draw]) for draw in draws]
    assert named == sorted({tuple(row) for row in rows})
    assert [named[i] for i in inverse] == [tuple(row) for row in rows]


def test_keys_tell_sets_of_a_layer_apart():
    positions = np.array([[[1, 2], [3, 4], [5, -1]], [[1, 2], [4, 3], [5, -1]], [[1, 2]] * 3])
    found = set_keys(positions, [slice(0, 1), slice(1, 3)])
    assert found.shape == (3, 2)
    assert len(set(found[:, 0])) == 1 and len(set(found[:, 1])) == 3
