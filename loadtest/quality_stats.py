"""How far greedy answers agree."""

from __future__ import annotations

from collections.abc import Sequence


def agreement(ours: Sequence[Sequence[int]], theirs: Sequence[Sequence[int]]) -> float:
    """Share of ``theirs``' tokens that come before the first one that ``ours`` differs in."""
    total = sum(map(len, theirs))
    same = sum(_common_prefix(a, b) for a, b in zip(ours, theirs, strict=True))
    return same / total


def _common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    pairs = zip(a, b, strict=False)
    return next((i for i, (x, y) in enumerate(pairs) if x != y), min(len(a), len(b)))
