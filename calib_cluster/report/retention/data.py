"""What a report of retention tables is made from, and the figures its sections share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from calib_cluster.errors import CalibrationError
from kvpolicy.errors import PolicyError
from kvpolicy.evidence import calibratable
from kvpolicy.geometry import LayerGeometry, LayerKind, ModelGeometry
from kvpolicy.manifest import CalibrationRecord
from kvpolicy.mix_view import alike, quota_parts
from kvpolicy.retention import MixTables, RetentionTables
from kvpolicy.retention_evidence import RetentionEvidence

SURE = 0.95

Cost = str | int | float | None


@dataclass(frozen=True, eq=False)
class RetentionReportInput:
    """Everything a report says of compiled tables.

    Fields:
        model_name, name: of the model's folder and of the policy.
        geometry: of that model.
        tables: the compiled tables, L attention layers, H kv heads, E x P risk cells.
        evidence: what supports them.
        record: how the tables were compiled.
        costs: what the compile took, by name, in the order shown.

    Raises:
        CalibrationError: tables or evidence do not fit, or the model has no global layer.
    """

    model_name: str
    name: str
    geometry: ModelGeometry
    tables: RetentionTables
    evidence: RetentionEvidence
    record: CalibrationRecord
    costs: Mapping[str, Cost] = field(default_factory=dict)

    def __post_init__(self) -> None:
        try:
            self.tables.check_fits(self.geometry)
            self.evidence.check_fits(self.tables)
        except PolicyError as error:
            raise CalibrationError(str(error)) from error
        if not self.heads.any():
            raise CalibrationError("the model has no head that a freeze could touch")

    @property
    def has_gate(self) -> bool:
        """Whether thresholds decide beside the budget."""
        return self.tables.rule.gate == "table"

    @property
    def mix(self) -> MixTables | None:
        """Shares and mixtures, if the rule has them instead of weights."""
        return self.tables.mix

    @property
    def bins(self) -> tuple[int, int]:
        """(E, P)."""
        return self.tables.entropy_edges.size + 1, self.tables.perplexity_edges.size + 1

    @cached_property
    def heads(self) -> np.ndarray:
        """bool [L, H]: cells of the head table that a freeze reads."""
        return calibratable(self.geometry)

    @cached_property
    def rows(self) -> tuple[int, ...]:
        """Rows of the tables that a freeze reads: global layers."""
        layers = enumerate(self.geometry.attention_layers)
        return tuple(row for row, layer in layers if layer.kind is LayerKind.GLOBAL)

    @property
    def layers(self) -> list[LayerGeometry]:
        """The layers of ``rows``."""
        return [self.geometry.attention_layers[row] for row in self.rows]

    @property
    def budgets(self) -> list[str]:
        """Names of the gate's budgets, or of those of a mix that differ."""
        if self.mix is not None:
            return [
                f"{', '.join(str(self.tables.budgets[i]) for i in group)} tokens"
                for group in alike(self.tables)
            ]
        return [f"{budget} tokens" for budget in self.tables.budgets]

    def shares(self, block: int) -> np.ndarray:
        """float32 [L, H] of a mix, at the budgets of that name in ``budgets``."""
        return self.mix.shares[alike(self.tables)[block][0]]

    def quotas(self, block: int) -> np.ndarray:
        """float64 [L, H, S], parts of 1, of a mix at the budgets of that name in ``budgets``."""
        return quota_parts(self.mix.quotas[alike(self.tables)[block][0]])

    def weights(self) -> np.ndarray:
        """float32 [U]: weights of all heads, by layer then kv head."""
        return self.tables.head_weights[self.heads]

    def thresholds(self, budget: int) -> np.ndarray:
        """float32 [global layers, E, P] of the budget at that index."""
        return self.tables.gate[budget, list(self.rows)]

    def of_heads(self, kind: str) -> np.ndarray:
        """``CellEvidence`` field ``kind`` of the head table, [U]."""
        return getattr(self.evidence.heads, kind)[self.heads]

    def of_gate(self, kind: str, budget: int) -> np.ndarray:
        """``CellEvidence`` field ``kind`` of one budget's gate, [global layers, E, P]."""
        return getattr(self.evidence.gate, kind)[budget, list(self.rows)]
