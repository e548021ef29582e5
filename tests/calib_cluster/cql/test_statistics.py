"""Cell statistics against plain loops; merging; standardising."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from calib_cluster.cql import CellStatistics
from calib_cluster.errors import CalibrationError

SHAPE = (3, 4)
record = st.tuples(st.integers(0, SHAPE[0] - 1), st.integers(0, SHAPE[1] - 1), st.floats(-50, 50))


def of(records: list[tuple[int, int, float]]) -> CellStatistics:
    columns = list(zip(*records, strict=True)) or [(), (), ()]
    states, actions = (np.array(c, dtype=np.int64) for c in columns[:2])
    return CellStatistics.of(states, actions, np.array(columns[2], dtype=np.float64), SHAPE)


def check_literally(found: CellStatistics, records: list[tuple[int, int, float]]) -> None:
    for state in range(SHAPE[0]):
        for action in range(SHAPE[1]):
            rewards = [r for s, a, r in records if (s, a) == (state, action)]
            cell = state, action
            assert found.counts[cell] == len(rewards)
            mean = sum(rewards) / len(rewards) if rewards else 0.0
            assert found.means[cell] == pytest.approx(mean, abs=1e-9)
            spread = sum((r - mean) ** 2 for r in rewards)
            assert found.spreads[cell] == pytest.approx(spread, abs=1e-7)


@given(st.lists(record, max_size=30), st.lists(record, max_size=30))
@settings(max_examples=50, deadline=None)
def test_counts_means_and_spreads_are_those_of_the_records_however_they_are_split(one, two):
    check_literally(of(one), one)
    check_literally(of(one) + of(two), one + two)


@given(st.lists(record, min_size=2, max_size=40))
@settings(max_examples=50, deadline=None)
def test_standardised_rewards_have_mean_zero_and_deviation_one(records):
    found, scale = of(records).standardised()
    rewards = np.array([r for _, _, r in records])
    if rewards.std() < 1e-6:
        return
    again = of([(s, a, (r - rewards.mean()) / rewards.std()) for s, a, r in records])
    assert scale.mean == pytest.approx(rewards.mean(), abs=1e-9)
    assert scale.deviation == pytest.approx(rewards.std())
    np.testing.assert_allclose(found.means, again.means, atol=1e-6)
    np.testing.assert_allclose(found.spreads, again.spreads, atol=1e-5)
    np.testing.assert_array_equal(found.counts, again.counts)


def test_equal_rewards_become_zero_rather_than_noise():
    found, scale = of([(0, 1, 0.1), (1, 2, 0.1), (2, 2, 0.1)] * 7).standardised()
    assert scale.deviation == 1.0
    assert np.abs(found.sums).max() < 1e-12


def test_shares_are_the_behaviour_in_each_state():
    found = of([(0, 1, 0.0), (0, 1, 1.0), (0, 3, 5.0), (2, 0, 2.0)])
    np.testing.assert_allclose(found.shares[0], [0, 2 / 3, 0, 1 / 3])
    assert found.shares[1].tolist() == [0] * 4
    assert found.totals.tolist() == [3, 0, 1]


@pytest.mark.parametrize(
    ("records", "message"),
    [
        ([(3, 0, 0.0)], "states 3..3, accepted are 0..2"),
        ([(0, -1, 0.0)], "actions -1..-1, accepted are 0..3"),
        ([(0, 0, float("nan"))], "not finite"),
        ([(0, 0, float("inf"))], "not finite"),
    ],
)
def test_bad_records_are_refused(records, message):
    with pytest.raises(CalibrationError, match=message):
        of(records)


def test_statistics_of_different_shapes_are_refused():
    with pytest.raises(CalibrationError, match="must be one"):
        CellStatistics(np.zeros((2, 3), np.int64), np.zeros((2, 2)), np.zeros((2, 3)))
