"""Paired differences with bootstrap intervals."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np

LEVEL = 0.95
_BLOCK = 1 << 22  # resampled numbers at once: 32 MB of indices


class Interval(msgspec.Struct, frozen=True):
    """Mean of ``n`` paired differences and its 95 % percentile-bootstrap interval."""

    n: int
    mean: float
    low: float
    high: float


def paired_interval(
    ours: Sequence[float], theirs: Sequence[float], resamples: int, seed: int
) -> Interval:
    """Interval of mean(ours - theirs), resampling the pairs. Raises ValueError if there are none.

    Equal differences give an interval of no width: that says what was seen, not that others
    are impossible.
    """
    differences = np.asarray(ours, dtype=np.float64) - np.asarray(theirs, dtype=np.float64)
    if not differences.size:
        raise ValueError("no pairs to compare")
    means = _resampled_means(differences, resamples, np.random.default_rng(seed))
    tail = (1 - LEVEL) / 2
    low, high = np.quantile(means, (tail, 1 - tail))
    return Interval(len(differences), float(differences.mean()), float(low), float(high))


def _resampled_means(values: np.ndarray, resamples: int, rng: np.random.Generator) -> np.ndarray:
    """float64 [resamples]: means of ``values`` [n] drawn n at a time with replacement."""
    n = len(values)
    rows = max(1, _BLOCK // n)
    sizes = [min(rows, resamples - done) for done in range(0, resamples, rows)]
    return np.concatenate([values[rng.integers(n, size=(s, n))].mean(axis=1) for s in sizes])
