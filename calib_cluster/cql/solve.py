"""The exact minimiser of eq. 1.

States are independent. In one of them, setting the gradient to 0 gives, with Z the log sum of exp,

    Q_a + (alpha / p_a) exp(Q_a - Z) = m_a + alpha        for every supported action a

whose left side increases in Q_a: given Z, ``exp(Q_a - Z) = (p_a / alpha) omega(x_a)`` with the
Wright omega function (omega + log omega = x) at ``x_a = m_a + alpha - Z + log(alpha / p_a)``. What
remains is one equation in Z, that these probabilities sum to 1; its left side is convex and
decreasing, so Newton's method from below the root climbs to it without overshooting.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from calib_cluster.cql.objective import residual
from calib_cluster.cql.statistics import CellStatistics
from calib_cluster.errors import CalibrationError

MAX_STEPS = 200
TOLERANCE = 1e-6


@dataclass(frozen=True, eq=False)
class Solution:
    """A Q table that minimises eq. 1.

    ``q`` float64 [S, A]: an action without records in a state that has some is ``-inf`` for
    alpha > 0, since eq. 1 falls without end as its Q does, and 0, where it started, for alpha = 0.
    States without any record are 0 throughout. ``residual`` float64 [S]: largest absolute gradient
    of each state's part of eq. 1.
    """

    q: np.ndarray
    residual: np.ndarray


def solve(statistics: CellStatistics, alpha: float) -> Solution:
    """Minimise eq. 1 with conservative weight ``alpha`` >= 0.

    Args:
        statistics: of the records, normally ``standardised``.

    Raises:
        CalibrationError: alpha is out of range, or a residual is 1e-6 or more.
    """
    check_alpha(alpha)
    q = np.where(statistics.counts > 0, statistics.means, 0.0)
    used = statistics.totals > 0
    if alpha > 0 and used.any():
        part = CellStatistics(
            statistics.counts[used], statistics.sums[used], statistics.spreads[used]
        )
        q[used] = _conservative(part, alpha)
    left = residual(statistics, q, alpha)
    if not (left < TOLERANCE).all():
        worst = int(np.argmax(left))
        raise CalibrationError(
            f"CQL of state {worst} did not converge: residual {left[worst]:.1e}, alpha {alpha:g}"
        )
    return Solution(q, left)


def check_alpha(alpha: float) -> None:
    """Raise CalibrationError unless ``alpha`` is a finite number of at least 0."""
    if not math.isfinite(alpha) or alpha < 0:
        raise CalibrationError(f"CQL alpha must be a number >= 0, found {alpha!r}")


def _conservative(statistics: CellStatistics, alpha: float) -> np.ndarray:
    """Q [S, A] for alpha > 0; every state has a record."""
    some = statistics.counts > 0
    with np.errstate(divide="ignore"):
        log_share = np.where(some, np.log(statistics.shares) - math.log(alpha), -np.inf)
    shifted = np.where(some, statistics.means + alpha - log_share, 0.0)
    # no Q is above m + alpha and at least one is not below its m (some softmax_a <= p_a)
    z = np.where(some, statistics.means, np.inf).min(axis=1)
    for _ in range(MAX_STEPS):
        log_policy, rate = _log_policy(shifted, log_share, z)
        policy = np.exp(log_policy)
        step = (policy.sum(axis=1) - 1) / (policy * rate).sum(axis=1)
        z = z + step
        if np.abs(step).max() <= 1e-13 * (1 + np.abs(z).max()):
            break
    return z[:, None] + _log_policy(shifted, log_share, z)[0]


def _log_policy(
    shifted: np.ndarray, log_share: np.ndarray, z: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """log softmax_a implied by Z, and minus its derivative by Z."""
    log_omega = log_wright_omega(shifted - z[:, None])
    return log_share + log_omega, 1 / (1 + np.exp(log_omega))


def log_wright_omega(x: np.ndarray) -> np.ndarray:
    """y with ``exp(y) + y = x``, elementwise: the log of Wright's omega function."""
    y = np.where(x > 1, np.log(np.maximum(x, 1.0)), x)  # at or above the root of a convex function
    for _ in range(MAX_STEPS):
        step = (np.exp(y) + y - x) / (np.exp(y) + 1)
        y = y - step
        if np.abs(step).max(initial=0) <= 1e-15 * (1 + np.abs(y).max(initial=0)):
            break
    return y
