"""Means of every cell, and paired differences of one arm with every other."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence

import numpy as np

from calib_cluster.judge.arms import FULL
from calib_cluster.judge.items import PLAIN, PROTOCOLS, TEXT
from calib_cluster.judge.results import CaseResult, Cell, Difference
from calib_cluster.judge.scoring import Score
from calib_cluster.judge.tasks import TASKS
from kvpolicy.bootstrap import paired_interval

ANSWERS = "answers"
"""All tasks that have an answer, together."""
ANSWER_MEASURES = ("accuracy", "exact", "nll")
TEXT_MEASURES = ("kl", "nll", "agreement")
RESAMPLES = 2000
Group = tuple[int, str, str]  # length, protocol, task
Arm = tuple[str, int | None]  # name, budget


def grouped(cases: Sequence[CaseResult]) -> dict[Group, list[CaseResult]]:
    """Cases of each length, protocol and task, by item; before its tasks, all answers of a length
    and protocol together. In the order in which protocols and tasks are listed."""
    groups: dict[Group, list[CaseResult]] = defaultdict(list)
    for case in sorted(cases, key=lambda case: (_place(*case.key[:3]), case.index)):
        if case.task != TEXT:
            groups[case.length, case.protocol, ANSWERS].append(case)
        groups[case.length, case.protocol, case.task].append(case)
    return dict(groups)


def _place(length: int, protocol: str, task: str) -> tuple[int, int, int, str]:
    known = list(TASKS)  # tasks of files come after them, in the order of their names
    place = known.index(task) if task in known else len(known)
    return length, (*PROTOCOLS, PLAIN).index(protocol), place, task


def measures_of(task: str) -> tuple[str, ...]:
    """What is worth comparing in a task."""
    return TEXT_MEASURES if task == TEXT else ANSWER_MEASURES


def cells(cases: Sequence[CaseResult]) -> list[Cell]:
    """Means of every arm in every group, in the order of ``grouped`` and of the arms."""
    return [
        Cell(*group, *arm, len(scores), *(_mean(scores, name) for name in _FIELDS))
        for group, members in grouped(cases).items()
        for arm, scores in by_arm(members).items()
    ]


_FIELDS = ("kept", "accuracy", "exact", "nll", "kl", "agreement")


def by_arm(cases: Sequence[CaseResult]) -> dict[Arm, list[Score]]:
    """Scores of each arm and budget, case by case."""
    scores: dict[Arm, list[Score]] = {}
    for case in cases:
        for score in case.scores:
            scores.setdefault((score.arm, score.budget), []).append(score)
    return scores


def values(scores: Sequence[Score], measure: str) -> np.ndarray:
    """float64 [n] of one measure."""
    return np.array([getattr(score, measure) for score in scores], dtype=np.float64)


def _mean(scores: Sequence[Score], measure: str) -> float:
    return float(values(scores, measure).mean())


def differences(
    cases: Sequence[CaseResult], against: str, resamples: int = RESAMPLES, seed: int = 0
) -> list[Difference]:
    """``against`` minus every other arm at each budget, and minus the full cache."""
    return [
        difference
        for group, members in grouped(cases).items()
        for difference in _of_group(group, by_arm(members), against, resamples, seed)
    ]


def _of_group(
    group: Group, scores: dict[Arm, list[Score]], against: str, resamples: int, seed: int
) -> Iterator[Difference]:
    for (name, budget), theirs in scores.items():
        if name == against:
            continue
        budgets = [b for arm, b in scores if arm == against] if name == FULL else [budget]
        for at in budgets:
            ours = scores[against, at]
            for measure in measures_of(group[2]):
                interval = paired_interval(
                    values(ours, measure), values(theirs, measure), resamples, seed
                )
                yield Difference(*group, at, against, name, measure, interval)
