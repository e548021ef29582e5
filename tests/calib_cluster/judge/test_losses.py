"""Which arm loses least everywhere, on columns worked out by hand."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from calib_cluster.judge.losses import losses
from calib_cluster.judge.results import Cell, Loss


def answers(task: str, arm: str, accuracy: float, budget: int | None = 64) -> Cell:
    return Cell(512, "aware", task, arm, budget, 4, 64.0, accuracy, 0.0, 1.0, 0.5, 0.9)


def text(arm: str, kl: float, budget: int | None = 64) -> Cell:
    return Cell(512, "plain", "text", arm, budget, 4, 64.0, 0.5, 0.0, 1.0, kl, 0.9)


def test_the_smallest_worst_loss_is_first_and_says_where_it_is():
    cells = [
        answers("needle", "full", 1.0, None), text("full", 0.0, None),
        answers("answers", "even", 0.1), answers("answers", "sharp", 1.0),
        answers("needle", "even", 0.6), answers("needle", "sharp", 0.8),
        text("even", 0.2), text("sharp", 0.5),
        text("even", 0.1, 128), text("sharp", 0.1, 128),
    ]  # fmt: skip
    even, sharp = losses(cells)
    assert even == Loss("even", pytest.approx(1 - 0.6 / 0.8), pytest.approx(0.25 / 3), 512,
                        "aware", "needle", 64, 3)  # fmt: skip
    assert sharp == Loss(
        "sharp", pytest.approx(0.6), pytest.approx(0.2), 512, "plain", "text", 64, 3
    )


def test_the_mean_decides_between_equal_worst_losses():
    cells = [
        answers("needle", "a", 0.5), answers("needle", "b", 1.0),
        answers("recall", "a", 1.0), answers("recall", "b", 0.5),
        answers("multikey", "a", 0.8), answers("multikey", "b", 1.0),
    ]  # fmt: skip
    assert [loss.arm for loss in losses(cells)] == ["b", "a"]


def test_a_column_that_nobody_answers_is_no_loss_of_anybody():
    cells = [answers("needle", arm, 0.0) for arm in "ab"] + [text(arm, 0.0) for arm in "ab"]
    assert [(loss.worst, loss.mean) for loss in losses(cells)] == [(0.0, 0.0)] * 2


def test_of_the_full_cache_alone_there_is_nothing_to_say():
    assert losses([answers("needle", "full", 1.0, None)]) == []


@given(st.lists(st.tuples(st.floats(0, 1), st.floats(0, 5)), min_size=1, max_size=6))
def test_losses_lie_in_the_unit_interval_and_a_column_has_a_winner(values):
    needles = [answers("needle", str(i), a) for i, (a, _) in enumerate(values)]
    texts = [text(str(i), kl) for i, (_, kl) in enumerate(values)]
    for column in (needles, texts):
        found = losses(column)
        assert found[0].worst == 0.0
        assert all(0 <= loss.worst <= 1 for loss in found)
