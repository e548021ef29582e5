"""What the two tables may choose from, and draws of it."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec
import numpy as np

from calib_cluster.errors import CalibrationError

ALL = -1
"""``Draws.varied`` of an evaluation that drew every action."""
MAX_ACTIONS = 256


class ActionGrid(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Actions of the head table (weights) and of the gate (thresholds), each ascending.

    Raises:
        CalibrationError: empty, not ascending, a weight not above 0 or a threshold below 0.
    """

    weights: tuple[float, ...] = tuple(round(0.8 + 0.025 * i, 3) for i in range(29))
    thresholds: tuple[float, ...] = tuple(round(0.8 + 0.01 * i, 2) for i in range(21))

    def __post_init__(self) -> None:
        for name, grid, low in (("weight", self.weights, 1e-6), ("threshold", self.thresholds, 0)):
            ascending = list(grid) == sorted(set(grid)) and all(np.isfinite(grid))
            if not 0 < len(grid) <= MAX_ACTIONS or not ascending or grid[0] < low:
                raise CalibrationError(f"{name} actions must ascend from above 0, found {grid}")

    def nearest(self, weight: float, threshold: float) -> tuple[int, int]:
        """Indices of the actions nearest to two values; ties to the lower."""
        return (
            int(np.abs(np.array(self.weights) - weight).argmin()),
            int(np.abs(np.array(self.thresholds) - threshold).argmin()),
        )


PAPER_GRID = ActionGrid()
"""29 weights in .8..1.5 and 21 thresholds in .8..1.0 (appendix C.7)."""


@dataclass(frozen=True, eq=False)
class Draws:
    """Actions of N evaluations as indices into an ``ActionGrid``.

    ``weights`` uint8 [N, U], ``thresholds`` uint8 [N, L]; ``varied`` int32 [N]: which state was
    drawn by the behaviour, unit u as u, freezing layer l as U + l, ``ALL`` for every one of them.
    """

    weights: np.ndarray
    thresholds: np.ndarray
    varied: np.ndarray

    def __len__(self) -> int:
        return len(self.varied)
