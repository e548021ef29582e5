"""What a mix's tables say, in numbers that people read: who keeps most, by which mixtures."""

from __future__ import annotations

from collections import Counter
from itertools import groupby

import numpy as np

from kvpolicy.evidence import calibratable
from kvpolicy.geometry import ModelGeometry
from kvpolicy.retention.mix_tables import MixTables
from kvpolicy.retention.rule import SOURCES
from kvpolicy.retention.tables import RetentionTables

RETRIEVES = 0.1
"""A query head counts as retrieving from this part of the highest weight on."""
Parts = tuple[float, ...]


def quota_parts(quotas: np.ndarray) -> np.ndarray:
    """Quotas [..., S] as parts of 1, to four decimals, so that equal mixtures compare equal."""
    found = quotas.astype(np.float64)
    return (found / found.sum(axis=-1, keepdims=True)).round(4)


def mixtures(quotas: np.ndarray) -> list[tuple[Parts, int]]:
    """Mixtures of quotas [units, S] and how many units use each; the most used first."""
    counts = Counter(map(tuple, quota_parts(quotas).tolist()))
    return sorted(counts.items(), key=lambda item: (-item[1], [-part for part in item[0]]))


def mixture_text(parts: Parts) -> str:
    """``window 40% focus 30% retrieval 30%``; sources without a part are left out."""
    named = zip(SOURCES, parts, strict=True)
    return " ".join(f"{name} {part:.0%}" for name, part in named if part)


def query_heads(geometry: ModelGeometry) -> np.ndarray:
    """bool [attention layers, most query heads]: those of global layers."""
    layers = geometry.attention_layers
    mask = np.zeros((len(layers), max(layer.num_q_heads for layer in layers)), dtype=bool)
    rows = calibratable(geometry).any(axis=1)
    for row, (layer, is_global) in enumerate(zip(layers, rows, strict=True)):
        mask[row, : layer.num_q_heads] = is_global
    return mask


def retrieving(mix: MixTables, geometry: ModelGeometry) -> tuple[int, int]:
    """(query heads of at least ``RETRIEVES`` of the highest weight, query heads) of global layers;
    none retrieve if all weights are 0."""
    weights = mix.query_weights[query_heads(geometry)]
    if not weights.size or weights.max() <= 0:
        return 0, weights.size
    return int((weights >= RETRIEVES * weights.max()).sum()), weights.size


def alike(tables: RetentionTables) -> list[tuple[int, ...]]:
    """Indices of the budgets of a mix, those next to each other with equal tables together."""
    mix = tables.mix

    def content(index: int) -> bytes:
        return mix.shares[index].tobytes() + mix.quotas[index].tobytes()

    return [tuple(group) for _, group in groupby(range(len(tables.budgets)), content)]


def keep_most(shares: np.ndarray, heads: np.ndarray, count: int) -> list[tuple[int, int]]:
    """(row, kv head) of the largest shares [L, H] where ``heads`` is True, the largest first."""
    places = np.argwhere(heads)
    order = np.argsort(-shares[heads], kind="stable")[:count]
    return [tuple(place) for place in places[order].tolist()]
