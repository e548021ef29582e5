"""Algorithm 1 and equations 4-8 of CompilerKV, transcribed one number at a time in float64.

Slow on purpose and independent of ``kvpolicy.retention``: loops over heads, positions and tokens,
sets for the candidates. Where the paper is silent the named options of the rule are spelled out.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction

import numpy as np


def softmax_row(logits: list[float]) -> list[float]:
    top = max(logits)
    weights = [math.exp(x - top) for x in logits]
    return [w / sum(weights) for w in weights]


def window_mass(q, k, query_positions, key_positions, scale, logit_cap=0.0) -> np.ndarray:
    """[H, S]: sum over queries of the group's mean attention, over visible keys only."""
    n, heads, group, _ = q.shape
    slots = k.shape[1]
    mass = np.zeros((heads, slots))
    for i in range(n):
        seen = [s for s in range(slots) if 0 <= key_positions[s] <= query_positions[i]]
        for h in range(heads):
            for g in range(group):
                logits = []
                for s in seen:
                    pairs = zip(q[i, h, g], k[h, s], strict=True)
                    logit = scale * sum(float(a) * float(b) for a, b in pairs)
                    logits.append(logit_cap * math.tanh(logit / logit_cap) if logit_cap else logit)
                shares = softmax_row(logits) if seen else []
                for s, p in zip(seen, shares, strict=True):
                    mass[h, s] += p / group
    return mass


def value_ratio(norms) -> np.ndarray:
    rho = np.zeros(norms.shape)
    for u, row in enumerate(norms):
        mean = sum(float(x) for x in row) / len(row)
        for t, norm in enumerate(row):
            rho[u, t] = float(norm) / mean if mean else 0.0
    return rho


def pooled(row, kernel: int) -> list[float]:
    half = kernel // 2
    out = []
    for t in range(len(row)):
        near = [row[s] for s in range(t - half, t + half + 1) if 0 <= s < len(row)]
        out.append(sum(near) / len(near))
    return out


def peers(unit: int, layers, scope: str) -> list[int]:
    """Units whose attention is averaged for one."""
    if scope == "head":
        return [unit]
    return [u for u in range(len(layers)) if scope == "global" or layers[u] == layers[unit]]


def alpha(mass, layers, rule, window: int) -> np.ndarray:
    units, length = mass.shape
    out = np.zeros(mass.shape)
    known: dict[tuple[int, ...], list[float]] = {}
    for u in range(units):
        others = tuple(peers(u, layers, rule.alpha_scope))
        if others not in known:
            mean = [sum(float(mass[o, t]) for o in others) / len(others) for t in range(length)]
            known[others] = [length / window * x for x in pooled(mean, rule.pool)]
        out[u] = known[others]
    return out


def layer_max(scores, layers) -> np.ndarray:
    out = np.zeros(scores.shape)
    for u in range(scores.shape[0]):
        same = [o for o in range(len(layers)) if layers[o] == layers[u]]
        for t in range(scores.shape[1]):
            out[u, t] = max(scores[o, t] for o in same)
    return out


def structural_risk(mass) -> float:
    """Entropy over ln T of the mean mass as a distribution."""
    units, length = mass.shape
    mean = [sum(float(mass[u, t]) for u in range(units)) / units for t in range(length)]
    share = [x / sum(mean) for x in mean]
    entropy = -sum(p * math.log(p) for p in share if p > 0)
    return entropy / math.log(length) if length > 1 else 0.0


def semantic_risk(nlls: list[float]) -> float:
    return math.exp(sum(nlls) / len(nlls)) if nlls else 1.0


def bin_of(value: float, edges) -> int:
    return sum(1 for edge in edges if float(edge) <= value)


def nearest_budget(budgets, budget: int) -> int:
    """Index of the budget whose ratio to ``budget`` is least; the smaller one on a tie."""
    ratios = [(max(Fraction(b, budget), Fraction(budget, b)), b) for b in budgets]
    return ratios.index(min(ratios))


def select(scores, threshold: float | None, budget: int, rule) -> list[int]:
    """Kept positions of one row, ascending."""
    length = len(scores)
    budget = max(1, budget)
    best_first = sorted(range(length), key=lambda t: (-scores[t], t))
    last = min(rule.observe, length, budget) if rule.keep_window else 1
    always = set(range(length - last, length))
    candidates = set(always)
    for place, t in enumerate(best_first):
        if threshold is None or scores[t] >= threshold or place < rule.floor:
            candidates.add(t)
    if len(candidates) <= budget:
        return sorted(candidates)
    rest = [t for t in best_first if t in candidates and t not in always]
    return sorted(always | set(rest[: budget - len(always)]))


@dataclass
class Outcome:
    kept: list[list[int]]
    entropy: float
    perplexity: float
    bins: tuple[int, int]


def retain(mass, norms, layers, heads, tables, budget: int, nlls: list[float]) -> Outcome:
    """Algorithm 1 from the window mass on."""
    rule = tables.rule
    window = min(rule.observe, mass.shape[1])
    entropy, perplexity = structural_risk(mass), semantic_risk(nlls)
    bins = bin_of(entropy, tables.entropy_edges), bin_of(perplexity, tables.perplexity_edges)
    scores = alpha(mass, layers, rule, window) * value_ratio(norms)
    for u in range(len(layers)):
        scores[u] *= float(tables.head_weights[layers[u], heads[u]])
    if rule.share == "layer":
        scores = layer_max(scores, layers)
    kept = []
    for u in range(len(layers)):
        threshold = None
        if rule.gate == "table":
            row = tables.gate[nearest_budget(tables.budgets, budget), layers[u]]
            threshold = float(row[bins])
        kept.append(select(list(scores[u]), threshold, budget, rule))
    return Outcome(kept, entropy, perplexity, bins)
