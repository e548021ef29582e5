"""The compiled tables of a retention policy (sections 4.2 and 4.3 of the paper)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from kvpolicy.errors import PolicyError
from kvpolicy.geometry import ModelGeometry
from kvpolicy.retention.arrays import frozen_array
from kvpolicy.retention.mix_tables import MIX_TENSORS, MixTables
from kvpolicy.retention.rule import RetentionRule

UNIFORM_BUDGET = 512
"""Budget an uncompiled gate is filed under; having one entry, it serves every budget."""

TENSORS = ("head_weights", "gate", "entropy_edges", "perplexity_edges")


@dataclass(frozen=True, eq=False)
class RetentionTables:
    """Head weights and risk gate of one model, with the rule they were compiled for.

    L counts attention layers in geometry order and H is the most KV heads of any (the indexing of
    the windows tensor); E entropy bins, P perplexity bins.

    Args:
        rule: the retention rule.
        head_weights: float32 [L, H], W_head of eq. 5, above 0 everywhere (cells of native layers
            and past a layer's KV heads are never read).
        budgets: compiled budgets in tokens, ascending; empty where the rule has neither a gate nor
            a mix.
        gate: float32 [len(budgets), L, E, P], thresholds T_gate >= 0; [0, L, 1, 1] for ``off``.
        entropy_edges: float32 [E - 1], ascending, in units of ln T (see ``structural_risk``).
        perplexity_edges: float32 [P - 1], ascending.
        mix: shares and mixtures of a rule that mixes, else None.

    Arrays are copied and made read-only.

    Raises:
        PolicyError: a dtype, shape or value that the above rules out.
    """

    rule: RetentionRule
    head_weights: np.ndarray
    budgets: tuple[int, ...]
    gate: np.ndarray
    entropy_edges: np.ndarray
    perplexity_edges: np.ndarray
    mix: MixTables | None = None

    def __post_init__(self) -> None:
        for name in TENSORS:
            object.__setattr__(self, name, frozen_array(name, getattr(self, name)))
        _check_weights(self.head_weights)
        _check_budgets(self.budgets, self.rule)
        _check_edges("entropy_edges", self.entropy_edges)
        _check_edges("perplexity_edges", self.perplexity_edges)
        self._check_gate()
        self._check_mix()

    def _check_mix(self) -> None:
        if (self.mix is not None) != self.rule.mixes:
            found = "none" if self.mix is None else "one"
            raise PolicyError(f"retention rule has mix={self.rule.mix}, found {found}")
        if self.mix is not None:
            self.mix.check_fits(len(self.budgets), *self.head_weights.shape)

    def _check_gate(self) -> None:
        bins = (self.entropy_edges.size + 1, self.perplexity_edges.size + 1)
        if self.rule.gate == "off" and bins != (1, 1):
            raise PolicyError(f"retention tables without a gate have one bin, found {list(bins)}")
        rows = len(self.budgets) if self.rule.gate == "table" else 0
        wanted = (rows, self.head_weights.shape[0], *bins)
        if self.gate.shape != wanted:
            raise PolicyError(
                f"retention gate must have shape {list(wanted)} (budgets, layers, entropy bins, "
                f"perplexity bins), found {list(self.gate.shape)}"
            )
        if (self.gate < 0).any():
            raise PolicyError("retention gate holds a negative threshold")

    @classmethod
    def uniform(
        cls,
        geometry: ModelGeometry,
        rule: RetentionRule,
        *,
        weight: float = 1.0,
        threshold: float = 0.9,
    ) -> RetentionTables:
        """Uncompiled tables: one head weight and, unless the gate is off, one threshold.

        A mix gets equal shares and equal quotas, and every query head retrieves alike.

        Raises:
            PolicyError: weight not above 0, or threshold negative.
        """
        layers, heads = len(geometry.attention_layers), geometry.max_kv_heads
        budgets = (UNIFORM_BUDGET,) if rule.compiled_budgets else ()
        rows = len(budgets) if rule.gate == "table" else 0
        return cls(
            rule=rule,
            head_weights=np.full((layers, heads), weight, dtype=np.float32),
            budgets=budgets,
            gate=np.full((rows, layers, 1, 1), threshold, dtype=np.float32),
            entropy_edges=np.zeros(0, dtype=np.float32),
            perplexity_edges=np.zeros(0, dtype=np.float32),
            mix=MixTables.uniform(geometry, len(budgets)) if rule.mixes else None,
        )

    def budget_index(self, budget: int) -> int:
        """Index of the compiled budget nearest to ``budget`` in log; ties to the smaller.

        Raises:
            PolicyError: ``budget`` below 1, or no budgets (the gate is off).
        """
        if budget < 1:
            raise PolicyError(f"retention budget must be at least 1 token, found {budget}")
        if not self.budgets:
            raise PolicyError("retention tables have no budgets (rule gate=off, mix=off)")
        # a budget between two compiled ones is nearer to the larger iff it is past their
        # geometric mean; in integers, so that a tie is exact
        pairs = zip(self.budgets, self.budgets[1:], strict=False)
        return sum(budget * budget > low * high for low, high in pairs)

    def gate_for(self, budget: int) -> np.ndarray:
        """Thresholds of the nearest compiled budget: float32 [L, E, P] (see ``budget_index``).

        Raises PolicyError if the rule has no gate.
        """
        if self.rule.gate == "off":
            raise PolicyError("retention tables have no gate (rule gate=off)")
        return self.gate[self.budget_index(budget)]

    def check_fits(self, geometry: ModelGeometry) -> None:
        """Raise PolicyError unless the tables have a row per attention layer, a cell per head."""
        wanted = (len(geometry.attention_layers), geometry.max_kv_heads)
        if self.head_weights.shape != wanted:
            raise PolicyError(
                f"retention head_weights must have shape {list(wanted)} (attention layers, kv "
                f"heads) for this model, found {list(self.head_weights.shape)}"
            )
        if self.mix is not None:
            self.mix.check_query_heads(geometry)

    def to_tensors(self) -> dict[str, np.ndarray]:
        """The arrays by name, as an artifact stores them."""
        arrays = {name: getattr(self, name) for name in TENSORS}
        return arrays | (self.mix.to_tensors() if self.mix is not None else {})

    @staticmethod
    def tensor_names(rule: RetentionRule) -> tuple[str, ...]:
        """Names of the arrays that tables of ``rule`` are stored as."""
        return (*TENSORS, *MIX_TENSORS) if rule.mixes else TENSORS

    @classmethod
    def from_tensors(
        cls, rule: RetentionRule, budgets: tuple[int, ...], tensors: Mapping[str, np.ndarray]
    ) -> RetentionTables:
        """The reverse of ``to_tensors``. Raises PolicyError as the constructor."""
        arrays = {name: tensors[name] for name in TENSORS}
        mix = MixTables(**{name: tensors[name] for name in MIX_TENSORS}) if rule.mixes else None
        return cls(rule=rule, budgets=budgets, mix=mix, **arrays)


def _check_weights(weights: np.ndarray) -> None:
    if weights.ndim != 2 or not weights.size:
        raise PolicyError(
            f"retention head_weights must be [layers, kv heads], found {list(weights.shape)}"
        )
    if (weights <= 0).any():
        raise PolicyError("retention head_weights must be above 0 everywhere")


def _check_edges(name: str, edges: np.ndarray) -> None:
    if edges.ndim != 1 or (np.diff(edges) < 0).any():
        raise PolicyError(f"retention {name} must be one ascending row, found {edges.tolist()}")


def _check_budgets(budgets: tuple[int, ...], rule: RetentionRule) -> None:
    whole = all(isinstance(b, int) and not isinstance(b, bool) for b in budgets)
    ascending = whole and list(budgets) == sorted(set(budgets))
    if not isinstance(budgets, tuple) or not ascending or (budgets and budgets[0] < 1):
        raise PolicyError(f"retention budgets must ascend from 1 or more, found {list(budgets)}")
    if rule.compiled_budgets != bool(budgets):
        raise PolicyError(
            f"retention rule {rule.name} has mix={rule.mix} and gate={rule.gate}, found "
            f"{len(budgets)} budgets"
        )
