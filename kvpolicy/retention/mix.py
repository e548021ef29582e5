"""Mixtures: orders of tokens from several sources, merged by compiled quotas.

Beyond the paper. A freeze is irreversible, and no one score serves all that decoding may read
next: what the prompt's end attends to (``window``), what its last queries look hard at
(``focus``), and what the model's retrieval heads look at, for every unit (``retrieval``). What
follows an attended token is what decoding reads next, so the last two are pooled forward. Ranks,
not values, are merged: the sources have no common scale.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from kvpolicy.errors import PolicyError
from kvpolicy.retention.rule import RetentionRule
from kvpolicy.retention.scores import pooled

REACH, DECAY = 32, 0.97
BACK, BACK_DECAY = 2, 0.9


@dataclass(frozen=True, eq=False)
class Focus:
    """Squared attention of the last ``rule.focus`` queries.

    ``own`` float32 [U, T]: of each unit, mean over its query heads. ``retrieval`` float32 [T]: of
    all query heads, weighted by ``MixTables.query_weights``.
    """

    own: Tensor
    retrieval: Tensor


def forward_pooled(scores: Tensor) -> Tensor:
    """The best of a token's own score and its neighbours', decayed by distance.

    ``s'(j) = max(max_{0<=d<=32} .97^d s(j - d), max_{1<=d<=2} .9^d s(j + d))``, for scores
    [..., T] of at least 0.
    """
    best, length = scores.clone(), scores.shape[-1]
    for d in range(1, min(REACH, length - 1) + 1):
        torch.maximum(best[..., d:], scores[..., :-d] * DECAY**d, out=best[..., d:])
    for d in range(1, min(BACK, length - 1) + 1):
        torch.maximum(best[..., :-d], scores[..., d:] * BACK_DECAY**d, out=best[..., :-d])
    return best


def protected(length: int, rule: RetentionRule, device: torch.device | str) -> Tensor:
    """bool [T]: tokens that are always kept: the first ``sinks`` and the ``last_kept``."""
    places = torch.arange(length, device=device)
    return (places < rule.sinks) | (places >= length - rule.last_kept)


def ranks(scores: Tensor, shielded: Tensor) -> Tensor:
    """Place of each token when ``scores`` [N, T] are sorted, the best is 0; float32 [N, T].

    Of equal scores the lower position is better. ``shielded`` bool [T] take part last.
    """
    masked = scores.masked_fill(shielded, -torch.inf)
    order = torch.sort(masked, dim=1, descending=True, stable=True).indices
    places = torch.arange(scores.shape[1], device=scores.device, dtype=torch.float32)
    return torch.empty_like(places.expand_as(order)).scatter(1, order, places.expand_as(order))


def mixed_scores(mass: Tensor, focus: Focus, quotas: Tensor, rule: RetentionRule) -> Tensor:
    """One score a token: ``max over sources of quota / (1 + rank)``.

    Taking the best n of it takes from each source its first tokens in proportion to its quota; a
    token that several sources want counts once, so others get in.

    Args:
        mass: float32 [U, T], ``window_mass`` of each unit.
        focus: of the same units.
        quotas: float32 [U, S], in the order of ``SOURCES``.

    Returns:
        float32 [U, T], between 0 and the largest quota.
    """
    return merged(source_ranks(mass, focus, rule), quotas)


def source_ranks(mass: Tensor, focus: Focus, rule: RetentionRule) -> Tensor:
    """Ranks of all tokens by every source: float32 [U, S, T]. Arguments as ``mixed_scores``."""
    sources = (
        pooled(mass, rule.pool),
        forward_pooled(focus.own.sqrt()),
        forward_pooled(focus.retrieval.sqrt())[None],
    )
    shielded = protected(mass.shape[1], rule, mass.device)
    return torch.stack([ranks(source, shielded).expand_as(mass) for source in sources], dim=1)


def merged(ranks: Tensor, quotas: Tensor) -> Tensor:
    """``max over sources of quota / (1 + rank)``: float32 [U, T] of ranks [U, S, T] and quotas
    [U, S]."""
    return (quotas[..., None] / (1.0 + ranks)).amax(dim=1)


def unit_budgets(shares: np.ndarray, budget: int, length: int, least: int = 1) -> np.ndarray:
    """Tokens each unit keeps of a prompt: ``budget`` on average, in proportion to ``shares``.

    No unit keeps less than ``least`` (nor than the budget, if that is smaller) nor more than the
    prompt; what these bounds take or leave is shared out in the same proportion.

    Args:
        shares: float [U], above 0.
        budget: B, from 1 to ``length``.

    Returns:
        int64 [U], whose sum is exactly ``U * budget``.

    Raises:
        PolicyError: a budget out of range.
    """
    if not 1 <= budget <= length:
        raise PolicyError(f"retention budget must be 1..{length} tokens, found {budget}")
    shares = np.asarray(shares, dtype=np.float64)
    if not len(shares):
        return np.zeros(0, dtype=np.int64)
    total, low = len(shares) * budget, min(least, budget)
    # the sum grows with the factor, so bisect it
    below, above = 0.0, length / float(shares.min())
    while below < (factor := (below + above) / 2) < above:
        enough = np.clip(factor * shares, low, length).sum() >= total
        below, above = (below, factor) if enough else (factor, above)
    exact = np.clip(above * shares, low, length)
    found = np.floor(exact + 1e-9).astype(np.int64)
    spare = total - int(found.sum())
    room = np.flatnonzero(found < length) if spare > 0 else np.flatnonzero(found > low)
    # rounded, so that what is equal but for the arithmetic goes to the first unit everywhere
    order = room[np.argsort(-np.round(exact - found, 9)[room], kind="stable")]
    found[order[:spare] if spare > 0 else order[::-1][:-spare]] += np.sign(spare)
    return found
