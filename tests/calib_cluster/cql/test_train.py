"""AdamW: run to convergence it is the solver; run as the paper does it is where it is."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from calib_cluster.cql import Recipe, Schedule, converge, objective, solve, train
from calib_cluster.cql.train import PAPER
from calib_cluster.errors import CalibrationError
from tests.calib_cluster.cql.bandits import Records, draw


def uneven(seed: int = 0, states: int = 8, actions: int = 21) -> Records:
    """Records of a table where some cells, and state 3, have none."""
    rng = np.random.default_rng(seed)
    counts = rng.integers(1, 30, (states, actions))
    counts[rng.random(counts.shape) < 0.2] = 0
    counts[3] = 0
    return draw(rng.normal(size=counts.shape), counts, seed=seed).standardised()


@pytest.mark.parametrize("alpha", [0.0, 0.1, 0.75, 3.0])
def test_at_convergence_it_agrees_with_the_exact_solution(alpha):
    statistics = uneven().statistics
    trained, exact = converge(statistics, alpha), solve(statistics, alpha)
    assert trained.residual.max() < 1e-6
    some = statistics.counts > 0
    np.testing.assert_allclose(trained.q[some], exact.q[some], atol=1e-3)
    low = trained.q[~some & (statistics.totals > 0)[:, None]]
    assert (low == 0).all() if alpha == 0 else (low < trained.q[some].min()).all()
    if alpha > 0:
        finite = np.where(some, trained.q, -np.inf)
        finite[statistics.totals == 0] = 0.0
        gap = objective(statistics, finite, alpha) - objective(statistics, exact.q, alpha)
        assert 0 <= gap < 1e-9


@given(st.integers(0, 10_000), st.sampled_from([0.2, 0.75]))
@settings(max_examples=8, deadline=None)
def test_at_convergence_the_chosen_actions_are_the_same(seed, alpha):
    statistics = uneven(seed, 4, 6).statistics
    trained, exact = converge(statistics, alpha), solve(statistics, alpha)
    best = np.sort(exact.q, axis=1)
    clear = (best[:, -1] - best[:, -2] > 1e-3) & (statistics.totals > 0)
    same = trained.q.argmax(axis=1) == exact.q.argmax(axis=1)
    assert same[clear].all()


def test_too_few_steps_are_said_to_be():
    with pytest.raises(CalibrationError, match="did not converge in 5 steps"):
        converge(uneven().statistics, 0.75, Schedule(max_steps=5))


def test_the_papers_recipe():
    assert (PAPER.learning_rate, PAPER.epochs, PAPER.batch) == (3e-4, 10, 4096)
    records = uneven()
    args = (records.states, records.actions, records.rewards, records.shape)
    found = train(*args, 0.75)
    assert found.steps == 10 * -(-len(records.states) // 4096)
    # Adam's step is the learning rate at most (to its warm-up): the table has hardly moved
    assert np.abs(found.q).max() <= 1.01 * 3e-4 * found.steps
    again = train(*args, 0.75)
    np.testing.assert_array_equal(found.q, again.q)


def test_minibatches_descend_the_same_objective():
    records = uneven()
    recipe = Recipe(learning_rate=0.02, epochs=600, batch=512, weight_decay=0.0)
    args = (records.states, records.actions, records.rewards, records.shape)
    found = train(*args, 0.75, recipe)
    statistics = records.statistics
    exact = objective(statistics, solve(statistics, 0.75).q, 0.75)
    started = objective(statistics, np.zeros(records.shape), 0.75)
    reached = objective(statistics, found.q, 0.75)
    assert reached - exact < 0.02 * (started - exact)


def test_another_order_of_the_records_is_another_seed():
    records = uneven()
    args = (records.states, records.actions, records.rewards, records.shape)
    recipes = [Recipe(batch=256, seed=seed) for seed in (0, 1)]
    one, two = (train(*args, 0.75, recipe).q for recipe in recipes)
    assert (one != two).any()


def test_nothing_to_train_on_is_refused():
    none = np.zeros(0, dtype=np.int64)
    with pytest.raises(CalibrationError, match="no records"):
        train(none, none, np.zeros(0), (2, 3), 0.75)
