"""Floors and verdicts by hand, what a suite is cut down to, and where needles are lost."""

from __future__ import annotations

import math

import numpy as np
import pytest

from loadtest.errors import UserError
from loadtest.quality_suite import floors, suites
from loadtest.quality_suite.floors import parse_floors, served_verdicts, verdicts
from loadtest.quality_suite.judging import Cell
from loadtest.quality_suite.results import ServedCase
from loadtest.quality_suite.suites import CI, NIGHTLY, SUITES, chosen

FLOORS = {"needle": 0.9, "labels": 0.9, "text": 0.8}


def cell(task: str, arm: str, budget: int | None, score: float, exact: float = 0.0) -> Cell:
    """A mean; of text the agreement, which is what counts there."""
    accuracy, agreement = (0.0, score) if task == "text" else (score, 0.0)
    return Cell(1024, "aware", task, arm, budget, 8, 1.0, accuracy, exact, 1.0, 0.0, agreement)


def served(arm: str, exact: bool, task: str = "needle", index: int = 0) -> ServedCase:
    return ServedCase(
        arm, task, "aware", 1024, index, "one", 0.5, "d", 1024, 1.0, "", 0.5, exact, 1.0
    )


def test_an_arm_is_below_its_floor_by_share_of_the_full_cache():
    cells = [
        cell("needle", "full", None, 0.8), cell("needle", "nothing", 128, 0.1),
        cell("needle", "a", 128, 0.72), cell("needle", "b", 128, 0.719),
        cell("text", "full", None, 1.0), cell("text", "a", 128, 0.8), cell("text", "b", 128, 0.7),
        cell("answers", "full", None, 1.0), cell("answers", "a", 128, 0.0),
    ]  # fmt: skip
    found = {(v.task, v.arm): v for v in verdicts(cells, FLOORS)}
    assert {key: v.below for key, v in found.items()} == {
        ("needle", "a"): False, ("needle", "b"): True, ("text", "a"): False, ("text", "b"): True,
    }  # fmt: skip
    first = found["needle", "a"]
    assert (first.full, first.nothing, first.floor) == (0.8, 0.1, 0.9)
    assert first.share == pytest.approx(0.9) and found["text", "a"].nothing is None


@pytest.mark.parametrize(
    ("task", "full", "nothing", "signal"),
    [
        ("needle", 0.35, 0.1, True), ("needle", 0.25, 0.1, False), ("labels", 0.4, 0.0, False),
        ("labels", 0.5, 0.0, True), ("labels", 0.5, 0.4, False),
    ],
)  # fmt: skip
def test_a_task_that_the_full_cache_does_not_do_has_no_verdict(task, full, nothing, signal):
    """Above what dropping everything scores, and above chance."""
    cells = [
        cell(task, "full", None, full), cell(task, "nothing", 128, nothing),
        cell(task, "a", 128, 0.0),
    ]  # fmt: skip
    (verdict,) = verdicts(cells, FLOORS)
    assert verdict.signal == verdict.below == signal
    assert verdict.chance == (0.25 if task == "labels" else 0)


def test_served_arms_are_held_to_exact_answers_of_the_judges_full():
    cells = [cell("needle", "full", None, 1.0, 0.75), cell("needle", "nothing", 64, 0.1, 0.0)]
    cases = [served("w", i < 3, index=i) for i in range(4)]
    (verdict,) = served_verdicts(cases, cells, FLOORS)
    assert (verdict.measure, verdict.budget, verdict.score) == ("exact", None, 0.75)
    assert verdict.full == 0.75 and not verdict.below
    cases = [served("w", i < 2, index=i) for i in range(4)]
    assert served_verdicts(cases, cells, FLOORS)[0].below


def test_a_served_full_goes_before_the_judges_and_none_means_no_verdict():
    cells = [cell("needle", "full", None, 1.0, 0.75)]
    cases = [served("full", True), served("w", True)]
    (verdict,) = served_verdicts(cases, cells, FLOORS)
    assert (verdict.arm, verdict.full, verdict.nothing) == ("w", 1.0, None)
    assert served_verdicts([served("w", True)], [], FLOORS) == []


def test_floors_have_defaults_and_can_be_said():
    assert parse_floors([], ["needle", "text"]) == {"needle": 0.9, "text": 0.8}
    assert parse_floors(["needle=.5", "text=0"], ["needle", "text"]) == {"needle": 0.5, "text": 0.0}


@pytest.mark.parametrize(
    ("word", "told"),
    [
        ("needle", "--floor 'needle' is not accepted: give TASK=SHARE, TASK one of needle, text"),
        ("riddle=.5", "TASK one of needle, text"),
        ("needle=high", "give a share from 0 to 1"),
        ("needle=1.5", "give a share from 0 to 1"),
        ("needle=nan", "give a share from 0 to 1"),
    ],
)
def test_bad_floors_are_one_line(word, told):
    with pytest.raises(UserError, match=told):
        parse_floors([word], ["needle", "text"])


def test_what_a_suite_is_cut_down_to():
    cut = chosen(NIGHTLY, ["needle", "text"], 5, 700)
    assert {(p.task, p.protocol, p.length, p.items) for p in cut.parts} == {
        ("needle", "aware", 700, 5), ("needle", "agnostic", 700, 5), ("text", "plain", 700, 5),
    }  # fmt: skip
    assert cut.file_items == 5 and chosen(CI, CI.tasks, None, None) == CI
    with pytest.raises(UserError, match="'riddle' is no task of suite ci: give needle, multikey"):
        chosen(CI, ["riddle"], None, None)


def test_suites_ask_every_task_and_both_protocols():
    every = {"needle", "multikey", "recall", "vartrack", "labels", "text"}
    for suite in SUITES.values():
        assert every <= set(suite.tasks)
        assert {p.protocol for p in suite.parts} == {"aware", "agnostic", "plain"}
        assert all((p.protocol == "plain") == (p.task == "text") for p in suite.parts)
    assert "longanswer" in NIGHTLY.tasks
    assert len({p.length for p in NIGHTLY.parts if p.task == "needle"}) == 3
    assert floors.measure_of("text") == "agreement" and math.isclose(suites.CHANCES["labels"], 0.25)


def test_needles_are_binned_by_depth_and_length():
    from types import SimpleNamespace

    from loadtest.quality_suite.heatmap import BINS, draw, needle_grids

    def case(length: int, depth: float, accuracy: float, task: str = "needle"):
        scores = [
            SimpleNamespace(arm="full", budget=None, accuracy=1.0),
            SimpleNamespace(arm="nothing", budget=64, accuracy=0.1),
            SimpleNamespace(arm="a", budget=64, accuracy=accuracy),
        ]
        return SimpleNamespace(
            task=task, protocol="aware", length=length, depth=depth, scores=scores
        )

    result = SimpleNamespace(
        cases=[
            case(512, 0.05, 0.2), case(512, 0.19, 0.4), case(512, 1.0, 0.9), case(1024, 0.5, 0.7),
            case(512, 0.5, 0.0, task="recall"),
        ],
        served=[served("w", True), served("full", True)],
        settings=SimpleNamespace(policies={"a": ""}, peers={}, model="m"),
    )  # fmt: skip
    lengths, grids = needle_grids(result)
    assert lengths == [512, 1024] and list(grids)[-1] == ("a", 64)
    assert set(grids) == {
        ("full", None), ("nothing", None), ("full (served)", None), ("w", None), ("a", 64),
    }  # fmt: skip
    grid = grids["a", 64]
    assert grid.shape == (BINS, 2) and grid[0, 0] == pytest.approx(0.3) and grid[4, 0] == 0.9
    assert grid[2, 1] == 0.7 and np.isnan(grid).sum() == 7
    assert grids["w", None][2, 1] == 0.5
    shown = draw(result, lengths, grids)
    titles = [axes.get_title() for axes in shown.axes]
    assert "a, 64" in titles and "full (served)" in titles
