"""Needles by depth and length, a map for each arm: where in a prompt an arm forgets."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from loadtest.quality_suite.floors import FULL
from loadtest.quality_suite.results import SuiteResult
from loadtest.quality_suite.suites import AWARE, NOTHING
from loadtest.result_files import write_png

PLOT_FILE = "heatmap.png"
TASKS = ("needle", "niah")
BINS = 5
DPI = 130
Arm = tuple[str, int | None]
Grid = np.ndarray


def needle_grids(result: SuiteResult) -> tuple[list[int], dict[Arm, Grid]]:
    """Lengths, and float64 [BINS, lengths] of each arm: the mean share of a needle's tokens that
    are right; NaN where none was hidden. A prompt that ends before ``length`` counts at its own.

    Arms without a budget come first: the full cache, nothing, and what is served.
    """
    scores: dict[tuple[Arm, int, int], list[float]] = defaultdict(list)
    for arm, length, depth, accuracy in _needles(result):
        scores[arm, length, min(BINS - 1, int(depth * BINS))].append(accuracy)
    lengths = sorted({length for _, length, _ in scores})
    grids: dict[Arm, Grid] = {}
    for arm in sorted({arm for arm, _, _ in scores}, key=lambda arm: _place(result, arm)):
        grid = np.full((BINS, len(lengths)), np.nan)
        for row in range(BINS):
            for column, length in enumerate(lengths):
                if found := scores.get((arm, length, row)):
                    grid[row, column] = np.mean(found)
        grids[arm] = grid
    return lengths, grids


def _needles(result: SuiteResult) -> Iterator[tuple[Arm, int, float, float]]:
    for case in result.cases:
        if case.task in TASKS and case.protocol == AWARE and case.depth is not None:
            for score in case.scores:
                budget = None if score.arm == NOTHING else score.budget  # alike at all of them
                yield (score.arm, budget), case.length, case.depth, score.accuracy
    for case in result.served:
        if case.task in TASKS and case.depth is not None:
            arm = f"{case.arm} (served)" if case.arm == FULL else case.arm
            yield (arm, None), case.length, case.depth, case.accuracy


def _place(result: SuiteResult, arm: Arm) -> tuple[bool, int, int]:
    name, budget = arm
    names = [FULL, NOTHING, *result.settings.policies, *result.settings.peers]
    at = names.index(name) if name in names else 2
    return budget is not None, at, budget or 0


def write_heatmap(result: SuiteResult, folder: Path) -> Path | None:
    """Write ``folder/heatmap.png`` by one rename; None if no needle was asked. Raises UserError."""
    lengths, grids = needle_grids(result)
    if not grids:
        return None
    with matplotlib.rc_context({"font.size": 9}):
        return write_png(folder / PLOT_FILE, draw(result, lengths, grids), DPI)


def draw(result: SuiteResult, lengths: list[int], grids: dict[Arm, Grid]) -> Figure:
    """A panel an arm: rows are arms, columns budgets; arms without a budget share the first row."""
    whole = [arm for arm in grids if arm[1] is None]
    names = list(dict.fromkeys(name for name, budget in grids if budget is not None))
    budgets = sorted({budget for _, budget in grids if budget is not None})
    columns = max(len(budgets), len(whole), 1)
    rows = [whole] + [[(name, budget) for budget in budgets] for name in names]
    width = max(1.5, 0.75 + 0.55 * len(lengths))
    figure = Figure(figsize=(columns * width + 1.6, 1.45 * len(rows) + 0.9), layout="constrained")
    title = f"{result.settings.model}: needles by depth, share of tokens right"
    figure.suptitle(title, fontsize=11)
    axes = figure.subplots(len(rows), columns, squeeze=False)
    image = None
    for line, row in zip(axes, rows, strict=True):
        for panel in line[len(row) :]:
            panel.set_axis_off()
        for panel, arm in zip(line, row, strict=False):
            image = _panel(panel, arm, lengths, grids.get(arm))
    figure.colorbar(image, ax=axes, shrink=0.5, aspect=30)
    return figure


def _panel(axes: Axes, arm: Arm, lengths: list[int], grid: Grid | None):
    name, budget = arm
    axes.set_title(name if budget is None else f"{name}, {budget}", fontsize=8.5)
    if grid is None:
        grid = np.full((BINS, len(lengths)), np.nan)
    image = axes.imshow(grid, vmin=0, vmax=1, cmap="viridis", aspect="auto")
    axes.set_facecolor("#e6e8eb")
    axes.set_xticks(range(len(lengths)), [str(length) for length in lengths], fontsize=8)
    axes.set_yticks([0, BINS - 1], ["start", "end"], fontsize=8)
    for (row, column), value in np.ndenumerate(grid):
        if not np.isnan(value):
            colour = "white" if value < 0.6 else "black"
            text = f"{value:.2f}".lstrip("0") if value < 1 else "1"
            axes.text(column, row, text, ha="center", va="center", color=colour, fontsize=7.5)
    return image
