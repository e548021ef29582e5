"""Compiled shares and mixtures: how much each unit keeps, and by which orders of tokens."""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np

from kvpolicy.errors import PolicyError
from kvpolicy.geometry import ModelGeometry
from kvpolicy.retention.arrays import frozen_array
from kvpolicy.retention.rule import SOURCES

MIX_TENSORS = ("shares", "quotas", "query_weights")


@dataclass(frozen=True, eq=False)
class MixTables:
    """Tables of a rule with ``mix=table``; K compiled budgets, L, H as in ``RetentionTables``.

    Args:
        shares: float32 [K, L, H], above 0: what a unit keeps in proportion to the others.
        quotas: float32 [K, L, H, S], at least 0 and not all 0: how much of it is chosen by each of
            the S ``SOURCES``, in proportion.
        query_weights: float32 [L, Hq], at least 0: how much each query head counts in the
            ``retrieval`` source; Hq is the most query heads of any layer.

    Arrays are copied and made read-only. Cells past a layer's heads are never read.

    Raises:
        PolicyError: a dtype, shape or value that the above rules out.
    """

    shares: np.ndarray
    quotas: np.ndarray
    query_weights: np.ndarray

    def __post_init__(self) -> None:
        for name in MIX_TENSORS:
            object.__setattr__(self, name, frozen_array(name, getattr(self, name)))
        if self.shares.ndim != 3 or (self.shares <= 0).any():
            raise PolicyError("retention shares must be [budgets, layers, kv heads], above 0")
        wanted = (*self.shares.shape, len(SOURCES))
        if self.quotas.shape != wanted:
            raise PolicyError(
                f"retention quotas must have shape {list(wanted)} (budgets, layers, kv heads, "
                f"{', '.join(SOURCES)}), found {list(self.quotas.shape)}"
            )
        if (self.quotas < 0).any() or (self.quotas.sum(axis=-1) <= 0).any():
            raise PolicyError("retention quotas must be at least 0, and not all 0 for a unit")
        if self.query_weights.ndim != 2 or (self.query_weights < 0).any():
            raise PolicyError("retention query_weights must be [layers, query heads], at least 0")

    @classmethod
    def uniform(cls, geometry: ModelGeometry, budgets: int) -> MixTables:
        """Equal shares and quotas; every query head counts alike."""
        layers = geometry.attention_layers
        shape = budgets, len(layers), geometry.max_kv_heads
        queries = len(layers), max(layer.num_q_heads for layer in layers)
        return cls(
            np.ones(shape, np.float32),
            np.ones((*shape, len(SOURCES)), np.float32),
            np.ones(queries, np.float32),
        )

    def check_fits(self, budgets: int, layers: int, heads: int) -> None:
        """Raise PolicyError unless the tables are for that many budgets, layers and kv heads."""
        if self.shares.shape != (budgets, layers, heads):
            raise PolicyError(
                f"retention shares must have shape {[budgets, layers, heads]} (budgets, layers, kv "
                f"heads), found {list(self.shares.shape)}"
            )
        if self.query_weights.shape[0] != layers:
            raise PolicyError(
                f"retention query_weights must have {layers} layers, found "
                f"{self.query_weights.shape[0]}"
            )

    def check_query_heads(self, geometry: ModelGeometry) -> None:
        """Raise PolicyError unless there is a weight for each of the model's query heads."""
        most = max(layer.num_q_heads for layer in geometry.attention_layers)
        if self.query_weights.shape[1] != most:
            raise PolicyError(
                f"retention query_weights must have {most} query heads a layer for this model, "
                f"found {self.query_weights.shape[1]}"
            )

    def to_tensors(self) -> dict[str, np.ndarray]:
        """The arrays by name."""
        return {field.name: getattr(self, field.name) for field in fields(self)}
