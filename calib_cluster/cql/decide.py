"""From a Q table to actions: eq. 5, with what supports each of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch

from calib_cluster.cql.statistics import CellStatistics
from calib_cluster.errors import CalibrationError

TIE = 1e-9
End = Literal["first", "last"]


@dataclass(frozen=True, eq=False)
class Choice:
    """The chosen action of every state and its evidence. All arrays [S].

    Fields:
        actions: int64, argmax of Q.
        values: float64, Q of it (in standardised rewards); 0 in empty states.
        records: int64, records of the state.
        support: int64, records of the chosen action among them.
        confidence: float64 in [0, 1]: how surely the chosen action's mean reward is above that of
            the best other supported action, by a normal approximation with the state's pooled
            variance. .5 is a toss-up, or nothing to compare; below .5 pessimism overruled the
            means; 0 without support. The choice was made on the same records, so it flatters.
        empty: bool, no record at all: the action is the conservative end.
    """

    actions: np.ndarray
    values: np.ndarray
    records: np.ndarray
    support: np.ndarray
    confidence: np.ndarray
    empty: np.ndarray


def decide(q: np.ndarray, statistics: CellStatistics, conservative: End) -> Choice:
    """argmax over actions of ``q`` [S, A], of a table solved or trained on ``statistics``.

    Args:
        conservative: the end of the action grid that keeps more or dares less. Of actions whose Q
            is within 1e-9 of the best, the one nearest to that end is taken, and it is the action
            of states without records. A gate's is ``first``, the lowest threshold.

    Raises:
        CalibrationError: q is NaN somewhere or of another shape, or an unknown ``conservative``.
    """
    if conservative not in ("first", "last"):
        raise CalibrationError(f"conservative must be first or last, found {conservative!r}")
    if q.shape != statistics.counts.shape or np.isnan(q).any():
        raise CalibrationError(f"Q must be {statistics.counts.shape} numbers, found {q.shape}")
    empty = statistics.totals == 0
    best = (q >= q.max(axis=1, keepdims=True) - TIE) | empty[:, None]
    last = q.shape[1] - 1
    actions = best.argmax(axis=1)
    if conservative == "last":
        actions = last - best[:, ::-1].argmax(axis=1)
    rows = np.arange(len(q))
    return Choice(
        actions=actions,
        values=np.where(empty, 0.0, q[rows, actions]),
        records=statistics.totals,
        support=statistics.counts[rows, actions],
        confidence=_confidence(statistics, actions),
        empty=empty,
    )


def _confidence(statistics: CellStatistics, actions: np.ndarray) -> np.ndarray:
    rows, counts = np.arange(len(actions)), statistics.counts
    chosen = counts[rows, actions]
    others = np.where(counts > 0, statistics.means, -np.inf)
    others[rows, actions] = -np.inf
    rival = others.argmax(axis=1)
    # one variance a state: cells are too small for their own
    cells = (counts > 0).sum(axis=1)
    freedom = statistics.totals - cells
    variance = statistics.spreads.sum(axis=1) / np.maximum(freedom, 1)
    rivals = counts[rows, rival]
    known = (chosen > 0) & (cells > 1) & (freedom > 0)
    error = np.sqrt(variance * (1 / np.maximum(chosen, 1) + 1 / np.maximum(rivals, 1)))
    gap = statistics.means[rows, actions] - statistics.means[rows, rival]
    with np.errstate(divide="ignore", invalid="ignore"):
        score = np.where(gap == 0, 0.0, gap / error)  # no spread: sure
    sure = torch.special.ndtr(torch.from_numpy(np.where(known, score, 0.0))).numpy()
    return np.where(known, sure, np.where(chosen > 0, 0.5, 0.0))
