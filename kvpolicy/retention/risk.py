"""Risk coordinates of a prompt and their bins (eq. 7)."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def structural_risk(mass: Tensor, window: int) -> Tensor:
    """R_struct of eq. 7 over ln T: entropy of the mean window mass, in [0, 1].

    Divided by ln T so that one set of bin edges serves prompts of every length. The mass is
    averaged over all units and never pooled, whatever the rule.

    Args:
        mass: float32 [U, T], ``window_mass`` of each unit.
        window: W, the number of observation queries behind it.

    Returns:
        float32 0-d; 0 for T = 1.
    """
    share = mass.mean(dim=0) / window
    share = share / share.sum().clamp_min(torch.finfo(share.dtype).tiny)
    entropy = -torch.special.xlogy(share, share).sum()
    return entropy / math.log(max(mass.shape[1], 2))


def semantic_risk(nll_sum: Tensor, count: Tensor | int) -> Tensor:
    """R_sem of eq. 7: perplexity of the observation window.

    Args:
        nll_sum: float32 0-d, summed negative log likelihood in nats of the window's tokens.
        count: how many tokens that is; 0 (a prompt of one token) gives 1.

    Returns:
        float32 0-d.
    """
    tokens = count.clamp_min(1) if isinstance(count, Tensor) else max(count, 1)
    return torch.exp(nll_sum / tokens)


def bin_of(value: Tensor, edges: Tensor) -> Tensor:
    """Bin of a 0-d ``value`` among ascending ``edges`` [n - 1]: int64 0-d in 0..n-1.

    A value equal to an edge belongs to the bin above it.
    """
    return torch.searchsorted(edges, value, right=True)
