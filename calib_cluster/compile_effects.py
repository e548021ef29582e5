"""What each action adds to a loss that many actions share: the link between the two tables.

In a factorial record every head and every layer has drawn its action at once, so one head's
rewards carry the noise of all others. The effects of all actions are estimated together, as random
effects: ``reward = sum over states of effect(state, action taken) + noise``, one state after
another against what the others leave unexplained, each shrunk by how much of its table's variance
is noise. Fitted so, each table sees the rewards with the other's part accounted for (section 4).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from calib_cluster.cql import CellStatistics


@dataclass(frozen=True, eq=False)
class Factor:
    """One kv head, or one layer in all its risk cells.

    ``states`` int64 [n], the state of each evaluation within the factor; ``actions`` int64 [n];
    ``drawn`` bool [n], whether the behaviour drew it; ``shape`` (states, actions); ``places``
    int64 [states], the states' numbers in their table.
    """

    states: np.ndarray
    actions: np.ndarray
    drawn: np.ndarray
    shape: tuple[int, int]
    places: np.ndarray

    def statistics(self, rewards: np.ndarray) -> CellStatistics:
        """Statistics of the evaluations that drew it; ``rewards`` float64 [n] of all."""
        rows = self.drawn
        return CellStatistics.of(self.states[rows], self.actions[rows], rewards[rows], self.shape)


class Effects:
    """Effects of all actions of a list of factors, estimated against the same rewards.

    Args:
        rewards: float64 [n], one an evaluation, relative to its prompt's mean.
        tables: the factors of each table; a table's factors share one shrinkage.
    """

    def __init__(self, rewards: np.ndarray, tables: list[list[Factor]]) -> None:
        self._tables = tables
        self._unexplained = rewards.astype(np.float64)
        self._effects = [[np.zeros(factor.shape) for factor in table] for table in tables]

    def rewards(self, table: int, factor: int) -> np.ndarray:
        """float64 [n]: the rewards without what all other factors explain."""
        return self._unexplained + self._taken(table, factor)

    def _taken(self, table: int, factor: int) -> np.ndarray:
        part = self._tables[table][factor]
        return self._effects[table][factor][part.states, part.actions]

    def update(self, table: int) -> None:
        """Estimate the effects of one table's factors anew, in order, given all others."""
        factors = self._tables[table]
        found = [f.statistics(self.rewards(table, i)) for i, f in enumerate(factors)]
        noise = noise_ratio(found)
        for i, factor in enumerate(factors):
            rewards = self.rewards(table, i)
            effect = _shrunk(factor.statistics(rewards), noise)
            self._effects[table][i] = effect
            self._unexplained = rewards - effect[factor.states, factor.actions]


def noise_ratio(tables: list[CellStatistics]) -> float:
    """Variance within cells over the variance of true cell means, by one-way analysis of variance.

    ``inf`` if the cells differ by no more than their noise, or if no cell has two records.
    """
    within = freedom = between = expected = size = 0.0
    for found in tables:
        counts, totals = found.counts, np.maximum(found.totals, 1)
        centre = found.sums.sum(axis=1) / totals
        cells = (counts > 0).sum(axis=1)
        within += found.spreads.sum()
        freedom += (found.totals - cells).sum()
        between += (counts * (found.means - centre[:, None]) ** 2).sum()
        expected += np.maximum(cells - 1, 0).sum()
        size += (found.totals - (counts.astype(np.float64) ** 2).sum(axis=1) / totals).sum()
    if freedom <= 0 or size <= 0:
        return np.inf
    noise = within / freedom
    signal = (between - expected * noise) / size
    return float(noise / signal) if signal > 0 else np.inf


def _shrunk(found: CellStatistics, noise: float) -> np.ndarray:
    """Effects [states, actions], of mean 0 in each state; 0 in cells without records."""
    if not np.isfinite(noise):
        return np.zeros(found.counts.shape)
    centre = found.sums.sum(axis=1) / np.maximum(found.totals, 1)
    trust = found.counts / (found.counts + noise) if noise > 0 else (found.counts > 0) * 1.0
    return trust * (found.means - centre[:, None])
