"""What the compiled tables may choose from, and draws of it."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec
import numpy as np

from calib_cluster.errors import CalibrationError
from kvpolicy.retention import SOURCES, RetentionRule

ALL = -1
"""``Draws.varied`` of an evaluation that drew every action."""
MAX_ACTIONS = 256


class ActionGrid(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Actions of the head table (weights) and of the gate (thresholds), each ascending, or of a
    rule that mixes: ``shares`` of the budget, ascending, and ``quotas`` of the ``SOURCES``.

    Raises:
        CalibrationError: empty, not ascending, a weight or share not above 0, a threshold below 0,
            or a mixture that is not a quota of at least 0 for every source, one of them above.
    """

    weights: tuple[float, ...] = tuple(round(0.8 + 0.025 * i, 3) for i in range(29))
    thresholds: tuple[float, ...] = tuple(round(0.8 + 0.01 * i, 2) for i in range(21))
    shares: tuple[float, ...] = (1.0,)
    quotas: tuple[tuple[float, ...], ...] = ((1.0,) * len(SOURCES),)

    def __post_init__(self) -> None:
        scales = (self.weights, 1e-6), (self.thresholds, 0), (self.shares, 1e-6)
        for name, (grid, low) in zip(("weight", "threshold", "share"), scales, strict=True):
            ascending = list(grid) == sorted(set(grid)) and all(np.isfinite(grid))
            if not 0 < len(grid) <= MAX_ACTIONS or not ascending or grid[0] < low:
                raise CalibrationError(f"{name} actions must ascend from above 0, found {grid}")
        mixtures = np.array(self.quotas, dtype=np.float64)
        if mixtures.shape != (len(self.quotas), len(SOURCES)) or not (
            0 < len(self.quotas) <= MAX_ACTIONS
            and (mixtures >= 0).all()
            and (mixtures.sum(axis=1) > 0).all()
        ):
            raise CalibrationError(
                f"mixtures must give {', '.join(SOURCES)} quotas of at least 0, found {self.quotas}"
            )

    def used(self, rule: RetentionRule) -> dict[str, list[float]]:
        """The actions that matter to ``rule``, by name; mixtures one after another."""
        if rule.mixes:
            mixtures = [quota for row in self.quotas for quota in row]
            return {"shares": list(self.shares), "mixtures": mixtures}
        return {"weights": list(self.weights), "thresholds": list(self.thresholds)}

    def nearest(self, weight: float, threshold: float) -> tuple[int, int]:
        """Indices of the actions nearest to two values; ties to the lower."""
        return (
            int(np.abs(np.array(self.weights) - weight).argmin()),
            int(np.abs(np.array(self.thresholds) - threshold).argmin()),
        )


PAPER_GRID = ActionGrid()
"""29 weights in .8..1.5 and 21 thresholds in .8..1.0 (appendix C.7)."""
MIX_GRID = ActionGrid(
    weights=(1.0,),
    thresholds=(0.0,),
    shares=(0.25, 0.5, 1.0, 2.0, 4.0),
    quotas=(
        (0.4, 0.3, 0.3), (1.0, 0.0, 0.0), (0.0, 1.0, 0.0), (0.0, 0.0, 1.0),
        (0.7, 0.3, 0.0), (0.7, 0.0, 0.3), (0.3, 0.7, 0.0), (0.3, 0.0, 0.7),
    ),
)  # fmt: skip
"""A unit's share of the budget, and its mixture; the first of both is where a compile starts."""


@dataclass(frozen=True, eq=False)
class Draws:
    """Actions of N evaluations as indices into an ``ActionGrid``.

    ``weights`` uint8 [N, U], ``thresholds`` uint8 [N, L]; ``varied`` int32 [N]: which state was
    drawn by the behaviour, unit u as u, freezing layer l as U + l, ``ALL`` for every one of them.
    ``shares`` and ``mixtures`` uint8 [N, U] of a rule that mixes; left out they are all 0.
    """

    weights: np.ndarray
    thresholds: np.ndarray
    varied: np.ndarray
    shares: np.ndarray | None = None
    mixtures: np.ndarray | None = None

    def __post_init__(self) -> None:
        for name in ("shares", "mixtures"):
            if getattr(self, name) is None:
                object.__setattr__(self, name, np.zeros_like(self.weights))

    def __len__(self) -> int:
        return len(self.varied)
