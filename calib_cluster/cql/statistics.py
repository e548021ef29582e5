"""Sufficient statistics of eq. 1: count, sum and spread of the rewards in each cell."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import msgspec
import numpy as np

from calib_cluster.errors import CalibrationError


class Scale(msgspec.Struct, frozen=True):
    """How rewards were standardised: ``(reward - mean) / deviation``."""

    mean: float
    deviation: float


@dataclass(frozen=True, eq=False)
class CellStatistics:
    """Rewards of all records of a table with S states and A actions, by cell.

    Args:
        counts: int64 [S, A], records.
        sums: float64 [S, A], their rewards added up.
        spreads: float64 [S, A], squared deviations from the cell's own mean, added up (kept
            instead of squared rewards, which cancel where the mean is large).

    ``a + b`` are the statistics of both sets of records.

    Raises:
        CalibrationError: shapes differ, or a count is negative.
    """

    counts: np.ndarray
    sums: np.ndarray
    spreads: np.ndarray

    def __post_init__(self) -> None:
        shapes = {self.counts.shape, self.sums.shape, self.spreads.shape}
        if len(shapes) > 1 or self.counts.ndim != 2 or not self.counts.shape[1]:
            raise CalibrationError(f"cell statistics must be one [states, actions], found {shapes}")
        if (self.counts < 0).any():
            raise CalibrationError("cell statistics hold a negative count")

    @classmethod
    def empty(cls, states: int, actions: int) -> CellStatistics:
        """No records yet."""
        zeros = np.zeros((states, actions))
        return cls(np.zeros((states, actions), dtype=np.int64), zeros, zeros)

    @classmethod
    def of(
        cls,
        states: np.ndarray,
        actions: np.ndarray,
        rewards: np.ndarray,
        shape: tuple[int, int],
    ) -> CellStatistics:
        """Statistics of n records: ``states``, ``actions`` integers [n], ``rewards`` floats [n].

        ``shape`` is (S, A).

        Raises:
            CalibrationError: a state or action outside ``shape``, or a reward that is not finite.
        """
        for name, index, limit in (("state", states, shape[0]), ("action", actions, shape[1])):
            if index.size and not 0 <= index.min() <= index.max() < limit:
                raise CalibrationError(
                    f"records have {name}s {index.min()}..{index.max()}, accepted are "
                    f"0..{limit - 1}"
                )
        if not np.isfinite(rewards).all():
            raise CalibrationError("records hold a reward that is not finite")
        cells, size = states.astype(np.int64) * shape[1] + actions, shape[0] * shape[1]
        counts = np.bincount(cells, minlength=size)
        sums = np.bincount(cells, weights=rewards, minlength=size)
        means = sums / np.maximum(counts, 1)
        spreads = np.bincount(cells, weights=(rewards - means[cells]) ** 2, minlength=size)
        return cls(counts.reshape(shape), sums.reshape(shape), spreads.reshape(shape))

    def __add__(self, other: CellStatistics) -> CellStatistics:
        both = np.maximum(self.counts + other.counts, 1)
        gap = self.means - other.means
        between = gap**2 * self.counts * other.counts / both
        return CellStatistics(
            self.counts + other.counts,
            self.sums + other.sums,
            self.spreads + other.spreads + between,
        )

    @cached_property
    def means(self) -> np.ndarray:
        """float64 [S, A], mean reward; 0 in cells without a record."""
        return self.sums / np.maximum(self.counts, 1)

    @cached_property
    def totals(self) -> np.ndarray:
        """int64 [S], records of each state."""
        return self.counts.sum(axis=1)

    @cached_property
    def shares(self) -> np.ndarray:
        """float64 [S, A], pi_beh(a | s) as the records show it; rows of empty states are 0."""
        return self.counts / np.maximum(self.totals, 1)[:, None]

    def standardised(self) -> tuple[CellStatistics, Scale]:
        """The same records with rewards of mean 0 and standard deviation 1 over the whole table.

        The paper's alpha has a meaning only on such a scale. Rewards that are all equal become 0.
        """
        total = max(int(self.counts.sum()), 1)
        mean = float(self.sums.sum()) / total
        between = (self.counts * (self.means - mean) ** 2).sum()
        deviation = float(np.sqrt((self.spreads.sum() + between) / total))
        # equal rewards differ by rounding only: to divide by that would make noise of them
        if deviation <= 1e-12 * max(abs(mean), 1e-300):
            deviation = 1.0
        sums = (self.sums - self.counts * mean) / deviation
        scaled = CellStatistics(self.counts, sums, self.spreads / deviation**2)
        return scaled, Scale(mean, deviation)
