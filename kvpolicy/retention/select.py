"""Final selection: elastic candidate pool with budget clamp (eq. 8)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvpolicy.retention.rule import RetentionRule


@dataclass(frozen=True, eq=False)
class Kept:
    """Kept positions of R rows: ``positions`` int64 [R, width], ascending, padded with -1;
    ``counts`` int64 [R], how many of them are kept."""

    positions: Tensor
    counts: Tensor


def select(
    scores: Tensor, thresholds: Tensor | None, budgets: Tensor, rule: RetentionRule, width: int
) -> Kept:
    """Eq. 8 per row: the candidates, or the best B of them if there are more.

    Always kept: the last min(``rule.recent``, B) tokens (with ``rule.keep_window`` the last
    min(W, B)) and, as far as B then allows, the first ``rule.sinks``; they count inside B.
    Candidates are the tokens at or above the threshold and the ``rule.floor`` best ones.
    Of equal scores the lower position wins. Fewer than B may remain.

    Args:
        scores: float32 [R, T], finite; T >= 1.
        thresholds: float32 [R], or None: every token is a candidate.
        budgets: int64 [R], B of each row; below 1 counts as 1, above ``width`` as ``width``.
        rule: ``observe``, ``keep_window``, ``recent``, ``sinks`` and ``floor``.
        width: columns of the result, at least 1.

    Returns:
        Kept of R rows. No host synchronisation.
    """
    rows, length = scores.shape
    budgets = budgets.clamp(1, width)[:, None]
    recent = budgets.clamp_max(min(rule.last_kept, length))
    sinks = (budgets - recent).clamp_max(min(rule.sinks, length)).clamp_max(length - recent)
    always = recent + sinks
    ranked = torch.sort(scores, dim=1, descending=True, stable=True)
    places = torch.arange(length, device=scores.device)

    protected = (ranked.indices >= length - recent) | (ranked.indices < sinks)
    candidate = ~protected
    if thresholds is not None:
        candidate &= (ranked.values >= thresholds[:, None]) | (places < rule.floor)
    chosen = protected | (candidate & (candidate.cumsum(1) <= budgets - always))

    kept = torch.zeros_like(chosen).scatter(1, ranked.indices, chosen)
    # dropped positions all go to a column that is cut off
    columns = torch.where(kept, kept.cumsum(1) - 1, width)
    positions = scores.new_full((rows, width + 1), -1, dtype=torch.int64)
    positions.scatter_(1, columns, places.expand(rows, length))
    return Kept(positions[:, :width], kept.sum(1))
