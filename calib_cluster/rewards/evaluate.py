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

    Fields: ``nll_full`` mean nats per scored token with the full cache; ``nll_compressed``
    float64 [N] with each draw's kept sets; ``divergence`` float64 [N], KL(full || kept) a token;
    ``kept`` int32 [N, U] tokens kept; ``psi`` float64 [N, L]; ``kept_set`` int32 [N], equal for
    draws that keep the same; ``distinct`` how many sets that are, each scored once.
    """

    nll_full: float
    nll_compressed: np.ndarray
    divergence: np.ndarray
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
    scored: int = 0,
    query_weights: torch.Tensor | None = None,
) -> Evaluation:
    """Score every draw on the continuation of ``prefill``.

    Args:
        scored: the first continuation token that counts.
        query_weights: float32 [U, G], of a rule that mixes.
        budget: B, in 1..T-1.
        batch: distinct kept sets scored at once; changes memory and speed only (and rounding).

    Raises:
        CalibrationError: as ``keep.keep``.
    """
    sets = keep(prefill, model.units, rule, budget, draws, grid, query_weights)
    width = int(sets.counts.max())  # columns past it are empty
    positions = sets.positions[:, :, :width]
    keys = set_keys(positions.cpu().numpy(), model.units.slices.values())
    rows, inverse = distinct(keys)
    found = [
        model.continuation_scores(prefill, positions[torch.from_numpy(rows[i : i + batch])])
        for i in range(0, len(rows), batch)
    ]
    losses, moved = (
        torch.cat(part)[:, scored:].double().mean(dim=1).cpu().numpy()
        for part in zip(*found, strict=True)
    )
    return Evaluation(
        nll_full=float(prefill.losses[scored:].double().mean()),
        nll_compressed=losses[inverse],
        divergence=moved[inverse],
        kept=sets.counts.cpu().numpy().astype(np.int32),
        psi=sets.psi(budget, model.units),
        kept_set=inverse.astype(np.int32),
        distinct=len(rows),
    )
