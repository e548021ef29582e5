"""Reward records as bandit records: (state, action, reward) of the two tables (eq. 2)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from calib_cluster.cql import CellStatistics
from calib_cluster.rewards.actions import ALL
from calib_cluster.rewards.records import RewardRecords

BETA = 1.0
"""beta_bud of eq. 2: the gate's lambda is this over T. The head table's lambda is 0."""


@dataclass(frozen=True, eq=False)
class BanditRecords:
    """n records of a table with ``shape`` = (states, actions): ``states`` and ``actions`` int64
    [n], ``rewards`` float64 [n]; ``rows`` int64 [n], the evaluation each comes from."""

    states: np.ndarray
    actions: np.ndarray
    rewards: np.ndarray
    rows: np.ndarray
    shape: tuple[int, int]

    @property
    def statistics(self) -> CellStatistics:
        """Their sufficient statistics."""
        return CellStatistics.of(self.states, self.actions, self.rewards, self.shape)


def loss_rewards(records: RewardRecords, baseline: bool = True) -> np.ndarray:
    """float64 [n]: minus the rise of the loss, the part of eq. 2 that both tables share.

    Args:
        baseline: relative to the mean over evaluations of the same prompt and budget, since
            prompts differ by far more than actions do.
    """
    rewards = -(records["nll_compressed"] - records["nll_full"])
    return rewards - group_means(records, rewards) if baseline else rewards


def gate_penalties(records: RewardRecords, beta: float = BETA, baseline: bool = True) -> np.ndarray:
    """float64 [n, L]: ``beta / T * Psi`` of each layer, what eq. 2 takes off the gate's rewards."""
    penalties = beta * records["psi"] / records["context"][:, None]
    return penalties - group_means(records, penalties) if baseline else penalties


def drawn(records: RewardRecords) -> np.ndarray:
    """bool [n, U + L]: which units and layers had their action drawn by the behaviour.

    The others were at the current tables: no record of a state that was not drawn.
    """
    varied = records["varied"][:, None]
    states = records.header.units + records.header.freezing_layers
    return (varied == ALL) | (varied == np.arange(states))


def head_records(records: RewardRecords, baseline: bool = True) -> BanditRecords:
    """Records of the head table: state = unit, action = weight index, lambda = 0."""
    units = records.header.units
    rows, states = np.nonzero(drawn(records)[:, :units])
    actions = records["weights"][rows, states].astype(np.int64)
    shape = (units, len(records.header.grid.weights))
    return BanditRecords(states, actions, loss_rewards(records, baseline)[rows], rows, shape)


def gate_records(
    records: RewardRecords, beta: float = BETA, baseline: bool = True
) -> BanditRecords:
    """Records of the gate: state = (layer, entropy bin, perplexity bin), action = threshold index.

    States count layers first, then entropy bins, then perplexity bins.
    """
    header = records.header
    layers, cells = header.freezing_layers, header.risk.shape
    rewards = loss_rewards(records, baseline)[:, None] - gate_penalties(records, beta, baseline)
    rows, place = np.nonzero(drawn(records)[:, header.units :])
    cell = records["entropy_bin"].astype(np.int64) * cells[1] + records["perplexity_bin"]
    states = place * (cells[0] * cells[1]) + cell[rows]
    actions = records["thresholds"][rows, place].astype(np.int64)
    shape = (layers * cells[0] * cells[1], len(header.grid.thresholds))
    return BanditRecords(states, actions, rewards[rows, place], rows, shape)


def group_means(records: RewardRecords, rewards: np.ndarray) -> np.ndarray:
    """Means of ``rewards`` [n, ...] over evaluations of the same prompt and budget."""
    _, prompts = np.unique(records["prompt"].astype(str), return_inverse=True)
    pairs = np.stack([prompts, records["budget"]], axis=1)
    _, group = np.unique(pairs, axis=0, return_inverse=True)
    group = group.reshape(-1)
    flat = rewards.reshape(len(rewards), -1)
    sizes = np.bincount(group)
    means = np.stack([np.bincount(group, weights=column) / sizes for column in flat.T], axis=1)
    return means[group].reshape(rewards.shape)
