"""Rewards of draws on one prompt: prefill once, keep, score the continuation in batches."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from calib_cluster.rewards.actions import ActionGrid, Draws
from calib_cluster.rewards.keep import keep
from calib_cluster.rewards.model import Prefill, RewardModel
from calib_cluster.rewards.sharing import distinct, set_keys
from kvpolicy.retention import RetentionRule

BATCH = 8


@dataclass(frozen=True, eq=False)
class Evaluation:
    """N draws on one prompt at one budget.

    Fields: ``nll_full`` mean nats per continuation token with the full cache; ``nll_compressed``
    float64 [N] with each draw's kept sets; ``kept`` int32 [N, U] tokens kept; ``psi`` float64
    [N, L]; ``kept_set`` int32 [N], equal for draws that keep the same; ``distinct`` how many sets
    that are, each scored once.
    """

    nll_full: float
    nll_compressed: np.ndarray
    kept: np.ndarray
    psi: np.ndarray
    kept_set: np.ndarray
    distinct: int


def evaluate(
    model: RewardModel,
    prefill: Prefill,
    rule: RetentionRule,
    budget: int,
    draws: Draws,
    grid: ActionGrid,
    batch: int = BATCH,
) -> Evaluation:
    """Score every draw on the continuation of ``prefill``.

    Args:
        budget: B, in 1..T-1.
        batch: distinct kept sets scored at once; changes memory and speed only (and rounding).

    Raises:
        CalibrationError: as ``keep.keep``.
    """
    sets = keep(prefill, model.units, rule, budget, draws, grid)
    width = int(sets.counts.max())  # columns past it are empty
    positions = sets.positions[:, :, :width]
    keys = set_keys(positions.cpu().numpy(), model.units.slices.values())
    rows, inverse = distinct(keys)
    losses = [
        model.continuation_losses(prefill, positions[torch.from_numpy(rows[i : i + batch])])
        for i in range(0, len(rows), batch)
    ]
    means = torch.cat(losses).double().mean(dim=1).cpu().numpy()
    return Evaluation(
        nll_full=float(prefill.losses.double().mean()),
        nll_compressed=means[inverse],
        kept=sets.counts.cpu().numpy().astype(np.int32),
        psi=sets.psi(budget, model.units),
        kept_set=inverse.astype(np.int32),
        distinct=len(rows),
    )
