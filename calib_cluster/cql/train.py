"""Eq. 1 by gradient descent: the paper's AdamW recipe, and AdamW run to convergence."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec
import numpy as np
import torch

from calib_cluster.cql.objective import residual
from calib_cluster.cql.solve import check_alpha
from calib_cluster.cql.statistics import CellStatistics
from calib_cluster.errors import CalibrationError


class Recipe(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Hyperparameters of ``train`` (appendix C.7).

    ``batch`` counts state-action records. The paper names AdamW without its decay: PyTorch's
    default of .01 is meant.
    """

    learning_rate: float = 3e-4
    epochs: int = 10
    batch: int = 4096
    weight_decay: float = 0.01
    seed: int = 0


class Schedule(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Hyperparameters of ``converge``: the learning rate falls from ``first`` by ``decay`` a step
    until the residual is below ``tolerance``; more than ``max_steps`` is a failure.

    Adam forgets gradients fast (``betas``): with its usual memory, steps stay too large or become
    too small for the tolerance, because gradients here shrink by orders of magnitude.
    """

    first: float = 0.1
    decay: float = 0.998
    betas: tuple[float, float] = (0.9, 0.9)
    tolerance: float = 1e-6
    max_steps: int = 10_000


PAPER = Recipe()
CONVERGED = Schedule()


@dataclass(frozen=True, eq=False)
class Trained:
    """``q`` float64 [S, A], ``residual`` float64 [S] as of ``solve.Solution``, ``steps`` taken."""

    q: np.ndarray
    residual: np.ndarray
    steps: int


def train(
    states: np.ndarray,
    actions: np.ndarray,
    rewards: np.ndarray,
    shape: tuple[int, int],
    alpha: float,
    recipe: Recipe = PAPER,
) -> Trained:
    """Minibatch AdamW on eq. 1 from Q = 0, as the paper trains.

    Adam moves an entry by about the learning rate a step at most: after n steps no Q is further
    from 0 than n times that, however many nats the rewards differ by.

    Args:
        states, actions: integers [n]; rewards: float64 [n], standardised; shape: (S, A).

    Raises:
        CalibrationError: no records, records outside ``shape``, or alpha out of range.
    """
    check_alpha(alpha)
    statistics = CellStatistics.of(states, actions, rewards, shape)
    if not len(states):
        raise CalibrationError("CQL has no records to train on")
    state, action = (torch.from_numpy(x.astype(np.int64)) for x in (states, actions))
    reward = torch.from_numpy(rewards.astype(np.float64))
    q = torch.zeros(shape, dtype=torch.float64, requires_grad=True)
    optimiser = torch.optim.AdamW(
        [q], lr=recipe.learning_rate, weight_decay=recipe.weight_decay, foreach=False
    )
    shuffle = torch.Generator().manual_seed(recipe.seed)
    steps = 0
    for _ in range(recipe.epochs):
        for rows in torch.randperm(len(state), generator=shuffle).split(recipe.batch):
            taken = q[state[rows]]
            chosen = taken.gather(1, action[rows, None])[:, 0]
            conservative = (taken.logsumexp(1) - chosen).mean()
            loss = alpha * conservative + 0.5 * ((chosen - reward[rows]) ** 2).mean()
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
            steps += 1
    table = q.detach().numpy()
    return Trained(table, residual(statistics, table, alpha), steps)


def converge(statistics: CellStatistics, alpha: float, schedule: Schedule = CONVERGED) -> Trained:
    """AdamW without decay on all records at once, until it stops: agrees with ``solve``.

    Where ``solve`` has -inf, Q ends so low that its softmax is below the tolerance.

    Raises:
        CalibrationError: alpha is out of range, or ``max_steps`` were not enough.
    """
    check_alpha(alpha)
    shares, means = (torch.from_numpy(x) for x in (statistics.shares, statistics.means))
    used = torch.from_numpy(statistics.totals > 0)[:, None]
    q = torch.zeros(shares.shape, dtype=torch.float64, requires_grad=True)
    optimiser = torch.optim.AdamW(
        [q], lr=schedule.first, betas=schedule.betas, weight_decay=0.0, foreach=False
    )
    falling = torch.optim.lr_scheduler.ExponentialLR(optimiser, schedule.decay)
    for step in range(schedule.max_steps):
        table = q.detach()
        pulled = alpha * (table.softmax(1) - shares) * used
        q.grad = pulled + shares * (table - means)
        if float(q.grad.abs().max()) < schedule.tolerance:
            found = table.numpy().copy()
            return Trained(found, residual(statistics, found, alpha), step)
        optimiser.step()
        falling.step()
    raise CalibrationError(
        f"AdamW did not converge in {schedule.max_steps} steps: gradient "
        f"{float(q.grad.abs().max()):.1e}, wanted {schedule.tolerance:g}"
    )
