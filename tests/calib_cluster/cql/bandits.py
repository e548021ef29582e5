"""Synthetic bandits, and eq. 1 spelled out record by record for autograd."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from calib_cluster.cql import CellStatistics


@dataclass(frozen=True)
class Records:
    """``states``, ``actions`` int64 [n], ``rewards`` float64 [n] of a table of ``shape``."""

    states: np.ndarray
    actions: np.ndarray
    rewards: np.ndarray
    shape: tuple[int, int]

    @property
    def statistics(self) -> CellStatistics:
        return CellStatistics.of(self.states, self.actions, self.rewards, self.shape)

    def standardised(self) -> Records:
        rewards = (self.rewards - self.rewards.mean()) / self.rewards.std()
        return Records(self.states, self.actions, rewards, self.shape)


def draw(means: np.ndarray, counts: np.ndarray, noise: float = 1.0, seed: int = 0) -> Records:
    """``counts`` int [S, A] records of each cell, with normal rewards around ``means`` [S, A]."""
    states, actions = (
        np.repeat(index.ravel(), counts.ravel()) for index in np.indices(counts.shape)
    )
    rng = np.random.default_rng(seed)
    rewards = means[states, actions] + noise * rng.normal(size=len(states))
    order = rng.permutation(len(states))
    return Records(states[order], actions[order], rewards[order], counts.shape)


def literal_loss(q: torch.Tensor, records: Records, alpha: float) -> torch.Tensor:
    """Eq. 1: three means over the records, exactly as printed."""
    total = torch.zeros((), dtype=torch.float64)
    for state, action, reward in zip(
        records.states.tolist(), records.actions.tolist(), records.rewards.tolist(), strict=True
    ):
        normaliser = torch.log(torch.exp(q[state]).sum())
        total = total + alpha * (normaliser - q[state, action])
        total = total + 0.5 * (q[state, action] - reward) ** 2
    return total / len(records.states)


def minimise_literally(records: Records, alpha: float) -> np.ndarray:
    """argmin of ``literal_loss`` by L-BFGS with autograd; every cell must have records."""
    q = torch.zeros(records.shape, dtype=torch.float64, requires_grad=True)
    optimiser = torch.optim.LBFGS(
        [q], max_iter=500, tolerance_grad=1e-12, tolerance_change=1e-16,
        line_search_fn="strong_wolfe",
    )  # fmt: skip

    def closure() -> torch.Tensor:
        optimiser.zero_grad()
        loss = literal_loss(q, records, alpha)
        loss.backward()
        return loss

    optimiser.step(closure)
    return q.detach().numpy()
