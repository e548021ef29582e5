"""Eq. 1 as a function of the whole Q table, and how far a table is from its minimum.

In terms of cells, with p(s) the share of records in state s, p(a | s) that of its actions and
m(s, a) their mean reward::

    sum_s p(s) [ alpha (log sum_a exp Q(s, a) - sum_a p(a | s) Q(s, a))
                 + 1/2 sum_a p(a | s) (Q(s, a) - m(s, a))^2 ] + 1/2 within-cell variance
"""

from __future__ import annotations

import numpy as np

from calib_cluster.cql.statistics import CellStatistics


def log_sum_exp(q: np.ndarray) -> np.ndarray:
    """log of the sum of exp over actions: float64 [S] of [S, A]; -inf where all are -inf."""
    top = q.max(axis=1)
    finite = np.where(np.isfinite(top), top, 0.0)
    with np.errstate(divide="ignore"):
        return finite + np.log(np.exp(q - finite[:, None]).sum(axis=1))


def objective(statistics: CellStatistics, q: np.ndarray, alpha: float) -> float:
    """Eq. 1 of ``q`` float64 [S, A]. States without records add nothing.

    Cells without records may be -inf; they then add nothing either.
    """
    shares, some = statistics.shares, statistics.counts > 0
    seen = np.where(some, q, 0.0)
    used = statistics.totals > 0
    conservative = np.where(used, log_sum_exp(q), 0.0) - (shares * seen).sum(axis=1)
    errors = (shares * (seen - statistics.means) ** 2).sum(axis=1)
    within = statistics.spreads.sum(axis=1) / np.maximum(statistics.totals, 1)
    weights = statistics.totals / max(int(statistics.totals.sum()), 1)
    return float(weights @ (alpha * conservative + (errors + within) / 2))


def gradient(statistics: CellStatistics, q: np.ndarray, alpha: float) -> np.ndarray:
    """Gradient of each state's own part of eq. 1 (not times p(s)): float64 [S, A].

    ``alpha (softmax(Q)_a - p_a) + p_a (Q_a - m_a)``; 0 in states without records and where Q is
    -inf.
    """
    shares, some = statistics.shares, statistics.counts > 0
    errors = shares * (np.where(some, q, 0.0) - statistics.means)
    if alpha == 0:
        return errors
    normaliser = log_sum_exp(q)
    policy = np.exp(q - np.where(np.isfinite(normaliser), normaliser, 0.0)[:, None])
    pulled = alpha * (policy - shares)
    return np.where((statistics.totals > 0)[:, None], pulled + errors, 0.0)


def residual(statistics: CellStatistics, q: np.ndarray, alpha: float) -> np.ndarray:
    """Stationarity residual of each state: the largest absolute gradient, float64 [S]."""
    return np.abs(gradient(statistics, q, alpha)).max(axis=1)
