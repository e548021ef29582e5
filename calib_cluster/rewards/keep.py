"""What each draw keeps of a prompt: the engine's own selection, with the draw as its tables."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from calib_cluster.errors import CalibrationError
from calib_cluster.rewards.actions import ActionGrid, Draws
from calib_cluster.rewards.model import Prefill
from calib_cluster.rewards.units import FreezingUnits
from kvpolicy.retention import RetentionRule, layer_max, utility
from kvpolicy.retention.mix import merged, source_ranks, unit_budgets
from kvpolicy.retention.select import select


@dataclass(frozen=True, eq=False)
class KeptSets:
    """``positions`` int64 [N, U, budget], ascending, -1 where there is none; ``counts`` int64
    [N, U]; ``candidates`` int64 [N, U], how many would be kept without a budget (|I_cand|)."""

    positions: torch.Tensor
    counts: torch.Tensor
    candidates: torch.Tensor

    def psi(self, budget: int, units: FreezingUnits) -> np.ndarray:
        """Psi of eq. 2, ``max(0, |I_cand| - B)``, float64 [N, L]; a mean over the layer's units
        where those keep their own sets."""
        over = (self.candidates - budget).clamp_min(0).double().cpu().numpy()
        return np.stack([over[:, part].mean(axis=1) for part in units.slices.values()], axis=1)


@torch.inference_mode()
def keep(
    prefill: Prefill,
    units: FreezingUnits,
    rule: RetentionRule,
    budget: int,
    draws: Draws,
    grid: ActionGrid,
    query_weights: torch.Tensor | None = None,
) -> KeptSets:
    """Equations 4, 6 and 8 with every draw's weights and thresholds; of a rule that mixes, every
    draw's shares and mixtures, with ``query_weights`` [U, G].

    Raises:
        CalibrationError: the budget is not in 1..T-1 (a freeze leaves such prompts alone), or the
            prompt was observed through another window than the rule's.
    """
    if not 1 <= budget < prefill.length:
        raise CalibrationError(
            f"budget {budget} is not accepted for a prompt of {prefill.length} tokens: give "
            f"1..{prefill.length - 1}"
        )
    if prefill.window != min(rule.observe, prefill.length):
        raise CalibrationError(f"the prompt was not observed through {rule.observe} tokens")
    if rule.mixes:
        return _mixed(prefill, rule, budget, draws, grid, query_weights)
    device = prefill.mass.device
    layers = torch.from_numpy(units.layers).to(device)
    plain = utility(prefill.mass, prefill.value_norms, layers, rule, prefill.window)
    weights = torch.tensor(grid.weights, device=device)[torch.from_numpy(draws.weights).long()]
    gates = np.array(grid.thresholds, dtype=np.float32)[draws.thresholds][:, units.place]
    thresholds = torch.from_numpy(gates).to(device)
    capped, free = [], []
    for weight, threshold in zip(weights, thresholds, strict=True):
        scores = plain * weight[:, None]
        if rule.share == "layer":
            scores = layer_max(scores, layers)
        gate = None if rule.gate == "off" else threshold
        capped.append(select(scores, gate, torch.full_like(layers, budget), rule, width=budget))
        whole = torch.full_like(layers, prefill.length)
        free.append(select(scores, gate, whole, rule, width=prefill.length).counts)
    return KeptSets(
        torch.stack([kept.positions for kept in capped]),
        torch.stack([kept.counts for kept in capped]),
        torch.stack(free),
    )


def _mixed(
    prefill: Prefill,
    rule: RetentionRule,
    budget: int,
    draws: Draws,
    grid: ActionGrid,
    query_weights: torch.Tensor | None,
) -> KeptSets:
    """Draws of shares and mixtures: all keep the same number in all, so nothing is over budget."""
    if query_weights is None or prefill.squares is None:
        raise CalibrationError("a rule that mixes needs query weights and the prompt's focus")
    device, length = prefill.mass.device, prefill.length
    ranks = source_ranks(prefill.mass, prefill.focus(query_weights), rule)
    quotas = torch.tensor(grid.quotas, device=device)
    by_mixture = torch.stack([merged(ranks, row.expand(len(ranks), -1)) for row in quotas])
    units = torch.arange(len(ranks), device=device)
    shares = np.array(grid.shares)[draws.shares]
    counts = np.stack([unit_budgets(row, budget, length, rule.least) for row in shares])
    chosen = torch.from_numpy(draws.mixtures.astype(np.int64)).to(device)
    width = int(counts.max())
    kept = [
        select(by_mixture[mixture, units], None, row, rule, width).positions
        for mixture, row in zip(chosen, torch.from_numpy(counts).to(device), strict=True)
    ]
    counts = torch.from_numpy(counts).to(device)
    return KeptSets(torch.stack(kept), counts, torch.full_like(counts, budget))
