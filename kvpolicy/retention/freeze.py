"""Algorithm 1 as one call: what every unit keeps of a prompt at the end of its prefill."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from kvpolicy.errors import PolicyError
from kvpolicy.retention.mix import Focus, mixed_scores, unit_budgets
from kvpolicy.retention.risk import bin_of, semantic_risk, structural_risk
from kvpolicy.retention.scores import layer_max, utility
from kvpolicy.retention.select import Kept, select
from kvpolicy.retention.tables import RetentionTables


@dataclass(frozen=True, eq=False)
class DeviceTables:
    """``RetentionTables`` on one device, for fixed units; build once with ``of``.

    ``weights`` float32 [U]; ``gates`` float32 [len(budgets), U, E * P]; ``entropy_edges`` float32
    [E - 1]; ``perplexity_edges`` float32 [P - 1]; ``shares`` float32 [len(budgets), U], on the
    host, and ``quotas`` float32 [len(budgets), U, S] of a rule that mixes, else None. Units as in
    the ``layers`` and ``heads`` given.
    """

    tables: RetentionTables
    weights: Tensor
    gates: Tensor
    entropy_edges: Tensor
    perplexity_edges: Tensor
    shares: np.ndarray | None = None
    quotas: Tensor | None = None

    @classmethod
    def of(
        cls, tables: RetentionTables, layers: Tensor, heads: Tensor, device: torch.device | str
    ) -> DeviceTables:
        """Copy to ``device`` the rows of units ``layers``, ``heads`` (int64 [U]).

        Raises:
            PolicyError: a unit outside the tables.
        """
        rows, columns = layers.cpu().numpy(), heads.cpu().numpy()
        shape = tables.head_weights.shape
        for name, index, limit in (("layer", rows, shape[0]), ("kv head", columns, shape[1])):
            if index.size and not 0 <= index.min() <= index.max() < limit:
                raise PolicyError(f"retention tables have {name}s 0..{limit - 1}, not all units'")
        budgets, layer_rows, *bins = tables.gate.shape
        gates = tables.gate.reshape(budgets, layer_rows, bins[0] * bins[1])[:, rows]
        arrays = (tables.head_weights[rows, columns], gates)
        arrays += (tables.entropy_edges.copy(), tables.perplexity_edges.copy())
        mix = ()
        if tables.mix is not None:
            quotas = torch.from_numpy(tables.mix.quotas[:, rows, columns].copy()).to(device)
            mix = (tables.mix.shares[:, rows, columns], quotas)
        return cls(tables, *(torch.from_numpy(array).to(device) for array in arrays), *mix)

    def unit_budgets(self, budget: int, length: int) -> np.ndarray:
        """Tokens each unit keeps of a prompt of ``length``: int64 [U], ``budget`` on average.

        Needs nothing from the device. ``budget`` is 1..length. Raises PolicyError if it is not.
        """
        rule, units = self.tables.rule, len(self.weights)
        shares = np.ones(units)
        if self.shares is not None:
            shares = self.shares[self.tables.budget_index(budget)]
        return unit_budgets(shares, budget, length, rule.least)

    def thresholds(self, budget: int, entropy_bin: Tensor, perplexity_bin: Tensor) -> Tensor | None:
        """tau of each unit (float32 [U]) at the nearest compiled budget; None if the gate is off.

        The bins are int64 0-d on the tables' device.
        """
        if self.tables.rule.gate == "off":
            return None
        cell = entropy_bin * (self.perplexity_edges.shape[0] + 1) + perplexity_bin
        gate = self.gates[self.tables.budget_index(budget)]
        # index_select: subscripting with a 0-d tensor would copy it to the host
        return gate.index_select(1, cell.reshape(1))[:, 0]


@dataclass(frozen=True, eq=False)
class Retained:
    """What a freeze keeps: ``kept`` over units, as wide as the most that one may keep; the prompt's
    risk coordinates (float32 0-d) and their bins (int64 0-d)."""

    kept: Kept
    entropy_bin: Tensor
    perplexity_bin: Tensor
    entropy: Tensor
    perplexity: Tensor


def retain(
    mass: Tensor,
    value_norms: Tensor | None,
    layers: Tensor,
    heads: Tensor,
    tables_on_device: DeviceTables,
    budget: int,
    nll_sum: Tensor,
    nll_count: Tensor | int,
    focus: Focus | None = None,
) -> Retained:
    """Algorithm 1 from the observed window mass on: scores, risk bins, gate, selection.

    A rule with ``mix=table`` orders tokens by ``mixed_scores`` instead of equations 4 to 6, and
    its units keep ``DeviceTables.unit_budgets``.

    Args:
        mass: float32 [U, T], ``window_mass`` of each unit, summed over min(observe, T) queries.
        value_norms: float32 [U, T], L2 norms of the cached values; a mix reads none.
        layers, heads: int64 [U], the units that ``tables_on_device`` was built for.
        tables_on_device: ``DeviceTables.of(tables, layers, heads, device)``.
        budget: B, tokens each unit may keep (of a mix: on average), at least 1.
        nll_sum, nll_count: negative log likelihood of the window's tokens (``semantic_risk``).
        focus: of the same units; a mix needs it.

    Returns:
        Retained; with ``share=layer`` every unit of a layer has the same set. No host
        synchronisation.

    Raises:
        PolicyError: budget below 1, not the units of the tables, or a mix without ``focus``.
    """
    rule = tables_on_device.tables.rule
    units, length = mass.shape
    if budget < 1:
        raise PolicyError(f"retention budget must be at least 1 token, found {budget}")
    if tables_on_device.weights.shape != layers.shape or layers.shape != heads.shape:
        raise PolicyError(f"retention tables are for {tables_on_device.weights.shape[0]} units")
    window = min(rule.observe, length)
    entropy, perplexity = structural_risk(mass, window), semantic_risk(nll_sum, nll_count)
    entropy_bin = bin_of(entropy, tables_on_device.entropy_edges)
    perplexity_bin = bin_of(perplexity, tables_on_device.perplexity_edges)

    if rule.mixes:
        kept = _mixed(mass, focus, tables_on_device, budget)
        return Retained(kept, entropy_bin, perplexity_bin, entropy, perplexity)
    scores = utility(mass, value_norms, layers, rule, window) * tables_on_device.weights[:, None]
    if rule.share == "layer":
        scores = layer_max(scores, layers)
    thresholds = tables_on_device.thresholds(budget, entropy_bin, perplexity_bin)
    budgets = torch.full((units,), budget, dtype=torch.int64, device=mass.device)
    kept = select(scores, thresholds, budgets, rule, width=min(budget, length))
    return Retained(kept, entropy_bin, perplexity_bin, entropy, perplexity)


def _mixed(mass: Tensor, focus: Focus | None, tables: DeviceTables, budget: int) -> Kept:
    if focus is None:
        raise PolicyError("a retention rule that mixes needs the focus of the prompt's end")
    rule, length = tables.tables.rule, mass.shape[1]
    counts = tables.unit_budgets(min(budget, length), length)
    quotas = tables.quotas[tables.tables.budget_index(budget)]
    scores = mixed_scores(mass, focus, quotas, rule)
    budgets = torch.from_numpy(counts).to(mass.device, non_blocking=True)
    return select(scores, None, budgets, rule, width=int(counts.max(initial=1)))
