"""From reward records of a rule that mixes to shares and mixtures.

Records are draws around a base, each with the same number of kept tokens in all, so a unit's
reward for a larger share is paid by the others. As in ``compile`` the effects of all actions are
estimated together, and each table is horizon-1 CQL (eq. 1) on the rewards without what the others
explain. A unit's Q then rises with the log of its share; its slope is what a doubling is worth. If
worth is logarithmic, the best shares under a budget are in proportion to it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from calib_cluster.compile_effects import Effects, Factor
from calib_cluster.compile_learn import CompileSettings, learn
from calib_cluster.cql import CellStatistics, Choice, decide
from calib_cluster.rewards.bandit import group_means
from calib_cluster.rewards.records import RewardRecords
from kvpolicy.geometry import ModelGeometry
from kvpolicy.retention import SOURCES, MixTables, RetentionTables

NO_EDGES = np.zeros(0, np.float32)


@dataclass(frozen=True, eq=False)
class CompiledMix:
    """Tables of a rule that mixes and what supports them.

    Fields: ``worth`` float64 [U], what a doubling of each unit's share adds to the standardised
    reward; ``heads`` and ``mixtures``: the best share and mixture of each unit taken alone, the
    confidence of ``heads`` being that more than its share is worth something;
    ``rounds``, ``settled`` and ``residual`` as in ``compile.Compiled``.
    """

    tables: RetentionTables
    worth: np.ndarray
    heads: Choice
    mixtures: Choice
    rounds: int
    settled: bool
    residual: float
    gate: Choice | None = None

    def evidence(self, records: RewardRecords) -> dict[str, np.ndarray]:
        """Support of each unit's share, ``head_{records,support,confidence,empty}`` [L, H]."""
        header, found = records.header, {}
        where = np.array(header.layers), np.array(header.heads)
        for name in ("records", "support", "confidence", "empty"):
            values = getattr(self.heads, name)
            table = np.full(self.tables.head_weights.shape, name == "empty", dtype=values.dtype)
            table[where] = values
            found[f"head_{name}"] = table
        return found


def fit_mix(
    records: RewardRecords,
    geometry: ModelGeometry,
    budgets: Sequence[int],
    settings: CompileSettings,
) -> CompiledMix:
    """Fit shares and mixtures to ``records`` (sorted, of ``budgets`` only), pooled over budgets."""
    factors = [_factors(records, "shares"), _factors(records, "mixtures")]
    effects = Effects(_rewards(records), factors)
    residuals, choices, before, rounds = [0.0, 0.0], [], None, 0
    while rounds < settings.max_rounds and (before is None or not _same(before, choices)):
        before, rounds = choices, rounds + 1
        learned = [_learned(effects, table, factors[table], settings) for table in (0, 1)]
        residuals = [part[2] for part in learned]
        choices = [decide(q, found, end) for (q, found, _), end in zip(learned, ENDS, strict=True)]
        if not settings.joint:
            break
        for table in (0, 1):
            effects.update(table)
    grid = records.header.grid
    worth, error = _slopes(*learned[0][:2], np.log2(np.array(grid.shares)))
    sure = torch.special.ndtr(torch.from_numpy(worth / error)).numpy()
    choices[0] = replace(choices[0], confidence=sure)
    mixtures = _pooled(*learned[1][:2]).argmax(axis=1)
    tables = _to_tables(records, geometry, budgets, _shares(worth, settings.even), mixtures)
    settled = not settings.joint or _same(before, choices)
    return CompiledMix(tables, worth, *choices, rounds, settled, max(residuals))


ENDS = ("last", "first")  # a larger share keeps more; the first mixture is where draws start


def _same(a: list[Choice], b: list[Choice]) -> bool:
    return len(a) == len(b) and all(
        (x.actions == y.actions).all() for x, y in zip(a, b, strict=True)
    )


def _rewards(records: RewardRecords) -> np.ndarray:
    """float64 [n]: minus the divergence, relative to its prompt and budget, on the scale of its
    corpus and budget: corpora differ in what is at stake, and none is to be sacrificed."""
    rewards = -records["divergence"]
    rewards = rewards - group_means(records, rewards)
    for corpus in np.unique(records["corpus"].astype(str)):
        for budget in np.unique(records["budget"]):
            rows = (records["corpus"].astype(str) == corpus) & (records["budget"] == budget)
            if rows.any():
                rewards[rows] /= max(float(rewards[rows].std()), 1e-12)
    return rewards


def _factors(records: RewardRecords, column: str) -> list[Factor]:
    """A factor of one state for every unit."""
    grid = records.header.grid
    shape = 1, len(grid.shares if column == "shares" else grid.quotas)
    none, every = np.zeros(len(records), np.int64), np.ones(len(records), bool)
    actions = records[column].astype(np.int64)
    return [
        Factor(none, actions[:, u], every, shape, np.array([u]))
        for u in range(records.header.units)
    ]


def _learned(
    effects: Effects, table: int, factors: list[Factor], settings: CompileSettings
) -> tuple[np.ndarray, CellStatistics, float]:
    """Q [U, A] of a table, the statistics behind it, and the worst residual."""
    states, actions, rewards = [], [], []
    for u, factor in enumerate(factors):
        states.append(np.full(len(factor.actions), u))
        actions.append(factor.actions)
        rewards.append(effects.rewards(table, u))
    columns = (np.concatenate(part) for part in (states, actions, rewards))
    return learn(*columns, (len(factors), factors[0].shape[1]), settings)


def _slopes(
    q: np.ndarray, found: CellStatistics, levels: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """float64 [U] both: slope of Q on ``levels`` [A], by least squares over the records, and its
    standard error.

    Not shrunk: a few units matter much and most a little, and cutting those that noise could
    explain costs more on plain text than it brings elsewhere (measured); ``even`` bounds what noise
    can do.
    """
    weights = found.counts / np.maximum(found.totals, 1)[:, None]
    values = np.where(found.counts > 0, q, 0.0)
    centred = levels - (weights * levels).sum(axis=1, keepdims=True)
    spread = (weights * centred**2).sum(axis=1)
    slopes = (weights * centred * values).sum(axis=1) / np.maximum(spread, 1e-12)
    freedom = np.maximum(found.totals - (found.counts > 0).sum(axis=1), 1)
    variance = found.spreads.sum(axis=1) / freedom
    error = np.sqrt(variance / np.maximum(found.totals * spread, 1e-12))
    return slopes, np.maximum(error, 1e-12)


def _shrunk(values: np.ndarray, noise: np.ndarray) -> np.ndarray:
    """``values`` [U] drawn to their mean; ``noise`` [U] is the variance of each one's error."""
    centre = values.mean()
    true = max(0.0, float(((values - centre) ** 2).mean() - noise.mean()))
    trust = true / (true + noise) if true > 0 else np.zeros_like(noise)
    return centre + trust * (values - centre)


def _pooled(q: np.ndarray, found: CellStatistics) -> np.ndarray:
    """float64 [U, A]: Q of mixtures, each column drawn to its mean over units."""
    freedom = np.maximum(found.totals - (found.counts > 0).sum(axis=1), 1)
    variance = found.spreads.sum(axis=1) / freedom
    columns = []
    for action in range(q.shape[1]):
        some = found.counts[:, action] > 0
        column = np.full(len(q), -np.inf)
        noise = variance / np.maximum(found.counts[:, action], 1)
        if some.any():
            column[some] = _shrunk(q[some, action], noise[some])
        columns.append(column)
    return np.stack(columns, axis=1)


def _shares(worth: np.ndarray, even: float) -> np.ndarray:
    """float64 [U], of mean 1: the part ``even`` is dealt evenly, the rest in proportion to worth.

    Evenly, because a unit whose share is cut with all others' loses more than it alone did.
    """
    positive = np.maximum(worth, 0.0)
    if positive.sum() <= 0:
        return np.ones_like(worth)
    return even + (1 - even) * positive / positive.mean()


def _to_tables(
    records: RewardRecords,
    geometry: ModelGeometry,
    budgets: Sequence[int],
    shares: np.ndarray,
    mixtures: np.ndarray,
) -> RetentionTables:
    header = records.header
    layers, heads = len(geometry.attention_layers), geometry.max_kv_heads
    where = np.array(header.layers), np.array(header.heads)
    share, quota = np.ones((layers, heads)), np.ones((layers, heads, len(SOURCES)))
    share[where] = shares
    quota[where] = np.array(header.grid.quotas)[mixtures]
    queries = np.zeros((layers, max(x.num_q_heads for x in geometry.attention_layers)))
    for (layer, head), row in zip(zip(*where, strict=True), header.query_weights, strict=True):
        queries[layer, head * len(row) : (head + 1) * len(row)] = row
    rows = (np.stack([part] * len(budgets)).astype(np.float32) for part in (share, quota))
    return RetentionTables(
        rule=header.rule,
        head_weights=np.ones((layers, heads), np.float32),
        budgets=tuple(budgets),
        gate=np.ones((0, layers, 1, 1), np.float32),
        entropy_edges=NO_EDGES,
        perplexity_edges=NO_EDGES,
        mix=MixTables(*rows, queries.astype(np.float32)),
    )
