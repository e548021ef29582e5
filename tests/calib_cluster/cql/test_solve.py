"""The exact minimiser against eq. 1 written out, a grid, and what theory says of it."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from calib_cluster.cql import CellStatistics, gradient, objective, residual, solve
from calib_cluster.cql.solve import log_wright_omega
from calib_cluster.errors import CalibrationError
from tests.calib_cluster.cql.bandits import draw, literal_loss, minimise_literally

ALPHAS = (0.0, 1e-6, 0.1, 0.75, 3.0, 100.0)


def random_statistics(seed: int, states: int, actions: int, empty: float) -> CellStatistics:
    rng = np.random.default_rng(seed)
    counts = rng.integers(1, 40, (states, actions))
    counts[rng.random(counts.shape) < empty] = 0
    means = rng.normal(size=counts.shape) * rng.choice([0.1, 1.0, 5.0])
    return CellStatistics(counts, means * counts, rng.random(counts.shape) * counts)


@pytest.mark.parametrize("alpha", [0.0, 0.75, 4.0])
def test_objective_and_gradient_are_those_of_eq_1_over_the_records(alpha):
    counts = np.array([[3, 1, 2], [1, 4, 1]])
    records = draw(np.zeros((2, 3)), counts)
    q = torch.from_numpy(np.random.default_rng(1).normal(size=(2, 3))).requires_grad_()
    loss = literal_loss(q, records, alpha)
    loss.backward()
    statistics = records.statistics
    table = q.detach().numpy()
    assert objective(statistics, table, alpha) == pytest.approx(loss.item(), rel=1e-12)
    weights = statistics.totals[:, None] / statistics.totals.sum()
    found = gradient(statistics, table, alpha) * weights
    np.testing.assert_allclose(found, q.grad.numpy(), atol=1e-12)


@pytest.mark.parametrize("alpha", [0.1, 0.75, 3.0])
def test_it_is_the_minimum_that_lbfgs_finds_of_eq_1_over_the_records(alpha):
    counts = np.array([[5, 1, 2, 3], [1, 1, 9, 2]])
    records = draw(np.array([[0.0, 2.0, 1.0, -1.0], [1.0, 0.0, -2.0, 0.5]]), counts)
    expected = minimise_literally(records, alpha)
    np.testing.assert_allclose(solve(records.statistics, alpha).q, expected, atol=1e-5)


@pytest.mark.parametrize("alpha", [0.2, 0.75, 5.0])
def test_no_point_of_a_grid_around_it_is_better(alpha):
    statistics = random_statistics(3, 1, 2, 0.0)
    found = solve(statistics, alpha).q
    least = objective(statistics, found, alpha)
    for a, b in itertools.product(np.linspace(-4, 4, 81), repeat=2):
        assert objective(statistics, found + np.array([[a, b]]), alpha) >= least - 1e-12


@given(
    st.integers(0, 2**31), st.integers(1, 6), st.integers(1, 29), st.floats(0, 0.9),
    st.sampled_from(ALPHAS),
)  # fmt: skip
@settings(max_examples=150, deadline=None)
def test_stationary_whatever_the_counts(seed, states, actions, empty, alpha):
    statistics = random_statistics(seed, states, actions, empty)
    solution = solve(statistics, alpha)
    assert solution.residual.max() < 1e-6
    np.testing.assert_array_equal(solution.residual, residual(statistics, solution.q, alpha))
    some, used = statistics.counts > 0, statistics.totals > 0
    assert np.isfinite(solution.q[some]).all()
    bottom = 0.0 if alpha == 0 else -np.inf
    assert (solution.q[~some & used[:, None]] == bottom).all()
    assert (solution.q[~used] == 0).all()


@given(st.integers(0, 2**31), st.integers(2, 10), st.floats(0, 0.5))
@settings(max_examples=60, deadline=None)
def test_a_larger_alpha_never_fits_better_nor_is_less_conservative(seed, actions, empty):
    """Weights of a sum trade its parts off: the penalty falls with alpha, the error rises."""
    statistics = random_statistics(seed, 2, actions, empty)
    penalties, errors = [], []
    for alpha in (0.05, 0.2, 0.5, 0.75, 1.0, 2.0, 10.0):
        q = solve(statistics, alpha).q
        error = objective(statistics, q, 0.0)
        errors.append(error)
        penalties.append((objective(statistics, q, alpha) - error) / alpha)
    assert (np.diff(penalties) <= 1e-9).all()
    assert (np.diff(errors) >= -1e-9).all()


@given(st.integers(0, 2**31), st.sampled_from(ALPHAS))
@settings(max_examples=40, deadline=None)
def test_an_even_behaviour_leaves_the_order_of_the_means(seed, alpha):
    """Pessimism is about support: with equal counts nothing but the means can decide."""
    rng = np.random.default_rng(seed)
    counts = np.full((3, 6), 7)
    means = rng.normal(size=counts.shape)
    q = solve(CellStatistics(counts, means * 7, counts * 0.5), alpha).q
    np.testing.assert_array_equal(q.argsort(axis=1), means.argsort(axis=1))


def test_one_record_of_one_action():
    statistics = CellStatistics(
        np.array([[0, 1, 0]]), np.array([[0.0, 2.5, 0.0]]), np.zeros((1, 3))
    )
    assert solve(statistics, 0.75).q.tolist() == [[-np.inf, pytest.approx(2.5), -np.inf]]
    assert solve(statistics, 0.0).q.tolist() == [[0.0, 2.5, 0.0]]


def test_no_records_at_all():
    solution = solve(CellStatistics.empty(2, 3), 0.75)
    assert solution.q.tolist() == [[0.0] * 3] * 2
    assert solution.residual.tolist() == [0.0, 0.0]


@pytest.mark.parametrize("alpha", [-0.1, float("nan"), float("inf")])
def test_bad_alpha_is_refused(alpha):
    with pytest.raises(CalibrationError, match="alpha must be a number >= 0"):
        solve(CellStatistics.empty(1, 2), alpha)


@given(st.floats(-700, 1e6))
def test_wright_omega(x):
    y = float(log_wright_omega(np.array([x]))[0])
    assert np.exp(y) + y == pytest.approx(x, rel=1e-12, abs=1e-12)
