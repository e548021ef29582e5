"""Equation 8 row by row: candidates, budget, ties, what is always kept."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvpolicy.retention import RetentionRule
from kvpolicy.retention.select import select
from tests.kvpolicy.retention import literal

# few distinct values, so that most rows have ties, also at the threshold
LEVELS = (0.0, 0.5, 0.75, 0.9, 1.0, 3.0)
RULES = st.builds(
    RetentionRule,
    name=st.just("rule"),
    observe=st.integers(1, 12),
    keep_window=st.booleans(),
    floor=st.integers(1, 5),
)


@st.composite
def rows(draw):
    """(scores [R, T], thresholds [R] or None, budgets [R])."""
    count, length = draw(st.integers(1, 4)), draw(st.integers(1, 20))
    cell = st.sampled_from(LEVELS)
    line = st.lists(cell, min_size=length, max_size=length)
    scores = draw(st.lists(line, min_size=count, max_size=count))
    thresholds = draw(st.none() | st.lists(cell, min_size=count, max_size=count))
    budgets = draw(st.lists(st.integers(0, 24), min_size=count, max_size=count))
    return scores, thresholds, budgets


def run(scores, thresholds, budgets, rule, width=None):
    tensor = torch.tensor(scores, dtype=torch.float32)
    taus = None if thresholds is None else torch.tensor(thresholds, dtype=torch.float32)
    width = width or max(1, min(max(budgets), tensor.shape[1]))
    return select(tensor, taus, torch.tensor(budgets), rule, width)


def plain(kept) -> list[list[int]]:
    """Kept positions as lists; the padding must be -1 and last."""
    found = []
    for row, count in zip(kept.positions.tolist(), kept.counts.tolist(), strict=True):
        assert row[count:] == [-1] * (len(row) - count)
        found.append(row[:count])
    return found


@settings(deadline=None, max_examples=400)
@given(case=rows(), rule=RULES)
def test_equals_the_literal_selection(case, rule):
    scores, thresholds, budgets = case
    kept = run(scores, thresholds, budgets, rule)
    assert kept.positions.dtype == kept.counts.dtype == torch.int64
    taus = thresholds or [None] * len(scores)
    expected = [
        literal.select(np.float32(row).tolist(), None if tau is None else np.float32(tau), b, rule)
        for row, tau, b in zip(scores, taus, budgets, strict=True)
    ]
    assert plain(kept) == expected


@settings(deadline=None, max_examples=100)
@given(case=rows(), rule=RULES)
def test_budget_order_and_last_token(case, rule):
    scores, thresholds, budgets = case
    length = len(scores[0])
    for row, budget in zip(plain(run(scores, thresholds, budgets, rule)), budgets, strict=True):
        assert 1 <= len(row) <= max(1, budget) and row == sorted(set(row))
        assert row[-1] == length - 1
        if rule.keep_window:
            last = min(rule.observe, length, max(1, budget))
            assert row[-last:] == list(range(length - last, length))


def test_ties_go_to_the_lower_position():
    rule = RetentionRule("rule")
    kept = run([[1.0, 2.0, 2.0, 2.0, 0.0, 0.0]], None, [3], rule)
    assert plain(kept) == [[1, 2, 5]]


def test_a_large_tie_stays_in_order():
    # unstable sorts show only on long rows
    kept = run([[1.0] * 5000], None, [100], RetentionRule("rule"))
    assert plain(kept) == [[*range(99), 4999]]


def test_threshold_is_inclusive_and_may_keep_fewer_than_the_budget():
    scores = [[0.9, 0.5, 1.0, 0.75, 0.0]]
    rule = RetentionRule("rule")
    assert plain(run(scores, [0.9], [4], rule)) == [[0, 2, 4]]
    assert plain(run(scores, [0.95], [4], rule)) == [[2, 4]]


def test_the_floor_keeps_the_best_below_the_threshold():
    scores = [[0.1, 0.4, 0.3, 0.2, 0.0]]
    for floor, expected in [(1, [1, 4]), (2, [1, 2, 4]), (9, [0, 1, 2, 3, 4])]:
        assert plain(run(scores, [9.0], [5], RetentionRule("rule", floor=floor))) == [expected]
    assert plain(run(scores, [9.0], [2], RetentionRule("rule", floor=9))) == [[1, 4]]


def test_the_last_token_alone_fills_a_budget_of_one():
    scores = [[5.0, 4.0, 0.0]]
    for keep in (False, True):
        rule = RetentionRule("rule", keep_window=keep)
        assert plain(run(scores, None, [1], rule)) == [[2]]
        assert plain(run(scores, None, [0], rule)) == [[2]]


def test_a_window_larger_than_the_budget_leaves_its_end():
    rule = RetentionRule("rule", observe=4, keep_window=True)
    scores = [[9.0, 0.0, 0.0, 0.0, 0.0, 0.0]]
    assert plain(run(scores, None, [3], rule)) == [[3, 4, 5]]
    assert plain(run(scores, None, [5], rule)) == [[0, 2, 3, 4, 5]]


def test_rows_may_have_different_budgets_and_the_width_limits_them():
    scores = [[1.0, 3.0, 2.0, 0.0]] * 2
    rule = RetentionRule("rule")
    assert plain(run(scores, None, [2, 4], rule)) == [[1, 3], [0, 1, 2, 3]]
    narrow = run(scores, None, [2, 4], rule, width=3)
    assert narrow.positions.shape == (2, 3) and plain(narrow) == [[1, 3], [1, 2, 3]]
