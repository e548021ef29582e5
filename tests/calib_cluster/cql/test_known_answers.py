"""Bandits whose right answer is known: what alpha is for, and which way ties and gaps fall."""

from __future__ import annotations

import numpy as np
import pytest

from calib_cluster.cql import CellStatistics, converge, decide, solve
from calib_cluster.errors import CalibrationError
from tests.calib_cluster.cql.bandits import draw

ACTIONS = 21
ALPHAS = (0.05, 0.2, 0.5, 0.75, 1.0, 2.0)


def gate_bandit() -> CellStatistics:
    """Every supported threshold costs something; the best supported one is action 6. Nobody tried
    the aggressive ones from 15 on."""
    means = np.broadcast_to(-1.0 - 0.1 * np.abs(np.arange(ACTIONS) - 6), (4, ACTIONS)).copy()
    counts = np.full((4, ACTIONS), 60)
    counts[:, 15:] = 0
    good = np.zeros((4, ACTIONS))  # another state of the table, which centres the rewards
    records = draw(np.concatenate([means, good]), np.concatenate([counts, counts * 0 + 40]), 0.05)
    return records.standardised().statistics


def lucky_bandit() -> CellStatistics:
    """Action 4 is right, seen 200 times; action 9 was seen twice, and was lucky."""
    means = np.full((1, 10), -1.0)
    means[0, 4] = 0.5
    counts = np.full((1, 10), 50)
    counts[0, 4], counts[0, 9] = 200, 2
    means[0, 9] = 0.8
    return draw(means, counts, noise=0.1).statistics


@pytest.mark.parametrize("method", [solve, converge])
def test_alpha_0_picks_actions_that_nobody_tried_and_alpha_75_does_not(method):
    statistics = gate_bandit()
    plain = decide(method(statistics, 0.0).q, statistics, "last")
    assert (plain.actions[:4] >= 15).all()
    assert (plain.support[:4] == 0).all()
    assert (plain.confidence[:4] == 0).all()
    careful = decide(method(statistics, 0.75).q, statistics, "last")
    assert (careful.actions[:4] == 6).all()
    assert (careful.support[:4] == 60).all()
    assert (careful.confidence[:4] > 0.99).all()


def test_alpha_0_takes_the_lucky_action_and_alpha_75_the_supported_one():
    statistics = lucky_bandit()
    plain, careful = (decide(solve(statistics, a).q, statistics, "first") for a in (0.0, 0.75))
    assert plain.actions.tolist() == [9] and plain.support.tolist() == [2]
    assert careful.actions.tolist() == [4] and careful.support.tolist() == [200]
    assert careful.confidence[0] < 0.5  # the means alone say 9


def test_pessimism_about_a_rare_action_grows_with_alpha():
    statistics = lucky_bandit()
    leads = [
        float(q[0, 9] - q[0, 4]) for q in (solve(statistics, alpha).q for alpha in (0.0, *ALPHAS))
    ]
    assert leads[0] > 0
    assert (np.diff(leads) < 0).all()


def test_a_very_large_alpha_imitates_the_behaviour():
    statistics = lucky_bandit()
    q = solve(statistics, 1e5).q
    policy = np.exp(q - q.max()) / np.exp(q - q.max()).sum()
    np.testing.assert_allclose(policy, statistics.shares, atol=1e-3)


@pytest.mark.parametrize(("end", "action"), [("first", 1), ("last", 3)])
def test_ties_and_empty_states_fall_to_the_conservative_end(end, action):
    counts = np.array([[4, 4, 4, 4, 4], [0] * 5])
    sums = np.array([[0.0, 8.0, 2.0, 8.0, -3.0], [0.0] * 5])
    statistics = CellStatistics(counts, sums, counts * 0.1)
    found = decide(solve(statistics, 0.75).q, statistics, end)
    assert found.actions.tolist() == [action, 0 if end == "first" else 4]
    assert found.empty.tolist() == [False, True]
    assert found.records.tolist() == [20, 0]
    assert found.support.tolist() == [4, 0]
    assert found.confidence.tolist() == [0.5, 0.0]
    assert found.values[1] == 0.0


def test_confidence_is_the_normal_tail_of_the_gap_to_the_runner_up():
    counts = np.array([[8, 2, 6]])
    means = np.array([[1.0, 0.7, -5.0]])
    spreads = np.array([[3.0, 1.0, 9.0]])
    found = decide(means, CellStatistics(counts, means * counts, spreads), "first")
    error = np.sqrt(13 / (16 - 3) * (1 / 8 + 1 / 2))
    z = 0.3 / error
    grid = np.linspace(-8, z, 200_001)
    tail = np.exp(-(grid**2) / 2).sum() * (grid[1] - grid[0]) / np.sqrt(2 * np.pi)
    assert found.confidence[0] == pytest.approx(tail, abs=1e-4)


def test_bad_tables_are_refused():
    statistics = CellStatistics.empty(2, 3)
    with pytest.raises(CalibrationError, match="first or last"):
        decide(np.zeros((2, 3)), statistics, "middle")
    with pytest.raises(CalibrationError, match="Q must be"):
        decide(np.zeros((2, 4)), statistics, "first")
    with pytest.raises(CalibrationError, match="Q must be"):
        decide(np.full((2, 3), np.nan), statistics, "first")
