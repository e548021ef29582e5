"""Algorithm 1 and equations 4-8 of CompilerKV, transcribed one number at a time in float64.

Slow on purpose and independent of ``kvpolicy.retention``: loops over heads, positions and tokens,
sets for the candidates. Where the paper is silent the named options of the rule are spelled out;
so is the rule that mixes orders of tokens, which is not the paper's.
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


def attention(q, k, query_positions, key_positions, scale, logit_cap=0.0):
    """Every (kv head, query head of its group, slot, weight) of every query's visible keys."""
    n, heads, group, _ = q.shape
    slots = k.shape[1]
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
                    yield h, g, s, p


def window_mass(q, k, query_positions, key_positions, scale, logit_cap=0.0) -> np.ndarray:
    """[H, S]: sum over queries of the group's mean attention, over visible keys only."""
    mass = np.zeros(k.shape[:2])
    for h, _, s, p in attention(q, k, query_positions, key_positions, scale, logit_cap):
        mass[h, s] += p / q.shape[2]
    return mass


def focus_mass(q, k, query_positions, key_positions, scale, logit_cap=0.0) -> np.ndarray:
    """[H, G, S]: sum over queries of each query head's squared attention."""
    focus = np.zeros((k.shape[0], q.shape[2], k.shape[1]))
    for h, g, s, p in attention(q, k, query_positions, key_positions, scale, logit_cap):
        focus[h, g, s] += p * p
    return focus


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
    always: set[int] = set()
    for t in [*range(length - 1, length - 1 - last_kept(rule), -1), *range(rule.sinks)]:
        if 0 <= t < length and len(always) < budget:
            always.add(t)
    candidates = set(always)
    for place, t in enumerate(best_first):
        if threshold is None or scores[t] >= threshold or place < rule.floor:
            candidates.add(t)
    if len(candidates) <= budget:
        return sorted(candidates)
    rest = [t for t in best_first if t in candidates and t not in always]
    return sorted(always | set(rest[: budget - len(always)]))


def last_kept(rule) -> int:
    """How many last positions the rule never gives up."""
    return max(rule.recent, rule.observe) if rule.keep_window else rule.recent


def forward_pooled(row) -> list[float]:
    """The best of a score and of its neighbours': up to 32 before it, and 2 after it."""
    out = []
    for j in range(len(row)):
        best = float(row[j])
        for d in range(1, 33):
            if j - d >= 0:
                best = max(best, 0.97**d * float(row[j - d]))
        for d in (1, 2):
            if j + d < len(row):
                best = max(best, 0.90**d * float(row[j + d]))
        out.append(best)
    return out


def ranks(scores, rule) -> list[int]:
    """Place of every token by descending score, protected ones after all others."""
    tokens = range(len(scores))
    kept = {t for t in tokens if t < rule.sinks or t >= len(scores) - last_kept(rule)}
    order = sorted(tokens, key=lambda t: (t in kept, 0 if t in kept else -scores[t], t))
    places = [0] * len(scores)
    for place, t in enumerate(order):
        places[t] = place
    return places


def mixed_scores(mass, own, retrieval, quotas, rule) -> np.ndarray:
    """[U, T]: the best ``quota / (1 + rank)`` of the three orders of each unit."""
    scores = np.zeros(mass.shape)
    for u in range(len(mass)):
        sources = (
            pooled(mass[u], rule.pool),
            forward_pooled([math.sqrt(x) for x in own[u]]),
            forward_pooled([math.sqrt(x) for x in retrieval]),
        )
        for quota, source in zip(quotas[u], sources, strict=True):
            for t, place in enumerate(ranks(source, rule)):
                scores[u, t] = max(scores[u, t], float(quota) / (1 + place))
    return scores


def unit_budgets(shares, budget: int, length: int, least: int) -> list[int]:
    """Split ``len(shares) * budget`` tokens in proportion, in exact fractions.

    Each unit gets at least min(least, budget) and at most ``length``; of what rounding down leaves
    the largest remainders get one more, the first unit of equal ones.
    """
    shares = [Fraction(float(x)) for x in shares]
    total, low = len(shares) * budget, min(least, budget)
    # the sum is linear between the factors at which some unit meets a bound
    corners = sorted({Fraction(bound) / share for share in shares for bound in (low, length)})

    def split(factor: Fraction) -> list[Fraction]:
        return [min(max(factor * share, Fraction(low)), Fraction(length)) for share in shares]

    after = next(i for i, corner in enumerate(corners) if sum(split(corner)) >= total)
    exact = split(corners[after])
    if sum(exact) > total:
        a, b = split(corners[after - 1]), exact
        step = (total - sum(a)) / (sum(b) - sum(a))
        exact = [x + step * (y - x) for x, y in zip(a, b, strict=True)]
    found = [math.floor(x) for x in exact]
    order = sorted(range(len(shares)), key=lambda u: (found[u] - exact[u], u))
    for u in order[: total - sum(found)]:
        found[u] += 1
    return found


@dataclass
class Outcome:
    kept: list[list[int]]
    entropy: float
    perplexity: float
    bins: tuple[int, int]


def mixed(mass, own, retrieval, layers, heads, tables, budget: int) -> list[list[int]]:
    """What every unit keeps by a rule that mixes."""
    rule, length = tables.rule, mass.shape[1]
    row = nearest_budget(tables.budgets, budget)
    cells = list(zip(layers, heads, strict=True))
    shares = [tables.mix.shares[row, layer, head] for layer, head in cells]
    quotas = [tables.mix.quotas[row, layer, head] for layer, head in cells]
    scores = mixed_scores(mass, own, retrieval, quotas, rule)
    budgets = unit_budgets(shares, budget, length, rule.sinks + last_kept(rule))
    return [select(list(s), None, b, rule) for s, b in zip(scores, budgets, strict=True)]


def retain(
    mass, norms, layers, heads, tables, budget: int, nlls: list[float], focus=None
) -> Outcome:
    """Algorithm 1 from the window mass on; ``focus`` (own [U, T], retrieval [T]) of a mix."""
    rule = tables.rule
    window = min(rule.observe, mass.shape[1])
    entropy, perplexity = structural_risk(mass), semantic_risk(nlls)
    bins = bin_of(entropy, tables.entropy_edges), bin_of(perplexity, tables.perplexity_edges)
    if rule.mix == "table":
        kept = mixed(mass, *focus, layers, heads, tables, min(budget, mass.shape[1]))
        return Outcome(kept, entropy, perplexity, bins)
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
