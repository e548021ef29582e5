"""From reward records to retention tables: CompilerKV's two tables, fitted in turn until settled.

The head table pools the records of all budgets, since a policy has one; the gate has a table for
each. Both are horizon-1 CQL (eq. 1) on standardised rewards (eq. 2). With ``joint`` each is fitted
on rewards from which the other's effect is taken out (``compile_effects``), and the two alternate
until neither chooses another action.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from calib_cluster.compile_effects import Effects, Factor
from calib_cluster.compile_learn import CompileSettings, learn
from calib_cluster.compile_mix import CompiledMix, fit_mix
from calib_cluster.cql import Choice, decide
from calib_cluster.cql.decide import End
from calib_cluster.errors import CalibrationError
from calib_cluster.rewards.bandit import drawn, gate_penalties, loss_rewards
from calib_cluster.rewards.records import RewardRecords
from calib_cluster.rewards.risk import RiskGrid
from kvpolicy.geometry import ModelGeometry
from kvpolicy.retention import RetentionTables


@dataclass(frozen=True, eq=False)
class Compiled:
    """Tables and what supports them.

    Fields: ``heads``: the choice of every unit [U]; ``gate``: that of every (budget, layer,
    entropy bin, perplexity bin), flat, None without a gate; ``rounds`` of alternation and whether
    the tables ``settled`` in them; ``residual``: the worst stationarity residual of eq. 1 in the
    last round (what ``paper`` leaves is not small).
    """

    tables: RetentionTables
    heads: Choice
    gate: Choice | None
    rounds: int
    settled: bool
    residual: float

    def evidence(self, records: RewardRecords) -> dict[str, np.ndarray]:
        """Support of each cell: ``{head,gate}_{records,support,confidence,empty}`` in the shape of
        the tables; 0, and empty, where a table is never read. ``records`` as compiled from."""
        header = records.header
        where = np.array(header.layers), np.array(header.heads)
        found = {}
        for name in ("records", "support", "confidence", "empty"):
            blank = True if name == "empty" else 0
            values = getattr(self.heads, name)
            table = np.full(self.tables.head_weights.shape, blank, dtype=values.dtype)
            table[where] = values
            found[f"head_{name}"] = table
            if self.gate is not None:
                values = getattr(self.gate, name)
                table = np.full(self.tables.gate.shape, blank, dtype=values.dtype)
                rows = np.unique(header.layers)
                table[:, rows] = values.reshape(table.shape[0], len(rows), *table.shape[2:])
                found[f"gate_{name}"] = table
        return found


def compile_tables(
    records: RewardRecords,
    geometry: ModelGeometry,
    budgets: Sequence[int],
    settings: CompileSettings = CompileSettings(),  # noqa: B008  frozen
) -> Compiled | CompiledMix:
    """Fit head table and gate to ``records``; of a rule that mixes, shares and mixtures.

    Deterministic, and the same for shards in any order. Records of other budgets are left out.

    Args:
        geometry: of the model that the records come from.
        budgets: ascending; the gate's.

    Raises:
        CalibrationError: records of another model, a budget without records, or no budget.
    """
    _check(records, geometry, budgets)
    records = _ordered(records.where(np.isin(records["budget"], budgets)))
    if records.header.rule.mixes:
        return fit_mix(records, geometry, tuple(budgets), settings)
    records = records.rebinned(_risk(records, settings))
    return _Compiler(records, tuple(budgets), settings).run(geometry)


class _Compiler:
    """One compile: the two tables' factors, and the effects between them."""

    def __init__(
        self, records: RewardRecords, budgets: tuple[int, ...], settings: CompileSettings
    ) -> None:
        self._records, self._budgets, self._settings = records, budgets, settings
        self._has_gate = records.header.rule.gate == "table"
        tables = [_head_factors(records)]
        if self._has_gate:
            tables.append(_gate_factors(records, budgets))
        self._tables = tables
        self._effects = Effects(loss_rewards(records, settings.baseline), tables)
        self._penalties = gate_penalties(records, settings.beta, settings.baseline)
        self._residuals = [0.0, 0.0]

    def run(self, geometry: ModelGeometry) -> Compiled:
        heads, gate = self._fit(0), self._fit(1)
        rounds, settled = 1, not self._settings.joint
        while not settled and rounds < self._settings.max_rounds:
            before = heads, gate
            heads, gate = self._turn(0), self._turn(1)
            rounds += 1
            settled = _same(before[0], heads) and _same(before[1], gate)
        tables = self._to_tables(geometry, heads, gate)
        return Compiled(tables, heads, gate, rounds, settled, max(self._residuals))

    def _turn(self, table: int) -> Choice | None:
        """Fit a table after the effects of both were brought up to date."""
        for other in range(len(self._tables)):
            self._effects.update(other)
        return self._fit(table)

    def _fit(self, table: int) -> Choice | None:
        """The table's actions, given all effects as they are known now."""
        if table >= len(self._tables):
            return None
        factors = self._tables[table]
        states, actions, rewards = [], [], []
        for i, factor in enumerate(factors):
            reward = self._effects.rewards(table, i)
            if table == 1:
                reward = reward - self._penalties[:, i]
            states.append(factor.places[factor.states[factor.drawn]])
            actions.append(factor.actions[factor.drawn])
            rewards.append(reward[factor.drawn])
        shape = sum(factor.shape[0] for factor in factors), factors[0].shape[1]
        columns = (np.concatenate(part) for part in (states, actions, rewards))
        q, statistics, self._residuals[table] = learn(*columns, shape, self._settings)
        # a larger weight and a lower threshold keep more
        end: End = "last" if table == 0 else "first"
        return decide(q, statistics, end)

    def _to_tables(
        self, geometry: ModelGeometry, heads: Choice, gate: Choice | None
    ) -> RetentionTables:
        header = self._records.header
        grid, rows = header.grid, np.unique(header.layers)
        weights = np.ones((len(geometry.attention_layers), geometry.max_kv_heads), np.float32)
        chosen = np.array(grid.weights, np.float32)[heads.actions]
        weights[np.array(header.layers), np.array(header.heads)] = chosen
        budgets, bins = (self._budgets, header.risk.shape) if gate is not None else ((), (1, 1))
        shape = len(budgets), len(geometry.attention_layers), *bins
        thresholds = np.full(shape, grid.thresholds[0], np.float32)
        risk = header.risk if gate is not None else RiskGrid()
        if gate is not None:
            actions = gate.actions.reshape(len(budgets), len(rows), *bins)
            thresholds[:, rows] = np.array(grid.thresholds, np.float32)[actions]
        edges = (np.array(e, np.float32) for e in (risk.entropy_edges, risk.perplexity_edges))
        return RetentionTables(header.rule, weights, budgets, thresholds, *edges)


def _same(a: Choice | None, b: Choice | None) -> bool:
    return a is b or bool((a.actions == b.actions).all())


def _head_factors(records: RewardRecords) -> list[Factor]:
    """A factor for every unit, of one state."""
    none, was_drawn = np.zeros(len(records), dtype=np.int64), drawn(records)
    actions = records["weights"].astype(np.int64)
    shape = 1, len(records.header.grid.weights)
    return [
        Factor(none, actions[:, u], was_drawn[:, u], shape, np.array([u]))
        for u in range(records.header.units)
    ]


def _gate_factors(records: RewardRecords, budgets: tuple[int, ...]) -> list[Factor]:
    """A factor for every freezing layer, of a state for each budget and risk cell."""
    header, was_drawn = records.header, drawn(records)
    layers, cells = header.freezing_layers, header.risk.shape
    budget = np.searchsorted(np.array(budgets), records["budget"])
    states = (budget * cells[0] + records["entropy_bin"]) * cells[1] + records["perplexity_bin"]
    actions = records["thresholds"].astype(np.int64)
    shape = len(budgets) * cells[0] * cells[1], len(header.grid.thresholds)
    places = np.arange(shape[0] * layers).reshape(len(budgets), layers, -1)
    return [
        Factor(
            states.astype(np.int64), actions[:, layer], was_drawn[:, header.units + layer], shape,
            places[:, layer].reshape(-1),
        )
        for layer in range(layers)
    ]  # fmt: skip


def _risk(records: RewardRecords, settings: CompileSettings) -> RiskGrid:
    """Quantile cells over the prompts, each counted once whatever its number of records."""
    _, first = np.unique(records["prompt"].astype(str), return_index=True)
    bins = settings.entropy_bins, settings.perplexity_bins
    return RiskGrid.quantiles(records["entropy"][first], records["perplexity"][first], bins)


def _ordered(records: RewardRecords) -> RewardRecords:
    """Sorted, so that sums have the same bits whatever shard came first."""
    keys = [records["nll_compressed"], *records["thresholds"].T, *records["weights"].T]
    keys += [records["varied"], records["budget"], records["prompt"].astype(str)]
    return records.where(np.lexsort(keys))


def _check(records: RewardRecords, geometry: ModelGeometry, budgets: Sequence[int]) -> None:
    if records.header.model_config != geometry.config_hash:
        raise CalibrationError("reward records are of another model")
    if not budgets or list(budgets) != sorted(set(budgets)):
        raise CalibrationError(f"budgets must ascend, found {list(budgets)}")
    if missing := sorted(set(budgets) - set(records["budget"].tolist())):
        raise CalibrationError(f"there are no reward records of budget {missing[0]}")
