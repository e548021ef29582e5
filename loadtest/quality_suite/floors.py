"""Which arms fall below a task's floor: a share of what the full cache scores."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import msgspec

from loadtest.errors import UserError
from loadtest.quality_suite.suites import CHANCES, FLOOR, FLOORS, NOTHING, TEXT

if TYPE_CHECKING:
    from loadtest.quality_suite.judging import Cell
    from loadtest.quality_suite.results import ServedCase

FULL = "full"
SIGNAL = 0.2
"""A task says something if the full cache scores at least this much above what no cache does."""
ROUNDING = 1e-9


class Verdict(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One arm on one task at one budget (None: served, which has none).

    ``score``, ``full`` and ``nothing`` (every token dropped; None where not measured) are means of
    ``measure``; ``chance`` what a guess scores; ``floor`` the share of ``full`` to keep. ``below``:
    it keeps less. ``signal``: the task tells the full cache from nothing here, so that a verdict
    means something.
    """

    length: int
    protocol: str
    task: str
    arm: str
    budget: int | None
    measure: str
    score: float
    full: float
    nothing: float | None
    chance: float
    floor: float
    signal: bool
    below: bool

    @property
    def share(self) -> float:
        """Of the full cache's score that is kept."""
        return self.score / self.full if self.full else 0.0

    @property
    def key(self) -> tuple[int, str, str, str, int | None]:
        """What no other verdict shares."""
        return self.length, self.protocol, self.task, self.arm, self.budget


def measure_of(task: str) -> str:
    """The score that a floor is about: answer tokens that are right; of text, the same tokens."""
    return "agreement" if task == TEXT else "accuracy"


def parse_floors(words: Sequence[str], tasks: Sequence[str]) -> dict[str, float]:
    """Floor of every one of ``tasks``: its default, or what ``TASK=SHARE`` says.

    Raises UserError for another task, or a share outside 0 to 1.
    """
    floors = {task: FLOORS.get(task, FLOOR) for task in tasks}
    for word in words:
        task, mark, share = word.partition("=")
        if not mark or task not in floors:
            raise UserError(
                f"--floor {word!r} is not accepted: give TASK=SHARE, TASK one of "
                f"{', '.join(floors)}"
            )
        try:
            value = float(share)
        except ValueError:
            value = -1.0
        if not 0 <= value <= 1:
            raise UserError(f"--floor {word!r} is not accepted: give a share from 0 to 1")
        floors[task] = value
    return floors


def verdicts(cells: Sequence[Cell], floors: Mapping[str, float]) -> list[Verdict]:
    """A verdict for every cell of an arm, on every task with a floor."""
    found = []
    for group in dict.fromkeys((c.length, c.protocol, c.task) for c in cells):
        task = group[2]
        if task not in floors:
            continue
        members = [c for c in cells if (c.length, c.protocol, c.task) == group]
        measure = measure_of(task)
        full = next(getattr(c, measure) for c in members if c.arm == FULL)
        nothing = next((getattr(c, measure) for c in members if c.arm == NOTHING), None)
        for cell in members:
            if cell.arm not in (FULL, NOTHING):
                score = getattr(cell, measure)
                found.append(
                    judged(group, cell.arm, cell.budget, measure, score, full, nothing, floors)
                )
    return found


def served_verdicts(
    cases: Sequence[ServedCase], cells: Sequence[Cell], floors: Mapping[str, float]
) -> list[Verdict]:
    """Verdicts on served arms, by the share of answers that are exact.

    That is one number whether greedy decoding is run or, as in the judge, follows from what is most
    likely. The reference is a served arm called ``full``, else the judge's. Without either: none.
    """
    means: dict[tuple[int, str, str], dict[str, list[bool]]] = {}
    for case in cases:
        group = case.length, case.protocol, case.task
        means.setdefault(group, {}).setdefault(case.arm, []).append(case.exact)
    judge = {(c.length, c.protocol, c.task, c.arm): c.exact for c in cells}
    found = []
    for group, arms in means.items():
        scores = {arm: sum(exact) / len(exact) for arm, exact in arms.items()}
        full = scores.get(FULL, judge.get((*group, FULL)))
        nothing = judge.get((*group, NOTHING))
        if full is None or group[2] not in floors:
            continue
        found += [
            judged(group, arm, None, "exact", score, full, nothing, floors)
            for arm, score in scores.items()
            if arm != FULL
        ]
    return found


def judged(
    group: tuple[int, str, str],
    arm: str,
    budget: int | None,
    measure: str,
    score: float,
    full: float,
    nothing: float | None,
    floors: Mapping[str, float],
) -> Verdict:
    """The verdict on one score."""
    task = group[2]
    chance, floor = CHANCES.get(task, 0.0), floors[task]
    signal = full - max(chance, nothing or 0.0) >= SIGNAL
    below = signal and score < floor * full - ROUNDING
    return Verdict(*group, arm, budget, measure, score, full, nothing, chance, floor, signal, below)
